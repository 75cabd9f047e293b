"""On a GPU, in bfloat16: bits that both sides share, gradients that repeat, and what the log-probs of a vocabulary cost."""

import pytest
import torch
from torch import Tensor

from miles_hpc import device
from miles_hpc.kernels import linear, logprob, moe, norm, selftest

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
    selftest.check(shapes, 128, torch.bfloat16, WHERE)
    selftest.check(shapes[:1], 64, torch.bfloat16, WHERE)


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


def _gradients(function, parts: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in parts]
    out = function(*leaves)
    upstream = random(*out.shape, seed=9).to(out.dtype)
    return list(torch.autograd.grad(out, leaves, upstream))
