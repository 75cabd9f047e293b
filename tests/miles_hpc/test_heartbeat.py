"""Heartbeats: what a rank was doing can be read while it works, and after its death."""

import json
import threading
import time

from miles_hpc.heartbeat import Heartbeat


def test_a_new_phase_is_written_at_once(tmp_path):
    heartbeat = Heartbeat(tmp_path / "beats" / "rank-0001.json", "rollout", 1, 2)
    heartbeat.enter("start")
    heartbeat.enter("rollout", 7)
    beat = json.loads(heartbeat.file.read_text())
    assert (beat["role"], beat["rank"], beat["attempt"], beat["phase"], beat["step"]) == ("rollout", 1, 2, "rollout", 7)
    assert beat["pid"] and beat["node"] and beat["peak_memory_mib"] > 0


def test_polling_writes_at_most_once_a_second(tmp_path, monkeypatch):
    now = [5.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    heartbeat = Heartbeat(tmp_path / "beat.json", "train", 0, 1)
    heartbeat.enter("wait", 1)
    first = heartbeat.file.stat().st_ino
    for _ in range(1000):
        heartbeat.beat()
    assert heartbeat.file.stat().st_ino == first
    now[0] += 1.0
    heartbeat.beat()
    assert json.loads(heartbeat.file.read_text())["beats"] == 2


def test_a_folder_that_is_gone_does_not_end_the_rank(tmp_path):
    heartbeat = Heartbeat(tmp_path / "beats" / "beat.json", "train", 0, 1)
    heartbeat.file.parent.rmdir()
    heartbeat.enter("train", 1)
    assert not heartbeat.file.exists()


def test_a_reader_never_sees_half_a_beat(tmp_path):
    heartbeat = Heartbeat(tmp_path / "beat.json", "train", 0, 1)
    heartbeat.enter("start")
    over = threading.Event()

    def write():
        for step in range(300):
            heartbeat.enter("train", step)
        over.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not over.is_set():
        json.loads(heartbeat.file.read_text())
    writer.join()
