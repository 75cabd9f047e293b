"""Verdicts that nobody wrote. The texts of srun and slurmstepd are recorded from Slurm 22.05."""

import signal

import pytest

from miles_hpc.launchers.evidence import (
    Evidence,
    Heartbeat,
    Loss,
    collateral,
    ended_by,
    judge,
    left,
    losses,
    of_others,
    refine,
)
from miles_hpc.launchers.verdict import Verdict

BEATS = tuple(
    Heartbeat(rank, role, "login", node, "generate", 4, 100.0 - rank)
    for rank, (role, node) in enumerate([("train", "t0"), ("train", "t1"), ("rollout", "r0"), ("rollout", "r1")])
)
HOSTS = ["t0", "t1", "r0", "r1"]
SRUN = """\
srun: error: r1: task 1: Killed
srun: launch/slurm: _step_signal: Terminating StepId=4.0
slurmstepd-t0: error: *** STEP 4.0 ON t0 CANCELLED AT 2026-11-29T16:27:08 ***
srun: error: t0: task 0: Terminated
srun: error: t1: task 1: Terminated
"""


def test_srun_counts_the_tasks_of_each_component_and_the_node_tells_the_rank():
    assert losses(SRUN, HOSTS, first_rollout=2)[0] == Loss(3, "Killed", signal=9)


def test_in_a_homogeneous_job_the_task_is_the_rank():
    assert losses("srun: error: r1: task 3: Exited with exit code 3\n", HOSTS, 2) == (
        Loss(3, "Exited with exit code 3", exit_code=3),
    )


def test_ranks_that_were_only_ended_along_come_last():
    said = "srun: error: t0: task 0: Terminated\nsrun: error: t1: task 1: Segmentation fault (core dumped)\n"
    assert [loss.rank for loss in losses(said, HOSTS, 2)] == [1, 0]


def test_several_tasks_on_one_node():
    assert losses("srun: error: n0: tasks 2-3: Exited with exit code 1\n")[0].rank == 2


def test_without_slurm_the_ranks_notes_are_in_the_order_of_their_ends():
    assert losses("", ends="2 137\n1 0\n0 1\n") == (Loss(2, "killed by signal 9", 9, 137), Loss(0, "exit code 1", 0, 1))
    assert [loss.rank for loss in losses("", ends="1 143\n0 139\n")] == [0, 1]


@pytest.mark.parametrize(("said", "notes"), [(SRUN.replace("r1: task 1: Killed", "r0: task 0: Killed"), ""), ("", "2 137\n")])
def test_a_killed_rank_is_named(said, notes):
    found = judge(Evidence(code=137, job_state="RUNNING", losses=losses(said, HOSTS, 2, notes), heartbeats=BEATS))
    assert (found.kind, found.rank, found.role, found.node, found.phase, found.step, found.signal) == (
        ("rank_died", 2, "rollout", "r0", "generate", 4, 9)
    )


@pytest.mark.parametrize(
    ("number", "error", "state", "lost", "expected"),
    [
        (signal.SIGTERM, "", "RUNNING", 9, True),  # it left in order, since another had died
        (signal.SIGTERM, "the engine's host process ended", "RUNNING", 9, True),
        (signal.SIGTERM, "", "PREEMPTED", 9, False),
        (signal.SIGTERM, "", "RUNNING", 15, False),
        (signal.SIGUSR2, "", "RUNNING", 9, False),
        (signal.SIGUSR2, "SIGUSR2 before the first step", "RUNNING", 9, False),
    ],
)
def test_a_rank_that_left_because_another_died_does_not_say_why_the_attempt_ended(number, error, state, lost, expected):
    found = Verdict(kind="preempted", rank=0, signal=number, error=error)
    seen = Evidence(code=137, job_state=state, losses=(Loss(2, "", signal=lost),), heartbeats=BEATS)
    assert collateral(found, seen) == expected


@pytest.mark.parametrize(
    ("lost", "state", "expected"),
    [
        (Loss(1, "Killed", signal=9), "RUNNING", True),
        (Loss(1, "Out Of Memory"), "RUNNING", True),
        (Loss(1, "Terminated", signal=15), "RUNNING", False),
        (Loss(0, "Exited with exit code 1", exit_code=1), "RUNNING", False),
        (Loss(1, "Killed", signal=9), "NODE_FAIL", False),
    ],
)
def test_a_rank_whose_peer_was_lost_is_not_to_blame(lost, state, expected):
    found = Verdict(kind="peer_lost", rank=0, error="RuntimeError: Connection reset by peer")
    assert collateral(found, Evidence(code=1, job_state=state, losses=(lost,))) == expected


