"""What fits into the grace, and who is told what; the world is one rank's, messages are lists."""

import math
import signal
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from miles_hpc import signals, stop, world
from miles_hpc.errors import Stopped
from miles_hpc.stop import HEARD, LEAVE, Leaving, Stop


class World:
    """One rank with what has arrived for it."""

    def __init__(self, rank: int, **arrived: list) -> None:
        self.rank, self.train, self.rollout = rank, (0, 1), (2, 3)
        self.role = "train" if rank < 2 else "rollout"
        self.arrived, self.sent, self.comm = arrived, [], self

    def take(self, tag: int):
        box = self.arrived.get({HEARD: "heard", LEAVE: "leave"}[tag], [])
        return box.pop() if box else None

    def isend(self, value, dest: int, tag: int) -> None:
        self.sent.append((value, dest, tag))


@pytest.fixture
def noted(monkeypatch):
    numbers: list[int] = []
    monkeypatch.setattr(signals, "noted", lambda: numbers[0] if numbers else 0)
    return numbers


def test_without_a_signal_everything_fits_and_nothing_is_due(noted):
    quiet = Stop(World(0), 120)
    quiet.poll()
    assert quiet.fits(1e9) and not quiet.due(math.inf) and quiet.asked == 0


def test_a_signal_is_passed_on_once_to_the_first_training_rank(noted):
    rank = Stop(World(3), 120)
    noted += [signal.SIGUSR2, signal.SIGUSR2, signal.SIGTERM]
    for _ in range(3):
        rank.poll()
    assert rank.world.sent == [(signal.SIGUSR2, 0, HEARD)]


def test_the_first_training_rank_hears_of_a_signal_that_it_did_not_get(noted):
    lead = Stop(World(0, heard=[signal.SIGTERM]), 120)
    lead.poll()
    assert lead.asked == signal.SIGTERM and lead.world.sent == []
    lead.tell()
    lead.tell()
    assert lead.world.sent == [(True, 2, LEAVE), (True, 3, LEAVE)]


def test_a_rollout_rank_leaves_when_told_and_then_goes_on_to_the_end(noted):
    rank = Stop(World(2, leave=[True]), 120)
    with pytest.raises(Stopped):
        rank.poll()
    rank.poll()


def test_a_training_rank_never_leaves_alone(noted):
    noted.append(signal.SIGTERM)
    Stop(World(1, leave=[True]), 120).poll()


def test_a_second_signal_does_not_move_the_deadline(noted):
    lead = Stop(World(0), 120)
    noted.append(signal.SIGUSR2)
    lead.poll()
    first, noted[:] = lead.deadline, [signal.SIGTERM]
    lead.world.arrived["heard"] = [signal.SIGTERM]
    lead.poll()
    assert (lead.asked, lead.deadline) == (signal.SIGUSR2, first)


@given(some.floats(0, 1000), some.floats(1, 600), some.sampled_from([signal.SIGUSR2, signal.SIGTERM]))
def test_what_is_begun_ends_before_the_kill(needed, warning, number):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stop.time, "monotonic", lambda: 100.0)
        lead = Stop(World(0), warning)
        lead._hear(number)
        grace = stop.TERM_SECONDS if number == signal.SIGTERM else warning
        assert lead.fits(needed) == (100.0 + needed + stop.MARGIN_SECONDS < 100.0 + grace)
        assert lead.fits(needed) or lead.due(needed)
        assert number != signal.SIGTERM or lead.due(0.0)


def test_whoever_leaves_at_the_last_moment_can_still_save(noted, monkeypatch):
    """From the decision to the save all ranks agree, which takes a moment."""
    now = [100.0]
    monkeypatch.setattr(stop.time, "monotonic", lambda: now[0])
    lead, save = Stop(World(0), 20), 3.0
    lead._hear(signal.SIGUSR2)
    while not lead.due(save):
        now[0] += 0.05
    now[0] += stop.MARGIN_SECONDS / 2
    assert lead.fits(save)


class Box:
    complete = False

    def take(self) -> bool:
        return False


def test_a_box_is_complete_when_it_is_time_to_leave():
    due: list[bool] = []
    leaving = Leaving(Box(), lambda: bool(due))
    assert not leaving.take() and not leaving.complete and not leaving.left
    due.append(True)
    assert leaving.take() and leaving.complete and leaving.left


class Reducer:
    """A communicator that, as MPI may, reads and writes the buffers only when it is asked for the result."""

    def Iallreduce(self, *arguments):
        self.buffers = [weakref.ref(a) for a in arguments if isinstance(a, np.ndarray)]
        return self

    def Test(self) -> bool:
        assert all(buffer() is not None for buffer in self.buffers), "a buffer was let go before it was used"
        return True


def test_a_vote_keeps_its_buffers_until_the_answer(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=SimpleNamespace(MAX=0, IN_PLACE=0)))
    role = Reducer()
    assert world.World(None, role, "train", 0, (0,), (1,), ("a", "a"), lambda: None).vote(5)() in (0, 5)
