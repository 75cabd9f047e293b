"""Rotary embeddings (arXiv 2104.09864): a table made once on the CPU, looked up by both sides."""

from typing import Any

import torch
from torch import Tensor


class Rotary:
    """Cosines and sines of every position of the context.

    Args:
        config: a transformers configuration; its rope type and scaling are transformers' own.
        length: positions.
        where: device of the table.
    """

    def __init__(self, config: Any, length: int, where: torch.device) -> None:
        # No transcendental function is evaluated per batch, nor on another device or in another type.
        with torch.device("cpu"):
            frequencies, scale = _frequencies(config)
            angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies.float())
            cos, sin = torch.cat([angles, angles], -1).cos() * scale, torch.cat([-angles, angles], -1).sin() * scale
        self.cos, self.sin = cos.to(where), sin.to(where)

    def of(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [t, 1, head_dim] float32 of positions [t] int64; sines are negative in the first half."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def _frequencies(config: Any) -> tuple[Tensor, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    return 1.0 / parameters["rope_theta"] ** exponents, 1.0


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [t, heads, head_dim], in float32: `x cos + swap(x) sin`, where `swap` exchanges the two halves."""
    return _Rotate.apply(x, cos, sin)


def _forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if x.is_cuda:
        from miles_hpc.kernels import fused

        return fused.rotate(x, cos, sin)
    y = x.float()
    return (y * cos + y.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _forward(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
        """The transpose of a rotation: the angle with the other sign."""
        cos, sin = ctx.saved_tensors
        return _forward(dout, cos, -sin), None, None
