"""Engines that die or hang in the middle of a run, on real parts: same attempt, nothing lost, the same weights bit for bit."""

import sys
from pathlib import Path

import psutil
import pytest

sys.path.append(str(Path(__file__).parent))
from runs import digest, events, logs, run, start, strike, wait

from miles_hpc.launchers import audit, report
from miles_hpc.paths import RunPaths

pytestmark = [pytest.mark.engine, pytest.mark.long]
SMALL = ["run.steps=4", "rollout.max_new_tokens=24", "eval.prompts=8", "data.eval=miles_hpc.examples.arithmetic:prompts"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def undisturbed(folder) -> RunPaths:
    return run(folder / "undisturbed", *SMALL)


def disturbed(folder: Path, *settings: str) -> RunPaths:
    """A run with one engine's scheduler killed while it generates, and another's, or the next, stopped later."""
    paths = start(folder, *SMALL, *settings)
    strike(paths, 0, -1, psutil.Process.kill)
    strike(paths, 2, 0, psutil.Process.suspend)
    wait(paths)
    return paths


@pytest.mark.parametrize("engines", [1, 2])
def test_a_killed_and_a_stopped_engine_change_nothing(folder, undisturbed, engines):
    paths = disturbed(folder / f"disturbed-{engines}", f"slurm.rollout.ranks_per_node={engines}")
    found = report.compute(paths.folder)
    assert (found.state, found.attempts, found.engine_restarts) == ("done", 1, 2), logs(paths)
    assert audit.audit(paths.folder) == 0
    assert digest(paths) == digest(undisturbed)
    restarts = [event for event in events(paths) if event["event"] == "engine_restart"]
    assert "ended" in restarts[0]["error"]
    assert any(words in restarts[1]["error"] for words in ("silent", "did not answer"))
    assert sum(e["metrics"]["engine/restarts"] for e in events(paths) if e["event"] == "step") == 2
