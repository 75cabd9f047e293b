import pytest
import torch
import torch.nn.functional as F


def _plain(x, probs, sizes, fc1, fc2):
    parts = []
    for xs, p, w1, w2 in zip(x.split(sizes), probs.split(sizes), fc1, fc2, strict=True):
        gate, up = (xs @ w1.t()).chunk(2, -1)
        parts.append((F.silu(gate) * up * p[:, None]) @ w2.t())
    return torch.cat(parts)


@pytest.mark.parametrize("sizes", [[5, 3, 2], [0, 7, 0], [0, 0, 0], [4]])
def test_values_and_gradients_are_those_of_one_mlp_per_expert(sizes):
    from miles_hpc.train.experts import _Experts

    g = torch.Generator().manual_seed(0)
    n, hidden, width = sum(sizes), 6, 4
    shapes = [(n, hidden), (n,), *[(2 * width, hidden)] * len(sizes), *[(hidden, width)] * len(sizes)]
    inputs = [torch.randn(shape, generator=g, dtype=torch.float32).requires_grad_() for shape in shapes]
    x, probs, weights = inputs[0], inputs[1], inputs[2:]
    grad = torch.randn(n, hidden, generator=g)
    expected = _plain(x, probs, sizes, weights[: len(sizes)], weights[len(sizes) :])
    expected_grads = torch.autograd.grad(expected, inputs, grad, allow_unused=True)
    found = _Experts.apply(x, probs, torch.tensor(sizes).cumsum(0).int(), *weights)
    torch.testing.assert_close(found, expected)
    for a, b in zip(torch.autograd.grad(found, inputs, grad), expected_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_the_model_uses_them(models, tmp_path):
    from train_parts import config, trainer

    from miles_hpc.train.experts import Experts

    with trainer(config(), models["moe"], tmp_path / "store") as made:
        assert all(isinstance(layer.mlp.experts, Experts) for layer in made.policy.module.decoder.layers)
