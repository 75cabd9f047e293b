"""The sampling noise: a pure function of (key, position), with the right distribution."""

import itertools

import pytest
import torch
from scipy.stats import chisquare, kstest

from miles_hpc.rollout import noise
from miles_hpc.rollout.request import sampling_seed

SPLITMIX_1234567 = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
"""First outputs of the reference implementation for seed 1234567."""


def rows(count: int, key: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((count,), key), torch.arange(count)


def test_mix_is_splitmix64() -> None:
    golden = 0x9E3779B97F4A7C15 - (1 << 64)
    values = noise.mix(1234567 + golden * torch.arange(1, 5))
    assert [v % (1 << 64) for v in values.tolist()] == SPLITMIX_1234567


def test_uniforms_are_uniform_in_every_direction() -> None:
    keys, positions = rows(200)
    u = noise.uniforms(keys, positions, 300).double()
    assert u.min() > 0 and u.max() <= 1
    for sample in (u[0], u[:, 0], u.diagonal(), noise.uniforms(torch.arange(5000), torch.zeros(5000), 1)[:, 0]):
        assert kstest(sample.numpy(), "uniform").pvalue > 1e-3


def test_neighbouring_keys_and_positions_are_uncorrelated() -> None:
    u = noise.uniforms(torch.arange(100).repeat_interleave(100), torch.arange(100).repeat(100), 1).double().view(100, 100) - 0.5
    for shifted in (u[1:] * u[:-1], u[:, 1:] * u[:, :-1]):
        assert abs(shifted.mean()) * 12 < 4 / shifted.numel() ** 0.5


@pytest.mark.parametrize("key", [0, 1, 2**62])
def test_draws_follow_the_softmax(key: int) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -4.0, 0.5])
    draws = 200_000
    keys, positions = rows(draws, key)
    tokens = noise.choose(torch.log_softmax(logits, 0).expand(draws, -1), keys, positions, torch.zeros(draws, dtype=torch.bool))
    observed = torch.bincount(tokens, minlength=6).numpy()
    expected = (torch.softmax(logits.double(), 0) * draws).numpy()
    assert chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-3


def test_draws_over_samples_follow_the_softmax() -> None:
    """As in a group: one position, many sample indices."""
    log_probs = torch.log_softmax(torch.tensor([0.3, 0.0, 1.2, -0.7]), 0)
    keys = torch.tensor([sampling_seed(3, prompt, sample) for prompt, sample in itertools.product(range(400), range(50))])
    tokens = noise.choose(
        log_probs.expand(len(keys), -1), keys, torch.full_like(keys, 9), torch.zeros(len(keys), dtype=torch.bool)
    )
    expected = (log_probs.double().exp() * len(keys)).numpy()
    observed = torch.bincount(tokens, minlength=4).numpy()
    assert chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-3


def test_a_row_does_not_depend_on_the_others() -> None:
    log_probs = torch.log_softmax(torch.randn(64, 50, generator=torch.Generator().manual_seed(0)), -1)
    keys, positions, greedy = torch.arange(64) * 1_000_003, torch.arange(64), torch.zeros(64, dtype=torch.bool)
    together = noise.choose(log_probs, keys, positions, greedy)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(noise.choose(log_probs[order], keys[order], positions[order], greedy), together[order])
    alone = [noise.choose(log_probs[i, None], keys[i, None], positions[i, None], greedy[:1]) for i in range(64)]
    assert torch.equal(torch.cat(alone), together)


def test_greedy_rows_take_the_most_likely_token() -> None:
    log_probs = torch.log_softmax(torch.randn(32, 50, generator=torch.Generator().manual_seed(0)), -1)
    keys, positions = rows(32)
    greedy = torch.arange(32) % 2 == 0
    tokens = noise.choose(log_probs, keys, positions, greedy)
    assert torch.equal(tokens[greedy], log_probs.argmax(-1)[greedy])
    assert not torch.equal(tokens, log_probs.argmax(-1))


def test_impossible_tokens_are_never_drawn() -> None:
    log_probs = torch.tensor([0.0, -float("inf"), -float("inf")]).expand(1000, -1)
    keys, positions = rows(1000)
    assert noise.choose(log_probs, keys, positions, torch.zeros(1000, dtype=torch.bool)).max() == 0


def test_seeds_differ_in_every_argument_and_fit_int64() -> None:
    keys = {sampling_seed(*triple) for triple in itertools.product(range(4), range(500), range(16))}
    assert len(keys) == 4 * 500 * 16
    assert all(0 <= key < 1 << 63 for key in keys)
    assert sampling_seed(1, 2, 3) == sampling_seed(1, 2, 3) != sampling_seed(2, 1, 3)
