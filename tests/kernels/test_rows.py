"""Each kernel beside its reference: values, gradients against autograd in float64, rows that do not depend on their company."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from miles_hpc.errors import NumericsError
from miles_hpc.kernels import activation, linear, logprob, norm, rope, rows, selftest

torch.set_num_threads(1)
TOKENS = 70
COUNTS = (1, 2, 3, 7, 8, 31, 64)


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


TEMPERATURE = torch.tensor([0.7])
TARGETS = torch.arange(TOKENS) * 7 % 155
OPS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]] = {
    "linear": (linear.linear, linear.reference, [random(TOKENS, 96), random(155, 96, seed=1)]),
    "rms_norm": (
        lambda x, w: norm.rms_norm(x, w, 1e-6),
        lambda x, w: norm.reference(x, w, 1e-6),
        [random(TOKENS, 96), random(96, seed=1)],
    ),
    "swiglu": (activation.swiglu, activation.reference, [random(TOKENS, 96)]),
    "log_prob": (
        lambda x, w: logprob.log_probs_and_entropy(x, w, TARGETS[: len(x)], TEMPERATURE)[0][:, None],
        lambda x, w: logprob.reference(x, w, TARGETS[: len(x)], TEMPERATURE.double())[0][:, None],
        [random(TOKENS, 24), random(155, 24, seed=1)],
    ),
    "log_prob_and_entropy": (
        lambda x, w: torch.stack(logprob.log_probs_and_entropy(x, w, TARGETS[: len(x)], TEMPERATURE), 1),
        lambda x, w: torch.stack(logprob.reference(x, w, TARGETS[: len(x)], TEMPERATURE.double()), 1),
        [random(TOKENS, 24), random(155, 24, seed=1)],
    ),
}


@pytest.mark.parametrize("name", OPS)
def test_values_and_gradients_are_the_references(name):
    kernel, reference, inputs = OPS[name]
    upstream = random(*kernel(*inputs).shape, seed=2)
    ours, theirs = (_gradients(f, inputs, upstream, kind) for f, kind in ((kernel, torch.float32), (reference, torch.float64)))
    for got, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)


def _gradients(function: Callable[..., Tensor], inputs: list[Tensor], upstream: Tensor, kind: torch.dtype) -> list[Tensor]:
    """Value and gradients of all inputs."""
    leaves = [x.to(kind).requires_grad_() for x in inputs]
    value = function(*leaves)
    return [value.detach(), *torch.autograd.grad(value, leaves, upstream.to(kind))]


@pytest.mark.parametrize("name", OPS)
def test_a_row_does_not_depend_on_its_company(name):
    kernel, _, (x, *weights) = OPS[name]
    whole = kernel(x, *weights)
    for count in COUNTS:
        assert torch.equal(kernel(x[:count], *weights), whole[:count]), count


@pytest.mark.parametrize("name", OPS)
def test_gradients_repeat(name):
    kernel, _, inputs = OPS[name]
    upstream = random(*kernel(*inputs).shape, seed=2)
    first, second = (_gradients(kernel, inputs, upstream, torch.float32) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.fixture
def small_pieces(monkeypatch):
    """Several pieces forward and backward, the last ones not full."""
    monkeypatch.setattr(logprob, "FORWARD", 155 * 33)
    monkeypatch.setattr(logprob, "BACKWARD", TOKENS * 40)


@pytest.mark.parametrize("name", ["log_prob", "log_prob_and_entropy"])
def test_pieces_give_the_same_values_and_gradients(name, small_pieces):
    test_values_and_gradients_are_the_references(name)


def test_sampler_and_trainer_share_one_formula(small_pieces):
    hidden, weight = random(TOKENS, 24), random(155, 24, seed=1)
    logits = linear.linear_float(hidden, weight)
    everything = logprob.log_softmax(logits, TEMPERATURE)
    log_probs, entropy = logprob.log_probs_and_entropy(hidden, weight, TARGETS, TEMPERATURE)
    assert torch.equal(everything.gather(1, TARGETS[:, None])[:, 0], log_probs)
    for count in COUNTS:
        assert torch.equal(logprob.log_softmax(logits[:count], TEMPERATURE.expand(count, 1)), everything[:count])
    torch.testing.assert_close(entropy, logprob.reference(hidden, weight, TARGETS, TEMPERATURE)[1], rtol=1e-4, atol=1e-5)


@given(st.integers(0, 999), st.integers(0, 20), st.integers(1, 50), st.floats(0.1, 50))
def test_log_probs_and_entropy_are_those_of_torch(seed, n, vocabulary, scale):
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(n, vocabulary, generator=g) * scale).requires_grad_()
    targets = torch.randint(0, vocabulary, (n,), generator=g)
    one = torch.ones(1)
    log_probs, entropy = logprob.log_probs_and_entropy(logits, torch.eye(vocabulary), targets, one)
    grad = torch.randn(n, generator=g)
    ((log_probs + entropy) * grad).sum().backward()
    found, logits.grad = logits.grad, None
    wanted = logprob.reference(logits, torch.eye(vocabulary), targets, one)
    ((wanted[0] + wanted[1]) * grad).sum().backward()
    torch.testing.assert_close(log_probs, wanted[0], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(entropy, wanted[1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found, torch.zeros(n, vocabulary) if n == 0 else logits.grad, atol=1e-4, rtol=1e-4)


def test_no_more_logits_are_held_than_the_pieces(small_pieces, monkeypatch):
    """Forward and backward; the largest product is what is held."""
    held, product = [], linear.product_float

    def watched(x: Tensor, weight: Tensor) -> Tensor:
        out = product(x, weight)
        held.append(out.numel())
        return out

    monkeypatch.setattr(logprob, "product_float", watched)
    leaves = [random(TOKENS, 24).requires_grad_(), random(155, 24, seed=1).requires_grad_()]
    logprob.log_probs_and_entropy(*leaves, TARGETS, TEMPERATURE)[0].sum().backward()
    assert max(held) <= 155 * 33 < TOKENS * 155 and len(held) == 3 + 2 * 5


def test_row_sums_and_padding():
    x = random(5, 97)
    torch.testing.assert_close(rows.row_sum(x), x.double().sum(-1, keepdim=True).float(), rtol=1e-5, atol=1e-5)
    assert rows.pad_rows(x).shape == (32, 97) and rows.pad_rows(x[:0]).shape == (0, 97)
    assert not rows.pad_rows(x)[5:].any()


def test_rotation_keeps_lengths_and_starts_at_zero():
    config = type("Config", (), {"head_dim": 16, "rope_parameters": {"rope_theta": 1e4}})
    table = rope.Rotary(config, 50, torch.device("cpu"))
    x = random(50, 3, 16)
    turned = rope.rotate(x, *table.of(torch.arange(50)))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[0], x[0])


def test_the_self_test_passes_here_and_refuses_a_product_that_depends_on_the_batch(monkeypatch):
    arguments = ([(96, 155), (64, 128)], 16, 2, torch.float32, torch.device("cpu"))
    selftest.check(*arguments)
    monkeypatch.setattr(selftest, "product", lambda x, weight: linear.product(x, weight) * (1 + len(x) % 2))
    with pytest.raises(NumericsError, match="gives 1 rows other bits"):
        selftest.check(*arguments)
