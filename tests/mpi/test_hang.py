"""Ranks that hang in a real MPI world: found in time, named rightly, all stacks written, nobody left; and false alarms."""

import json
import time
from pathlib import Path

import psutil
import pytest

from miles_hpc.paths import RunPaths

pytestmark = pytest.mark.mpi


def verdict(run: Path) -> dict:
    return json.loads(RunPaths(run).verdict(1).read_text())


def living(run: Path) -> list[psutil.Process]:
    """Ranks of this world that are still there."""
    return [process for process in psutil.process_iter(["cmdline"]) if str(run) in " ".join(process.info["cmdline"] or ())]


@pytest.mark.parametrize(
    ("mode", "rank", "said"),
    [
        pytest.param("stopped", 0, "no sign of life", marks=pytest.mark.long),
        ("blocked", 1, "no sign of life"),
        ("asleep", 1, "no progress"),
    ],
)
def test_the_rank_that_hangs_is_named_and_all_end(mpi, tmp_path, mode, rank, said):
    done = mpi("hang", mode, train=2, rollout=2)
    end, since = time.time(), float((tmp_path / "since").read_text())
    assert done.returncode != 0
    found = verdict(tmp_path)
    assert found["time"] - since < 60 and end - found["time"] < 60  # of a busy machine; 6 and 0 of an idle one
    assert (found["kind"], found["rank"], found["role"], found["phase"], found["step"]) == ("hang", rank, "train", "train", 3)
    last = {beat["rank"]: beat["time"] for beat in found["heartbeats"]}
    assert sorted(last) == [0, 1, 2, 3] and (mode == "asleep" or last[rank] < found["time"] - 3)
    assert said in found["error"] and found["host"] and "; so did" not in found["error"]
    assert psutil.wait_procs(living(tmp_path), timeout=60)[1] == []
    stacks = {file.stem: file.read_text() for file in (RunPaths(tmp_path).attempt(1) / "stacks").iterdir()}
    own = stacks.pop(f"train-{rank:04d}")
    # a blocked interpreter's are written by a thread that needs none; a stopped process can write nothing
    assert {"stopped": "", "blocked": "misbehave", "asleep": "sleep_for_ever"}[mode] in own
    assert "all_reduce" in stacks.pop(f"train-{1 - rank:04d}")
    assert len(stacks) == 2 and all("in receive" in text for text in stacks.values())
    assert mode != "asleep" or "sleep_for_ever" in found["where"]


def test_a_slow_phase_and_a_short_stop_are_left_alone(mpi, tmp_path):
    done = mpi("hang", "slow", train=2, rollout=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert verdict(tmp_path)["kind"] == "done"
