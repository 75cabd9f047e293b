"""Triton kernels around the experts: router, rows of the pairs (token, expert), tokens to rows and back. CUDA only.

No atomics: one program per token or per expert, so every order is fixed. Beside their plain operations in `moe`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_hpc.kernels.fused import STRICT, WARPS

CHUNK = 1024


@triton.jit
def _route(logits, probs, ids, experts, RENORMALISE: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    value = tl.load(logits + row * experts + at, mask=at < experts, other=float("-inf"))
    exp = tl.exp(value - tl.max(value, 0))
    p = exp / tl.sum(exp, 0)
    # NaN must still choose TOP_K experts: it ends the run as a loss that is not finite, not as a wild address.
    left = tl.where(at < experts, tl.where(p == p, p, 0.0), -1.0)
    chosen = at < 0
    for _ in tl.static_range(TOP_K):
        best = tl.argmax(left, 0, tie_break_left=True)
        chosen = chosen | (at == best)
        left = tl.where(at == best, -2.0, left)
    if RENORMALISE:
        p = p / tl.sum(tl.where(chosen, p, 0.0), 0)
    place = row * TOP_K + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(probs + place, p, mask=chosen)
    tl.store(ids + place, at.to(tl.int64), mask=chosen)


def route(logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """See `moe.route`; without autograd."""
    logits, (tokens, experts) = logits.contiguous(), logits.shape
    probs, ids = logits.new_empty(tokens, top_k), logits.new_empty(tokens, top_k, dtype=torch.int64)
    if tokens:
        width = triton.next_power_of_2(experts)
        _route[(tokens,)](logits, probs, ids, experts, RENORMALISE=renormalise, TOP_K=top_k, WIDTH=width, num_warps=1, **STRICT)
    return probs, ids


@triton.jit
def _places(ids, rows, ends, pairs, CHUNK: tl.constexpr):
    expert = tl.program_id(0)
    at = tl.arange(0, CHUNK)
    lower = 0
    for start in range(0, pairs, CHUNK):
        lower += tl.sum((tl.load(ids + start + at, mask=start + at < pairs, other=1 << 30) < expert).to(tl.int32), 0)
    for start in range(0, pairs, CHUNK):
        own = tl.load(ids + start + at, mask=start + at < pairs, other=-1) == expert
        rank = lower + tl.cumsum(own.to(tl.int32), 0) - 1
        tl.store(rows + start + at, rank.to(tl.int64), mask=own)
        lower += tl.sum(own.to(tl.int32), 0)
    tl.store(ends + expert, lower)


def places(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """[pairs] int64 -> row of each pair, sorted by expert, [pairs] int64, and where each expert ends, [experts] int32."""
    rows, ends = torch.empty_like(ids), ids.new_empty(experts, dtype=torch.int32)
    _places[(experts,)](ids, rows, ends, len(ids), CHUNK=CHUNK, num_warps=WARPS)
    return rows, ends


@triton.jit
def _spread(x, rows, out, top_k, n, CHUNK: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(x + pair // top_k * n + at, mask=at < n)
    tl.store(out + tl.load(rows + pair) * n + at, value, mask=at < n)


def spread(x: Tensor, rows: Tensor) -> Tensor:
    """[tokens, n] -> [pairs, n]: row `rows[i]` is token `i // (pairs / tokens)`."""
    x, (tokens, n) = x.contiguous(), x.shape
    out = x.new_empty(len(rows), n)
    if tokens:
        chunk = min(CHUNK, triton.next_power_of_2(n))
        _spread[(len(rows), triton.cdiv(n, chunk))](x, rows, out, len(rows) // tokens, n, CHUNK=chunk, num_warps=WARPS)
    return out


@triton.jit
def _combine(x, rows, out, n, TOP_K: tl.constexpr, CHUNK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    total = tl.zeros((CHUNK,), tl.float32)
    for k in tl.static_range(TOP_K):
        total += tl.load(x + tl.load(rows + token * TOP_K + k) * n + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out + token * n + at, total.to(out.dtype.element_ty), mask=at < n)


def combine(x: Tensor, rows: Tensor, top_k: int) -> Tensor:
    """[pairs, n] -> [tokens, n]: the rows of each token's pairs, added in float32, one after the other."""
    x, n = x.contiguous(), x.shape[-1]
    tokens = len(rows) // top_k
    out = x.new_empty(tokens, n)
    if tokens:
        chunk = min(CHUNK, triton.next_power_of_2(n))
        _combine[(tokens, triton.cdiv(n, chunk))](x, rows, out, n, TOP_K=top_k, CHUNK=chunk, num_warps=WARPS)
    return out
