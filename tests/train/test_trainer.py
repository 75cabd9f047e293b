"""One training step, in one process."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from train_parts import config, hf_model, run_steps, samples, trainer

from miles_hpc.errors import Diverged
from miles_hpc.launchers.advantages import always
from miles_hpc.train.advantage import group_advantages


def _advantages(s, group=4):
    return group_advantages(s.rewards, group)


def _reference_log_probs(model, s, temperature=1.0):
    """[total] by transformers, one sequence at a time."""
    flat = torch.zeros(len(s.tokens))
    for start, end in zip(s.offsets[:-1], s.offsets[1:], strict=True):
        tokens = torch.from_numpy(s.tokens[start:end]).long()
        log_probs = F.log_softmax(model(tokens[None]).logits[0] / temperature, -1)
        flat[start + 1 : end] = log_probs[:-1].gather(1, tokens[1:, None])[:, 0]
    return flat * torch.from_numpy(s.loss_mask)


@pytest.mark.parametrize("mini_batches", [1, 4])
def test_train_log_probs_are_those_of_the_weights_that_sampled(mini_batches, models, tmp_path):
    s = samples()
    with trainer(config(mini_batches=mini_batches), models["moe"], tmp_path / "store") as made:
        result = made.step(s, _advantages(s), 0)
    expected = _reference_log_probs(hf_model("moe"), s).detach().numpy()
    assert result.own.tolist() == list(range(len(s)))
    np.testing.assert_allclose(result.train_log_probs, expected, atol=1e-5)
    distance = np.abs(expected - s.rollout_log_probs)[s.loss_mask == 1]
    assert result.metrics["train/logp_abs_diff_max"] == pytest.approx(distance.max(), abs=1e-4)
    assert result.metrics["train/logp_abs_diff_mean"] == pytest.approx(distance.mean(), abs=1e-4)
    ratio = np.exp((expected - s.rollout_log_probs)[s.loss_mask == 1].astype(np.float64))
    assert result.metrics["train/rollout_kl_k1"] == pytest.approx(-np.log(ratio).mean(), abs=1e-4)
    assert result.metrics["train/rollout_kl_k3"] == pytest.approx((ratio - 1 - np.log(ratio)).mean(), rel=1e-4)
    outside = (ratio < 0.9) | (ratio > 1.1)
    assert 0 < outside.mean() < 1 and result.metrics["train/ratio_outside"] == pytest.approx(outside.mean())
    assert result.metrics["train/tokens"] == len(s.tokens)


def without_loss(s, *removed):
    """As a generate function that sets `remove_sample`."""
    mask = s.loss_mask.copy()
    mask[s.tokens_of(np.array(removed, np.int64))] = 0
    return dataclasses.replace(s, loss_mask=mask)


@pytest.mark.parametrize("removed", [(), (1, 6)])
def test_loss_and_gradient_are_those_of_plain_torch(removed, models, tmp_path):
    s = without_loss(samples(), *removed)
    advantages = _advantages(s)
    model = hf_model("qwen3")
    log_probs = _reference_log_probs(model, s, temperature=0.7)
    lengths = np.diff(s.offsets)
    kept = torch.from_numpy((s.loss_mask == 1) & (np.repeat(advantages, lengths) != 0))
    a = torch.from_numpy(np.repeat(advantages, lengths))
    ratio = torch.exp(log_probs - torch.from_numpy(s.rollout_log_probs))
    loss = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)[kept].sum() / kept.sum()
    loss.backward()
    norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters()))
    settings = config(clip_high=0.28)
    settings = settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"temperature": 0.7})})
    with trainer(settings, models["qwen3"], tmp_path / "store") as made:
        metrics = made.step(s, advantages, 0).metrics
    assert metrics["train/loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert metrics["train/trained_tokens"] == kept.sum().item()


@pytest.mark.parametrize(
    "train", [{}, {"advantage": "gae"}, {"kl_coef": 0.1}, {"entropy_coef": 0.1}, {"teacher": "qwen3"}], ids=str
)
def test_what_is_said_to_be_trained_is_trained(train, models, tmp_path):
    """The second group has no advantage, the third no loss; the audit knows where samples need no advantage."""
    s = without_loss(samples(), 8, 9, 10, 11)
    advantages = np.where(np.arange(len(s)) // 4 == 1, 0, 1).astype(np.float32)
    settings = config(**train | ({"teacher": str(models["qwen3"])} if "teacher" in train else {}))
    with trainer(settings, models["qwen3"], tmp_path / "store") as made:
        result = made.step(s, advantages, 0)
        nothing = made.step(without_loss(s, *range(len(s))), advantages, 1)
    expected = np.repeat([True, bool(train), False] + [True] * (len(s) // 4 - 3), 4)
    assert result.trained.tolist() == expected.tolist() and always(settings.train) == bool(train)
    assert result.metrics["train/trained_tokens"] == s.answer_lengths[expected].sum() and len(result.own) == len(s)
    assert not nothing.trained.any() and nothing.metrics["train/optimizer_steps"] == 0


def test_one_step_is_that_of_torch_adamw(models, tmp_path):
    """Against transformers and `torch.optim.AdamW` on a clipped gradient."""
    s = samples()
    model = hf_model("qwen3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    with trainer(config(lr=1e-3), models["qwen3"], tmp_path / "store") as made:
        for _ in range(2):
            log_probs = _reference_log_probs(model, s)
            old = log_probs.detach()
            a = torch.from_numpy(np.repeat(_advantages(s), np.diff(s.offsets)))
            kept = (torch.from_numpy(s.loss_mask) == 1) & (a != 0)
            (-(torch.exp(log_probs - old) * a)[kept].sum() / kept.sum()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            made.step(dataclasses.replace(s, rollout_log_probs=old.numpy()), _advantages(s), 0)
        weights = dict(made.weights())
    for name, parameter in model.named_parameters():
        # AdamW's first steps have the size of the learning rate, whatever the gradient: tiny gradients may differ in sign.
        close = (weights[name] - parameter).abs() < 2e-5
        assert close.float().mean() > 0.99, name


def test_micro_batch_size_changes_nothing(models, tmp_path):
    results = []
    for i, limit in enumerate((64, 100000)):
        with trainer(config(micro_batch_tokens=limit, mini_batches=2, lr=1e-3), models["moe"], tmp_path / str(i)) as made:
            results.append(run_steps(made, 2))
    small, large = results
    for a, b in zip(small["metrics"], large["metrics"], strict=True):
        assert a == pytest.approx(b, abs=1e-4, rel=1e-4)


def test_the_same_seed_gives_the_same_bits(models, tmp_path):
    results = []
    for i, seed in enumerate((0, 0, 1)):
        with trainer(config(mini_batches=4, seed=seed), models["moe"], tmp_path / str(i)) as made:
            results.append(run_steps(made, 2)["weights"])
    first, second, other = results
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert not all(torch.equal(first[n], other[n]) for n in first)


def test_without_any_signal_nothing_moves(models, tmp_path):
    s = samples()
    with trainer(config(mini_batches=2), models["moe"], tmp_path / "store") as made:
        before = {n: t.clone() for n, t in made.weights()}
        result = made.step(s, np.zeros(len(s), np.float32), 0)
        assert all(torch.equal(before[n], t) for n, t in made.weights())
    assert result.metrics["train/optimizer_steps"] == 0 and result.metrics["train/trained_tokens"] == 0
    assert np.isfinite(list(result.metrics.values())).all()
    assert (result.train_log_probs[s.loss_mask == 1] != 0).all()


@pytest.mark.parametrize("advantage", ["group_std", "gae"])
def test_samples_without_a_token_of_the_model_take_no_part(advantage, models, tmp_path):
    """A whole group is masked out, as when every answer is a tool's: the others train as if it were not there."""
    whole = samples()
    masked = whole.loss_mask.copy()
    masked[: whole.offsets[4]] = 0
    results = []
    for i, s in enumerate((dataclasses.replace(whole, loss_mask=masked), whole.take(np.arange(4, len(whole))))):
        with trainer(config(advantage=advantage, critic_lr=1e-3), models["qwen3"], tmp_path / str(i)) as made:
            results.append([made.step(s, _advantages(s), step).metrics for step in range(2)])
    for with_masked, without in zip(*results, strict=True):
        assert np.isfinite(list(with_masked.values())).all()
        for key in without.keys() - {"train/tokens"}:
            assert with_masked[key] == pytest.approx(without[key], abs=1e-5, rel=1e-4), key


