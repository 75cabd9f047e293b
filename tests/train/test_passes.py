"""A rank that runs out of memory in a micro-batch: all ranks go on with smaller ones, and nothing else is different."""

import gc
import hashlib
import weakref

import numpy as np
import pytest
import torch
from train_parts import config, kept_gradients, run_steps, samples, short_of_memory, trainer

from miles_hpc.errors import OutOfMemory
from miles_hpc.train.advantage import group_advantages
from miles_hpc.train.passes import Passes

TOKENS = 96
STEPS = 2


def digest(tensor):
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def figures(results):
    """Metrics and log-probs, as their bits."""
    return results["metrics"], [found.tobytes() for found in results["log_probs"]]


def learned(results):
    """The weights."""
    return {name: digest(tensor) for name, tensor in results["weights"].items()}


def run(made):
    """What came of some steps, and the last gradients."""
    gradients = kept_gradients(made)
    results = run_steps(made, STEPS)
    return results, learned(results), {name: digest(tensor) for name, tensor in gradients.items()}


@pytest.mark.parametrize(
    ("family", "train", "at"),
    [
        ("qwen3", {}, "forward"),
        ("moe", {"mini_batches": 2, "routing_replay": True}, "backward"),
        ("moe", {"advantage": "gae", "critic_lr": 1e-3}, "forward"),
    ],
)
def test_the_step_is_bit_for_bit_that_of_a_run_that_began_with_less(models, tmp_path, family, train, at):
    """All of it if the first pass is short of memory; if a later one is, log-probs of earlier passes stay as they were."""
    lowered: list = []
    with trainer(config(micro_batch_tokens=TOKENS, **train), models[family], tmp_path / "short") as made:
        made.passes.lowered = lowered.append
        with short_of_memory(TOKENS // 2, at) as sizes:
            found = run(made)
        assert max(sizes) > TOKENS // 2 == made.passes.limit and lowered == [TOKENS]
    with trainer(config(micro_batch_tokens=TOKENS // 2, **train), models[family], tmp_path / "small") as made:
        small = run(made)
    assert small[1:] == found[1:]
    assert at == "backward" or figures(small[0]) == figures(found[0])
    for a, b in zip(small[0]["metrics"], found[0]["metrics"], strict=True):
        assert a == pytest.approx(b, abs=1e-5, rel=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "moe"])
def test_what_a_failed_forward_had_saved_is_gone_before_the_next(models, tmp_path, family):
    """On a GPU the next pass would have no more memory than the one that failed."""
    marks, held = [], []

    def mark(layer, inputs, outputs):
        if not marks and outputs[0].requires_grad:
            outputs[0].grad_fn.metadata["mark"] = found = Mark()
            marks.append(weakref.ref(found))

    def fail(mlp, inputs):
        if marks and not held:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def look(before):
        gc.collect()
        held.append(marks[0]() is not None)

    with trainer(config(), models[family], tmp_path / "store") as made:
        layers, made.passes.lowered = made.policy.module.decoder.layers, look
        layers[0].register_forward_hook(mark)
        layers[-1].mlp.register_forward_pre_hook(fail)
        run_steps(made, 1)
    assert held == [False]


class Mark:
    """Lives as long as the node of the graph that has it."""


def test_the_warm_start_too(models, tmp_path):
    s, losses = samples(), []
    spans = list(zip(s.offsets[:-1], s.offsets[1:], strict=True))
    sequences, masks = ([values[a:b].tolist() for a, b in spans] for values in (s.tokens, s.loss_mask))
    for limit, memory in ((TOKENS, TOKENS // 2), (TOKENS // 2, 10 * TOKENS)):
        with short_of_memory(memory), trainer(config(micro_batch_tokens=limit), models["qwen3"], tmp_path / f"{limit}") as made:
            loss = made.supervised_step(sequences, masks, 1e-3)
            losses.append((loss, {name: digest(tensor) for name, tensor in made.weights()}))
    assert losses[0] == losses[1]


def test_a_limit_far_above_what_there_is_to_train_is_halved_until_something_changes(models, tmp_path):
    s = samples(prompts=2)
    with short_of_memory(len(s.tokens) - 1), trainer(config(micro_batch_tokens=2**14), models["qwen3"], tmp_path / "s") as made:
        lowered: list = []
        made.passes.lowered = lowered.append
        made.step(s, group_advantages(s.rewards, 4), 0)
    assert lowered == [2**14] and made.passes.limit < len(s.tokens) <= 2 * made.passes.limit


def test_a_sample_that_does_not_fit_alone_is_refused_with_the_key_to_lower(models, tmp_path):
    s = samples()
    longest = int(np.diff(s.offsets).max())
    with short_of_memory(longest - 1), trainer(config(), models["qwen3"], tmp_path / "store") as made:
        with pytest.raises(OutOfMemory, match=f"a single sample has {longest}") as caught:
            made.step(s, group_advantages(s.rewards, 4), 0)
        assert made.passes.limit <= longest
    assert "rollout.max_new_tokens" in caught.value.next_step and caught.value.kind == "out_of_memory"


def test_where_ranks_meet_within_a_micro_batch_it_ends_at_once_and_says_what_comes_next(models, tmp_path, monkeypatch):
    s, lowered = samples(), []
    monkeypatch.setattr(Passes, "tied", True)
    with short_of_memory(TOKENS) as sizes, trainer(config(), models["qwen3"], tmp_path / "store") as made:
        made.passes.lowered = lowered.append
        with pytest.raises(OutOfMemory, match="split over ranks") as caught:
            made.step(s, group_advantages(s.rewards, 4), 0)
        assert lowered == [256] and made.passes.limit < max(sizes) == sizes[-1]
    assert f"the next attempt trains in micro-batches of {made.passes.limit} tokens" in caught.value.next_step


def test_another_error_is_not_taken_for_it(models, tmp_path, monkeypatch):
    s = samples()
    with trainer(config(), models["qwen3"], tmp_path / "store") as made:
        monkeypatch.setattr(made.policy, "log_probs", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            made.step(s, group_advantages(s.rewards, 4), 0)
        assert made.passes.limit == 256
