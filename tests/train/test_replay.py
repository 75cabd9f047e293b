"""Routing replay: the engine's experts are used in the forward, in the backward, and in a recomputation of the forward."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from train_parts import EXPERTS, SIZES, config, hf_model, kept_gradients, routing, run_steps, samples, trainer

from miles_hpc.errors import ModelError, SampleError
from miles_hpc.train import architecture, passes
from miles_hpc.train.advantage import group_advantages
from miles_hpc.train.packing import pack
from miles_hpc.train.replay import Replay

LAYERS, EXPERT_COUNT, TOP_K = SIZES["num_hidden_layers"], EXPERTS["num_experts"], EXPERTS["num_experts_per_tok"]
PACKS, TRAINED_PACKS = 3, 2
"""Micro-batches of the samples below, and those of them with a gradient."""
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def recorded(**changes):
    s = samples()
    return dataclasses.replace(s, routing=routing(s), **changes)


def reference(s):
    """Log-probs [total] of transformers with the recorded experts, and the model, whose gates have their gradients."""
    model, where = hf_model("moe"), {}

    def chosen(layer):
        def hook(gate, inputs, outputs):
            ids = where["ids"][:, layer]
            known = where["ids"].flatten(1).any(1)[:, None]
            ids = torch.where(known, ids, outputs[2])
            scores = F.softmax(outputs[0], -1).gather(1, ids)
            return outputs[0], scores / scores.sum(-1, keepdim=True), ids

        return hook

    for i, layer in enumerate(model.model.layers):
        layer.mlp.gate.register_forward_hook(chosen(i))
    flat = torch.zeros(len(s.tokens))
    for start, end in zip(s.offsets[:-1], s.offsets[1:], strict=True):
        where["ids"] = torch.from_numpy(s.routing[start:end]).long()
        tokens = torch.from_numpy(s.tokens[start:end]).long()
        log_probs = F.log_softmax(model(tokens[None]).logits[0], -1)
        flat[start + 1 : end] = log_probs[:-1].gather(1, tokens[1:, None])[:, 0]
    return flat * torch.from_numpy(s.loss_mask), model


def one_step(models, scratch, s, multiple=1, **train):
    """Log-probs, metrics, and the router's gradient of a step on `s`, packs filled up to `multiple` tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "pack", lambda q, i, _, where: pack(q, i, multiple, where))
        with trainer(config(loss="reinforce", **train), models["moe"], scratch) as made:
            gradients = kept_gradients(made)
            result = made.step(s, group_advantages(s.rewards, 4), 0)
    return result.train_log_probs, result.metrics, gradients


@pytest.mark.parametrize("layout", ["packed", "padded", "recomputed"])
def test_log_probs_and_gradients_are_those_of_transformers_with_the_same_experts(models, tmp_path, monkeypatch, layout):
    s = recorded()
    if layout == "recomputed":
        for name, value in RECOMPUTE.items():
            monkeypatch.setitem(architecture._FIXED, name, value)
    multiple, forwards = 64 if layout == "padded" else 1, []
    monkeypatch.setattr(Replay, "compare", lambda *arguments: forwards.append(1))
    found, _, gradients = one_step(models, tmp_path / "store", s, multiple, routing_replay=True)
    expected, model = reference(s)
    np.testing.assert_allclose(found, expected.detach().numpy(), atol=1e-5)
    advantages = torch.from_numpy(np.repeat(group_advantages(s.rewards, 4), s.lengths))
    kept = torch.from_numpy(s.loss_mask == 1) & (advantages != 0)
    (-(expected * advantages)[kept].sum() / kept.sum()).backward()
    for layer in range(LAYERS):
        gate = gradients[f"decoder.layers.{layer}.mlp.router.weight"]
        torch.testing.assert_close(gate, model.model.layers[layer].mlp.gate.weight.grad, atol=1e-5, rtol=1e-3)
        assert gate.abs().max() > 1e-4
    assert len(forwards) == LAYERS * (PACKS + (layout == "recomputed") * TRAINED_PACKS)


def test_random_experts_are_a_mismatch(models, tmp_path):
    """Of the 6 pairs of 4 experts, the recorded one is the trainer's own in about a sixth."""
    rate = one_step(models, tmp_path / "store", recorded(), routing_replay=True)[1]["train/routing_mismatch"]
    assert 0.7 < rate < 0.95


def test_its_own_experts_change_nothing_and_are_no_mismatch(models, tmp_path):
    """Also with several mini-batches, after whose first the weights are others: only the engine's weights are compared."""
    s = samples()
    own = dataclasses.replace(s, routing=chosen_by(hf_model("moe"), s))
    plain = one_step(models, tmp_path / "plain", s, mini_batches=2)
    same = one_step(models, tmp_path / "same", own, mini_batches=2, routing_replay=True)
    assert (plain[0] == same[0]).all() and same[1]["train/routing_mismatch"] == 0.0
    assert "train/routing_mismatch" not in plain[1]
    other = own.routing.copy()
    other[5, 1] = [0, 1] if other[5, 1].tolist() != [0, 1] else [2, 3]  # a prompt's or answer's token, never a last one
    pairs = LAYERS * (len(s.tokens) - len(s))
    once = one_step(models, tmp_path / "once", dataclasses.replace(own, routing=other), routing_replay=True)[1]
    assert 1 / pairs <= once["train/routing_mismatch"] < 10 / pairs


def chosen_by(model, s):
    """[total, layers, top_k] uint8, the experts that transformers chooses."""
    found = np.zeros((len(s.tokens), LAYERS, TOP_K), np.uint8)
    seen: list = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda m, i, outputs: seen.append(outputs[2]))
    for start, end in zip(s.offsets[:-1], s.offsets[1:], strict=True):
        seen.clear()
        model(torch.from_numpy(s.tokens[start:end]).long()[None])
        found[start : end - 1] = torch.stack(seen, 1).sort(-1)[0][:-1].numpy()
    return found


def test_the_reference_policy_routes_by_itself(models, tmp_path):
    with trainer(config(routing_replay=True, kl_coef=0.1), models["moe"], tmp_path / "store") as made:
        run_steps(made, 1)
        assert made.policy.replays and made.reference.replays is None


@pytest.mark.parametrize(
    "change",
    [lambda r: None, lambda r: r[:, :1], lambda r: np.concatenate([r, r], -1), lambda r: r + np.uint8(EXPERT_COUNT)],
    ids=["none", "layers", "top_k", "experts"],
)
def test_samples_without_a_record_of_this_model_are_refused(models, tmp_path, change):
    s = recorded()
    changed = dataclasses.replace(s, routing=change(s.routing))
    refused = pytest.raises(SampleError, match=r"routing_replay needs a record of 2 layers x 2 of 4 experts")
    with trainer(config(routing_replay=True), models["moe"], tmp_path / "store") as made, refused:
        made.step(changed, group_advantages(s.rewards, 4), 0)


def test_a_dense_model_is_refused(models, tmp_path):
    refused = pytest.raises(ModelError, match="routing_replay = true, but the model has no experts")
    with refused, trainer(config(routing_replay=True), models["qwen3"], tmp_path / "store"):
        pass
