"""On a GPU, in bfloat16: bits that both sides share, gradients that repeat, and what the log-probs of a vocabulary cost."""

import numpy as np
import pytest
import torch
from torch import Tensor

from miles_hpc import device
from miles_hpc.kernels import flash, linear, logprob, merge, moe, norm, segments, selftest
from miles_hpc.kernels.segments import SEGMENT

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytestmark = pytest.mark.gpu
device.without_workspace()

WHERE = torch.device("cuda")
TOKENS, VOCABULARY, HIDDEN = 8192, 151936, 1024


def random(*size: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    g = torch.Generator(WHERE).manual_seed(seed)
    return (torch.randn(*size, device=WHERE, generator=g) * scale).bfloat16()


@pytest.fixture(scope="module")
def head() -> list[Tensor]:
    """Hidden states, output layer, targets, temperature."""
    targets = torch.arange(TOKENS, device=WHERE) * 7919 % VOCABULARY
    return [random(TOKENS, HIDDEN), random(VOCABULARY, HIDDEN, seed=1, scale=0.05), targets, torch.tensor([0.9], device=WHERE)]


def test_the_self_test_passes():
    shapes = [(1024, 3072), (2048, 12288), (6144, 2048), (1024, 4096), (2048, 1024), (1024, 32)]
    selftest.check(shapes, 128, 2, torch.bfloat16, WHERE)
    selftest.check(shapes[:1], 64, 4, torch.bfloat16, WHERE)


def test_log_probs_are_exact_to_1e_5_and_entropy_too(head):
    hidden, weight, targets, heat = head
    ours = logprob.log_probs_and_entropy(*head)
    rows = slice(0, TOKENS, 64)
    wanted = logprob.reference(hidden[rows].double(), weight.double(), targets[rows], heat.double())
    for got, value in zip(ours, wanted, strict=True):
        assert (got[rows] - value).abs().max() < 1e-5


def test_the_sampler_has_the_same_bits(head):
    hidden, weight, targets, heat = head
    ours = logprob.log_probs_and_entropy(*head)[0]
    for first, count in ((0, 1), (5, 7), (64, 64), (300, 256)):
        rows = slice(first, first + count)
        everything = logprob.log_softmax(linear.linear_float(hidden[rows], weight), heat.expand(count, 1))
        assert torch.equal(everything.gather(1, targets[rows, None])[:, 0], ours[rows])


def test_logits_are_never_held_as_a_whole(head):
    """Extra memory at the peak, beside inputs and gradients: less than 5 % of the logits in float32."""
    leaves = [x.detach().requires_grad_() for x in head[:2]]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    log_probs, entropy = logprob.log_probs_and_entropy(*leaves, *head[2:])
    (log_probs.sum() + 0.1 * entropy.sum()).backward()
    gradients = sum(x.numel() * x.element_size() for x in leaves)
    extra = torch.cuda.max_memory_allocated() - before - gradients
    print(f"extra {extra / 1e6:.0f} MB, {100 * extra / (TOKENS * VOCABULARY * 4):.2f} %")
    assert extra < 0.05 * TOKENS * VOCABULARY * 4


def gradients(leaves: list[Tensor], *rest: Tensor) -> list[Tensor]:
    copies = [x.detach().requires_grad_() for x in leaves]
    log_probs, entropy = logprob.log_probs_and_entropy(*copies, *rest)
    return list(torch.autograd.grad((log_probs + 0.1 * entropy).sum(), copies))


def test_gradients_repeat_and_are_the_references():
    hidden, weight = random(300, 256), random(5000, 256, seed=1, scale=0.1)
    targets, heat = torch.arange(300, device=WHERE) * 13 % 5000, torch.tensor([0.9], device=WHERE)
    first, second = (gradients([hidden, weight], targets, heat) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    log_probs, entropy = logprob.reference(*exact, targets, heat.double())
    wanted = torch.autograd.grad((log_probs + 0.1 * entropy).sum(), exact)
    for got, value in zip(first, wanted, strict=True):
        assert (got - value).norm() < 0.01 * value.norm()


def test_a_token_of_the_experts_does_not_depend_on_its_company():
    x, logits = random(500, 1024), random(500, 32, seed=1).float()
    up, down = random(32, 1024, 1024, seed=2, scale=0.03), random(32, 1024, 512, seed=3, scale=0.03)
    whole = moe.experts(x, *moe.route(logits, 4, True), up, down)
    for count in (1, 2, 8, 63):
        assert torch.equal(moe.experts(x[:count], *moe.route(logits[:count], 4, True), up, down), whole[:count])
    order = torch.randperm(500, device=WHERE)
    assert torch.equal(moe.experts(x[order], *moe.route(logits[order], 4, True), up, down), whole[order])
    assert torch.equal(moe.experts(x, *moe.route(logits, 4, True), list(up), list(down)), whole)


def test_the_experts_gradients_repeat_and_are_the_references():
    up, down = random(8, 256, 256, seed=2, scale=0.06), random(8, 256, 128, seed=3, scale=0.06)
    parts = [random(300, 256), random(300, 8, seed=1), up, down]

    def ours(x: Tensor, logits: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return moe.experts(x, *moe.route(logits.float(), 2, True), list(up), list(down))

    first, second = (_gradients(ours, parts) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    wanted = _gradients(lambda x, logits, up, down: moe.reference(x, logits, 2, True, up, down), [x.double() for x in parts])
    for got, value in zip(first, wanted, strict=True):
        assert (got - value).norm() < 0.02 * value.norm()


def test_the_norms_gradients_are_the_references():
    parts = [random(1000, 2048), random(2048, seed=1)]
    got = _gradients(lambda x, w: norm.rms_norm(x, w, 1e-6), parts)
    wanted = _gradients(lambda x, w: norm.reference(x, w, 1e-6), [x.double() for x in parts])
    for a, b in zip(got, wanted, strict=True):
        assert (a - b).norm() < 0.01 * b.norm()


class Attention:
    """Sequences that end around the borders of segments; their keys lie anywhere in a pool."""

    lengths = np.array([1, SEGMENT - 1, SEGMENT, 100, SEGMENT + 1, 2 * SEGMENT, 2 * SEGMENT + 1, 3 * SEGMENT + 77])
    starts = np.cumsum(lengths) - lengths
    scale = 0.1

    def __init__(self, heads: int, groups: int, size: int) -> None:
        tokens = int(self.lengths.sum())
        self.q, self.k, self.v = (random(tokens, n, size, seed=i) for i, n in enumerate((heads, groups, groups)))
        place = torch.randperm(tokens + 99, device=WHERE)[:tokens]
        self.keys, self.values = (random(tokens + 99, groups, size, seed=i) for i in (3, 4))
        self.keys[place], self.values[place] = self.k, self.v
        token = torch.from_numpy(self.starts[:, None] + np.arange(max(self.lengths))).to(WHERE).clamp(max=tokens - 1)
        self.tokens, self.slots = token.int(), place[token].int()
        self.bounds = torch.from_numpy(np.append(self.starts, tokens)).to(WHERE, torch.int32)
        self.whole = self.trained(self.q, self.k, self.v)

    def trained(self, q: Tensor, k: Tensor, v: Tensor, in_segments: bool = True) -> Tensor:
        cut = segments.plan(0 * self.lengths, self.lengths, self.tokens) if in_segments else None
        return flash.varlen(q, k, v, flash.Sequences(self.bounds, max(self.lengths), cut), self.scale)

    def prefilled(self, first: np.ndarray, count: np.ndarray) -> bool:
        """Whether these tokens of each sequence, behind the others, are computed as in training."""
        rows = np.concatenate([np.arange(s + f, s + f + n) for s, f, n in zip(self.starts, first, count, strict=True)])
        cut = segments.plan(first, count, self.slots)
        return torch.equal(flash.paged(self.q[rows], self.keys, self.values, cut, self.scale), self.whole[rows])

    def decoded(self, lengths: np.ndarray) -> bool:
        """Whether the last tokens of sequences of these lengths are computed as in training."""
        entries = segments.Entries.room(len(lengths) + 2, 5, WHERE).part(len(lengths))
        merge.fill(entries, torch.from_numpy(lengths).to(WHERE), torch.arange(len(lengths), device=WHERE), self.slots)
        rows = self.starts + lengths - 1
        for prepared in (None, flash.schedule(entries, self.q.shape[1], self.k.shape[1], self.q.shape[2])):
            out = flash.decode(self.q[rows], self.keys, self.values, entries, prepared, self.scale)
            if not torch.equal(out, self.whole[rows]):
                return False
        return True


@pytest.fixture(scope="module", params=[(16, 8, 128), (8, 1, 128), (4, 4, 64), (16, 2, 64)], ids=str)
def attention(request):
    return Attention(*request.param)


@pytest.mark.parametrize("first", [0, 100, SEGMENT - 5, SEGMENT, SEGMENT + 3, 2 * SEGMENT - 1])
@pytest.mark.parametrize("count", [1, 10, SEGMENT, 2 * SEGMENT + 9])
def test_prefill_in_chunks_has_the_bits_of_training(attention, first, count):
    start = np.minimum(first, attention.lengths - 1)
    assert attention.prefilled(start, np.minimum(count, attention.lengths - start))


@pytest.mark.parametrize("at", [1, 129, SEGMENT, SEGMENT + 1, 2 * SEGMENT, 2 * SEGMENT + 1, 4 * SEGMENT])
def test_decoding_has_the_bits_of_training(attention, at):
    assert attention.decoded(np.minimum(at, attention.lengths))


def test_rounds_of_any_size_have_the_same_bits(attention, monkeypatch):
    monkeypatch.setattr(segments, "ROWS", 3000)
    assert torch.equal(attention.trained(attention.q, attention.k, attention.v), attention.whole)


def test_the_first_segment_has_the_bits_of_attention_without_segments(attention):
    usual = attention.trained(attention.q, attention.k, attention.v, in_segments=False)
    inside = np.concatenate(
        [np.arange(s, s + min(n, SEGMENT)) for s, n in zip(attention.starts, attention.lengths, strict=True)]
    )
    assert torch.equal(usual[inside], attention.whole[inside])
    torch.testing.assert_close(usual, attention.whole, rtol=0.02, atol=0.004)


def test_gradients_of_attention_in_segments_repeat_and_are_the_references(attention):
    parts = [attention.q, attention.k, attention.v]
    first, second = (_gradients(attention.trained, parts) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    wanted = _gradients(lambda *x: attention.trained(*x, in_segments=False), parts)
    for got, value in zip(first, wanted, strict=True):
        assert (got - value).norm() < 0.01 * value.norm()


def _gradients(function, parts: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in parts]
    out = function(*leaves)
    upstream = random(*out.shape, seed=9).to(out.dtype)
    return list(torch.autograd.grad(out, leaves, upstream))
