"""A run folder as ranks write one, made by their own code, without ranks; and what a user hands to `miles-submit`."""

import json
import os
import signal
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from miles_hpc import config, metrics, verdicts
from miles_hpc.paths import RunPaths
from miles_hpc.samples import store
from miles_hpc.samples.schema import STOPPED, TRUNCATED, Samples
from miles_hpc.train.advantage import group_advantages

ROWS, PROMPTS, GROUP = 30, 4, 2


@dataclass
class FakeRun:
    """A run of `steps` steps with 4 prompts of 2 samples; rewards rise with the step."""

    paths: RunPaths
    prompts: list[dict[str, str]]
    clock: float = 1000.0
    attempt: int = 0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    @property
    def folder(self) -> Path:
        return self.paths.folder

    def begin(self, step: int) -> None:
        """A new attempt that starts at `step`."""
        self.attempt += 1
        self.paths.attempt(self.attempt).mkdir(parents=True)
        self.paths.start(self.attempt).write_text(json.dumps({"time": self.clock}))
        self.event("start", step=step, ranks=1, engines=1)
        if step == 0:
            self.event("eval", step=0, accuracy=0.2, prompts=8)

    def step(self, step: int, shards: int = 2) -> None:
        """A whole step: shards, ledger, events."""
        samples = self.sample(step, shards)
        self.train(step, samples)
        self.finish(step, samples)

    def sample(self, step: int, shards: int = 2) -> Samples:
        """The rollout side of a step, unless its shards are there already."""
        if not self.paths.step_samples(step).exists():
            for part in np.array_split(self.ids(step), shards):
                store.write(self.paths, step, 1, self.attempt, self.groups(step, part))
        return Samples.concat([store.read(shard) for shard in store.on_disk(self.paths, step)]).sorted()

    def train(self, step: int, samples: Samples) -> None:
        """The train shard."""
        noise = (self.rng.normal(0, 1e-6, len(samples.tokens)) * samples.loss_mask).astype(np.float32)
        advantages = group_advantages(samples.rewards, GROUP)
        store.write_train(self.paths, step, 0, samples, samples.rollout_log_probs + noise, advantages)
        log_ratio = ((samples.rollout_log_probs + noise).astype(float) - samples.rollout_log_probs)[samples.loss_mask > 0]
        self.distances = {"train/logp_abs_diff_max": float(np.abs(log_ratio).max())} | {
            "train/logp_abs_diff_mean": float(np.abs(log_ratio).mean()),
            "train/rollout_kl_k1": -float(log_ratio.mean()),
            "train/rollout_kl_k3": float((np.expm1(log_ratio) - log_ratio).mean()),
            "train/ratio_outside": 0.0,
        }

    def finish(self, step: int, samples: Samples, trained: np.ndarray | None = None) -> None:
        """Ledger and events of a step."""
        trained = group_advantages(samples.rewards, GROUP) != 0 if trained is None else trained
        _, ledger = metrics.journals(self.paths)
        ledger.append(*metrics.fates(samples, [], trained, GROUP, step, self.attempt))
        self.event("sync", version=step + 1, seconds=0.5, bytes=10**9)
        figures = metrics.of_samples(samples, trained, GROUP) | {
            **self.distances,
            "speed/rollout_tokens_per_s": 100.0,
            "speed/train_tokens_per_s": 300.0,
        }
        seconds = dict.fromkeys(metrics.PHASES, 0.25) | {"rollout": 2.0, "train": 1.0}
        self.event("step", step=step, metrics=figures, phase_seconds=seconds, seconds=4.0)

    def event(self, event: str, **fields: object) -> None:
        self.clock += 1.0
        metrics.journals(self.paths)[0].append({"event": event, "attempt": self.attempt, "time": self.clock, **fields})

    def end(self, kind: str) -> None:
        verdicts.write(self.paths, self.attempt, kind=kind)

    def ids(self, step: int) -> np.ndarray:
        """As `Prompts.ids_of_step`."""
        epochs, places = np.divmod(np.arange(step * PROMPTS, (step + 1) * PROMPTS), ROWS)
        orders = {int(e): np.random.default_rng([0, int(e)]).permutation(ROWS) for e in set(epochs.tolist())}
        return np.array([e * ROWS + orders[int(e)][p] for e, p in zip(epochs, places, strict=True)])

    def groups(self, step: int, ids: np.ndarray) -> Samples:
        """Whole groups: prompts of 3 tokens, answers of 1 to 5."""
        n = len(ids) * GROUP
        answers = self.rng.integers(1, 6, n)
        offsets = np.concatenate([[0], np.cumsum(answers + 3)])
        mask = np.concatenate([[0] * 3 + [1] * a for a in answers]).astype(np.uint8)
        prompt_ids = np.repeat(ids, GROUP)
        return Samples(
            prompt_ids=prompt_ids.astype(np.int64),
            sample_index=np.tile(np.arange(GROUP), len(ids)).astype(np.int32),
            offsets=offsets.astype(np.int64),
            tokens=self.rng.integers(0, 100, len(mask)).astype(np.int32),
            loss_mask=mask,
            rollout_log_probs=(-self.rng.random(len(mask)) * mask).astype(np.float32),
            weight_versions=np.where(mask, step, -1).astype(np.int32),
            rewards=(self.rng.random(n) < (step + 1) / 12).astype(np.float32),
            status=np.where(answers == 5, TRUNCATED, STOPPED).astype(np.uint8),
            prompts=[self.prompts[i % ROWS]["prompt"] for i in prompt_ids],
            answers=[f"answer {i}" for i in range(n)],
            labels=["4"] * n,
            reward_parts={"form": np.ones(n, np.float32)},
        )


