"""Every path of a run, computed in one place, for any attempt.

<folder>/config.toml  job.sbatch  job.log  job.json  provenance.json  ledger.jsonl  events.jsonl
         attempts/NNN/{train,rollout,engine}-RRRR.log  attempts/NNN/{start,health,verdict}.json  attempts/NNN/launcher.log
         attempts/NNN/config.toml  attempts/NNN/stacks/{train,rollout}-RRRR.txt
         samples/step-SSSSSS/{rollout-RRRR-III.h5,drafts-RRRR-III.h5,train-RRRR.h5}
         checkpoints/step-SSSSSS/  export/  model/  tensorboard/{train,rollout}/  heartbeat/
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_hpc.config import Config


@dataclass(frozen=True)
class RunPaths:
    """Paths below one run folder. Nothing is created here."""

    folder: Path

    @property
    def config(self) -> Path:
        """The resolved configuration, the only one that ranks read."""
        return self.folder / "config.toml"

    @property
    def script(self) -> Path:
        """The batch script as submitted."""
        return self.folder / "job.sbatch"

    @property
    def rank_map(self) -> Path:
        """Which ranks have which role, for `srun --multi-prog` in a homogeneous job."""
        return self.folder / "ranks.conf"

    @property
    def job_log(self) -> Path:
        """What the batch script printed, over all attempts."""
        return self.folder / "job.log"

    @property
    def job(self) -> Path:
        """How the run was submitted: scheduler and job id (JSON)."""
        return self.folder / "job.json"

    @property
    def provenance(self) -> Path:
        """Commit, package versions, seed, command and host of the submission (JSON)."""
        return self.folder / "provenance.json"

    @property
    def ledger(self) -> Path:
        """One JSON line per prompt and fate, append-only."""
        return self.folder / "ledger.jsonl"

    @property
    def events(self) -> Path:
        """One JSON line per completed step, evaluation, sync or checkpoint, append-only."""
        return self.folder / "events.jsonl"

    @property
    def attempts(self) -> Path:
        """One folder per attempt."""
        return self.folder / "attempts"

    def attempt(self, number: int) -> Path:
        """Everything of one attempt; attempts count from 1."""
        return self.attempts / f"{number:03d}"

    def attempt_numbers(self) -> list[int]:
        """Numbers of the attempts that exist, ascending."""
        if not self.attempts.is_dir():
            return []
        return sorted(int(p.name) for p in self.attempts.iterdir() if re.fullmatch(r"[0-9]+", p.name))

    def log(self, attempt: int, role: str, rank: int) -> Path:
        """What a rank printed."""
        return self.attempt(attempt) / f"{role}-{rank:04d}.log"

    def stacks(self, attempt: int, role: str, rank: int) -> Path:
        """Python stacks of all threads of a rank, written when a rank hangs or its interpreter is blocked for long."""
        return self.attempt(attempt) / "stacks" / f"{role}-{rank:04d}.txt"

    def launcher_log(self, attempt: int) -> Path:
        """What srun or mpiexec said about the ranks."""
        return self.attempt(attempt) / "launcher.log"

    def ends(self, attempt: int) -> Path:
        """Without Slurm: rank and exit code of every rank that has ended, one a line, in that order."""
        return self.attempt(attempt) / "ends"

    def hosts(self, attempt: int) -> Path:
        """Node of every rank, one a line."""
        return self.attempt(attempt) / "hosts"

    def nodes(self, attempt: int, role: str) -> Path:
        """Nodes of a role, with commas, as srun reads them."""
        return self.attempt(attempt) / f"{role}.nodes"

    def health(self, attempt: int) -> Path:
        """What every node said before the ranks started (JSON)."""
        return self.attempt(attempt) / "health.json"

    def start(self, attempt: int) -> Path:
        """When and where the attempt started, how many steps were complete, and which keys had changed (JSON)."""
        return self.attempt(attempt) / "start.json"

    def attempt_config(self, attempt: int) -> Path:
        """The resolved configuration as it was when the attempt started."""
        return self.attempt(attempt) / "config.toml"

    def verdict(self, attempt: int) -> Path:
        """How and why the attempt ended (JSON)."""
        return self.attempt(attempt) / "verdict.json"

    @property
    def samples(self) -> Path:
        """One folder of shards per step."""
        return self.folder / "samples"

    @property
    def removed_samples(self) -> Path:
        """Up to which step samples were removed by `checkpoint.keep_samples` (JSON)."""
        return self.samples / "removed.json"

    def step_samples(self, step: int) -> Path:
        """Shards of one step."""
        return self.samples / f"step-{step:06d}"

    def sampled_steps(self) -> list[int]:
        """Steps that have a folder of shards, ascending."""
        return _steps(self.samples)

    def rollout_shard(self, step: int, rank: int, index: int) -> Path:
        """Whole groups of samples, written once."""
        return self.step_samples(step) / f"rollout-{rank:04d}-{index:03d}.h5"

    def drafts(self, step: int, rank: int, index: int) -> Path:
        """Answers that an interruption left unfinished."""
        return self.step_samples(step) / f"drafts-{rank:04d}-{index:03d}.h5"

    def train_shard(self, step: int, rank: int) -> Path:
        """The trainer's log-probs and advantages of what it trained on."""
        return self.step_samples(step) / f"train-{rank:04d}.h5"

    @property
    def checkpoints(self) -> Path:
        """One folder per checkpoint."""
        return self.folder / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """The state after `step` steps."""
        return self.checkpoints / f"step-{step:06d}"

    def saved_steps(self) -> list[int]:
        """Steps of the checkpoints that exist, ascending; one that is being written has another name."""
        return _steps(self.checkpoints)

    @property
    def export(self) -> Path:
        """The final policy as a Hugging Face checkpoint."""
        return self.folder / "export"

    @property
    def model(self) -> Path:
        """The initial Hugging Face checkpoint where the run makes its own (`model.source` without `model.path`)."""
        return self.folder / "model"

    def model_of(self, config: "Config") -> Path:
        """The initial checkpoint: `model.path`, else the one that the run makes for itself."""
        return Path(config.model.path) if config.model.path else self.model

    def tensorboard(self, role: str) -> Path:
        """Event files of a role."""
        return self.folder / "tensorboard" / role

    def heartbeat(self, rank: int) -> Path:
        """What a rank is doing, written anew every second (JSON)."""
        return self.folder / "heartbeat" / f"rank-{rank:04d}.json"


def _steps(folder: Path) -> list[int]:
    """Numbers of the folders `step-SSSSSS`; not of one that somebody has put aside as `step-SSSSSS.old`."""
    found = (re.fullmatch(r"step-([0-9]{6})", path.name) for path in folder.glob("step-*"))
    return sorted(int(name[1]) for name in found if name)
