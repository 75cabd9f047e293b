"""Every loss and correction by name: invariant to splits and order, zero where there is nothing, identities on policy."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_hpc.config import Train
from miles_hpc.kernels.logprob import log_probs_and_entropy
from miles_hpc.train.advantage import ADVANTAGES, group_advantages, reinforce_pp, reinforce_pp_baseline
from miles_hpc.train.correction import CORRECTIONS
from miles_hpc.train.distillation import distilled_advantages
from miles_hpc.train.divergence import ESTIMATORS
from miles_hpc.train.loss import LOSSES, Tokens, token_weights
from miles_hpc.train.objective import Objective
from miles_hpc.train.value import gae, whiten

SEEDS = st.integers(0, 999)
LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=8)
KINDS = (
    [{"loss": name} for name in LOSSES] + [{"correction": name} for name in CORRECTIONS] + [{"kl": name} for name in ESTIMATORS]
)
KINDS += [{"dual_clip": 1.5}, {"entropy_coef": 0.1}, {"loss_mean": "sequence"}, {"loss_mean": "constant"}]


def objective(**train) -> Objective:
    made = Train(lr=0.0, **train)
    return Objective(made, LOSSES[made.loss], CORRECTIONS[made.correction], ESTIMATORS[made.kl])


def tokens(lengths: list[int], seed: int, reference: bool = True) -> Tokens:
    g = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    new = torch.randn(n, generator=g) - 2
    old, rollout, ref = (new + torch.randn(n, generator=g) * s for s in (0.3, 0.4, 0.5))
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.long))
    advantages = torch.randn(len(lengths), generator=g)[sample]
    entropy = torch.rand(n, generator=g)
    return Tokens(new, old, advantages, sample, len(lengths), rollout, ref if reference else None, entropy)


def part(t: Tokens, samples: list[int], new: torch.Tensor) -> Tokens:
    """The tokens of some samples, in that order, as a micro-batch of their own."""
    index = torch.cat([torch.nonzero(t.sample == s)[:, 0] for s in samples]) if samples else torch.zeros(0, dtype=torch.long)
    lengths = torch.tensor([int((t.sample == s).sum()) for s in samples], dtype=torch.long)
    fields = {f.name: getattr(t, f.name) for f in dataclasses.fields(t)}
    picked = {name: value[index] for name, value in fields.items() if isinstance(value, torch.Tensor)}
    sample = torch.repeat_interleave(torch.arange(len(samples)), lengths)
    return Tokens(**picked | {"log_probs": new[index], "sample": sample, "samples": len(samples)})


@pytest.mark.parametrize("kind", KINDS, ids=str)
@settings(max_examples=25)
@given(LENGTHS, SEEDS, st.sampled_from([1, 2, 4]), st.randoms(use_true_random=False))
def test_any_split_over_ranks_and_micro_batches_gives_the_same(kind, lengths, seed, ranks, random):
    """The denominators are global: parts of a mini-batch add up to the whole, value and gradient, for 1, 2 and 4 ranks."""
    made, t = objective(kl_coef=0.1, **kind), tokens(lengths, seed)
    per_sample = token_weights(torch.tensor(lengths), made.train.loss_mean, 10)
    new = t.log_probs.clone().requires_grad_()
    order = list(range(len(lengths)))
    whole = made(part(t, order, new), per_sample[t.sample])
    whole.loss.backward()
    expected, new.grad = new.grad, None
    random.shuffle(order)
    parts = [order[rank::ranks] for rank in range(ranks)]
    total = 0.0
    for samples in [piece for share in parts for piece in (share[:1], share[1:])]:
        micro = part(t, samples, new)
        terms = made(micro, per_sample[torch.tensor(samples, dtype=torch.long)][micro.sample])
        terms.loss.backward()
        total += terms.loss.item()
    assert total == pytest.approx(whole.loss.item(), rel=1e-5, abs=1e-5)
    torch.testing.assert_close(new.grad, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_nothing_to_learn_from_gives_zero(kind, lengths):
    made, t = objective(kl_coef=0.1, **kind), tokens(lengths, 0)
    new = t.log_probs.requires_grad_()
    terms = made(t, token_weights(torch.tensor(lengths, dtype=torch.long), made.train.loss_mean)[t.sample])
    terms.loss.backward()
    assert terms.loss == 0 and new.grad.shape == (0,)


@pytest.mark.parametrize("name", CORRECTIONS)
@settings(max_examples=25)
@given(LENGTHS, SEEDS)
def test_corrections_are_exactly_one_where_sampler_and_trainer_agree(name, lengths, seed):
    t = tokens(lengths, seed)
    t = dataclasses.replace(t, rollout_log_probs=t.old_log_probs.clone())
    train = Train(lr=0.0, correction=name, correction_low=1.0, correction_high=1.0)
    assert (CORRECTIONS[name](t, train) == 1).all()


@pytest.mark.parametrize("name", [n for n in LOSSES if n != "supervised"])
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name):
    t = tokens([3, 2, 4], 1)
    new = t.log_probs.requires_grad_()
    t = dataclasses.replace(t, old_log_probs=new.detach().clone())
    LOSSES[name](t, Train(lr=0.0)).values.sum().backward()
    torch.testing.assert_close(new.grad, -t.advantages)


@pytest.mark.parametrize("name", ["k2", "k3_k2", "k3_unbiased"])
def test_kl_terms_with_the_gradient_of_the_kl(name):
    """Over all tokens of a small vocabulary, sampled from the policy: the mean gradient is that of the exact KL."""
    g = torch.Generator().manual_seed(0)
    logits, ref = torch.randn(5, generator=g).requires_grad_(), torch.randn(5, generator=g).log_softmax(0)
    log_probs = logits.log_softmax(0)
    p = log_probs.detach().exp()
    (p * ESTIMATORS[name](log_probs, ref, log_probs.detach())).sum().backward()
    found, logits.grad = logits.grad, None
    log_probs = logits.log_softmax(0)
    (log_probs.exp() * (log_probs - ref)).sum().backward()
    torch.testing.assert_close(found, logits.grad, rtol=1e-4, atol=1e-6)


def test_supervised_is_the_cross_entropy_of_torch():
    """Value and gradient, as the mean over the tokens of samples with an advantage; the others take no part."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 9, generator=g).requires_grad_()
    targets, sample = torch.randint(0, 9, (6,), generator=g), torch.tensor([0, 0, 1, 1, 1, 2])
    log_probs = log_probs_and_entropy(logits, torch.eye(9), targets, torch.ones(1))[0]
    advantages = torch.tensor([1.0, 0.0, 0.3])[sample]
    t = Tokens(log_probs, log_probs.detach(), advantages, sample, 3, log_probs.detach())
    loss = objective(loss="supervised")(t, token_weights(torch.tensor([2, 0, 1]), "token")[sample]).loss
    loss.backward()
    found, logits.grad, chosen = logits.grad, None, [0, 1, 5]
    expected = torch.nn.functional.cross_entropy(logits[chosen], targets[chosen])
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, logits.grad)


