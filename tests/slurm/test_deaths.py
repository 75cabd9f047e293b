"""Deaths that take a minute each: the time limit, and a node that falls silent."""

import json
import time

import psutil
import pytest

from miles_hpc.launchers import state, verdict
from miles_hpc.paths import RunPaths

pytestmark = [pytest.mark.slurm, pytest.mark.long]
SMALL = ("slurm.train.nodes=1", "slurm.train.ranks_per_node=1", "slurm.rollout.nodes=1")


def test_a_job_of_one_minute_goes_on_three_times(submit, ended, until):
    """Warned early enough to save, requeued by itself, and so on; no step is done twice, none is left out."""
    run = submit("steps", *SMALL, "slurm.time_minutes=1", "run.steps=150")
    until(lambda: state.state_of(run).ended, 900)
    now, paths = ended(run), RunPaths(run)
    done = [json.loads(line)["step"] for line in paths.events.read_text().splitlines()]
    assert now.word == "done" and now.attempt >= 4 and done == list(range(150))
    assert {verdict.read(paths, attempt).kind for attempt in paths.attempt_numbers()[:-1]} == {"time_limit"}


def test_a_node_that_falls_silent_is_named_and_replaced(submit, ended, until, slurm):
    """Its daemon, the step's daemon and the rank die at once, as when the power fails; nobody is told."""
    run = submit("hold", *SMALL)
    paths = RunPaths(run)
    until(lambda: len(beats(paths, 1)) == 2)
    beat = json.loads(paths.heartbeat(1).read_text())
    node, rank = beat["node"], psutil.Process(beat["pid"])
    daemon = slurm._daemon(f"slurmd-{node}")
    for process in (psutil.Process(daemon.pid), rank.parent(), rank):
        process.kill()
    died = time.monotonic()
    try:
        until(lambda: paths.attempt_numbers() == [1, 2], 200)
        (run / "go").touch()
        now = ended(run)
    finally:
        daemon.start(slurm._environment())
    assert (now.word, now.attempt) == ("done", 2) and time.monotonic() - died < 200
    found = verdict.read(paths, 1)
    assert found.kind == "node_failure" and node in found.error
    assert node not in paths.hosts(2).read_text().split()


def beats(paths, attempt):
    """Heartbeats of the attempt."""
    found = [json.loads(file.read_text()) for file in paths.heartbeat(0).parent.glob("*.json")]
    return [beat for beat in found if beat["attempt"] == attempt]
