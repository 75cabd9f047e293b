"""Row-invariant linear layer."""

from typing import Any

import torch
from torch import Tensor

from miles_hpc.kernels.rows import pad_rows


def reference(x: Tensor, weight: Tensor) -> Tensor:
    """[..., k] and [n, k] -> [..., n]."""
    return x @ weight.t()


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`reference`; a row of the result depends on its row of `x` and on `weight` only. Deterministic backward.

    On a GPU this needs cuBLAS without workspace (`device.without_workspace`), which rules out split-K kernels.
    """
    return _Linear.apply(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], len(weight))


def linear_float(x: Tensor, weight: Tensor) -> Tensor:
    """`linear` with a float32 result, as a router wants it: [t, k] and [n, k] -> [t, n]."""
    return _LinearFloat.apply(x, weight)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """[t, k] and [n, k] -> [t, n], without autograd."""
    if x.is_cuda:
        return torch.mm(x, weight.t())
    return torch.mm(pad_rows(x), weight.t())[: len(x)]


def product_float(x: Tensor, weight: Tensor) -> Tensor:
    """`product` with a float32 result."""
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return product(x.float(), weight.float())


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        """In the type of the result, then in those of the arguments."""
        x, weight = ctx.saved_tensors
        dx, dweight = product(dy, weight.to(dy.dtype).t()), dy.t() @ x.to(dy.dtype)
        return dx.to(x.dtype), dweight.to(weight.dtype)


class _LinearFloat(_Linear):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product_float(x, weight)