@given(SEEDS, st.integers(1, 5))
def test_whitened_advantages_have_mean_zero_over_tokens(seed, size):
    random = np.random.default_rng(seed)
    rewards, lengths = random.normal(size=4 * size).astype(np.float32), random.integers(0, 5, 4 * size)
    for advantages in (reinforce_pp(rewards, lengths), reinforce_pp_baseline(rewards, lengths, size)):
        assert np.isfinite(advantages).all() and abs((advantages * lengths).sum()) < 1e-2
    assert (reinforce_pp(np.ones(4, np.float32), np.arange(4)) == 0).all()
    assert (reinforce_pp(rewards, np.zeros(4 * size, np.int64)) == 0).all()


def test_one_sample_per_group_gives_zero():
    rewards = np.array([1.0, 0.0, 2.0], np.float32)
    assert all((group_advantages(rewards, 1, kind) == 0).all() for kind in ("group_std", "group_mean", "rloo"))
    assert (reinforce_pp_baseline(rewards, np.ones(3, np.int64), 1) == 0).all()


def test_names_in_the_configuration_are_those_of_the_tables():
    fields = Train.model_fields
    for key, table in (("loss", LOSSES), ("advantage", ADVANTAGES), ("correction", CORRECTIONS), ("kl", ESTIMATORS)):
        annotation = fields[key].annotation
        names = [n for a in (annotation, *getattr(annotation, "__args__", ())) for n in getattr(a, "__args__", (a,))]
        assert {n for n in names if isinstance(n, str)} == set(table), key


def test_gae_skips_what_is_not_the_policys():
    """Tokens of a tool between two of the policy change nothing; without a policy's token everything is 0."""
    rewards, values = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5, 0.25, 0.125]])
    short = gae(rewards, values, torch.ones(1, 3), 0.9, 0.8)
    wide = [torch.stack([x[:, 0], torch.full((1,), 9.0), x[:, 1], x[:, 2]], 1) for x in (rewards, values)]
    long = gae(*wide, torch.tensor([[1.0, 0.0, 1.0, 1.0]]), 0.9, 0.8)
    torch.testing.assert_close(long[0][:, [0, 2, 3]], short[0])
    assert (gae(rewards, values, torch.zeros(1, 3), 0.9, 0.8)[0] == 0).all()
    assert (whiten(rewards, torch.zeros(1, 3)) == 0).all()


def test_distillation_pulls_towards_the_teacher():
    advantages = distilled_advantages(torch.zeros(2), torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -1.0]), 0.5)
    assert advantages.tolist() == [-0.5, 1.0]
