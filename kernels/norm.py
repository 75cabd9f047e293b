"""RMSNorm (arXiv 1910.07467) in float32, with one rounding."""

from typing import Any

import torch
from torch import Tensor

from miles_hpc.kernels.rows import row_sum


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension; [..., n] and [n] -> [..., n] in the type of `weight`."""
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight).to(weight.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`reference`, row-invariant; `x` may be a float32 residual stream beside bfloat16 weights."""
    return _RMSNorm.apply(x, weight, eps)


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x + added` and its `rms_norm`, without gradient; a residual stream [t, n] float32 and what a layer adds to it [t, n]."""
    if x.is_cuda:
        from miles_hpc.kernels import fused

        return fused.add_rms_norm(x, added, weight, eps)
    x = x + added
    return x, _forward(x, weight, eps)[0]


def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Result, and the scale of each row [..., 1] float32."""
    if x.is_cuda:
        from miles_hpc.kernels import fused

        return fused.rms_norm(x, weight, eps)
    y = x.float()
    scale = torch.rsqrt(row_sum(y * y) / x.shape[-1] + eps)
    return (y * scale * weight.float()).to(weight.dtype), scale


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, scale = _forward(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None]:
        """With n = x * scale and g = dout * weight: dx = scale * (g - n * mean(g * n)), dweight = sum over rows of dout * n."""
        x, weight, scale = ctx.saved_tensors
        if x.is_cuda:
            from miles_hpc.kernels import fused

            return *fused.rms_norm_backward(x, weight, scale, dout), None
        normed, dout = x.float() * scale, dout.float()
        g = dout * weight.float()
        dx = scale * (g - normed * (row_sum(g * normed) / x.shape[-1]))
        dweight = (dout * normed).reshape(-1, len(weight)).sum(0)
        return dx.to(x.dtype), dweight.to(weight.dtype), None
