"""Mixture of experts: router, and experts as one autograd step.

A token's result depends on the token and the weights only: probabilities in float32, ties to the lowest expert, every expert's
matrix products row-invariant, and the chosen experts added in ascending order.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
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


def experts(x: Tensor, probs: Tensor, ids: Tensor, up: Tensor | Sequence[Tensor], down: Tensor | Sequence[Tensor]) -> Tensor:
    """Tokens through their experts. The probability multiplies the activation before `down`, as in Megatron-core.

    Args:
        x: [tokens, hidden].
        probs: [tokens, top_k] float32.
        ids: [tokens, top_k] int64, ascending.
        up: per expert [2 * width, hidden], gate above up; as one tensor for a forward without gradient.
        down: per expert [hidden, width].

    Returns:
        [tokens, hidden].
    """
    if isinstance(up, Tensor):
        return _forward(x, probs, ids, up, down)[0]
    return _Experts.apply(x, probs, ids, len(up), *up, *down)


class Places(NamedTuple):
    """Pairs (token, expert) sorted by expert, each expert's rows filled up to a multiple of ROWS."""

    rows: Tensor
    """[tokens * top_k] int64, row of each pair."""
    ends: Tensor
    """[experts] int32, one past the last row of each expert."""
    total: int
    """Rows; on a GPU the most there can be, since the sizes stay on the device."""

    @classmethod
    def of(cls, ids: Tensor, count: int) -> "Places":
        flat = ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        tokens = (flat[:, None] == torch.arange(count, device=flat.device)).sum(0)
        sizes = (tokens + ROWS - 1) // ROWS * ROWS
        ends = sizes.cumsum(0)
        gap = (ends - sizes) - (tokens.cumsum(0) - tokens)
        rows = torch.empty_like(flat)
        rows[order] = torch.arange(len(flat), device=flat.device) + gap[flat[order]]
        most = len(flat) + min(count, len(flat)) * (ROWS - 1)
        return cls(rows, ends.int(), most if ids.is_cuda else int(ends[-1]))

    def scatter(self, pairs: Tensor) -> Tensor:
        """[tokens * top_k, ...] -> [rows, ...], zero where there is no pair."""
        out = pairs.new_zeros(self.total, *pairs.shape[1:])
        out[self.rows] = pairs
        return out


def _forward(
    x: Tensor, probs: Tensor, ids: Tensor, up: Tensor | Sequence[Tensor], down: Tensor | Sequence[Tensor]
) -> tuple[Tensor, Places, tuple[Tensor, ...]]:
    """Result, places, and what the backward needs: rows, probabilities, products with `up`, activations."""
    places, top_k = Places.of(ids, len(up)), ids.shape[1]
    rows = places.scatter(x.repeat_interleave(top_k, 0))
    p = places.scatter(probs.reshape(-1, 1))
    h = _products(rows, up, places.ends, transpose=True)
    a = activation.forward(h, p)
    out = _products(a, down, places.ends, transpose=True)
    return _combine(out[places.rows].view(-1, top_k, x.shape[1])), places, (rows, p, h, a)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, ids: Tensor, count: int, *weights: Tensor) -> Tensor:
        out, ctx.places, saved = _forward(x, probs, ids, weights[:count], weights[count:])
        ctx.top_k = ids.shape[1]
        ctx.save_for_backward(*saved, *weights)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        rows, p, h, a, *weights = ctx.saved_tensors
        places, ends = ctx.places, ctx.places.ends
        up, down = weights[: len(ends)], weights[len(ends) :]
        dout = places.scatter(dy.repeat_interleave(ctx.top_k, 0))
        da = _products(dout, down, ends).float()
        dp = row_sum((da * activation.forward(h).float())[places.rows]).view(-1, ctx.top_k)
        dh = activation.backward(h, da * p)
        drows = _products(dh, up, ends)
        dx = _combine(drows[places.rows].view(-1, ctx.top_k, dy.shape[1]))
        return dx, dp, None, None, *_outer(dh, rows, ends), *_outer(dout, a, ends)


def _products(x: Tensor, weights: Tensor | Sequence[Tensor], ends: Tensor, transpose: bool = False) -> Tensor:
    """Rows of `x` times the matrix of their expert, or its transpose."""
    if x.is_cuda:
        whole = weights if isinstance(weights, Tensor) else torch.stack(list(weights))
        return F.grouped_mm(x, whole.transpose(1, 2) if transpose else whole, offs=ends)
    matrices = [w.t() if transpose else w for w in weights]
    out = x.new_empty(len(x), matrices[0].shape[1])
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    for part, into, matrix in zip(x.split(sizes), out.split(sizes), matrices, strict=True):
        if len(part):
            torch.mm(part, matrix, out=into)
    return out


def _outer(left: Tensor, right: Tensor, ends: Tensor) -> list[Tensor]:
    """Weight gradients; zero for an expert without tokens."""
    if left.is_cuda:
        return list(F.grouped_mm(left.t(), right, offs=ends).unbind())
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return [a.t() @ b for a, b in zip(left.split(sizes), right.split(sizes), strict=True)]


def _combine(pairs: Tensor) -> Tensor:
    """[tokens, top_k, n] -> [tokens, n]: added in float32, one expert after the other."""
    total = pairs[:, 0].float()
    for k in range(1, pairs.shape[1]):
        total = total + pairs[:, k].float()
    return total.to(pairs.dtype)
