"""A run that is interrupted after any step and resumed is the uninterrupted run, bit for bit: everything the trainer keeps."""

import math
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from train_parts import config, samples, step_counters, trainer

from miles_hpc.checkpoint import Checkpoints
from miles_hpc.paths import RunPaths
from miles_hpc.sections import Checkpoint
from miles_hpc.train.advantage import group_advantages

STEPS = 4
COSINE = """\
import math
def cosine(step, values):
    return values._replace(lr=values.lr * (1 + math.cos(math.pi * step / 4)) / 2)
"""


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Two optimizer steps per rollout step, warm-up, a cosine decay and a reference policy: all that counts something."""
    folder = tmp_path_factory.mktemp("hook")
    (folder / "resume_hook.py").write_text(COSINE)
    made = config(mini_batches=2, lr_warmup_steps=2, kl_coef=0.01, optimizer_hook="resume_hook:cosine")
    return made.model_copy(update={"run": made.run.model_copy(update={"edges_folder": str(folder)})})


@dataclass
class Went:
    """Everything that a run computed and is left with."""

    metrics: list = field(default_factory=list)
    log_probs: list = field(default_factory=list)
    drawn: list = field(default_factory=list)
    """Random numbers, as a user's function may draw them in each step."""
    weights: dict = field(default_factory=dict)
    counters: list = field(default_factory=list)

    def steps(self, made, first, last):
        for step in range(first, last):
            data = samples(seed=step)
            result = made.step(data, group_advantages(data.rewards, 4), step)
            self.metrics.append(result.metrics)
            self.log_probs.append(result.train_log_probs.tobytes())
            self.drawn.append((float(torch.rand(())), float(np.random.rand()), random.random()))
        self.weights = {name: tensor.numpy().tobytes() for name, tensor in made.weights()}
        self.counters = step_counters(made)


def seed():
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)


@pytest.fixture(scope="module")
def uninterrupted(settings, models, tmp_path_factory):
    seed()
    went = Went()
    with trainer(settings, models["moe"], tmp_path_factory.mktemp("whole") / "store") as made:
        went.steps(made, 0, STEPS)
    return went


@pytest.mark.parametrize("stop", range(STEPS + 1))
def test_interrupted_anywhere(stop, settings, models, uninterrupted, tmp_path):
    """Before the first step, after the last, and between any two."""
    seed()
    went = Went()
    with trainer(settings, models["moe"], tmp_path / "a") as made:
        went.steps(made, 0, stop)
        Checkpoints(RunPaths(tmp_path), Checkpoint(keep=1), lambda: None, True).save(made, stop)
        made.step(samples(seed=99), np.ones(32, np.float32), stop)  # what came after the save is gone
    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    with trainer(settings, models["moe"], tmp_path / "b") as made:
        assert Checkpoints(RunPaths(tmp_path), Checkpoint(keep=1), lambda: None, True).resume(made) == stop
        went.steps(made, stop, STEPS)
    assert went == uninterrupted


def test_the_learning_rate_counts_rollout_steps_and_adam_its_own(uninterrupted):
    warm_up = [min(1, (step + 1) / 2) for step in range(STEPS)]
    cosine = [(1 + math.cos(math.pi * step / STEPS)) / 2 for step in range(STEPS)]
    expected = [1e-2 * a * b for a, b in zip(warm_up, cosine, strict=True)]
    assert [metrics["train/lr"] for metrics in uninterrupted.metrics] == pytest.approx(expected)
    assert set(uninterrupted.counters) == {2.0 * STEPS}
