"""The three cures of resuming megatron's distributed AdamW without Transformer Engine (see `train/optimizer.py`)."""

import psutil
import pytest
import torch
from train_parts import config, run_steps, step_counters, trainer


def _same(a, b):
    assert a["metrics"] == b["metrics"]
    for name, tensor in a["weights"].items():
        assert torch.equal(tensor, b["weights"][name]), name


@pytest.mark.parametrize(
    ("family", "dtype", "kl"), [("qwen3", "float32", 0.0), ("moe", "float32", 0.1), ("moe", "bfloat16", 0.0)]
)
def test_the_steps_after_a_resume_are_bitwise_those_of_the_uninterrupted_run(family, dtype, kl, models, tmp_path):
    settings = config(dtype=dtype, kl_coef=kl, mini_batches=2)
    (tmp_path / "saved").mkdir()
    with trainer(settings, models[family], tmp_path / "a") as made:
        run_steps(made, 2)
        made.save(tmp_path / "saved", {"version": 2})
        expected = run_steps(made, 2)
        counters = step_counters(made)
    with trainer(settings, models[family], tmp_path / "b") as made:
        assert made.load(tmp_path / "saved") == {"version": 2}
        # Cure 3: one counter per parameter, all at the number of optimizer steps so far.
        assert set(step_counters(made)) == {4.0}
        _same(run_steps(made, 2), expected)
        assert step_counters(made) == counters and set(counters) == {8.0}


def test_a_state_from_before_the_first_step_is_saved_and_read(models, tmp_path):
    (tmp_path / "saved").mkdir()
    with trainer(config(), models["qwen3"], tmp_path / "a") as made:
        made.save(tmp_path / "saved", {})  # cure 1: megatron asserts on an empty state
        expected = run_steps(made, 1)
    with trainer(config(), models["qwen3"], tmp_path / "b") as made:
        made.load(tmp_path / "saved")
        assert set(step_counters(made)) == {0.0}
        _same(run_steps(made, 1), expected)


def test_saving_starts_no_process(models, tmp_path):
    """A process of the trainer's would outlive its death by SIGKILL."""
    (tmp_path / "saved").mkdir()
    before = set(psutil.Process().children(recursive=True))
    with trainer(config(), models["qwen3"], tmp_path / "a") as made:
        made.save(tmp_path / "saved", {})
        assert set(psutil.Process().children(recursive=True)) <= before
        made.load(tmp_path / "saved")


def test_a_warm_start_leaves_no_trace_in_the_optimizer_nor_in_what_is_saved_of_it(models, tmp_path):
    (tmp_path / "saved").mkdir()
    with trainer(config(), models["qwen3"], tmp_path / "a") as made:
        losses = [made.supervised_step([[5, 6, 7, 8], [9, 10, 11]], [[0, 0, 1, 1], [0, 1, 1]], 2e-3) for _ in range(20)]
        assert losses[-1] < losses[0] / 2
        made.reset_optimizer()
        made.save(tmp_path / "saved", {})
        expected = run_steps(made, 1)
        assert set(step_counters(made)) == {1.0}
    with trainer(config(), models["qwen3"], tmp_path / "b") as made:
        made.load(tmp_path / "saved")
        _same(run_steps(made, 1), expected)
