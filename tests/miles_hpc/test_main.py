"""The end of a rank that cannot say why it ends."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles_hpc import main as rank
from miles_hpc import signals, verdicts
from miles_hpc.errors import EdgeError, EngineDied, Stopped
from miles_hpc.paths import RunPaths


class Asleep:
    """No watchdog, which would end this process after the verdict."""

    def start(self) -> None: ...


ARGUMENTS = ("--attempt", "1", "--world-size", "2")


def test_a_rank_ends_the_world_even_where_no_verdict_can_be_written(tmp_path, monkeypatch):
    ended = []
    monkeypatch.setattr(signals, "install", lambda: None)
    monkeypatch.setattr(rank, "_end", ended.append)
    monkeypatch.setattr(verdicts, "write", lambda *a, **k: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        rank.main(["--role", "train", "--run", str(tmp_path), *ARGUMENTS])
    assert ended == [[]]


def test_a_rank_whose_log_takes_nothing_leaves_its_verdict_and_no_fork(tmp_path, monkeypatch):
    fork = os.fork()
    if not fork:
        time.sleep(60)
        os._exit(0)
    program = subprocess.Popen(["sleep", "60"])  # holds nothing of ours
    monkeypatch.setattr(signals, "install", lambda: None)
    monkeypatch.setattr(rank, "_end", lambda world: sys.exit(1))
    with contextlib.suppress(OSError), Path("/dev/full").open("w") as log:
        monkeypatch.setattr(sys, "stderr", log)
        with pytest.raises(SystemExit):
            rank.main(["--role", "train", "--run", str(tmp_path), *ARGUMENTS])
    assert "config.toml" in RunPaths(tmp_path).verdict(1).read_text()
    assert os.waitpid(fork, 0)[1] == signal.SIGKILL and program.poll() is None
    program.kill()
    program.wait()


@pytest.mark.parametrize(
    ("noted", "error", "kind"),
    [
        (signal.SIGTERM, EngineDied("gone"), "preempted"),
        (signal.SIGTERM, RuntimeError("connection closed by peer"), "preempted"),
        (signal.SIGTERM, EdgeError("reward"), "user_error"),
        (signal.SIGUSR2, EngineDied("gone"), "rank_died"),
        (signal.SIGUSR2, Stopped("before the first step"), "preempted"),
        (0, EngineDied("gone"), "rank_died"),
    ],
)
def test_what_breaks_after_slurms_last_word_is_a_preemption(tmp_path, monkeypatch, noted, error, kind):
    monkeypatch.setattr(signals, "install", lambda: None)
    monkeypatch.setattr(signals, "noted", lambda: noted)
    monkeypatch.setattr(rank, "_end", lambda world: sys.exit(1))
    monkeypatch.setattr(rank.configuration, "read", lambda file: None)
    monkeypatch.setattr(rank, "_watchdog", lambda *told: Asleep())
    monkeypatch.setattr(rank, "_run", lambda *told: (_ for _ in ()).throw(error))
    with pytest.raises(SystemExit):
        rank.main(["--role", "train", "--run", str(tmp_path), *ARGUMENTS])
    verdict = json.loads(RunPaths(tmp_path).verdict(1).read_text())
    assert (verdict["kind"], verdict.get("signal")) == (kind, noted if kind == "preempted" else None)
