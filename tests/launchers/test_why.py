"""`miles-submit why` on run folders as attempts of every kind leave them."""

import contextlib
import json
import os
import re
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_hpc import config as configuration
from miles_hpc import verdicts
from miles_hpc.errors import EngineDied, UserError
from miles_hpc.launchers import cli, verdict, why
from miles_hpc.paths import RunPaths


@pytest.fixture
def paths(tmp_path, launch_config, no_slurm) -> RunPaths:
    """A run without Slurm whose script is gone."""
    found = RunPaths(tmp_path / "my run")
    found.attempt(1).mkdir(parents=True)
    found.config.write_text(configuration.dump(launch_config))
    found.job.write_text(json.dumps({"scheduler": "local", "job_id": "999999999", "first_attempt": 1}))
    found.start(1).write_text(json.dumps({"attempt": 1, "steps": -1, "nodes": [], "job_log_bytes": 0}))
    return found


def beat(paths: RunPaths, rank: int, role: str, time: float) -> None:
    text = {"role": role, "rank": rank, "attempt": 1, "node": f"n{rank}", "phase": "generate", "step": 4, "time": time}
    paths.heartbeat(rank).parent.mkdir(exist_ok=True)
    paths.heartbeat(rank).write_text(json.dumps(text | {"peak_memory_mib": 1000 + rank}))


def test_everything_that_is_known_of_a_rank_that_failed(paths):
    for rank, role in enumerate(("train", "rollout")):
        beat(paths, rank, role, 1000.0 + rank)
    try:
        raise EngineDied("the engine's host process ended", where="rollout rank 1", next_step="look at its log")
    except EngineDied as error:
        of_error = verdicts.of_error(error, "look elsewhere") | {"frame": "miles_hpc/rollout/engine.py:12 next"}
    verdicts.write(paths, 1, **of_error, rank=1, role="rollout", node="n1", host="h", phase="generate", step=4, signal=15)
    verdict.amend(
        paths,
        1,
        action="stop",
        time=1003.0,
        heartbeats=[json.loads(paths.heartbeat(r).read_text()) for r in (0, 1)],
        bad_nodes=[],
    )
    stacks = paths.attempt(1) / "stacks/rollout-0001.txt"
    stacks.parent.mkdir()
    stacks.write_text("Thread 0x1 (most recent call first)")
    stacks.with_name("train-0000.txt").touch()
    said = why.why(paths.folder, None)
    for text in (
        "attempt 1 of", "rank_died", "the engine's host process ended", "engine.py:12 next", "rollout rank 1 on node n1 host h",
        "generate, step 4", "signal 15 SIGTERM", "0 train    n0: generate, step 4, 3 s before the end, peak 1000 MiB",
        "peak 1001 MiB", str(stacks), "look at its log", f"miles-submit resume '{paths.folder}'", "Traceback",
    ):  # fmt: skip
        assert text in said, said
    assert "train-0000.txt" not in said


def test_where_the_batch_side_died_too_the_verdict_is_written_now(paths, capsys):
    beat(paths, 0, "train", 1000.0)
    assert cli.main(["why", str(paths.folder)]) == 0
    told = json.loads(paths.verdict(1).read_text())
    assert told["kind"] == "node_failure" and told["heartbeats"][0]["peak_memory_mib"] == 1000
    assert "vanished" in capsys.readouterr().out


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """No file can be written beyond its first bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def another_user(folder: Path) -> Iterator[None]:
    folder.chmod(0o555)
    before = os.geteuid()
    os.seteuid(before or 65534)
    yield
    os.seteuid(before)


@pytest.mark.parametrize("left", ["nothing", "a rank's verdict", "half a verdict"])
@pytest.mark.parametrize(
    ("way", "reason"), [(full_disk, "File too large"), (another_user, "Permission denied|Operation not permitted")]
)
def test_who_cannot_write_into_the_run_reads_the_judgement_all_the_same(paths, capsys, way, reason, left):
    if left == "a rank's verdict":
        verdicts.write(paths, 1, kind="hang", error="said by a rank")
    if left == "half a verdict":
        paths.verdict(1).write_text('{"kind"')
    beat(paths, 0, "train", 1000.0)
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        run = RunPaths(shutil.copytree(paths.folder, Path(place) / "run"))
        before = {file.name: file.read_bytes() for file in run.attempt(1).iterdir()}
        with way(run.attempt(1)):
            assert cli.main(["why", str(run.folder)]) == 0
        assert before.items() <= {file.name: file.read_bytes() for file in run.attempt(1).iterdir()}.items()
        said = capsys.readouterr()
        assert ("said by a rank" if "rank" in left else "vanished") in said.out and "peak 1000 MiB" in said.out
        assert re.search(f"note .*({reason}): {run.verdict(1)}", said.out) and said.err == ""
        assert cli.main(["why", str(run.folder)]) == 0 and verdict.read(run, 1)
        assert "note" not in capsys.readouterr().out


def test_an_attempt_by_number(paths):
    for number, kind in ((1, "hang"), (2, "done")):
        paths.attempt(number).mkdir(exist_ok=True)
        verdicts.write(paths, number, kind=kind)
    assert "attempt 2 of" in why.why(paths.folder, None)
    assert "hang" in why.why(paths.folder, 1)
    with pytest.raises(UserError, match="attempt 3 has no verdict; ended so far: 1, 2"):
        why.why(paths.folder, 3)


def test_before_the_first_attempt(paths):
    paths.start(1).unlink()
    paths.attempt(1).rmdir()
    with pytest.raises(UserError, match="no attempt has ended yet"):
        why.why(paths.folder, None)
