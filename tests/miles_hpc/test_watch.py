"""Who hangs: the decision as a pure function, and the memory that learns how long phases take."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as some

from miles_hpc.position import ENGINE, RANKS, REWARD
from miles_hpc.watch import STARTING, UNKNOWN, Limits, Seen, Watch, hanging

LIMITS = Limits(silent=30, still=60, factor=5, long=1800)


def seen(rank: int, still: float = 0, waits_for: str = "", silent: float = 0, **fields) -> Seen:
    fields = {"role": "train", "phase": "train", "step": 3} | fields
    return Seen(rank, still=still, waits_for=waits_for, silent=silent, silent_limit=30, limit=60, **fields)


def test_the_one_that_works_too_long_is_named_not_those_that_wait():
    ranks = [seen(0, 100, RANKS), seen(1, 99), seen(2, 400, RANKS, role="rollout", phase="sync")]
    assert [s.rank for s in hanging(ranks, 2)] == [1]


def test_a_rank_without_a_sign_of_life_comes_before_one_without_progress():
    assert [s.rank for s in hanging([seen(0, 200), seen(1, 40, silent=35), seen(2, 100, RANKS)], 2)] == [1]


def test_of_those_that_stopped_together_the_one_that_got_least_far_is_named():
    """On a GPU a rank that waits in a collective looks busy; it has queued one micro-batch more than the one that hangs."""
    assert [s.rank for s in hanging([seen(0, 70, progress=5), seen(1, 71, progress=4), seen(2, 71, progress=5)], 2)] == [1]
    assert [s.rank for s in hanging([seen(0, 80, progress=5), seen(1, 70, progress=4)], 2)] == [0]


def test_ranks_that_cannot_be_told_apart_are_all_named():
    assert [s.rank for s in hanging([seen(0, 70), seen(1, 71)], 2)] == [1, 0]


def test_all_that_wait_for_each_other_hang():
    assert [s.rank for s in hanging([seen(0, 90, RANKS), seen(1, 120, RANKS)], 2)] == [1]


@pytest.mark.parametrize("who", [ENGINE, REWARD])
def test_a_rank_with_a_deadline_of_its_own_is_left_alone_and_so_are_those_that_wait_for_it(who):
    assert hanging([seen(0, 5000, RANKS), seen(1, 5000, who, role="rollout", phase="rollout")], 2) == []


RANK = some.builds(
    seen,
    rank=some.integers(0, 50),
    still=some.floats(0, 500),
    waits_for=some.sampled_from(["", RANKS, ENGINE, REWARD]),
    silent=some.floats(0, 60),
    step=some.integers(0, 4),
    progress=some.integers(0, 4),
    phase=some.sampled_from(["train", "sync"]),
)


@given(some.lists(RANK, max_size=8, unique_by=lambda s: s.rank))
def test_whoever_is_named_is_dead_or_late_and_waits_for_nobody_that_is(ranks):
    found = hanging(ranks, 2)
    gone, late = [s for s in ranks if s.gone], [s for s in ranks if s.overdue and not s.waits_for]
    assert set(found) <= set(gone or late or [s for s in ranks if s.overdue and s.waits_for == RANKS])
    assert bool(found) >= bool(gone or late)
    assert len({s.rank for s in found}) == len(found)


@given(some.lists(RANK, max_size=8, unique_by=lambda s: s.rank))
def test_nobody_is_named_while_all_are_within_their_limits(ranks):
    fine = [dataclasses.replace(s, still=min(s.still, s.limit), silent=min(s.silent, s.silent_limit)) for s in ranks]
    assert hanging(fine, 2) == []


@given(some.lists(RANK, min_size=1, max_size=8, unique_by=lambda s: s.rank), some.randoms())
def test_the_order_of_the_ranks_does_not_matter(ranks, random):
    shuffled = random.sample(ranks, len(ranks))
    assert hanging(ranks, 2) == hanging(shuffled, 2)


def beat(beats: int, phase: str, step: int = 0, progress: int = 0, waits_for: str = "") -> dict:
    return {"beats": beats, "phase": phase, "step": step, "progress": progress, "waits_for": waits_for}


def lived(watch: Watch, phase: str, seconds: int, step: int = 0, first: int = 0) -> int:
    """Rank 0 lives that long in a phase without progress; the number of its last heartbeat."""
    for second in range(seconds):
        watch.look({0: beat(first + second, phase, step)}, 1.0)
    return first + seconds


def test_a_phase_is_measured_before_it_has_a_short_deadline():
    watch = Watch({0: "train"}, LIMITS)
    assert watch.limit("train", "train") == 1800
    after = lived(watch, "train", 100)
    assert watch.limit("train", "train") == 1800 and watch.hanging(2) == []
    lived(watch, "sync", 1, first=after)
    assert watch.limit("train", "train") == pytest.approx(5 * 100, rel=0.02)
    assert watch.limit("rollout", "train") == watch.limit("train", "sync") == 1800


def test_a_short_phase_has_the_least_deadline_and_none_more_than_the_long_one():
    watch = Watch({0: "train"}, LIMITS)
    after = lived(watch, "train", 2)
    after = lived(watch, "wait", 1000, first=after)
    lived(watch, "train", 2, first=after)
    assert watch.limit("train", "train") == 60 and watch.limit("train", "wait") == 1800


@pytest.mark.parametrize("phase", [*STARTING, *UNKNOWN])
def test_start_and_users_functions_keep_the_long_deadline(phase):
    watch = Watch({0: "train"}, LIMITS)
    after = lived(watch, phase, 2)
    after = lived(watch, "train", 2, first=after)
    lived(watch, phase, 500, first=after)
    assert watch.hanging(2) == []


def test_progress_within_a_phase_starts_its_time_again():
    watch = Watch({0: "train"}, dataclasses.replace(LIMITS, long=50))
    for second in range(500):
        watch.look({0: beat(second, "warm_start", progress=second // 40)}, 1.0)
    assert watch.hanging(2) == []
    for second in range(500, 560):
        watch.look({0: beat(second, "warm_start", progress=99)}, 1.0)
    assert [s.rank for s in watch.hanging(2)] == [0]


def test_a_heartbeat_that_stands_still_or_cannot_be_read_is_no_life():
    watch = Watch({0: "train", 1: "rollout"}, LIMITS)
    for second in range(29):
        watch.look({0: beat(second, "train"), 1: beat(1, "rollout", waits_for=ENGINE)}, 1.0)
    assert watch.hanging(2) == []
    for second in range(29, 33):
        watch.look({0: beat(second, "train")}, 1.0)
    assert [(s.rank, s.gone) for s in watch.hanging(2)] == [(1, True)]


def test_a_rank_that_is_loading_libraries_may_be_silent_for_long():
    watch = Watch({0: "train", 1: "rollout"}, LIMITS)
    for second in range(1700):
        watch.look({0: beat(second, "start", waits_for=RANKS)}, 1.0)
    assert watch.hanging(2) == []
