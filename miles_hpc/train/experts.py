"""The experts of a layer as one autograd step.

megatron's `SequentialMLP` runs a whole MLP per expert, forward and backward; for small experts most is bookkeeping. Here
only the matrix products are per expert, everything else is done once for all tokens. Parameters keep their names and places.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor


class Experts(SequentialMLP):
    """SwiGLU experts without biases, tokens sorted by expert."""

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Routed tokens through their experts, weighted by the router.

        Args:
            hidden: [tokens, hidden size].
            tokens_per_expert: [local experts] int64.
            probs: [tokens] float32.

        Returns:
            [tokens, hidden size], and no bias.
        """
        up = [expert.linear_fc1.weight for expert in self.local_experts]
        down = [expert.linear_fc2.weight for expert in self.local_experts]
        return _Experts.apply(hidden, probs, tokens_per_expert.tolist(), *up, *down), None


class _Experts(torch.autograd.Function):
    """`(silu(x G') * (x U') * p) D'` per expert, where fc1 = [G; U] and fc2 = D; element-wise operations in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, sizes: list[int], *weights: Tensor) -> Tensor:
        fc1, fc2 = weights[: len(sizes)], weights[len(sizes) :]
        h = _products(x, [w.t() for w in fc1], sizes)
        gate, up = h.float().chunk(2, -1)
        a = (F.silu(gate) * up * probs[:, None]).to(x.dtype)
        ctx.sizes = sizes
        ctx.save_for_backward(x, probs, h, a, *weights)
        return _products(a, [w.t() for w in fc2], sizes)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, probs, h, a, *weights = ctx.saved_tensors
        sizes = ctx.sizes
        fc1, fc2 = weights[: len(sizes)], weights[len(sizes) :]
        dy = dy.contiguous()
        da = _products(dy, fc2, sizes).float()
        dh, dprobs = _swiglu_backward(h.float(), probs, da)
        dh = dh.to(x.dtype)
        dx = _products(dh, fc1, sizes)
        return dx, dprobs.to(probs.dtype), None, *_outer(dh, x, sizes), *_outer(dy, a, sizes)


def _products(x: Tensor, weights: list[Tensor], sizes: list[int]) -> Tensor:
    """Rows of `x` times the matrix of their expert."""
    out = x.new_empty(len(x), weights[0].shape[1])
    for part, into, weight in zip(x.split(sizes), out.split(sizes), weights, strict=True):
        torch.mm(part, weight, out=into)
    return out


def _outer(left: Tensor, right: Tensor, sizes: list[int]) -> list[Tensor]:
    """Weight gradients; zero for an expert without tokens."""
    return [a.t() @ b for a, b in zip(left.split(sizes), right.split(sizes), strict=True)]


def _swiglu_backward(h: Tensor, probs: Tensor, da: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `silu(gate) * up * p` for h = [gate, up] and p."""
    gate, up = h.chunk(2, -1)
    sigmoid = torch.sigmoid(gate)
    act = gate * sigmoid
    dprobs = (da * act * up).sum(-1)
    dz = da * probs[:, None]
    dh = torch.empty_like(h)
    dgate, dup = dh.chunk(2, -1)
    torch.mul(dz, act, out=dup)
    torch.mul(dz * up, sigmoid + act * (1 - sigmoid), out=dgate)
    return dh, dprobs
