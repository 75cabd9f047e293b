"""Mixture of experts: router, and experts as one autograd step.

A token's result depends on the token and the weights only: probabilities in float32, ties to the lowest expert, every expert's
matrix products row-invariant, and the chosen experts added in ascending order.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from miles_hpc.kernels import activation
from miles_hpc.kernels.rows import ROWS, row_sum


def reference(x: Tensor, logits: Tensor, top_k: int, renormalise: bool, up: Sequence[Tensor], down: Sequence[Tensor]) -> Tensor:
    """`sum_e p_e * down_e(swiglu(up_e(x)))` over the `top_k` most probable experts; arguments as in `route` and `experts`."""
    p, ids = torch.softmax(logits, -1).topk(top_k, -1)
    p = p / p.sum(-1, keepdim=True) if renormalise else p
    every = torch.stack([activation.reference(x @ u.t()) @ d.t() for u, d in zip(up, down, strict=True)], 1)
    return (every.gather(1, ids[..., None].expand(-1, -1, x.shape[-1])) * p[..., None]).sum(1)


def route(logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """The experts of each token in ascending order, and their probabilities.

    Args:
        logits: [tokens, experts] float32.
        top_k: experts per token.
        renormalise: the probabilities of the chosen experts sum to one.

    Returns:
        Probabilities [tokens, top_k] float32 with gradient, expert ids [tokens, top_k] int64.
    """
    exp = torch.exp(logits - logits.detach().amax(-1, keepdim=True))
    value, ids = torch.sort(exp / row_sum(exp), dim=-1, descending=True, stable=True)
    value, ids = value[:, :top_k], ids[:, :top_k]
    value = value / row_sum(value) if renormalise else value
    ids, order = torch.sort(ids, dim=-1)
    return value.gather(1, order), ids


def experts(x: Tensor, probs: Tensor, ids: Tensor, up: Sequence[Tensor], down: Sequence[Tensor]) -> Tensor:
    """Tokens through their experts. The probability multiplies the activation before `down`, as in Megatron-core.

    Args:
        x: [tokens, hidden].
        probs: [tokens, top_k] float32.
        ids: [tokens, top_k] int64, ascending.
        up: per expert [2 * width, hidden], gate above up.
        down: per expert [hidden, width].

    Returns:
        [tokens, hidden].
    """
    return _Experts.apply(x, probs, ids, len(up), *up, *down)


class Places(NamedTuple):
    """Pairs (token, expert) sorted by expert, each expert's rows filled up to a multiple of ROWS."""

    rows: Tensor
    """[tokens * top_k] int64, row of each pair."""
    sizes: list[int]
    """Rows of each expert."""

    @classmethod
    def of(cls, ids: Tensor, count: int) -> "Places":
        flat = ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        tokens = torch.bincount(flat, minlength=count)
        sizes = (tokens + ROWS - 1) // ROWS * ROWS
        gap = (sizes.cumsum(0) - sizes) - (tokens.cumsum(0) - tokens)
        rows = torch.empty_like(flat)
        rows[order] = torch.arange(len(flat), device=flat.device) + gap[flat[order]]
        return cls(rows, sizes.tolist())

    def scatter(self, pairs: Tensor) -> Tensor:
        """[tokens * top_k, ...] -> [rows, ...], zero where there is no pair."""
        out = pairs.new_zeros(sum(self.sizes), *pairs.shape[1:])
        out[self.rows] = pairs
        return out


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, ids: Tensor, count: int, *weights: Tensor) -> Tensor:
        places, top_k = Places.of(ids, count), ids.shape[1]
        rows = places.scatter(x.repeat_interleave(top_k, 0))
        p = places.scatter(probs.reshape(-1, 1))
        h = _products(rows, [w.t() for w in weights[:count]], places.sizes)
        a = (activation.forward(h) * p).to(x.dtype)
        out = _products(a, [w.t() for w in weights[count:]], places.sizes)
        ctx.places, ctx.top_k = places, top_k
        ctx.save_for_backward(rows, p, h, a, *weights)
        return _combine(out[places.rows].view(-1, top_k, x.shape[1]))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        rows, p, h, a, *weights = ctx.saved_tensors
        places, sizes = ctx.places, ctx.places.sizes
        up, down = weights[: len(sizes)], weights[len(sizes) :]
        dout = places.scatter(dy.repeat_interleave(ctx.top_k, 0))
        da = _products(dout, down, sizes).float()
        dp = row_sum(da * activation.forward(h))[places.rows].view(-1, ctx.top_k)
        dh = activation.backward(h, da * p)
        drows = _products(dh, up, sizes)
        dx = _combine(drows[places.rows].view(-1, ctx.top_k, dy.shape[1]))
        return dx, dp, None, None, *_outer(dh, rows, sizes), *_outer(dout, a, sizes)


def _products(x: Tensor, matrices: Sequence[Tensor], sizes: list[int]) -> Tensor:
    """Rows of `x` times the [k, n] matrix of their expert."""
    out = x.new_empty(len(x), matrices[0].shape[1])
    for part, into, matrix in zip(x.split(sizes), out.split(sizes), matrices, strict=True):
        if len(part):
            torch.mm(part, matrix, out=into)
    return out


def _outer(left: Tensor, right: Tensor, sizes: list[int]) -> list[Tensor]:
    """Weight gradients; zero for an expert without tokens."""
    return [a.t() @ b for a, b in zip(left.split(sizes), right.split(sizes), strict=True)]


def _combine(pairs: Tensor) -> Tensor:
    """[tokens, top_k, n] -> [tokens, n]: added in float32, one expert after the other."""
    total = pairs[:, 0].float()
    for k in range(1, pairs.shape[1]):
        total = total + pairs[:, k].float()
    return total.to(pairs.dtype)
