"""Causal attention over packed sequences on a GPU: FlashAttention 3 forward, FlashAttention 2 backward.

With `num_splits=1` FlashAttention 3 walks all keys of a query in one order, so SGLang's paged decode and this forward agree bit
for bit (docs/numerics.md). The engine needs no twin of this file: SGLang calls the same library.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor


def usable(x: Tensor) -> bool:
    """What the libraries are built for."""
    return x.is_cuda and x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device)[0] in (8, 9)


def varlen(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float, repeatable: bool = True) -> Tensor:
    """[t, heads, d], [t, groups, d] twice -> [t, heads, d]; bfloat16.

    Args:
        q: queries.
        k: keys.
        v: values.
        bounds: [sequences + 1] int32, first token of each sequence.
        longest: longest sequence.
        scale: of the scores.
        repeatable: gradients are the same bits every time; the backward then takes twice as long.
    """
    return _Varlen.apply(q, k, v, bounds, longest, scale, repeatable)


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float, repeatable: bool
    ) -> Tensor:
        from sgl_kernel.flash_attn import flash_attn_varlen_func

        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, log_sum, *_ = flash_attn_varlen_func(
            q,
            k,
            v,
            bounds,
            bounds,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            softmax_scale=scale,
            causal=True,
            num_splits=1,
            return_softmax_lse=True,
        )
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
        return dq, dk, dv, None, None, None, None


class _deterministic:
    """torch's deterministic mode, in which dq does not depend on timing; with `warn_only` aten would stay with its usual one.

    Around this call alone: for cuBLAS torch wants other workspace settings with it, and products are repeatable without any.
    """

    def __enter__(self) -> None:
        self.before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True)

    def __exit__(self, *error: Any) -> None:
        torch.use_deterministic_algorithms(self.before[0], warn_only=self.before[1])
