"""SwiGLU (arXiv 2002.05202) in float32, with one rounding."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from miles_hpc.kernels.rows import row_sum


def reference(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` for [..., 2 f] = [gate, up] -> [..., f]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def swiglu(gate_up: Tensor) -> Tensor:
    """`reference`, with the intermediate values in float32."""
    return _SwiGLU.apply(gate_up)


def forward(gate_up: Tensor, factor: Tensor | None = None) -> Tensor:
    """[t, 2 f] -> [t, f], times [t, 1] float32 where given; without autograd."""
    if gate_up.is_cuda:
        from miles_hpc.kernels import fused

        return fused.swiglu(gate_up, factor)
    gate, up = gate_up.float().chunk(2, -1)
    out = F.silu(gate) * up
    return (out if factor is None else out * factor).to(gate_up.dtype)


def backward(gate_up: Tensor, dout: Tensor, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Gradients of `gate_up`, in its type, and of `factor` [t, 1] float32 (of a factor of one where none is given).

    With s = sigmoid(gate) and d = dout * factor: dup = d * gate * s, dgate = d * up * (s + gate * s * (1 - s)).
    """
    if gate_up.is_cuda:
        from miles_hpc.kernels import fused

        return fused.swiglu_backward(gate_up, dout, factor)
    gate, up = gate_up.float().chunk(2, -1)
    sigmoid = torch.sigmoid(gate)
    act, dout = gate * sigmoid, dout.float()
    d = dout if factor is None else dout * factor
    dgate_up = torch.cat([d * up * (sigmoid + act * (1 - sigmoid)), d * act], -1)
    return dgate_up.to(gate_up.dtype), row_sum(dout * act * up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return forward(gate_up.flatten(0, -2)).view(*gate_up.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Tensor:
        gate_up = ctx.saved_tensors[0]
        rows = gate_up.flatten(0, -2), dout.flatten(0, -2)
        return backward(*rows)[0].view_as(gate_up)
