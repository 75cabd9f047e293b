"""A fixed part of `make chaos`: one run, a few faults of every class, and nothing is different at its end.

How long anything takes is a matter of load, and not judged here.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from miles_hpc.launchers import cli, node, state

sys.path.append(str(Path(__file__).parent))
import storage
from faults import ENGINE_A, ENGINE_B, FAULTS, TRAINER, death, slurm
from harness import differences, finish, interrupted, planned, private_cluster, start, strike

pytestmark = [pytest.mark.slurm, pytest.mark.engine, pytest.mark.timeout(1800)]
CHOSEN = {
    "SIGKILL of a rollout rank",
    "scheduler killed",
    "reward raises",
    "reward is NaN",
    "request out of memory",
    "no space for a shard",
    "USR2 to the batch shell",
}
ON_DISK = {"bit flipped in a checkpoint", "shard truncated", "killed while saving", "disk full while saving"}


@pytest.fixture(scope="module")
def cluster():
    with private_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def runs(cluster, tmp_path_factory):
    """The disturbed run with the outcomes of its faults, and the undisturbed one."""
    chosen = [replace(fault, abrupt=False, seconds=0.0) for fault in FAULTS if fault.name in CHOSEN]
    folder, plan = tmp_path_factory.mktemp("chaos"), planned(chosen)
    undisturbed = start(cluster, folder / "undisturbed", plan)
    finish(undisturbed)
    subject = start(cluster, folder / "chaos", plan)
    outcomes = strike(subject, plan, folder / "faults.jsonl")
    finish(subject)
    return subject, undisturbed, outcomes


def test_every_fault_is_survived_and_named(runs):
    _, _, outcomes = runs
    assert {outcome.name for outcome in outcomes} == CHOSEN
    assert [f"{outcome.name}: {outcome.problems}" for outcome in outcomes if outcome.problems] == []


def test_nothing_is_lost_or_different_at_the_end(runs):
    subject, undisturbed, _ = runs
    assert differences(subject, undisturbed) == []


@pytest.fixture(scope="module")
def on_disk(runs, tmp_path_factory):
    chosen = [fault for fault in storage.FAULTS if fault.name in ON_DISK]
    outcomes = storage.strike(interrupted(runs[0]), tmp_path_factory.mktemp("storage"), chosen)
    return {outcome.name: outcome.problems for outcome in outcomes}


@pytest.mark.parametrize("name", sorted(ON_DISK))
def test_what_is_damaged_is_named_and_the_newest_valid_is_found(name, on_disk):
    assert on_disk[name] == []


@pytest.mark.long
def test_neither_a_time_limit_nor_a_cancel_leaves_a_process(cluster, tmp_path):
    """The time limit ends the first attempt, the user the second."""
    run = start(cluster, tmp_path / "ends", [(5000, FAULTS[0])], "slurm.warning_seconds=20")
    began = time.time()
    ends(run, 1, "time_limit", lambda: limit_minutes(run, 2 + (time.time() - began) // 60))
    limit_minutes(run, 30)  # the job keeps its limit when it is requeued
    ends(run, 2, "preempted", lambda: cli.main(["cancel", str(run.paths.folder)]))
    run.until(lambda: state.state_of(run.paths.folder).ended, "the end")
    assert list(node.stale(run.paths.folder)) == []


def limit_minutes(run, minutes):
    """Since the start of the job."""
    for component in (0, 1):
        slurm(run, "scontrol", "update", f"jobid={run.job_id}+{component}", f"timelimit={minutes:.0f}")


def ends(run, attempt, kind, end):
    """Of ranks, engines and all that they started nothing is left."""
    run.until(lambda: run.attempt == attempt and run.beat(ENGINE_B).get("phase") == "rollout", "a generation")
    processes = run.processes()
    assert sum("scheduler" in process.name() for process in processes) == 2  # SGLang's, children of the engines' hosts
    end()
    assert psutil.wait_procs(processes, timeout=300)[1] == []
    run.until(lambda: run.verdict(attempt).get("kind") == kind, f"the verdict {kind}", 60)


@pytest.mark.long
def test_interrupted_at_step_0_at_the_end_of_an_epoch_and_at_the_last_step(cluster, tmp_path):
    """An epoch of 48 prompts ends with every third step. The last checkpoint is met while it is written, or never."""
    rows = [f'{{"prompt": "{i % 9} + {i // 9 + 1} =", "label": "{i % 9 + i // 9 + 1}"}}\n' for i in range(48)]
    moments = [(0, "train"), (3, "checkpoint"), (5, "train"), (9, "checkpoint")]
    plan = [(step, death(f"SIGKILL in {phase} {step}", TRAINER, phase)) for step, phase in moments]
    plan.insert(2, (4, death("SIGKILL of an engine's rank", ENGINE_A, "rollout")))
    plan = [(step, replace(fault, abrupt=False)) for step, fault in plan]
    (tmp_path / "prompts.jsonl").write_text("".join(rows))
    runs = {}
    for name in ("undisturbed", "chaos"):
        overrides = ("run.steps=9", f"data.prompts={tmp_path / 'prompts.jsonl'}")
        runs[name] = start(cluster, tmp_path / name, plan, *overrides)
        outcomes = strike(runs[name], plan, tmp_path / "faults.jsonl") if name == "chaos" else []
        finish(runs[name])
    assert [outcome.problems for outcome in outcomes if outcome.problems] == []
    assert differences(runs["chaos"], runs["undisturbed"]) == []
