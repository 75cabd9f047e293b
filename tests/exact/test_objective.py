"""What an exact policy is trained on: importance corrections are the identity, and the entropy bonus has the right gradient."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "train"))
from train_parts import FAMILIES, config, hf_model, kept_gradients, samples, trainer, write_model

from miles_hpc.config import Config
from miles_hpc.train.advantage import group_advantages
from miles_hpc.train.correction import CORRECTIONS

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    return {family: write_model(family, root / family) for family in FAMILIES}


def exact(**train) -> Config:
    found = config(**train)
    run, rollout = found.run.model_copy(update={"numerics": "exact"}), {"temperature": TEMPERATURE}
    return found.model_copy(update={"run": run, "rollout": found.rollout.model_copy(update=rollout)})


def stepped(model: Path, scratch: Path, s, advantages, **train):
    """Result of a step in exact numerics, gradients of its last optimizer step, weights."""
    with trainer(exact(**train), model, scratch) as made:
        gradients = kept_gradients(made)
        result = made.step(s, advantages, 0)
        return result, gradients, {name: tensor.clone() for name, tensor in made.weights()}


def test_corrections_are_the_identity(models, tmp_path):
    """The first step proves that trainer and sampler agree; then no correction changes a bit of the weights."""
    s, bounds = samples(), {"correction_low": 1.0, "correction_high": 1.0}
    with trainer(exact(lr=0.0), models["moe"], tmp_path / "first") as made:
        made.proved = True  # these samples' log-probs are made up
        sampled = made.step(s, np.zeros(len(s), np.float32), 0).train_log_probs
    s = dataclasses.replace(s, rollout_log_probs=sampled)
    advantages = group_advantages(s.rewards, 4)
    found = {
        name: stepped(models["moe"], tmp_path / name, s, advantages, mini_batches=2, correction=name, **bounds)
        for name in CORRECTIONS
    }
    result, _, weights = found["none"]
    assert result.metrics["train/logp_abs_diff_max"] == 0.0 and result.metrics["train/grad_norm"] > 0
    for name in ("train/rollout_kl_k1", "train/rollout_kl_k3", "train/ratio_outside"):
        assert result.metrics[name] == 0.0
    for name, (result, _, others) in found.items():
        assert result.metrics["train/correction"] == pytest.approx(1.0, abs=1e-6), name
        assert all(torch.equal(others[key], weights[key]) for key in weights), name


@pytest.mark.parametrize("family", ["qwen3", "moe"])
def test_the_entropy_bonus_has_the_gradient_of_float64_and_repeats(models, tmp_path, family):
    s, nothing = samples(), np.zeros(32, np.float32)
    s = dataclasses.replace(s, rollout_log_probs=_log_probs(models[family], tmp_path / "log_probs", s))
    runs = [stepped(models[family], tmp_path / str(i), s, nothing, entropy_coef=1.0) for i in range(2)]
    (result, gradients, weights), (_, again, weights_again) = runs
    assert all(torch.equal(gradients[name], again[name]) for name in gradients)
    assert all(torch.equal(weights[name], weights_again[name]) for name in weights)
    model = hf_model(family).double()
    model.set_experts_implementation("eager")  # the usual one has no float64
    entropy = _entropy(model, s)
    assert result.metrics["train/entropy"] == pytest.approx(entropy.item(), rel=1e-5)
    (-entropy).backward()
    pairs = {"final_layernorm": model.model.norm, "layers.0.self_attention.linear_proj": model.model.layers[0].self_attn.o_proj}
    if family == "moe":
        pairs["layers.1.mlp.router"] = model.model.layers[1].mlp.gate
    for name, layer in pairs.items():
        torch.testing.assert_close(gradients[f"decoder.{name}.weight"].double(), layer.weight.grad, rtol=1e-3, atol=1e-6)


def _log_probs(model: Path, scratch: Path, s) -> np.ndarray:
    with trainer(exact(lr=0.0), model, scratch) as made:
        made.proved = True
        return made.step(s, np.zeros(len(s), np.float32), 0).train_log_probs


def _entropy(model, s) -> torch.Tensor:
    """Mean over answer tokens of the entropy of the distribution each was drawn from, in nats."""
    total = torch.zeros((), dtype=torch.float64)
    for start, end in zip(s.offsets[:-1], s.offsets[1:], strict=True):
        tokens = torch.from_numpy(s.tokens[start:end]).long()
        log_p = torch.log_softmax(model(tokens[None]).logits[0] / TEMPERATURE, -1)
        answers = torch.from_numpy(s.loss_mask[start + 1 : end] == 1)
        total = total - (log_p.exp() * log_p).sum(-1)[:-1][answers].sum()
    return total / int(s.loss_mask.sum())
