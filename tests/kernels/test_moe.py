"""Router and experts: against a dense reference, ties, and tokens that do not depend on their company."""

import pytest
import torch
from torch import Tensor

from miles_hpc.kernels import moe

torch.set_num_threads(1)
TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K = 70, 32, 24, 6, 3


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def inputs() -> list[Tensor]:
    """Tokens, router logits, and the experts' weights; no token wants the last expert."""
    logits = random(TOKENS, EXPERTS, seed=1)
    logits[:, -1] = -50.0
    return [random(TOKENS, HIDDEN), logits, random(EXPERTS, 2 * WIDTH, HIDDEN, seed=2), random(EXPERTS, HIDDEN, WIDTH, seed=3)]


def layer(x: Tensor, logits: Tensor, up: Tensor, down: Tensor, renormalise: bool = True) -> Tensor:
    return moe.experts(x, *moe.route(logits, TOP_K, renormalise), list(up), list(down))


@pytest.mark.parametrize("renormalise", [True, False])
def test_values_and_gradients_are_the_references(renormalise):
    upstream = random(TOKENS, HIDDEN, seed=4)
    results = []
    for kind in (torch.float32, torch.float64):
        leaves = [x.to(kind).requires_grad_() for x in inputs()]
        x, logits, up, down = leaves
        exact = kind == torch.float64
        value = moe.reference(x, logits, TOP_K, renormalise, up, down) if exact else layer(*leaves, renormalise)
        results.append([value.detach(), *torch.autograd.grad(value, leaves, upstream.to(kind))])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)
    assert not results[0][3][-1].any()


def test_a_token_does_not_depend_on_its_company():
    x, logits, up, down = inputs()
    whole = layer(x, logits, up, down)
    for count in (1, 2, 3, 7, 33):
        assert torch.equal(layer(x[:count], logits[:count], up, down), whole[:count]), count
    back = layer(x.flip(0), logits.flip(0), up, down)
    assert torch.equal(back.flip(0), whole)


def test_ties_go_to_the_lowest_expert_and_experts_ascend():
    probs, ids = moe.route(torch.zeros(2, EXPERTS), TOP_K, True)
    assert ids.tolist() == [[0, 1, 2]] * 2 and torch.equal(probs, torch.full((2, 3), 1 / 3))
    logits = torch.tensor([[0.0, 3.0, 1.0, 1.0, 2.0, 1.0]])
    assert moe.route(logits, TOP_K, True)[1].tolist() == [[1, 2, 4]]


def test_pairs_come_back_to_their_tokens():
    ids = torch.tensor([[0, 4], [4, 5], [0, 1]])
    places = moe.Places.of(ids, EXPERTS)
    assert places.ends.tolist() == [32, 64, 64, 64, 96, 128] and len(set(places.rows.tolist())) == 6
    pairs = torch.arange(6.0)[:, None]
    assert torch.equal(places.scatter(pairs)[places.rows], pairs)
