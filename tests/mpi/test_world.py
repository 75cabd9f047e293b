"""The MPI world: who is who, messages, deadlines, and worlds that are not what the launcher asked for."""

import pytest

pytestmark = pytest.mark.mpi


def test_ranks_find_each_other_by_role(mpi):
    done = mpi("world", "talk", train=2, rollout=3)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert lines == [
        "rank 0 train 0/2 (0, 1) (2, 3, 4) 127.0.0.1",
        "rank 1 train 1/2 (0, 1) (2, 3, 4) 127.0.0.1",
        "rank 2 rollout 0/3 (0, 1) (2, 3, 4) 127.0.0.1",
        "rank 3 rollout 1/3 (0, 1) (2, 3, 4) 127.0.0.1",
        "rank 4 rollout 2/3 (0, 1) (2, 3, 4) 127.0.0.1",
    ]


def test_a_world_of_another_size_is_refused_with_the_cure(mpi):
    done = mpi("world", "talk", train=1, rollout=1, claim=6)
    assert done.stdout.count("refused: the MPI world has 2 ranks, the launcher started 6") == 2
    assert "srun --mpi=list" in done.stdout


def test_a_world_with_one_role_is_refused(mpi):
    done = mpi("world", "one-role", train=1, rollout=1)
    assert "refused: 2 train and 0 rollout ranks: both roles are needed" in done.stdout


@pytest.mark.parametrize(("mode", "what"), [("mute", "the first barrier over all ranks"), ("mute-large", "an 8 MiB broadcast")])
def test_a_world_in_which_messages_get_lost_is_found_at_the_start(mpi, tmp_path, mode, what):
    """Barriers and broadcasts that hang between components, while the size of the world is right (mpi4py#199)."""
    mpi("world", mode, train=1, rollout=1)
    said = (tmp_path / "said").read_text()
    assert f"waited 2 s for {what}" in said and "where: train rank 0" in said
