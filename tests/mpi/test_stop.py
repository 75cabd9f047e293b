"""A signal in the middle of a step: all ranks leave together, and the next attempt goes on where this one was."""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from miles_hpc.launchers import audit, cli, state
from miles_hpc.paths import RunPaths
from miles_hpc.samples import store

STEPS, PROMPTS, SAMPLES, WARNING_SECONDS = 3, 8, 4, 20
TOML = """\
run = { name = "left", steps = 3, seed = 3 }
model = { source = "miles_hpc.examples.arithmetic:model", context_length = 64 }
data = { prompts = "miles_hpc.examples.arithmetic:prompts", eval = "miles_hpc.examples.arithmetic:prompts" }
warm_start = { data = "miles_hpc.examples.arithmetic:demonstrations", steps = 200 }
eval = { prompts = 4, every_steps = 2 }
checkpoint = { every_steps = 100 }
train = { lr = 1e-3, loss = "beside:loss", micro_batch_tokens = 100 }
slurm = { warning_seconds = 20 }

[rollout]
prompts_per_step = 8
samples_per_prompt = 4
max_new_tokens = 20
flush_groups = 64
reward_threads = 64
reward = "beside:reward"
"""
EDGES = '''\
import json
import time
from pathlib import Path

from miles_hpc.train import loss as losses

HERE = Path(__file__).parent


def wait_in(phase, step):
    """While the test holds this phase of this step."""
    hold = HERE / "hold"
    while hold.exists() and hold.read_text() == f"{phase} {step}":
        (HERE / "held").touch()
        time.sleep(0.05)


def now(rank):
    file = HERE / f"runs/left-000/heartbeat/rank-{rank:04d}.json"
    beat = json.loads(file.read_text()) if file.exists() else {"phase": "", "step": -1}
    return beat["phase"], beat["step"]


def reward(prompt, answer, label, metadata):
    if sum(map(ord, prompt)) % 2 or now(1)[0] == "evaluation":
        wait_in(*now(1))
    with (HERE / f"scored-{now(1)[1]}").open("a") as file:
        file.write(f"{prompt}\\n")
    return float(len(answer) % 3)  # differs within any group: without it nothing is trained


def loss(tokens, train):
    wait_in(*now(0))
    return losses.ppo(tokens, train)
'''


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("mode", "train", "rollout"),
    [
        ("generation", "in the wait", "in the wait"),
        ("update", "at batch 1", "in the wait"),
        ("fits", "not at all", "after its work"),
    ],
)
def test_all_ranks_leave_at_the_word_of_one(mpi, mode, train, rollout):
    done = mpi("stop", mode, train=2, rollout=2)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert lines == [f"rank {rank} left {train if rank < 2 else rollout}" for rank in range(4)]


