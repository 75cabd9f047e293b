"""One private cluster for the whole session, below a folder of its own, gone at the end."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from miles_hpc.launchers import controller, state, submission
from miles_hpc.launchers.cluster import Cluster, Settings
from miles_hpc.paths import RunPaths

PROBE = str(Path(__file__).parent / "probe.py")
TOML = """\
[run]
name = "demo"
steps = 3
[model]
path = "model"
[data]
prompts = "prompts.jsonl"
[rollout]
prompts_per_step = 8
samples_per_prompt = 4
max_new_tokens = 8
reward = "scoring:reward"
[train]
lr = 1e-3
[slurm]
time_minutes = 5
[slurm.train]
nodes = 2
ranks_per_node = 2
[slurm.rollout]
nodes = 2
"""


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two training and two rollout nodes with two GPUs each that Slurm takes for real."""
    # MILES_TEST_CLUSTER: a folder that keeps the downloaded packages between sessions
    kept = os.environ.get("MILES_TEST_CLUSTER")
    home = Path(kept or tempfile.mkdtemp(prefix="miles-"))
    found = Cluster(home)
    found.up(Settings(gpus=2))
    try:
        yield found
    finally:
        found.down(purge=True)
        if not kept:
            shutil.rmtree(home)


@pytest.fixture
def slurm(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The cluster, in this process's environment."""
    for name, value in cluster.exports().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(controller, "BRIEF", controller.PATIENT)  # on a busy machine slow is not silent
    return cluster


@dataclass
class Submit:
    """Submits runs of the probe."""

    toml: Path

    def __call__(self, mode: str, *overrides: str, prepare: str = "prepare") -> Path:
        programs = {"main": (PROBE, mode), "prepare": (PROBE, prepare)}
        return submission.run(self.toml, overrides, without_slurm=False, **programs)


@pytest.fixture
def submit(slurm: Cluster, users_file: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Submit]:
    toml = users_file(TOML, "def reward(prompt, answer, label, metadata): ...\n")
    monkeypatch.chdir(toml.parent)
    yield Submit(toml)
    slurm._cancel_all()


def wait_until(condition: Callable[[], bool], seconds: float = 180.0) -> None:
    """Poll until `condition` holds; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)


@pytest.fixture
def until() -> Callable[..., None]:
    return wait_until


@pytest.fixture
def ended() -> Callable[[Path], state.RunState]:
    """Wait for a run's end; its last state, with the batch script's log where the test fails."""

    def wait(run: Path) -> state.RunState:
        wait_until(lambda: state.state_of(run).ended)
        print(RunPaths(run).job_log.read_text())
        return state.state_of(run)

    return wait


@pytest.fixture
def holding() -> Callable[[Path], None]:
    """Wait until all six ranks of a `hold` run wait."""
    return lambda run: wait_until(lambda: len(list(run.glob("holding-*"))) == 6)
