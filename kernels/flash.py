"""Causal attention over packed sequences on a GPU: FlashAttention 3 forward, FlashAttention 2 backward.

With `num_splits=1` FlashAttention 3 walks all keys of a query in one order, so SGLang's paged decode and this forward agree bit
for bit (docs/numerics.md). Up to a segment of keys SGLang calls the same library by itself; longer contexts are computed in
segments on both sides (`segments`).
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from miles_hpc.kernels.segments import Call, Entries, Plan

LEAST = 65
"""Queries of a sequence that the library is told of at least where heads are small: for fewer it takes another tile of keys."""


def usable(x: Tensor) -> bool:
    """What the libraries are built for."""
    return x.is_cuda and x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device)[0] in (8, 9)


class Sequences(NamedTuple):
    """Whole sequences, one after the other."""

    bounds: Tensor
    """[sequences + 1] int32, first token of each."""
    longest: int
    """Tokens of the longest."""
    plan: Plan | None = None
    """Of the same sequences, if the forward is to be in segments; slots are tokens of the pack."""


def varlen(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float, repeatable: bool = True) -> Tensor:
    """[t, heads, d], [t, groups, d] twice -> [t, heads, d]; bfloat16.

    Args:
        q: queries.
        k: keys.
        v: values.
        sequences: that the tokens are of.
        scale: of the scores.
        repeatable: gradients are the same bits every time; the backward then takes twice as long.
    """
    return _Varlen.apply(q, k, v, sequences, scale, repeatable)


def paged(q: Tensor, keys: Tensor, values: Tensor, plan: Plan, scale: float) -> Tensor:
    """Attention of new tokens over a pool of keys and values, in segments, without gradient.

    Args:
        q: [t, heads, d].
        keys: [slots, groups, d].
        values: [slots, groups, d].
        plan: of the new tokens; slots are those of the pool.
        scale: of the scores.

    Returns:
        [t, heads, d].
    """
    out, log_sum = over_pool(q, keys, values, plan.own, scale)
    _before(q, keys, values, plan, scale, out, log_sum)
    return out


def decode(q: Tensor, keys: Tensor, values: Tensor, entries: Entries, prepared: Tensor | None, scale: float) -> Tensor:
    """Attention of one new token per sequence, in segments; the bits are those of `paged` and `varlen`.

    Args:
        q: [m, heads, d].
        keys: [slots, groups, d].
        values: [slots, groups, d].
        entries: filled for these sequences.
        prepared: their `schedule`, or None.
        scale: of the scores.

    Returns:
        [m, heads, d].
    """
    from miles_hpc.kernels import merge

    rows = merge.spread(q, entries.first, entries.number, len(entries.keys))
    call = Call(entries.bounds, 1, entries.keys, entries.table)
    parts = over_pool(rows, keys, values, call, scale, causal=False, prepared=prepared)
    return merge.combine(*parts, entries.first, entries.number)


def schedule(entries: Entries, heads: int, groups: int, size: int) -> Tensor:
    """What FlashAttention computes of the entries before it starts, for all layers at once; `size` of a head."""
    from sgl_kernel.flash_attn import get_scheduler_metadata

    return get_scheduler_metadata(
        batch_size=len(entries.keys),
        max_seqlen_q=_most(1, size),
        max_seqlen_k=entries.table.shape[1],
        num_heads=heads,
        num_heads_k=groups,
        headdim=size,
        cache_seqlens=entries.keys,
        cu_seqlens_q=entries.bounds,
        page_size=1,
        causal=False,
        num_splits=1,
    )


def over_pool(
    q: Tensor, keys: Tensor, values: Tensor, call: Call, scale: float, causal: bool = True, prepared: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One call of FlashAttention 3 over keys in a pool: [t, heads, d] and log of the sum of exponentials [heads, t] float32.

    Args:
        q: [t, heads, d].
        keys: [slots, groups, d].
        values: [slots, groups, d].
        call: which queries see which slots.
        scale: of the scores.
        causal: the last query of an entry sees all its keys, the one before one less; otherwise each sees all.
        prepared: what the library computes of the call, if it was computed before.
    """
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    out, log_sum, *_ = flash_attn_with_kvcache(
        q,
        keys[:, None],
        values[:, None],
        cache_seqlens=call.keys,
        page_table=call.table,
        cu_seqlens_q=call.bounds,
        max_seqlen_q=_most(call.longest, q.shape[-1]),
        softmax_scale=scale,
        causal=causal,
        scheduler_metadata=prepared,
        num_splits=1,
        return_softmax_lse=True,
    )
    return out, log_sum


def one_tile(size: int) -> bool:
    """Whether the library takes the same tile of keys for heads of this size however few queries there are."""
    return size >= 128


def _most(longest: int, size: int) -> int:
    return longest if one_tile(size) else max(longest, LEAST)


def _before(q: Tensor, keys: Tensor, values: Tensor, plan: Plan, scale: float, out: Tensor, log_sum: Tensor) -> None:
    """Add what the queries see of the segments before their own.

    Of a pool of single slots the library takes the same tile of keys with and without a mask: the bits are those of decoding.
    """
    from miles_hpc.kernels import merge

    for some in plan.rounds:
        parts = over_pool(q[some.rows], keys, values, some.call, scale, causal=False)
        merge.add(*parts, some.parts, out, log_sum)


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float, repeatable: bool) -> Tensor:
        from sgl_kernel.flash_attn import flash_attn_varlen_func

        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        bounds, longest, plan = sequences
        own, most = (plan.own.bounds, plan.own.longest) if plan else (bounds, longest)
        most = _most(most, q.shape[-1])
        out, log_sum, *_ = flash_attn_varlen_func(
            q,
            k,
            v,
            own,
            own,
            max_seqlen_q=most,
            max_seqlen_k=most,
            softmax_scale=scale,
            causal=True,
            num_splits=1,
            return_softmax_lse=True,
        )
        if plan:
            _before(q, k, v, plan, scale, out, log_sum)
        ctx.save_for_backward(q, k, v, out, log_sum, bounds)
        ctx.longest, ctx.scale, ctx.repeatable = longest, scale, repeatable
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        q, k, v, out, log_sum, bounds = ctx.saved_tensors
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # of the random state: there is no dropout
        with _deterministic() if ctx.repeatable else nullcontext():
            dq, dk, dv = torch.ops.aten._flash_attention_backward(
                dout.contiguous(),
                q,
                k,
                v,
                out,
                log_sum,
                bounds,
                bounds,
                ctx.longest,
                ctx.longest,
                0.0,
                True,
                unused,
                unused,
                scale=ctx.scale,
            )
        return dq, dk, dv, None, None, None


@contextmanager
def _deterministic() -> Iterator[None]:
    """torch's deterministic mode, in which dq does not depend on timing; with `warn_only` aten would stay with its usual one.

    Around this call alone: for cuBLAS torch wants other workspace settings with it, and products are repeatable without any.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
