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
    return _Route.apply(logits, top_k, renormalise)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
        probs, ids = _route(logits, top_k, renormalise)
        ctx.save_for_backward(logits, probs, ids)
        ctx.renormalise = renormalise
        ctx.mark_non_differentiable(ids)
        return probs, ids

    @staticmethod
    def backward(ctx: Any, grad: Tensor, unused: Any) -> tuple[Tensor, None, None]:
        """Of a softmax over the chosen experts or over all: dlogit_i = p_i (grad_i - sum_j p_j grad_j); grad is 0 elsewhere."""
        logits, probs, ids = ctx.saved_tensors
        weighted = probs * grad
        mean = weighted.sum(-1, keepdim=True)
        if ctx.renormalise:
            return torch.zeros_like(logits).scatter(1, ids, weighted - probs * mean), None, None
        return (-mean * torch.softmax(logits, -1)).scatter_add(1, ids, weighted), None, None


def _route(logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    if logits.is_cuda:
        from miles_hpc.kernels import dispatch

        return dispatch.route(logits, top_k, renormalise)
    exp = torch.exp(logits - logits.amax(-1, keepdim=True))
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
    """Rows of the pairs (token, expert), sorted by expert. On a CPU each expert's rows are filled up to a multiple of ROWS."""

    rows: Tensor
    """[tokens * top_k] int64, row of each pair."""
    ends: Tensor
    """[experts] int32, one past the last row of each expert."""
    total: int
    """Rows."""
    top_k: int

    @classmethod
    def of(cls, ids: Tensor, count: int) -> "Places":
        """[t, top_k] expert ids below `count` -> where each pair of token and expert lies, experts in order, stable."""
        flat = ids.reshape(-1)
        if ids.is_cuda:
            from miles_hpc.kernels import dispatch

            return cls(*dispatch.places(flat, count), len(flat), ids.shape[1])
        order = torch.argsort(flat, stable=True)
        tokens = torch.bincount(flat, minlength=count)
        sizes = (tokens + ROWS - 1) // ROWS * ROWS
        ends = sizes.cumsum(0)
        gap = (ends - sizes) - (tokens.cumsum(0) - tokens)
        rows = torch.empty_like(flat)
        rows[order] = torch.arange(len(flat)) + gap[flat[order]]
        return cls(rows, ends.int(), int(ends[-1]), ids.shape[1])

    def scatter(self, pairs: Tensor) -> Tensor:
        """[tokens * top_k, ...] -> [rows, ...], zero where there is no pair."""
        out = pairs.new_zeros(self.total, *pairs.shape[1:])
        out[self.rows] = pairs
        return out

    def spread(self, x: Tensor) -> Tensor:
        """[tokens, n] -> [rows, n]: each token to the rows of its pairs."""
        if x.is_cuda:
            from miles_hpc.kernels import dispatch

            return dispatch.spread(x, self.rows)
        return self.scatter(x.repeat_interleave(self.top_k, 0))

    def combine(self, x: Tensor) -> Tensor:
        """[rows, n] -> [tokens, n]: the rows of a token, added in float32, one expert after the other."""
        if x.is_cuda:
            from miles_hpc.kernels import dispatch

            return dispatch.combine(x, self.rows, self.top_k)
        pairs = x[self.rows].view(-1, self.top_k, x.shape[-1])
        total = pairs[:, 0].float()
        for k in range(1, self.top_k):
            total = total + pairs[:, k].float()
        return total.to(x.dtype)


def _forward(
    x: Tensor, probs: Tensor, ids: Tensor, up: Tensor | Sequence[Tensor], down: Tensor | Sequence[Tensor]
) -> tuple[Tensor, Places, tuple[Tensor, ...]]:
    """Result, places, and what the backward needs: rows, probabilities, products with `up`, activations."""
    places = Places.of(ids, len(up))
    rows, p = places.spread(x), places.scatter(probs.reshape(-1, 1))
    h = products(rows, up, places.ends, transpose=True)
    a = activation.forward(h, p)
    return places.combine(products(a, down, places.ends, transpose=True)), places, (rows, p, h, a)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, ids: Tensor, count: int, *weights: Tensor) -> Tensor:
        out, ctx.places, saved = _forward(x, probs, ids, weights[:count], weights[count:])
        ctx.save_for_backward(*saved, *weights)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        rows, p, h, a, *weights = ctx.saved_tensors
        places, ends = ctx.places, ctx.places.ends
        up, down = weights[: len(ends)], weights[len(ends) :]
        dout = places.spread(dy)
        dh, dp = activation.backward(h, products(dout, down, ends), p)
        dx = places.combine(products(dh, up, ends))
        return dx, dp[places.rows].view(-1, places.top_k), None, None, *outer(dh, rows, ends), *outer(dout, a, ends)


def products(x: Tensor, weights: Tensor | Sequence[Tensor], ends: Tensor, transpose: bool = False) -> Tensor:
    """Rows of `x`, sorted by expert, times the matrix of their expert.

    Args:
        x: [rows, k].
        weights: per expert [k, n], or [n, k] with `transpose`.
        ends: [experts] int32, one past the last row of each expert.
        transpose: times the transposed matrix.

    Returns:
        [rows, n].
    """
    if _grouped(x):
        whole = weights if isinstance(weights, Tensor) else torch.stack(list(weights))
        return F.grouped_mm(x, whole.transpose(1, 2) if transpose else whole, offs=ends)
    matrices = [w.t() if transpose else w for w in weights]
    out = x.new_empty(len(x), matrices[0].shape[1])
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    for part, into, matrix in zip(x.split(sizes), out.split(sizes), matrices, strict=True):
        if len(part):
            torch.mm(part, matrix, out=into)
    return out


def outer(left: Tensor, right: Tensor, ends: Tensor) -> list[Tensor]:
    """Weight gradients, per expert [k, n] from rows [rows, k] and [rows, n]; zero for an expert without tokens."""
    if _grouped(left):
        return list(F.grouped_mm(left.t(), right, offs=ends).unbind())
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return [a.t() @ b for a, b in zip(left.split(sizes), right.split(sizes), strict=True)]


def _grouped(x: Tensor) -> bool:
    """True where `F.grouped_mm` takes these rows."""
    return x.is_cuda and x.dtype == torch.bfloat16 and len(x) > 0