def test_a_rank_that_ended_before_the_one_it_lost_was_noticed_is_not_taken_for_it():
    found = Verdict(kind="peer_lost", rank=0, error="RuntimeError: Connection reset by peer")
    lost = (Loss(0, "Exited with exit code 1", exit_code=1), Loss(1, "Killed", signal=9))
    seen = Evidence(code=1, losses=lost, heartbeats=BEATS)
    assert collateral(found, seen) and judge(of_others(found, seen)).rank == 1
    assert not collateral(found, Evidence(code=1, losses=(Loss(0, "killed by signal 9", 9, 9),), heartbeats=BEATS))


LEFT = """\
srun: First task exited 60s ago
srun: StepId=4.0 task 0: running
srun: StepId=5.0 task 0: exited
slurmstepd-t0: error: *** STEP 4.0 ON t0 CANCELLED AT 2026-11-29T17:42:42 ***
srun: error: t0: task 0: Killed
"""


def test_a_rank_that_left_with_code_0_is_suspected_not_the_one_that_srun_ended():
    found = judge(Evidence(code=137, losses=losses(LEFT, HOSTS, 2), left=left(LEFT), heartbeats=BEATS))
    assert (found.kind, found.rank, found.role) == ("rank_died", 3, "rollout") and "code 0" in found.error
    assert not left(SRUN) and not left("")


def test_without_words_the_longest_silent_rank_is_suspected():
    assert judge(Evidence(code=143, heartbeats=BEATS)).rank == 3


@pytest.mark.parametrize(
    ("seen", "kind"),
    [
        (Evidence(code=137, job_state="RUNNING", bad_nodes=("t1",)), "node_failure"),
        (Evidence(code=137, job_state="NODE_FAIL"), "node_failure"),
        (Evidence(code=-1, vanished=True), "node_failure"),
        (Evidence(code=143, job_state="TIMEOUT"), "time_limit"),
        (Evidence(code=143, job_state="PREEMPTED"), "preempted"),
        (Evidence(code=143, job_state="REQUEUED"), "preempted"),
        (Evidence(code=143, job_state="CANCELLED"), "preempted"),
        (Evidence(code=137, job_state="OUT_OF_MEMORY"), "out_of_memory"),
        (Evidence(code=137, losses=(Loss(0, "Out Of Memory"),)), "out_of_memory"),
        (Evidence(code=2, prepared=False), "user_error"),
        (Evidence(code=1, prepared=False), "bug"),
        (Evidence(code=0), "bug"),
        (Evidence(code=1), "rank_died"),
    ],
)
def test_kind(seen, kind):
    assert judge(seen).kind == kind


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        ("", "CANCELLED"),
        (" DUE TO TIME LIMIT", "TIMEOUT"),
        (" DUE TO PREEMPTION", "PREEMPTED"),
        (" DUE TO JOB REQUEUE", "REQUEUED"),
        (" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS", "NODE_FAIL"),
    ],
)
def test_why_slurm_ends_a_job(reason, state):
    assert (
        ended_by(f"attempt 1 on t0\nslurmstepd-t0: error: *** JOB 16 ON t0 CANCELLED AT 2026-11-29T16:29:37{reason} ***\n")
        == state
    )


def test_the_end_of_a_step_is_not_the_end_of_the_job():
    assert ended_by("slurmstepd-t0: error: *** STEP 8.0 ON t0 CANCELLED AT 2026-11-29T16:27:08 ***\n") == ""


@pytest.mark.parametrize("kind", ["preempted", "rank_died", "peer_lost", "bug", "hang"])
@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (Evidence(code=1, job_state="REQUEUED"), "preempted"),
        (Evidence(code=1, job_state="TIMEOUT"), "time_limit"),
        (Evidence(code=1, bad_nodes=("t0",)), "node_failure"),
        (Evidence(code=1, job_state="RUNNING"), None),
    ],
)
def test_what_breaks_while_slurm_takes_the_nodes_broke_because_of_that(kind, seen, expected):
    assert refine(Verdict(kind), seen).get("kind", kind) == (expected or kind)


@pytest.mark.parametrize("kind", ["done", "user_error", "diverged", "out_of_memory"])
def test_what_the_ranks_know_better_stands(kind):
    assert refine(Verdict(kind), Evidence(code=1, job_state="REQUEUED")) == {}


def test_a_rank_that_was_told_to_end_does_not_know_that_a_node_is_gone():
    seen = Evidence(code=1, bad_nodes=("r0",))
    assert refine(Verdict("preempted"), seen) == {"kind": "node_failure", "error": "node r0 was down or did not respond"}
    assert refine(Verdict("bug", error="connection closed by r0"), seen) == {"kind": "node_failure"}