def test_the_warm_start_minimises_the_cross_entropy_of_transformers(models, tmp_path):
    s = samples(prompts=2)
    sequences = [s.tokens[a:b].tolist() for a, b in zip(s.offsets[:-1], s.offsets[1:], strict=True)]
    masks = [s.loss_mask[a:b].tolist() for a, b in zip(s.offsets[:-1], s.offsets[1:], strict=True)]
    expected = -_reference_log_probs(hf_model("moe"), s).sum().item() / s.loss_mask.sum()
    with trainer(config(), models["moe"], tmp_path / "store") as made:
        assert made.supervised_step(sequences, masks, 1e-3) == pytest.approx(expected, rel=1e-5)


def test_learning_rate_zero_freezes_the_policy(models, tmp_path):
    with trainer(config(lr=0.0, mini_batches=2), models["moe"], tmp_path / "store") as made:
        before = {n: t.clone() for n, t in made.weights()}
        run_steps(made, 1)
        assert all(torch.equal(before[n], t) for n, t in made.weights())


def test_warm_up_counts_rollout_steps(models, tmp_path):
    with trainer(config(lr=1e-3, lr_warmup_steps=2, mini_batches=4), models["qwen3"], tmp_path / "store") as made:
        rates = [m["train/lr"] for m in run_steps(made, 3)["metrics"]]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3])


