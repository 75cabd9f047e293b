import json

import pytest

from miles_hpc.launchers import verdict
from miles_hpc.launchers.verdict import Attempt, Situation, Verdict, avoided, decide, stalled
from miles_hpc.paths import RunPaths


def history(*kinds: str, moving: bool = True) -> tuple[Attempt, ...]:
    return tuple(Attempt(n, kind, n * moving, (n + 1) * moving) for n, kind in enumerate(kinds))


@pytest.mark.parametrize(
    ("kinds", "action"),
    [
        (["done"], "done"),
        (["rank_died"], "restart"),
        (["hang"], "restart"),
        (["out_of_memory"], "restart"),
        (["bug"], "restart"),
        (["peer_lost"], "restart"),
        (["preempted"], "requeue"),
        (["time_limit"], "requeue"),
        (["node_failure"], "requeue"),
        (["user_error"], "stop"),
        (["diverged"], "stop"),
        (["rank_died", "rank_died"], "restart"),
        (["rank_died", "hang", "bug"], "stop"),
        (["rank_died", "hang", "done"], "done"),
        # the nodes' fault does not count against the program
        (["node_failure", "time_limit", "preempted", "rank_died"], "restart"),
        (["time_limit"] * 20, "requeue"),
        (["rank_died", "rank_died", "preempted"], "requeue"),
    ],
)
def test_decision(kinds, action):
    assert decide(Situation(history(*kinds), max_restarts=2)) == action


@pytest.mark.parametrize(("faults", "seconds"), [(1, 0), (2, 10), (3, 20), (4, 40), (5, 60), (6, 60)])
def test_the_pause_grows_with_faults_in_a_row_and_starts_anew_when_the_run_gets_on(faults, seconds):
    standing = history(*["rank_died"] * faults, moving=False)
    assert verdict.pause_before_restart(standing) == seconds
    assert verdict.pause_before_restart(history(*["bug"] * 5) + standing[1:]) == seconds
    assert verdict.pause_before_restart(standing + history("bug", "preempted", "hang")) == 0


@pytest.mark.parametrize("kind", ["preempted", "rank_died", "time_limit"])
def test_a_cancelled_job_stops(kind):
    assert decide(Situation(history(kind), max_restarts=5, job_state="CANCELLED")) == "stop"


def test_done_stands_even_if_the_job_is_cancelled_later():
    assert decide(Situation(history("done"), max_restarts=5, job_state="CANCELLED")) == "done"


def test_without_slurm_there_is_no_queue_to_go_back_to():
    assert decide(Situation(history("preempted"), max_restarts=5, slurm=False)) == "stop"
    assert decide(Situation(history("rank_died"), max_restarts=5, slurm=False)) == "restart"


@pytest.mark.parametrize("kind", ["time_limit", "node_failure", "rank_died", "hang", "bug"])
def test_three_attempts_without_a_new_step_stop(kind):
    assert decide(Situation(history(kind, kind, moving=False), max_restarts=9)) != "stop"
    assert decide(Situation(history(kind, kind, kind, moving=False), max_restarts=9)) == "stop"


@pytest.mark.parametrize("kind", ["preempted", "bad_node"])
def test_attempts_that_got_no_time_do_not_count(kind):
    assert decide(Situation(history(*[kind] * 20, moving=False), max_restarts=0, replaceable=False)) == "requeue"


def test_preemptions_between_faults_neither_count_nor_help():
    kinds = ["rank_died", "preempted", "rank_died", "preempted", "preempted", "rank_died"]
    assert not stalled(history(*kinds[:-1], moving=False))
    assert decide(Situation(history(*kinds, moving=False), max_restarts=9)) == "stop"


def test_a_node_on_which_ranks_die_twice_is_avoided_and_asks_for_another_allocation_where_this_one_has_none():
    past = tuple(Attempt(n, kind, n, n + 1, (node,)) for n, kind, node in [(1, "rank_died", "r1"), (2, "hang", "r1")])
    assert avoided(past[:1]) == () and avoided(past) == ("r1",)
    assert decide(Situation(past, max_restarts=5)) == "restart"
    assert decide(Situation(past, max_restarts=5, replaceable=False)) == "requeue"
    assert decide(Situation(past, max_restarts=1, replaceable=False)) == "stop"
    assert decide(Situation(past, max_restarts=5, replaceable=False, slurm=False)) == "restart"


def test_faults_on_several_nodes_in_turn_accuse_none():
    named = [("rank_died", "t0"), ("preempted", ""), ("hang", "r0"), ("rank_died", "t0"), ("bug", "r0")]
    assert avoided(tuple(Attempt(n, kind, n, n + 1, (node,)) for n, (kind, node) in enumerate(named))) == ()
    named.insert(4, ("rank_died", "t0"))
    assert avoided(tuple(Attempt(n, kind, n, n + 1, (node,)) for n, (kind, node) in enumerate(named))) == ("t0",)


def test_a_node_that_fails_its_check_is_avoided_at_once_one_that_slurm_lost_is_left_to_slurm():
    assert avoided((Attempt(1, "bad_node", 0, 0, ("t1", "r0")), Attempt(2, "node_failure", 0, 0, ("t3",)))) == ("r0", "t1")


def test_a_node_whose_gpu_broke_is_replaced_by_a_spare_or_left_and_never_tried_again():
    past = (Attempt(1, "bad_node", 0, 3, ("t1",)),)
    assert avoided(past) == ("t1",)
    assert decide(Situation(past, max_restarts=0)) == "restart"
    assert decide(Situation(past, max_restarts=0, replaceable=False)) == "requeue"
    assert decide(Situation(past, max_restarts=0, replaceable=False, others=False)) == "stop"
    assert decide(Situation(past, max_restarts=9, slurm=False)) == "stop"


def test_progress_in_one_of_the_last_three_is_progress():
    rows = (Attempt(1, "bug", -1, -1), Attempt(2, "bug", -1, 5), Attempt(3, "bug", 5, 5), Attempt(4, "bug", 5, 5))
    assert not stalled(rows)
    assert stalled((*rows, Attempt(5, "bug", 5, 5)))


def test_a_verdict_with_more_fields_than_the_launcher_knows_is_read(tmp_path):
    paths = RunPaths(tmp_path)
    paths.attempt(1).mkdir(parents=True)
    paths.verdict(1).write_text(json.dumps({"kind": "hang", "rank": 3, "pid": 7, "role": None}))
    assert verdict.newest(paths) == Verdict(kind="hang", rank=3)


def test_no_verdict_yet(tmp_path):
    assert verdict.newest(RunPaths(tmp_path)) is None
    RunPaths(tmp_path).attempt(1).mkdir(parents=True)
    assert verdict.newest(RunPaths(tmp_path)) is None


def test_sentence_names_who_where_and_what():
    said = verdict.sentence(Verdict("rank_died", 5, "rollout", "n1", "r1", "generate", 3, error="Killed"))
    assert said == "rank_died (rollout rank 5 on r1, in generate at step 3): Killed"
    assert verdict.sentence(Verdict("user_error", role="prepare", host="n1")) == "user_error (prepare on n1)"
    assert verdict.sentence(Verdict("hang", rank=3)) == "hang (rank 3)"
    assert verdict.sentence(Verdict("done")) == "done"
