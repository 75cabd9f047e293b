import json
from pathlib import Path

from miles_hpc.launchers.progress import duration, progress_of
from miles_hpc.paths import RunPaths


def write(folder: Path, *events: dict, tail: str = "") -> None:
    RunPaths(folder).events.write_text("".join(json.dumps(e) + "\n" for e in events) + tail)


def step(number: int, time: float) -> dict:
    seconds = {"rollout": 1.25, "train": 0.5, "wait": 0.0}
    return {
        "event": "step",
        "step": number,
        "attempt": 1,
        "time": time,
        "metrics": {"reward/mean": 0.4},
        "phase_seconds": seconds,
    }


def test_before_the_first_step(tmp_path):
    assert progress_of(tmp_path, 40).line() == "0/40 steps done"


def test_reward_phases_and_time_left_by_the_median_step(tmp_path):
    write(
        tmp_path,
        {"event": "start", "step": 0, "attempt": 1, "time": 0.0},
        *(step(n, t) for n, t in enumerate((10, 12, 14, 50))),
    )
    assert progress_of(tmp_path, 40).line() == "4/40 steps done  reward 0.400  rollout 1.2 s  train 0.5 s  ETA 1 min 12 s"


def test_a_clock_that_is_set_back_leaves_no_time_less_than_none(tmp_path):
    write(tmp_path, step(0, 5000.0), step(1, 10.0))
    assert progress_of(tmp_path, 4).line().endswith("ETA 0 s")


def test_durations_name_their_units():
    assert [duration(s) for s in (0.4, 59.6, 3599.4, 6949, 90000)] == [
        "0 s",
        "1 min 0 s",
        "59 min 59 s",
        "1 h 55 min",
        "25 h 0 min",
    ]


def test_refused_groups_are_on_the_line(tmp_path):
    filtered = step(0, 1.0)
    filtered["metrics"]["groups/refused"] = 3.0
    write(tmp_path, filtered)
    assert progress_of(tmp_path, 1).line() == "1/1 steps done  reward 0.400  refused 3  rollout 1.2 s  train 0.5 s"


def test_engines_that_were_started_again_are_on_the_line(tmp_path):
    write(tmp_path, {"event": "engine_restart", "rank": 1, "error": "gone"}, step(0, 1.0))
    assert "engine restarts 1" in progress_of(tmp_path, 1).line()


def test_a_limit_that_memory_has_lowered_is_on_the_line(tmp_path):
    write(
        tmp_path, *({"event": "micro_batch_tokens", "step": 0, "tokens": n, "before": 2 * n} for n in (512, 256)), step(0, 1.0)
    )
    assert "out of memory: micro-batches of 256 tokens" in progress_of(tmp_path, 1).line()


def test_a_half_written_line_does_not_count(tmp_path):
    write(tmp_path, step(0, 1.0), tail='{"event": "st')
    assert progress_of(tmp_path, 1).line() == "1/1 steps done  reward 0.400  rollout 1.2 s  train 0.5 s"
