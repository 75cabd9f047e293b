"""Verdicts of ranks: the first stands, each kind of error has its own."""

import json

import pytest

from miles_hpc import errors, verdicts
from miles_hpc.paths import RunPaths


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path)


def test_the_first_verdict_stands_and_nothing_else_is_left(paths):
    assert verdicts.write(paths, 1, kind="hang", rank=3)
    assert not verdicts.write(paths, 1, kind="bug", rank=4)
    written = json.loads(paths.verdict(1).read_text())
    assert (written["kind"], written["rank"], written["attempt"]) == ("hang", 3, 1)
    assert [file.name for file in paths.attempt(1).iterdir()] == ["verdict.json"]


def test_attempts_have_verdicts_of_their_own(paths):
    assert verdicts.write(paths, 1, kind="rank_died") and verdicts.write(paths, 2, kind="done")
    assert json.loads(paths.verdict(2).read_text())["kind"] == "done"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.DataError("empty", where="a.jsonl"), "user_error"),
        (errors.DeadlineExceeded("waited"), "hang"),
        (errors.EngineDied("gone"), "rank_died"),
        (errors.Diverged("nan"), "diverged"),
        (MemoryError(), "out_of_memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "out_of_memory"),
        (ZeroDivisionError("by zero"), "bug"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "bad_node"),
        (RuntimeError("NVML: GPU is lost"), "bad_node"),
        (errors.EngineDied("the engine's host process ended: CUDA error: uncorrectable ECC error encountered"), "bad_node"),
        (errors.EngineError("the engine refused a request: CUDA error: uncorrectable ECC error encountered"), "bug"),
        (RuntimeError("CUDA error: device-side assert triggered"), "bug"),
        (RuntimeError("CUDA error: unspecified launch failure"), "bug"),
        (RuntimeError("[pair.cc:537] Read error [127.0.0.1]:1394: Connection reset by peer"), "peer_lost"),
        (RuntimeError("ncclRemoteError: A call failed ... remote process exited or there was a network error"), "peer_lost"),
        (RuntimeError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"), "hang"),
        (ConnectionResetError("Connection reset by peer"), "bug"),
        (errors.OutOfMemory("a sample does not fit"), "out_of_memory"),
    ],
)
def test_kinds_of_errors(error, kind):
    assert verdicts.of_error(error, "")["kind"] == kind


def test_a_users_error_has_no_traceback_and_others_have_the_innermost_frame_of_ours(paths):
    assert "traceback" not in verdicts.of_error(errors.ConfigError("no", next_step="fix it"), "")
    try:
        verdicts.of_error(None, "")
    except Exception as error:
        fields = verdicts.of_error(error, verdicts.logs(paths.folder, "rollout", 1, 2))
    assert "verdicts.py" in fields["frame"] and "traceback" in fields
    assert fields["next"] == f"miles-submit logs {paths.folder} --role rollout --rank 1 --attempt 2"
