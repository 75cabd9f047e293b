"""What breaks around a run in a real Slurm: nodes, processes, the controller, the batch shell. The probe plays the ranks."""

import functools
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from miles_hpc.launchers import cli, node, state, submission, verdict
from miles_hpc.paths import RunPaths

pytestmark = pytest.mark.slurm
PROBE = str(Path(__file__).parent / "probe.py")
SMALL = ("slurm.train.nodes=1", "slurm.train.ranks_per_node=1", "slurm.rollout.nodes=1")


def kinds(run: Path) -> list[str]:
    return [verdict.read(RunPaths(run), n).kind for n in RunPaths(run).attempt_numbers()]


def hosts(run: Path, attempt: int) -> list[str]:
    return RunPaths(run).hosts(attempt).read_text().split()


def job_id(run: Path) -> str:
    return json.loads(RunPaths(run).job.read_text())["job_id"]


def left(run: Path) -> list[str]:
    """Processes of ranks, and what they started."""
    return [line for _, line in node.stale(run)]


def gone(run: Path, seconds: float = 60) -> None:
    """Wait until no process of the ranks is left; by themselves they would stay for ten minutes, or an hour."""
    end = time.monotonic() + seconds
    while still := left(run):
        assert time.monotonic() < end, still
        time.sleep(0.05)


