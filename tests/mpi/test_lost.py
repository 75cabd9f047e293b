"""Collectives that lose a rank, in a real MPI world with a real gloo group: the verdict is about the rank that was lost."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from miles_hpc.launchers import autopsy, evidence, local, verdict
from miles_hpc.launchers.script import RANK
from miles_hpc.paths import RunPaths

pytestmark = pytest.mark.mpi


def closed(folder, mode):
    """The verdict after the batch side has looked at what `rank.sh` has noted."""
    paths, program = RunPaths(folder), [sys.executable, Path(__file__).with_name("lost.py"), mode]
    paths.attempt(1).mkdir(parents=True)
    command = [local.mpiexec(sys.executable), "-launcher", "fork", "-hosts", "localhost"]
    command += ["-n", "2", RANK, "train", folder, "3", *program, ":", "-n", "1", RANK, "rollout", folder, "3", *program]
    environment = local.environment() | {"OMP_NUM_THREADS": "1", "MILES_ATTEMPT": "001"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment)
    assert done.returncode != 0
    notes = paths.ends(1).read_text() if paths.ends(1).exists() else ""  # none where a rank has ended all others at once
    lost = evidence.losses(done.stderr, ends=notes)
    autopsy.close(paths, 1, evidence.Evidence(done.returncode, losses=lost, heartbeats=evidence.heartbeats(folder, 1)))
    return verdict.newest(paths), json.loads(paths.verdict(1).read_text())


def test_the_rank_that_was_killed_is_named_not_the_one_whose_collective_failed(tmp_path):
    found, _ = closed(tmp_path, "killed")
    assert (found.kind, found.rank, found.role, found.signal) == ("rank_died", 1, "train", signal.SIGKILL)
    assert (found.phase, found.step) == ("train", 3)


def test_a_collective_whose_patience_ends_is_a_hang(tmp_path):
    """In a run the watchdog, which is less patient, has named the other rank long before."""
    found, fields = closed(tmp_path, "late")
    assert (found.kind, found.rank) == ("hang", 0) and "Timed out waiting" in found.error
    assert {beat["rank"] for beat in fields["heartbeats"]} == {0, 1, 2}
