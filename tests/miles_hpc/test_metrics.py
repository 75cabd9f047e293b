"""Journals, the clock, and the figures of a step."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from miles_hpc import metrics
from miles_hpc.paths import RunPaths
from miles_hpc.samples.schema import STOPPED, TRUNCATED, Samples


def samples(rewards: list[float], **changes) -> Samples:
    """Groups of two, one prompt token and two answer tokens each."""
    n = len(rewards)
    fields = {
        "prompt_ids": np.repeat(np.arange(n // 2), 2),
        "sample_index": np.tile(np.arange(2, dtype=np.int32), n // 2),
        "offsets": np.arange(n + 1) * 3,
        "tokens": np.zeros(3 * n, np.int32),
        "loss_mask": np.tile(np.array([0, 1, 1], np.uint8), n),
        "rollout_log_probs": np.zeros(3 * n, np.float32),
        "weight_versions": np.tile(np.array([-1, 0, 0], np.int32), n),
        "rewards": np.array(rewards, np.float32),
        "status": np.full(n, STOPPED, np.uint8),
        "prompts": ["p"] * n,
        "answers": ["a"] * n,
        "labels": ["1"] * n,
    }
    return Samples(**(fields | changes))


APPEND_MANY = """
import sys
from pathlib import Path
from miles_hpc.metrics import Journal
journal, name = Journal(Path(sys.argv[1])), sys.argv[2]
for i in range(50):
    journal.append({"who": name, "i": i, "filler": "x" * 500}, {"who": name, "i": i, "second": True})
"""


def test_journal_lines_of_two_processes_stay_whole(tmp_path):
    file = tmp_path / "events.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", APPEND_MANY, file, name]) for name in "ab"]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    lines = [json.loads(line) for line in file.read_text().splitlines() if line]
    assert len(lines) == 200
    assert [line["i"] for line in lines if line["who"] == "a" and "second" not in line] == list(range(50))


def test_figures_of_a_step():
    found = metrics.of_samples(
        samples([1, 0, 1, 1], status=np.array([STOPPED, TRUNCATED, STOPPED, STOPPED], np.uint8),
                reward_parts={"form": np.array([1, np.nan, 0, 0], np.float32), "mean": np.full(4, 7, np.float32),
                              "of_refused_groups_alone": np.full(4, np.nan, np.float32)}),
        np.array([True, True, False, False]), 2,
    )  # fmt: skip
    assert found["reward/mean"] == 0.75 and found["reward/std"] == pytest.approx(np.std([1, 0, 1, 1]))
    assert found["response/length_mean"] == 2 and found["response/length_max"] == 2 and found["response/truncated"] == 0.25
    assert found["groups/zero_variance"] == 0.5 and found["reward/form"] == pytest.approx(1 / 3)
    assert "reward/of_refused_groups_alone" not in found


def test_fates_name_every_prompt():
    mask = np.tile(np.array([0, 1, 1], np.uint8), 6)
    mask[12:] = 0  # the last group is kept out of the loss
    step, trained = samples([1, 0, 1, 1, 1, 0], loss_mask=mask), np.array([True, False, False, False, False, False])
    lines = metrics.fates(step, [7], trained, 2, step=3, attempt=2)
    assert [(line["prompt_id"], line["fate"], line["samples"], line["reward"]) for line in lines] == [
        (0, "trained", 2, 0.5), (1, "zero_variance", 2, 1.0), (2, "removed", 2, 0.5), (7, "reward_error", 0, None),
    ]  # fmt: skip
    figures = metrics.of_samples(step, trained, 2)
    assert figures["groups/zero_variance"] == figures["response/removed"] == 1 / 3 and figures["response/length_mean"] == 2
    assert all(line["step"] == 3 and line["attempt"] == 2 for line in lines)
    json.dumps(lines)


def test_clock_adds_up_and_starts_anew():
    entered = []
    clock = metrics.Clock(SimpleNamespace(enter=lambda *a: entered.append(a)))
    with clock("train", 1):
        pass
    with pytest.raises(RuntimeError), clock("train", 1):
        raise RuntimeError
    first = clock.take()
    assert list(first) == ["train"] and first["train"] >= 0 and clock.take() == {}
    assert entered == [("train", 1), ("train", 1)]


def test_board_replaces_points_of_a_later_attempt(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = RunPaths(tmp_path).tensorboard("train")
    for first, value in ((0, 1.0), (2, 5.0)):
        board = metrics.Board(folder, first)
        for step in range(first, 4):
            board.scalars(step, {"reward/mean": value})
        board.close()
    found = EventAccumulator(str(folder))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("reward/mean")] == [(0, 1.0), (1, 1.0), (2, 5.0), (3, 5.0)]


def test_a_line_cut_by_a_crash_does_not_swallow_the_next(tmp_path):
    journal = metrics.Journal(tmp_path / "events.jsonl")
    journal.append({"a": 1})
    with journal.file.open("a") as file:
        file.write('{"a": 2, "b')
    metrics.Journal(journal.file).append({"a": 3}, {"a": 4})
    assert journal.file.read_text().splitlines() == ['{"a": 1}', '{"a": 2, "b', '{"a": 3}', '{"a": 4}']