@pytest.fixture(autouse=True)
def term_as_before():
    """The batch side ignores TERM from its requeue on, and what is started then inherits that."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def fresh_run(tmp_path: Path) -> FakeRun:
    """A submitted run that has not started."""
    rows = [{"prompt": f"question {i}", "label": "4"} for i in range(ROWS)]
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    file = tmp_path / "job.toml"
    file.write_text(
        f"""run = {{ name = "fake", steps = 12 }}
        model = {{ path = "model" }}
        data = {{ prompts = "{data}" }}
        rollout = {{ prompts_per_step = {PROMPTS}, samples_per_prompt = {GROUP}, max_new_tokens = 5, reward = "m:f" }}
        train = {{ lr = 1e-4 }}
        """,
        encoding="utf-8",
    )
    paths = RunPaths(tmp_path / "runs" / "fake 000")
    paths.folder.mkdir(parents=True)
    paths.config.write_text(config.dump(config.load(file)), encoding="utf-8")
    paths.job.write_text('{"scheduler": "local", "job_id": ""}', encoding="utf-8")
    return FakeRun(paths, rows)


@pytest.fixture
def make_run(fresh_run: FakeRun) -> Callable[[int], FakeRun]:
    """A run of `steps` steps in one attempt that is done."""

    def make(steps: int) -> FakeRun:
        fresh_run.begin(0)
        for step in range(steps):
            fresh_run.step(step)
        fresh_run.event("eval", step=steps, accuracy=0.7, prompts=8)
        fresh_run.end("done")
        return fresh_run

    return make


TOML = """\
[run]
name = "demo"
steps = 3
[model]
path = "model"
[data]
prompts = "prompts.jsonl"
[rollout]
prompts_per_step = 4
samples_per_prompt = 4
max_new_tokens = 8
reward = "scoring:reward"
[train]
lr = 1e-3
[slurm]
time_minutes = 30
account = "physics"
setup = ["module load cuda/13"]
[slurm.train]
nodes = 2
ranks_per_node = 2
[slurm.rollout]
nodes = 2
cpus_per_rank = 4
"""


@pytest.fixture
def toml(users_file: Callable[[str, str], Path]) -> Path:
    """Importing the reward fails: the login node must not."""
    return users_file(TOML, "raise RuntimeError('imported')\n\ndef reward(prompt, answer, label, metadata): ...\n")


@pytest.fixture
def launch_config() -> config.Config:
    """The same file, validated, without files beside it."""
    return config.Config.model_validate(tomllib.loads(TOML))


@pytest.fixture
def no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty current folder on a machine without Slurm."""
    for name in [n for n in os.environ if n.startswith("SLURM")]:
        monkeypatch.delenv(name)
    bare = [p for p in os.environ["PATH"].split(":") if not (Path(p) / "sinfo").exists()]
    monkeypatch.setenv("PATH", ":".join(bare))
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder
