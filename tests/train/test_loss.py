import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.config import Train
from miles_hpc.train.correction import CORRECTIONS
from miles_hpc.train.divergence import ESTIMATORS, k3
from miles_hpc.train.loss import LOSSES, Tokens, token_weights
from miles_hpc.train.objective import Objective, PolicyLoss

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def policy_loss(
    new, old, advantages, weights, ref_log_probs=None, sample=None, rollout=None, entropy=None, **train
) -> PolicyLoss:
    """The objective of `train` on tokens that are samples of their own unless `sample` says otherwise."""
    settings = Train(lr=0.0, **train)
    objective = Objective(settings, LOSSES[settings.loss], CORRECTIONS[settings.correction], ESTIMATORS[settings.kl])
    sample = torch.arange(len(new)) if sample is None else sample
    samples = int(sample.max()) + 1 if len(sample) else 0
    rollout = old if rollout is None else rollout
    return objective(Tokens(new, old, advantages, sample, samples, rollout, ref_log_probs, entropy), weights)


def _tokens(seed: int, n: int):
    g = torch.Generator().manual_seed(seed)
    new = (torch.randn(n, generator=g) - 2).requires_grad_()
    return new, new.detach() + torch.randn(n, generator=g) * 0.3, torch.randn(n, generator=g), torch.rand(n, generator=g)


def _reference(new, old, advantages, weights, low, high):
    """The textbook loop over tokens."""
    total = 0.0
    for logp, before, a, w in zip(new.tolist(), old.tolist(), advantages.tolist(), weights.tolist(), strict=True):
        r = math.exp(logp - before)
        total -= w * min(r * a, min(max(r, 1 - low), 1 + high) * a)
    return total


@given(st.integers(0, 999), st.integers(1, 40))
def test_policy_loss_is_the_textbook_formula(seed, n):
    new, old, advantages, weights = _tokens(seed, n)
    terms = policy_loss(new, old, advantages, weights, **CLIP)
    assert terms.loss.item() == pytest.approx(_reference(new, old, advantages, weights, 0.2, 0.28), abs=1e-5)


@given(st.integers(0, 999), st.integers(2, 40), st.data())
def test_loss_and_gradient_do_not_depend_on_the_split_or_the_order(seed, n, data):
    new, old, advantages, weights = _tokens(seed, n)
    ref = old + 0.1
    order = torch.tensor(data.draw(st.permutations(range(n))))
    cut = data.draw(st.integers(0, n))
    whole = policy_loss(new, old, advantages, weights, kl_coef=0.1, ref_log_probs=ref, **CLIP)
    whole.loss.backward()
    expected, new.grad = new.grad.clone(), None
    total = 0.0
    for part in (order[:cut], order[cut:]):
        terms = policy_loss(new[part], old[part], advantages[part], weights[part], kl_coef=0.1, ref_log_probs=ref[part], **CLIP)
        terms.loss.backward()
        total += terms.loss.item()
    assert total == pytest.approx(whole.loss.item(), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(new.grad, expected, rtol=1e-5, atol=1e-7)


def test_on_policy_the_gradient_is_the_advantage():
    new, _, advantages, weights = _tokens(0, 10)
    terms = policy_loss(new, new.detach(), advantages, weights, **CLIP)
    terms.loss.backward()
    torch.testing.assert_close(new.grad, -advantages * weights)
    assert terms.clip_fraction == 0 and terms.kl == 0


def test_clip_cuts_gradients_only_where_the_ratio_went_too_far():
    old = torch.zeros(4)
    new = torch.log(torch.tensor([1.5, 1.5, 0.5, 0.5])).requires_grad_()
    terms = policy_loss(new, old, torch.tensor([1.0, -1.0, 1.0, -1.0]), torch.ones(4), **CLIP)
    terms.loss.backward()
    assert (new.grad == 0).tolist() == [True, False, False, True]
    assert terms.clip_fraction == 2


def test_no_tokens_give_zero_and_a_gradient():
    new = torch.zeros(0, requires_grad=True)
    terms = policy_loss(new, torch.zeros(0), torch.zeros(0), torch.zeros(0), **CLIP)
    terms.loss.backward()
    assert terms.loss == 0 and new.grad.shape == (0,)


@given(st.lists(st.floats(-30, 0, width=32), min_size=1, max_size=20), st.floats(-30, 0, width=32))
def test_k3_is_finite_and_never_negative(log_probs, ref):
    values = k3(torch.tensor(log_probs), torch.full((len(log_probs),), ref))
    assert torch.isfinite(values).all() and (values >= 0).all()


def test_k3_is_unbiased():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
    assert (p * k3(p.log(), q.log())).sum().item() == pytest.approx((p * (p / q).log()).sum().item(), rel=1e-5)


LENGTHS = st.lists(st.integers(0, 50), min_size=1, max_size=20)


@given(LENGTHS, st.sampled_from(["token", "sequence"]))
def test_token_weights_add_up_to_one(lengths, kind):
    lengths = torch.tensor(lengths)
    weights = token_weights(lengths, kind)
    assert torch.isfinite(weights).all()
    assert (weights * lengths).sum().item() == pytest.approx(float(lengths.any()), abs=1e-5)
    assert (weights[lengths == 0] == 0).all()


def test_token_and_sequence_means_differ_as_they_should():
    lengths = torch.tensor([1, 3])
    assert token_weights(lengths, "token").tolist() == pytest.approx([1 / 4, 1 / 4])
    assert token_weights(lengths, "sequence").tolist() == pytest.approx([1 / 2, 1 / 6])
    assert token_weights(lengths, "constant", 10).tolist() == pytest.approx([1 / 20, 1 / 20])
    with pytest.raises(ValueError, match="none of token, sequence, constant"):
        token_weights(lengths, "mean")