class Run:
    """A run whose phases can be held."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.paths, self.held = folder, RunPaths(folder / "runs/left-000"), folder / "held"
        self.finished = np.array([])

    def hold(self, phase: str, step: int) -> None:
        self.held.unlink(missing_ok=True)
        (self.folder / "hold").write_text(f"{phase} {step}")

    def release(self) -> None:
        (self.folder / "hold").write_text("")  # not removed: somebody may be about to read it

    def wait(self, reached: Callable[[], object], seconds: float = 300) -> None:
        end = time.monotonic() + seconds
        while not reached():
            now = state.state_of(self.paths.folder)
            assert time.monotonic() < end and not now.ended, f"{now}\n{self.logs()}"
            time.sleep(0.1)

    def logs(self) -> str:
        return "\n".join(f"== {file}\n{file.read_text()[-3000:]}" for file in sorted(self.paths.attempts.glob("*/*.log")))

    def send(self, *numbers: int) -> None:
        """To all ranks, as Slurm does."""
        for rank in (0, 1):
            pid = json.loads(self.paths.heartbeat(rank).read_text())["pid"]
            for number in numbers:
                os.kill(pid, number)

    def ended(self) -> dict:
        """The verdict, after the end."""
        begin = time.monotonic()
        while not state.state_of(self.paths.folder).ended:
            assert time.monotonic() < begin + 200, self.logs()
            time.sleep(0.1)
        verdict = self.paths.verdict(max(self.paths.attempt_numbers()))
        return json.loads(verdict.read_text())

    def preempted(self, *numbers: int, release: bool = False) -> list[int]:
        """Send signals, wait for the end; all that is saved must be so within the grace. Versions that are on disk."""
        sent = time.time()
        self.send(*numbers)
        if release:
            self.release()
        verdict = self.ended()
        assert (verdict["kind"], verdict["signal"]) == ("preempted", numbers[0]), self.logs()
        print(f"{[int(n) for n in numbers]} in {verdict['phase']}: left after {verdict['time'] - sent:.1f} s")
        assert verdict["time"] - sent < WARNING_SECONDS
        return sorted(int(folder.name.removeprefix("step-")) for folder in self.paths.checkpoints.glob("step-*"))

    def groups(self, step: int) -> np.ndarray:
        """Prompt ids on disk."""
        return np.concatenate([np.unique(store.read(shard).prompt_ids) for shard in store.on_disk(self.paths, step)])

    def scored(self, step: int) -> bool:
        """All answers to some prompt have their reward."""
        file = self.folder / f"scored-{step}"
        return file.exists() and max(Counter(file.read_text().splitlines()).values(), default=0) == SAMPLES

    def phase(self, rank: int) -> str:
        return json.loads(self.paths.heartbeat(rank).read_text())["phase"]

    def resume(self) -> None:
        assert cli.main(["resume", str(self.paths.folder), "--local"]) == 0


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("left")
    (folder / "job.toml").write_text(TOML)
    (folder / "beside.py").write_text(EDGES)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(["run", "--local", "job.toml"]) == 0
        yield Run(folder)
        cli.main(["cancel", str(folder / "runs/left-000")])


@pytest.mark.mpi
@pytest.mark.engine
@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_run_that_is_asked_to_end_in_every_phase_loses_nothing(run):
    """One run, left in warm start, in a rollout, in an update and in an evaluation, then let go to its end."""
    in_the_warm_start(run)
    in_a_rollout(run)
    in_an_update(run)
    in_an_evaluation(run)
    run.resume()
    assert run.ended()["kind"] == "done"
    ids = np.concatenate([run.groups(step) for step in range(STEPS)])
    assert len(ids) == len(np.unique(ids)) == STEPS * PROMPTS
    assert audit.audit(run.paths.folder) == 0


def in_the_warm_start(run: Run) -> None:
    """Nothing is on disk yet, nothing is saved."""
    run.wait(lambda: run.paths.heartbeat(0).exists() and run.phase(0) == "warm_start")
    run.hold("rollout", 1)
    assert run.preempted(signal.SIGUSR2, signal.SIGUSR2) == []


def in_a_rollout(run: Run) -> None:
    """Half of the groups wait for their reward; the others are finished, but not enough for a shard."""
    run.resume()
    run.wait(lambda: run.held.exists() and run.scored(1))
    time.sleep(1)  # until the rank has heard of it
    assert run.preempted(signal.SIGUSR2) == [0, 1]
    assert 0 < len(run.groups(1)) < PROMPTS
    run.finished = run.groups(1)


def in_an_update(run: Run) -> None:
    """Between two micro-batches: the weights are those of before. Slurm's last word."""
    run.hold("train", 1)
    run.resume()
    run.wait(run.held.exists)
    assert run.preempted(signal.SIGTERM, release=True) == [0, 1]
    assert len(run.groups(1)) == PROMPTS and set(run.finished) < set(run.groups(1))


def in_an_evaluation(run: Run) -> None:
    """The step before it is done, but was not due to be saved."""
    run.hold("evaluation", 2)
    run.resume()
    run.wait(run.held.exists)
    assert run.preempted(signal.SIGUSR2) == [1, 2]
    run.release()
