"""Where a thread is, and whom it waits for there."""

import json
import sys
import threading
from pathlib import Path

import pytest

from miles_hpc import position
from miles_hpc.heartbeat import Heartbeat
from miles_hpc.position import ENGINE, RANKS, position_of
from miles_hpc.rollout import generate
from miles_hpc.rollout.engine import EngineHost
from miles_hpc.world import World


class Standing:
    """A thread that has come to a halt in a function."""

    def __init__(self, function) -> None:
        self.go, self.there = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=function, args=(self.halt,))

    def halt(self, *_: object) -> bool:
        self.there.set()
        return self.go.wait(100)

    def __enter__(self) -> "Standing":
        self.thread.start()
        assert self.there.wait(100)
        return self

    def __exit__(self, *error: object) -> None:
        self.go.set()
        self.thread.join()


def users_function(halt) -> None:
    json.loads("[]", object_hook=None)
    max([1], key=halt)


def test_a_users_function_is_named_through_libraries_and_works():
    with Standing(users_function) as standing:
        at, waits_for = position_of(standing.thread.ident)
    assert at.startswith(__file__) and at.endswith(" halt") and waits_for == ""


class Never:
    def __init__(self, halt) -> None:
        self.Test = halt


def test_a_wait_for_other_ranks_is_known(monkeypatch):
    world = World(None, None, "train", 0, (0,), (1,), ("a", "a"), lambda: None)
    # the halt is no frame of a user in reality: MPI's Test is C
    monkeypatch.setattr(position, "LIBRARIES", (*position.LIBRARIES, __file__))
    with Standing(lambda halt: world.wait(Never(halt), 100, "a word")) as standing:
        at, waits_for = position_of(standing.thread.ident)
    assert at.endswith(" wait") and "world.py" in at and waits_for == RANKS


def test_a_wait_for_the_engine_is_known(monkeypatch):
    monkeypatch.setattr(position, "LIBRARIES", (*position.LIBRARIES, __file__))

    class Silent:
        poll = None

    def receive(halt) -> None:
        Silent.poll = halt
        engine = EngineHost.__new__(EngineHost)
        engine._connection, engine.poll_hook = Silent(), lambda: None
        Silent.recv = lambda self: None
        engine._receive("a test", 100)

    with Standing(receive) as standing:
        at, waits_for = position_of(standing.thread.ident)
    assert at.endswith(" _arrived") and waits_for == ENGINE


def test_a_thread_that_has_ended_is_nowhere():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert position_of(thread.ident) == ("", "")


def test_every_wait_that_is_named_exists():
    for (file, function), _ in position.WAITS.items():
        assert (position.PACKAGE / file).is_file()
        owners = {"rollout/generate.py": generate.Generator}
        assert not function or hasattr(owners[file], function)


def test_a_rank_that_writes_its_heartbeat_is_where_it_was_before(tmp_path):
    Heartbeat(tmp_path / "beat.json", "train", 0, 1).enter("train", 1)
    at = json.loads((tmp_path / "beat.json").read_text())["at"]
    assert Path(at.partition(":")[0]) == Path(__file__) and at.endswith(sys._getframe().f_code.co_name)


@pytest.mark.mpi
def test_the_frame_of_a_collective_is_still_torchs():
    import torch.distributed.distributed_c10d as c10d

    assert c10d.__file__.endswith("torch/distributed/distributed_c10d.py") and hasattr(c10d, "all_reduce")
