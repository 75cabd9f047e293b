"""Runs without Slurm: a real mpiexec, the probe of tests/slurm in place of the ranks."""

import time
from pathlib import Path

import pytest

from miles_hpc import config as configuration
from miles_hpc.errors import UserError
from miles_hpc.launchers import logs, state, status, submission, verdict, watch, why
from miles_hpc.paths import RunPaths

PROBE = str(Path(__file__).parents[1] / "slurm/probe.py")
SIZE = ["slurm.train.nodes=1", "slurm.train.ranks_per_node=1", "slurm.rollout.nodes=1", "slurm.setup=[]"]
pytestmark = pytest.mark.mpi


def start(toml: Path, mode: str, prepare: str = "prepare", *overrides: str) -> Path:
    programs = {"main": (PROBE, mode), "prepare": (PROBE, prepare)}
    return submission.run(toml, [*SIZE, *overrides], without_slurm=True, **programs)


def wait(condition, seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


def test_a_run_from_start_to_end(no_slurm, toml, capsys):
    run = start(toml, "done")
    assert run == no_slurm / "runs/demo-000"
    wait(lambda: state.state_of(run).ended)
    assert state.state_of(run).word == "done"
    assert status.text(run).splitlines()[1].startswith("state    done, process")
    assert logs.show(run, "rollout", None, None, follow=True) == 0
    assert capsys.readouterr().out == "rollout rank 1 of 2\n"
    with pytest.raises(UserError, match="complete"):
        submission.resume(run, without_slurm=True)


def test_a_killed_rank_is_named_and_the_next_attempt_ends_the_run(no_slurm, toml):
    run = start(toml, "kill")
    wait(lambda: state.state_of(run).ended)
    first, second = (verdict.read(RunPaths(run), n) for n in (1, 2))
    assert (first.kind, first.rank, first.role, first.signal) == ("rank_died", 1, "rollout", 9)
    assert second.kind == "done"


def test_cancel_lets_the_ranks_save_and_resume_goes_on(no_slurm, toml):
    run = start(toml, "hold")
    wait(lambda: all((run / f"holding-{rank}").exists() for rank in (0, 1)))
    with pytest.raises(UserError, match="still running"):
        submission.resume(run, without_slurm=True)
    assert "cancelled" in status.cancel(run)
    wait(lambda: state.state_of(run).ended)
    assert (verdict.newest(RunPaths(run)).kind, state.state_of(run).word) == ("preempted", "cancelled")
    assert "saved" in RunPaths(run).log(1, "train", 0).read_text()

    submission.resume(run, ["run.steps=7"], without_slurm=True, main=(PROBE, "done"), prepare=(PROBE, "prepare"))
    assert configuration.read(RunPaths(run).config).run.steps == 7
    wait(lambda: state.state_of(run).ended)
    assert state.state_of(run).word == "done"
    assert RunPaths(run).attempt_numbers() == [1, 2]


def test_a_failed_preparation_is_a_user_error_and_starts_no_rank(no_slurm, toml):
    run = start(toml, "done", "prepare-fails")
    wait(lambda: state.state_of(run).ended)
    assert (state.state_of(run).word, state.state_of(run).exit_code) == ("user_error", 2)
    assert not RunPaths(run).log(1, "train", 0).exists()
    assert "--role job" in why.why(run, None)


def test_a_failed_submission_leaves_nothing(no_slurm, toml, monkeypatch):
    from miles_hpc.launchers import local

    monkeypatch.setattr(local, "start", lambda job: (_ for _ in ()).throw(OSError("no more processes")))
    with pytest.raises(OSError, match="no more processes"):
        start(toml, "done")
    assert list((no_slurm / "runs").iterdir()) == []


def test_two_runs_at_once_get_folders_of_their_own(no_slurm, toml):
    runs = [start(toml, "done") for _ in range(2)]
    assert [run.name for run in runs] == ["demo-000", "demo-001"]
    wait(lambda: all(state.state_of(run).ended for run in runs))
    assert [state.state_of(run).word for run in runs] == ["done", "done"]


def test_watch_shows_progress_and_returns_the_runs_exit_code(no_slurm, toml, capsys, monkeypatch):
    run, sleep = start(toml, "hold"), time.sleep
    monkeypatch.setattr(watch.time, "sleep", lambda seconds: (run / "go").touch() or sleep(seconds))  # it was shown by then
    assert submission.follow(run, watch=True) == 0
    assert "0/3 steps done  [running" in capsys.readouterr().out
    assert submission.follow(start(toml, "done", "prepare-fails"), watch=True) == 2
    assert "user_error (in prepare)" in capsys.readouterr().err


def test_what_to_type_next_is_printed(no_slurm, toml, capsys):
    run = start(toml, "done")
    assert submission.follow(run, watch=False) == 0
    said = capsys.readouterr().out
    assert "runs/demo-000: process" in said and "miles-submit logs runs/demo-000 -f" in said
    wait(lambda: state.state_of(run).ended)


@pytest.mark.parametrize(
    ("setup", "line", "code"),
    [
        (["export A=1", "no-such-command --now", "echo not reached"], "no-such-command --now", 127),
        (["load() { false || return 7; }", "load 'a b'"], "load 'a b'", 7),
        (["if true; then", "  (exit 5)", "fi"], "(exit 5)", 5),
        (["source /no/such/file"], "source /no/such/file", 1),
    ],
)
def test_a_line_of_the_setup_that_fails_is_named_before_any_rank(no_slurm, toml, setup, line, code):
    run = start(toml, "done", "prepare", f"slurm.setup={setup}")
    wait(lambda: state.state_of(run).ended)
    now = state.state_of(run)
    assert (now.word, now.exit_code, now.attempt, now.verdict.phase) == ("user_error", 2, 1, "setup")
    assert f"ended with code {code}: {line}" in now.verdict.error and "slurm.setup" in now.verdict.where
    assert "not reached" not in RunPaths(run).job_log.read_text()
    assert line in why.why(run, None)


def test_what_a_sourced_file_of_the_setup_tries_in_vain_is_its_own_business(no_slurm, toml, tmp_path):
    (tmp_path / "profile.sh").write_text("false\n[ -f /no/such/file ] && true\nexport SEEN=1\n")
    setup = [f"source {tmp_path / 'profile.sh'}", "[ -f /no/such/file ] && false", "false || true"]
    run = start(toml, "done", "prepare", f"slurm.setup={setup}")
    wait(lambda: state.state_of(run).ended)
    assert state.state_of(run).word == "done"