def test_kl_to_the_reference_holds_the_policy_back(models, tmp_path):
    drift = []
    for i, coefficient in enumerate((1e-9, 10.0)):
        with trainer(config(kl_coef=coefficient, lr=1e-3, mini_batches=2), models["qwen3"], tmp_path / str(i)) as made:
            drift.append([m["train/kl"] for m in run_steps(made, 4)["metrics"]])
    assert drift[1][-1] < drift[0][-1] * 0.8
    assert all(value >= 0 for values in drift for value in values)


def test_rewarded_answers_become_more_likely(models, tmp_path):
    s = samples()
    advantages = _advantages(s)
    with trainer(config(lr=1e-3), models["moe"], tmp_path / "store") as made:
        first = made.step(s, advantages, 0).train_log_probs
        for step in range(1, 6):
            s = dataclasses.replace(s, rollout_log_probs=made.step(s, advantages, step).train_log_probs)
        last = made.step(s, advantages, 6).train_log_probs
    gain = (last - first) * np.repeat(advantages, np.diff(s.offsets)) * s.loss_mask
    assert gain.sum() > 1.0


def test_a_loss_that_is_not_finite_ends_the_run(models, tmp_path):
    s = samples()
    advantages = _advantages(s)
    advantages[0] = np.nan
    with trainer(config(), models["qwen3"], tmp_path / "store") as made, pytest.raises(Diverged, match="gradient norm is nan"):
        made.step(s, advantages, 0)


def test_bfloat16_keeps_float32_masters(models, tmp_path):
    with trainer(config(dtype="bfloat16", lr=1e-6, mini_batches=2), models["moe"], tmp_path / "store") as made:
        result = run_steps(made, 2)
        masters = [p for part in made.optimizer.chained_optimizers for g in part.optimizer.param_groups for p in g["params"]]
    assert {p.dtype for p in masters} == {torch.float32}
    assert {t.dtype for t in result["weights"].values()} == {torch.bfloat16}
    assert result["metrics"][0]["train/logp_abs_diff_mean"] > 0


def test_a_closed_trainer_leaves_no_threads(models, tmp_path):
    """Gloo has three per group, and those of a trainer that has done a backward would stay for ever."""
    counts = []
    for i in range(3):
        with trainer(config(), models["moe"], tmp_path / str(i)) as made:
            run_steps(made, 1)
        counts.append(len(list(Path("/proc/self/task").iterdir())))
    assert counts[2] <= counts[0]
