"""How a run stands between the end of its last attempt and that of its job, and while Slurm does not answer."""

import json

import pytest

from miles_hpc import verdicts
from miles_hpc.launchers import controller, local, state, status, verdict
from miles_hpc.launchers.controller import JobState
from miles_hpc.paths import RunPaths


@pytest.fixture
def paths(fresh_run, no_slurm, monkeypatch) -> RunPaths:
    """A run without Slurm whose script lives."""
    fresh_run.paths.job.write_text(json.dumps({"scheduler": "local", "job_id": "7", "first_attempt": 1}))
    monkeypatch.setattr(local, "alive", lambda pid, run: True)
    return fresh_run.paths


def rows(paths: RunPaths) -> list[tuple[str, str]]:
    return [(line[:9].strip(), line[9:]) for line in status.text(paths.folder).splitlines()]


@pytest.mark.parametrize(
    ("kind", "action", "state", "next_step"),
    [
        ("user_error", "", "ending", "mend it"),
        ("rank_died", "stop", "ending", "mend it"),
        ("preempted", "requeue", "ending", "mend it"),
        ("rank_died", "restart", "running", "miles-submit logs '{}' -f"),
        ("rank_died", "", "running", "miles-submit logs '{}' -f"),
        ("diverged", "restart", "running", "miles-submit logs '{}' -f"),  # slurm.failure_policy
        ("done", "done", "ending", "miles-submit report '{}'"),
    ],
)
def test_a_job_whose_last_attempt_has_ended_is_ending(paths, kind, action, state, next_step):
    verdicts.write(paths, 1, kind=kind, next="" if kind == "done" else "mend it")
    verdict.amend(paths, 1, action=action)
    said = rows(paths)
    assert ("state", f"{state}, process 7, attempt 1") in said
    assert [text for name, text in said if name == "next"] == [next_step.format(paths.folder)]


@pytest.fixture
def patience(paths, monkeypatch) -> list[float]:
    """The run is Slurm's, which does not answer; how long it was waited for each time."""
    waited: list[float] = []
    paths.job.write_text(json.dumps({"scheduler": "slurm", "job_id": "7", "first_attempt": 1}))
    monkeypatch.setattr(controller, "job", lambda job_id, seconds: waited.append(seconds) or JobState("NO_ANSWER"))
    return waited


@pytest.mark.parametrize(
    ("kind", "action", "ended"),
    [
        ("done", "", True),
        ("user_error", "stop", True),
        ("rank_died", "stop", True),
        ("user_error", "", False),  # the batch script has not decided yet
        ("rank_died", "restart", False),
        ("preempted", "requeue", False),
    ],
)
def test_while_slurm_does_not_answer_only_a_last_word_is_an_end(paths, patience, kind, action, ended):
    """`--watch` and `logs -f` would leave a run that goes on."""
    verdicts.write(paths, 1, kind=kind)
    verdict.amend(paths, 1, action=action)
    now = state.state_of(paths.folder)
    assert (now.ended, now.word) == (ended, kind if ended else "unknown (Slurm does not answer)")


def test_who_follows_a_run_gives_a_slurm_that_is_slow_more_time_from_then_on(paths, patience, monkeypatch):
    follower = state.Follower(paths.folder)
    for _ in range(2):
        follower.look()
        follower.due = 0.0
    assert patience == [controller.BRIEF, controller.PATIENT]
