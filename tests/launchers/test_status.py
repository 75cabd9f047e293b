"""What `miles-submit status` says of a run between the end of its last attempt and that of its job."""

import json

import pytest

from miles_hpc import verdicts
from miles_hpc.launchers import local, status, verdict
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
        ("done", "done", "ending", "miles-submit report '{}'"),
    ],
)
def test_a_job_whose_last_attempt_has_ended_is_ending(paths, kind, action, state, next_step):
    verdicts.write(paths, 1, kind=kind, next="" if kind == "done" else "mend it")
    verdict.amend(paths, 1, action=action)
    said = rows(paths)
    assert ("state", f"{state}, process 7, attempt 1") in said
    assert [text for name, text in said if name == "next"] == [next_step.format(paths.folder)]
