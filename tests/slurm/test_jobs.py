"""Whole runs in a real Slurm, the probe in place of the ranks."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from miles_hpc.errors import SiteError, UserError
from miles_hpc.launchers import cli, state, status, submission, verdict, why
from miles_hpc.launchers.job import HetJob
from miles_hpc.paths import RunPaths

pytestmark = pytest.mark.slurm
PROBE = str(Path(__file__).parent / "probe.py")


def world(run, attempt: int = 1) -> list[list]:
    return json.loads((RunPaths(run).attempt(attempt) / "world.json").read_text())


def test_one_world_over_both_components_in_a_path_with_spaces(submit, ended):
    run = submit("hold", "slurm.train.gpus_per_node=2", "slurm.rollout.gpus_per_node=1")
    assert " " in str(run)
    job = HetJob(run, json.loads(RunPaths(run).job.read_text())["job_id"])
    assert job.state in ("PENDING", "RUNNING") and not job.done(force_check=True)
    (run / "go").touch()
    now = ended(run)
    assert (now.word, now.exit_code, now.attempt) == ("done", 0, 1)
    assert [role for _, role, _ in world(run)] == ["train"] * 4 + ["rollout"] * 2
    assert [node for _, _, node in world(run)] == ["t0", "t0", "t1", "t1", "r0", "r1"]
    assert RunPaths(run).hosts(1).read_text().split() == ["t0", "t0", "t1", "t1", "r0", "r1"]
    assert RunPaths(run).log(1, "rollout", 5).read_text() == "rollout rank 5 of 6\n"
    for file in ("config.toml", "provenance.json", "job.sbatch", "job.json"):
        assert (run / file).is_file()
    assert job.get_info()["State"] == "COMPLETED"
    assert job.result().kind == "done"


def test_a_killed_rank_is_named_and_the_next_attempt_runs_in_the_same_allocation(submit, ended):
    run = submit("kill")
    now = ended(run)
    first = verdict.read(RunPaths(run), 1)
    assert (first.kind, first.rank, first.role, first.node, first.signal) == ("rank_died", 5, "rollout", "r1", 9)
    assert (now.word, now.attempt, now.slurm.restarts) == ("done", 2, 0)


def test_a_run_without_restarts_stops_with_its_verdict(submit, ended, capsys):
    run = submit("kill", "slurm.max_restarts=0")
    assert (ended(run).word, state.state_of(run).exit_code) == ("rank_died", 1)
    assert cli.main(["why", str(run)]) == 0
    assert "rank_died" in capsys.readouterr().out


def test_the_wrong_kind_of_mpi_stops_at_once(submit, ended):
    run = submit("done", "slurm.mpi=none")
    now = ended(run)
    assert (now.word, now.exit_code, now.attempt) == ("user_error", 2, 1)
    assert "the MPI world has 1 ranks" in now.verdict.error


def test_homogeneous_job_where_het_steps_are_refused(submit, ended):
    (submit.toml.parent / "site.toml").write_text('het = false\npartition = "all"\n')
    run = submit("done", "slurm.site=site.toml")
    assert ended(run).word == "done"
    assert [role for _, role, _ in world(run)] == ["train"] * 4 + ["rollout"] * 2
    nodes = [node for _, _, node in world(run)]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3] and len(set(nodes)) == 4
    assert nodes == RunPaths(run).hosts(1).read_text().split()


def test_colocated_ranks_of_both_roles_share_one_component(submit, ended):
    size = ["slurm.train.gpus_per_node=2", "slurm.rollout.nodes=1"]
    run = submit("done", "run.placement=colocate", *size)
    assert ended(run).word == "done"
    assert [role for _, role, _ in world(run)] == ["train"] * 4 + ["rollout"] * 4
    nodes = [node for _, _, node in world(run)]
    assert nodes == ["t0", "t0", "t1", "t1"] * 2 == RunPaths(run).hosts(1).read_text().split()


def test_a_failed_preparation_ends_the_run_before_any_rank(submit, ended):
    run = submit("done", prepare="prepare-fails")
    assert ended(run).word == "user_error"
    assert list(RunPaths(run).attempt(1).glob("*-0000.log")) == []


def test_cancel_ends_the_run_for_good_and_resume_goes_on(submit, holding, ended):
    run = submit("hold")
    holding(run)
    with pytest.raises(UserError, match="still running"):
        submission.resume(run, without_slurm=False)
    slow = [{"event": "step", "step": n, "attempt": 1, "time": 3600.0 * n, "metrics": {}, "phase_seconds": {}} for n in (0, 1)]
    RunPaths(run).events.write_text("".join(f"{json.dumps(event)}\n" for event in slow))
    text = status.text(run)
    assert "rank     5 rollout on r1: rollout, step 3" in text
    assert "ETA 1 h 0 min" in text
    assert re.search(r"warning  the time limit comes in \d min \d+ s, before the last step", text)
    status.cancel(run)
    now = ended(run)
    assert (now.word, now.attempt, now.verdict.kind) == ("cancelled", 1, "preempted")
    assert why.why(run, None).startswith(f"attempt 1 of {run}: cancelled")
    assert "saved" in RunPaths(run).log(1, "train", 0).read_text()

    (run / "go").touch()
    submission.resume(run, without_slurm=False, main=(PROBE, "done"), prepare=(PROBE, "prepare"))
    assert (ended(run).word, state.state_of(run).attempt) == ("done", 2)


def test_two_runs_at_once_one_requeued_by_slurm_and_one_by_itself(submit, holding, ended, until):
    by_itself = submit("preempted")
    by_slurm = submit("hold")
    holding(by_slurm)
    subprocess.run(["scontrol", "requeue", json.loads(RunPaths(by_slurm).job.read_text())["job_id"]], check=True)
    until(lambda: RunPaths(by_slurm).attempt_numbers() == [1, 2])
    (by_slurm / "go").touch()
    for run in (by_itself, by_slurm):
        now = ended(run)
        assert (now.word, now.attempt, now.slurm.restarts) == ("done", 2, 1)
        assert verdict.read(RunPaths(run), 1).kind == "preempted"
        assert {row[0] for row in world(run, 2)} == set(range(6))


def test_what_slurm_does_not_have_is_refused_before_the_queue_and_leaves_nothing(submit):
    runs = submit.toml.parent / "runs"
    for override, said in (
        ("slurm.train.nodes=4", "nodes wanted"),
        ("slurm.train.partition=trian", "did you mean train"),
        ("slurm.train.gpus_per_node=64", "with 64 GPUs"),
        ("slurm.train.constraint=nowhere", "sbatch refused the job"),
    ):
        with pytest.raises(SiteError, match=said) as refused:
            submit("done", override)
        assert str(runs) not in str(refused.value)
    assert list(runs.iterdir()) == []
