"""Collectives that lose a rank, in a real MPI world with a real gloo group: the verdict is about the rank that was lost."""

import json
import signal

import pytest

from miles_hpc.launchers import autopsy, evidence, verdict
from miles_hpc.paths import RunPaths

pytestmark = pytest.mark.mpi


def closed(mpi, folder, mode):
    """The verdict after the batch side has looked at what mpiexec said."""
    done, paths = mpi("lost", mode, train=2, rollout=1), RunPaths(folder)
    assert done.returncode != 0
    lost = evidence.losses(done.stdout + done.stderr)
    autopsy.close(paths, 1, evidence.Evidence(done.returncode, losses=lost, heartbeats=evidence.heartbeats(folder, 1)))
    return verdict.newest(paths), json.loads(paths.verdict(1).read_text())


@pytest.mark.long  # on a busy machine mpiexec may name the other rank, which it has killed itself; srun names the right one
def test_the_rank_that_was_killed_is_named_not_the_one_whose_collective_failed(mpi, tmp_path):
    found, _ = closed(mpi, tmp_path, "killed")
    assert (found.kind, found.rank, found.role, found.signal) == ("rank_died", 1, "train", signal.SIGKILL)
    assert (found.phase, found.step) == ("train", 3)


def test_a_collective_whose_patience_ends_is_a_hang(mpi, tmp_path):
    """In a run the watchdog, which is less patient, has named the other rank long before."""
    found, fields = closed(mpi, tmp_path, "late")
    assert (found.kind, found.rank) == ("hang", 0) and "Timed out waiting" in found.error
    assert {beat["rank"] for beat in fields["heartbeats"]} == {0, 1, 2}
