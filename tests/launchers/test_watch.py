"""What `--watch` says beside the live line."""

import json
from types import SimpleNamespace

from miles_hpc.launchers import watch
from miles_hpc.launchers.controller import JobState
from miles_hpc.paths import RunPaths


def test_a_slurm_that_is_away_is_reported_now_and_then_with_the_age_of_the_ranks(tmp_path, monkeypatch, capsys):
    clock = SimpleNamespace(now=5000.0)
    monkeypatch.setattr(watch.time, "time", lambda: clock.now)
    beat = RunPaths(tmp_path).heartbeat(0)
    beat.parent.mkdir()
    beat.write_text(json.dumps({"rank": 0, "attempt": 2, "time": 4990.0}))
    silence = watch.Silence(tmp_path)
    for state in ["RUNNING", *["NO_ANSWER"] * 130, "RUNNING", "RUNNING"]:
        silence.look(SimpleNamespace(slurm=JobState(state), attempt=2))
        clock.now += 10.0
    assert capsys.readouterr().err.splitlines() == [
        "Slurm has not answered for 0 s; the ranks last wrote 20 s ago; waiting",
        "Slurm has not answered for 600 s; the ranks last wrote 620 s ago; waiting",
        "Slurm has not answered for 1200 s; the ranks last wrote 1220 s ago; waiting",
        "Slurm answers again",
    ]