@pytest.fixture
def gpu_trouble(tmp_path: Path, slurm) -> str:
    """A line of the setup: an nvidia-smi that finds errors on r0, or on BROKEN, and no fault on other nodes."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text(
        '#!/bin/bash\nfor gpu in 0 1; do echo "$gpu, $([ "$SLURMD_NODENAME" = "${BROKEN:-r0}" ] && echo 7 || echo 0)"; done\n'
    )
    program.chmod(0o755)
    return f"export PATH={folder}:$PATH"


def test_a_node_on_which_ranks_die_twice_is_left_out_of_the_next_allocation(submit, ended):
    run = submit("dies-on-r0", *SMALL)
    now = ended(run)
    assert (now.word, now.attempt, now.slurm.restarts) == ("done", 3, 1)
    assert kinds(run) == ["rank_died", "rank_died", "done"]
    assert [hosts(run, n) for n in (1, 2, 3)] == [["t0", "r0"], ["t0", "r0"], ["t0", "r1"]]
    assert [verdict.read(RunPaths(run), n).action for n in (1, 2, 3)] == ["restart", "requeue", "done"]
    assert verdict.fields(RunPaths(run), 2)["avoided"] == ["r0"]


def test_a_spare_takes_over_within_the_allocation(submit, ended):
    run = submit("dies-on-r0", *SMALL, "slurm.rollout.spares=1")
    now = ended(run)
    assert (now.word, now.attempt, now.slurm.restarts) == ("done", 3, 0)
    assert "r0" in hosts(run, 1) and "r0" not in hosts(run, 3)


def test_a_node_with_damaged_gpus_is_found_before_any_rank_starts(submit, ended, gpu_trouble, capsys):
    run = submit("done", *SMALL, f"slurm.setup={json.dumps([gpu_trouble])}")
    now = ended(run)
    assert (now.word, now.attempt, now.slurm.restarts) == ("done", 2, 1)
    assert list(RunPaths(run).attempt(1).glob("*-0000.log")) == [] and hosts(run, 2) == ["t0", "r1"]
    first = verdict.read(RunPaths(run), 1)
    assert (first.kind, first.nodes, first.phase) == ("bad_node", ("r0",), "health")
    assert "r0: GPU 0: 7 uncorrected ECC errors" in first.error
    assert cli.main(["why", str(run), "--attempt", "1"]) == 0
    assert "r0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spares", "broken", "used"),
    [
        (["slurm.rollout.spares=1"], "r0", ["t0", "r1"]),
        (["slurm.train.spares=1", "run.placement=colocate"], "t0", ["t1", "t1"]),
    ],
    ids=["two components", "one"],
)
def test_with_a_spare_the_damaged_node_costs_nothing(submit, ended, gpu_trouble, spares, broken, used):
    run = submit("done", *SMALL, *spares, f"slurm.setup={json.dumps([gpu_trouble, f'export BROKEN={broken}'])}")
    assert (ended(run).word, state.state_of(run).attempt, hosts(run, 1)) == ("done", 1, used)
    world = json.loads((RunPaths(run).attempt(1) / "world.json").read_text())
    assert [(role, node) for _, role, node in world] == [("train", used[0]), ("rollout", used[1])]
    assert f"health: {broken} GPU 0: 7 uncorrected ECC errors" in RunPaths(run).job_log.read_text()


def test_where_no_other_node_is_left_the_run_stops_and_says_why(submit, ended, gpu_trouble):
    run = submit("done", *SMALL, "slurm.rollout.nodes=2", f"slurm.setup={json.dumps([gpu_trouble])}")
    now = ended(run)
    assert (now.word, now.attempt, now.verdict.action) == ("bad_node", 1, "stop")


def test_what_fails_on_every_node_is_the_users_to_mend(submit, ended, tmp_path):
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 'Driver/library version mismatch'\nexit 18\n")
    driver.chmod(0o755)
    run = submit("done", *SMALL, f"slurm.setup={json.dumps([f'export PATH={tmp_path}:$PATH'])}")
    now = ended(run)
    assert (now.word, now.exit_code) == ("user_error", 2)
    assert now.verdict.error.startswith("every node fails") and "version mismatch" in now.verdict.error


def test_a_node_whose_daemon_died_after_the_allocation_is_left_out(submit, ended, slurm):
    """The task cannot be launched there; the others are asked again and are fine."""
    once = f'[ -e "$RUN/killed" ] || {{ touch "$RUN/killed"; kill -9 $(cat {slurm.home}/run/slurmd-r0.pid); }}'
    try:
        run = submit("done", *SMALL, f"slurm.setup={json.dumps([once])}")
        now = ended(run)
    finally:
        slurm._daemon("slurmd-r0").start(slurm._environment())
    assert (now.word, verdict.read(RunPaths(run), 1).nodes) == ("done", ("r0",))
    assert kinds(run)[0] in ("bad_node", "node_failure")  # found by the health check or by Slurm, whoever is first
    assert hosts(run, now.attempt) == ["t0", "r1"]


def test_a_process_that_a_rank_left_behind_is_ended_before_the_next_attempt(submit, ended):
    run = submit("orphan", *SMALL)
    assert ended(run).word == "done"
    gone(run)
    assert "sleep 3600" in RunPaths(run).job_log.read_text()


def test_a_rank_that_exits_takes_all_with_it_and_is_named(submit, ended, until):
    """One with a thread that would never end; the exit code is lost by srun in a second component, the rank is not."""
    run = submit("exit-3", "slurm.max_restarts=0")
    until(lambda: (RunPaths(run).attempt(1) / "world.json").exists())
    gone(run)
    found = ended(run).verdict
    assert (found.kind, found.rank, found.node) == ("rank_died", 5, "r1")


def test_after_a_requeue_nothing_of_a_deaf_rank_lives_beyond_killwait(submit, holding, ended, until, slurm):
    run = submit("deaf")
    holding(run)
    subprocess.run(["scontrol", "requeue", job_id(run)], check=True)
    gone(run, 10 + 60)
    assert ended(run).word == "done" and kinds(run) == ["preempted", "done"]
    assert "drain" not in slurm.say("sinfo", "-hN", "-o", "%t", timeout=120)
    for attempt in (1, 2):  # each attempt has logs of its own
        assert RunPaths(run).log(attempt, "rollout", 5).read_text() == "rollout rank 5 of 6\n"


def test_a_node_that_is_set_down_sends_the_run_to_another(submit, holding, ended, until, slurm):
    run = submit("hold", *SMALL, "slurm.train.nodes=1")
    until(lambda: len(list(run.glob("holding-*"))) == 2)
    subprocess.run(["scontrol", "update", f"nodename={hosts(run, 1)[1]}", "state=down", "reason=test"], check=True)
    until(lambda: RunPaths(run).attempt_numbers() == [1, 2])
    (run / "go").touch()
    now = ended(run)
    assert (now.word, kinds(run), now.slurm.restarts) == ("done", ["node_failure", "done"], 1)


def test_ranks_need_no_scontrol(submit, ended):
    (submit.toml.parent / "site.toml").write_text('het = true\nsrun_options = ["--export=ALL,PATH=/usr/bin:/bin"]\n')
    run = submit("preempted", *SMALL, "slurm.site=site.toml", "slurm.train.partition=train", "slurm.rollout.partition=rollout")
    assert (ended(run).word, kinds(run)) == ("done", ["preempted", "done"])


def test_where_the_batch_shell_has_no_scontrol_watch_submits_again(submit, slurm, tmp_path, monkeypatch, capsys):
    """Its PATH holds what the script needs, and no program of Slurm's but srun."""
    folder = tmp_path / "few"
    folder.mkdir()
    for program in ("srun", "bash", "sed", "cat"):
        (folder / program).symlink_to(shutil.which(program))
    run = submit("preempted", *SMALL, f"slurm.setup={json.dumps([f'export PATH={folder}'])}")
    programs = {"main": (PROBE, "preempted"), "prepare": (PROBE, "prepare")}
    monkeypatch.setattr(submission, "go_on", functools.partial(submission.go_on, **programs))
    assert submission.follow(run, watch=True) == 0
    assert (kinds(run), hosts(run, 2)) == (["preempted", "done"], ["t0", "r0"])
    assert "could not go back to the queue" in RunPaths(run).job_log.read_text()
    assert "submitted again" in capsys.readouterr().err


@pytest.mark.long
def test_a_controller_that_is_away_while_the_job_asks_to_be_requeued(submit, ended, slurm, until):
    run = submit("hold", *SMALL)
    until(lambda: len(list(run.glob("holding-*"))) == 2)
    controller = slurm._daemon("slurmctld")
    subprocess.run(["scancel", "--signal=USR2", job_id(run)], check=True)
    os.kill(controller.pid, signal.SIGSTOP)
    try:
        until(lambda: RunPaths(run).verdict(1).exists())
        (run / "go").touch()
        time.sleep(12)
    finally:
        os.kill(controller.pid, signal.SIGCONT)
    assert (ended(run).word, kinds(run)) == ("done", ["preempted", "done"])


def test_why_completes_the_verdict_where_the_batch_shell_was_killed(submit, holding, ended, capsys):
    run = submit("hold")
    holding(run)
    subprocess.run(["scancel", "--batch", "--signal=KILL", job_id(run)], check=True)
    ended(run)
    gone(run)
    assert cli.main(["why", str(run)]) == 0
    assert "attempt 1 of" in capsys.readouterr().out
    assert len(verdict.fields(RunPaths(run), 1)["heartbeats"]) == 6
