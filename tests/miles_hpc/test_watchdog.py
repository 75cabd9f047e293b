"""The watchdog without its thread: what a watcher reads, what it writes, and when a rank leaves."""

import json
import os
import time

import pytest

from miles_hpc import verdicts, watchdog
from miles_hpc.heartbeat import Heartbeat
from miles_hpc.paths import RunPaths
from miles_hpc.watch import Limits, Watch
from miles_hpc.watchdog import Watchdog

ROLES = {0: "train", 1: "train", 2: "rollout"}


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path / "a run")


def dog(paths: RunPaths, rank: int = 0, roles: dict[int, str] = ROLES) -> Watchdog:
    beat = Heartbeat(paths.heartbeat(rank), roles[rank], rank, 1)
    return Watchdog(beat, paths, 1, Watch(roles, Limits(silent=5, still=5, long=50)), watching=True)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that the watcher's clock is ahead."""
    ahead, real = [0.0], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + ahead[0])
    return ahead


def look(watcher: Watchdog, clock: list[float], seconds: int, *living: Heartbeat) -> None:
    for _ in range(seconds):
        clock[0] += 1.01
        for beat in living:
            beat.beat()
        watcher._look()


def test_a_rank_whose_file_stands_still_is_named_with_what_it_last_said(paths, clock):
    watcher = dog(paths)
    ranks = [Heartbeat(paths.heartbeat(rank), ROLES[rank], rank, 1) for rank in ROLES]
    for beat in ranks:
        beat.enter("train", 4)
    look(watcher, clock, 20, ranks[0], ranks[2])
    verdict = json.loads(paths.verdict(1).read_text())
    assert [verdict[key] for key in ("kind", "rank", "role", "phase", "step")] == ["hang", 1, "train", "train", 4]
    assert verdict["pid"] == os.getpid() and verdict["node"] and verdict["found_by"] == 0
    assert "no sign of life" in verdict["error"] and "test_watchdog.py" in verdict["where"]
    assert (
        f"logs '{paths.folder}' --role train --rank 1 --attempt 1; " in verdict["next"]
        and "attempts/001/stacks" in verdict["next"]
    )


def test_time_in_which_the_watcher_did_not_look_does_not_count(paths, clock):
    """A suspended job: when it goes on, the watcher wakes before the others have beaten."""
    watcher = dog(paths)
    ranks = [Heartbeat(paths.heartbeat(rank), ROLES[rank], rank, 1) for rank in ROLES]
    for beat in ranks:
        beat.enter("train", 4)
    look(watcher, clock, 3, *ranks)
    clock[0] += 3600
    watcher._look()
    look(watcher, clock, 10, *ranks)
    assert not paths.verdict(1).exists()


def test_a_disk_that_takes_no_heartbeat_is_no_rank_that_hangs(paths, clock, monkeypatch):
    watcher = dog(paths)
    ranks = [Heartbeat(paths.heartbeat(rank), ROLES[rank], rank, 1) for rank in ROLES]
    for beat in ranks:
        beat.enter("train", 4)
    look(watcher, clock, 2, *ranks)
    monkeypatch.setattr(Heartbeat, "_write", lambda self: None)
    look(watcher, clock, 100, *ranks)
    paths.heartbeat(0).unlink()
    look(watcher, clock, 100, *ranks)
    assert not paths.verdict(1).exists()


def test_a_verdict_that_the_disk_refuses_is_written_at_the_next_look(paths, clock, monkeypatch):
    watcher, write, tries = dog(paths), verdicts.write, []

    def refused_once(*given, **fields):
        tries.append(fields["rank"])
        if len(tries) == 1:
            raise OSError(28, "No space left on device")
        return write(*given, **fields)

    monkeypatch.setattr(verdicts, "write", refused_once)
    ranks = [Heartbeat(paths.heartbeat(rank), ROLES[rank], rank, 1) for rank in ROLES]
    for beat in ranks:
        beat.enter("train", 4)
    look(watcher, clock, 20, ranks[0], ranks[2])
    assert len(tries) > 1 and verdicts.kind_of(paths, 1) == "hang"


def test_heartbeats_of_an_earlier_attempt_and_torn_ones_are_no_life(paths, clock):
    watcher = dog(paths)
    old = Heartbeat(paths.heartbeat(1), "train", 1, 0)
    for rank in ROLES:
        Heartbeat(paths.heartbeat(rank), ROLES[rank], rank, 1).enter("train")
    old.enter("train")
    paths.heartbeat(2).write_text('{"rank": 2, "att')
    assert set(watcher._beats()) == {0}


def test_a_rank_that_never_came_is_named_too(paths, clock):
    watcher = dog(paths)
    ranks = [Heartbeat(paths.heartbeat(rank), ROLES[rank], rank, 1) for rank in (0, 1)]
    look(watcher, clock, 60, *ranks)
    verdict = json.loads(paths.verdict(1).read_text())
    assert (verdict["rank"], verdict["role"], verdict["phase"]) == (2, "rollout", "start")


@pytest.mark.parametrize(
    ("kind", "leaves", "dumps"),
    [
        ("hang", True, True),
        ("bug", True, False),
        ("rank_died", True, False),
        ("preempted", False, False),
        ("done", False, False),
    ],
)
def test_a_rank_leaves_an_attempt_that_has_failed(paths, monkeypatch, kind, leaves, dumps):
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(watchdog, "LEAVE_SECONDS", 0.0)
    rank = dog(paths)
    rank._file.parent.mkdir(parents=True)
    with rank._file.open("a") as rank._stacks:
        rank._obey()
        assert left == []
        verdicts.write(paths, 1, kind=kind)
        rank._obey()
    assert left == ([1] if leaves else [])
    assert ("most recent call first" in rank._file.read_text()) == dumps


def test_a_rank_that_ends_well_leaves_no_empty_file(paths):
    rank = dog(paths)
    rank.watch.limits = Limits(silent=1000)  # else this process need only be slow to leave its stacks there
    rank.start()
    assert rank._file.exists()
    rank.stop()
    assert not rank._file.exists()


def test_a_large_world_is_looked_at_less_often(paths):
    small, large = dog(paths), dog(paths, roles=dict.fromkeys(range(1000), "train"))
    assert (small.interval, small.watch.limits.silent) == (1.0, 5.0)
    assert (large.interval, large.watch.limits.silent, large.watch.limits.still) == (10.0, 50.0, 50.0)


LOST = """\
srun: error: r0: task 0: Killed
srun: launch/slurm: _step_signal: Terminating StepId=7.0
slurmstepd-t0: error: *** STEP 7.0 ON t0 CANCELLED AT 2026-11-29T20:07:07 ***
srun: Job step aborted: Waiting up to 12 seconds for job step to finish.
"""
REQUEUED = """\
slurmstepd-t0: error: *** STEP 7.0 ON t0 CANCELLED AT 2026-11-29T20:10:16 DUE TO JOB REQUEUE ***
srun: Job step aborted: Waiting up to 12 seconds for job step to finish.
srun: error: t0: task 0: Exited with exit code 1
srun: launch/slurm: _step_signal: Terminating StepId=7.0
"""


@pytest.mark.parametrize(("said", "leaves"), [(LOST, True), (REQUEUED, False), ("", False)])
def test_a_rank_leaves_at_once_where_srun_ends_the_step_for_a_dead_one(said, leaves, paths, monkeypatch):
    """Be it told by Slurm or not; not where Slurm ends the job: then there are seconds to save."""
    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    paths.attempt(1).mkdir(parents=True)
    paths.launcher_log(1).write_text(said)
    dog(paths)._obey()
    assert left == [1] * leaves
