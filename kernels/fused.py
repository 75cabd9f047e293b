"""Triton kernels of the row-wise operations: one program per row, so a row's order of addition is fixed. CUDA only.

Each computes what the plain operations beside its caller compute; both sides of a run call the same kernel, since compiled and
eager code round differently.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096
WARPS = 4


@triton.jit
def _row_sum(x, out, n, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, CHUNK)
    total = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, n, CHUNK):
        total += tl.load(x + row * n + start + at, mask=start + at < n, other=0.0)
    tl.store(out + row, tl.sum(total, 0))


def row_sum(x: Tensor) -> Tensor:
    """[..., n] float32 -> [..., 1]."""
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], 1)
    if out.numel():
        _row_sum[(out.numel(),)](x, out, x.shape[-1], CHUNK=min(CHUNK, triton.next_power_of_2(x.shape[-1])), num_warps=WARPS)
    return out


@triton.jit
def _rms_norm(x, weight, out, scales, n, eps, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    value = tl.load(x + row * n + at, mask=at < n, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / n + eps)
    value = value * scale * tl.load(weight + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out + row * n + at, value.to(out.dtype.element_ty), mask=at < n)
    tl.store(scales + row, scale)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """[..., n] and [n] -> [..., n] in the type of `weight`, and the scale of each row [..., 1] float32."""
    x, n = x.contiguous(), x.shape[-1]
    out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    scales = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    if scales.numel():
        _rms_norm[(scales.numel(),)](x, weight, out, scales, n, eps, WIDTH=triton.next_power_of_2(n), num_warps=WARPS)
    return out, scales


@triton.jit
def _rotate(x, cos, sin, out, heads, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIZE)
    token = row // heads
    value = tl.load(x + row * SIZE + at).to(tl.float32)
    other = tl.load(x + row * SIZE + (at + SIZE // 2) % SIZE).to(tl.float32)
    value = value * tl.load(cos + token * SIZE + at) + other * tl.load(sin + token * SIZE + at)
    tl.store(out + row * SIZE + at, value.to(out.dtype.element_ty))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[t, heads, d] with [t, 1, d] float32 twice -> [t, heads, d]; d is a power of two."""
    x, (tokens, heads, size) = x.contiguous(), x.shape
    out = torch.empty_like(x)
    if tokens:
        _rotate[(tokens * heads,)](x, cos.contiguous(), sin.contiguous(), out, heads, SIZE=size, num_warps=1)
    return out


@triton.jit
def _swiglu(gate_up, factor, out, width, HAS_FACTOR: tl.constexpr, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    gate = tl.load(gate_up + row * 2 * width + at, mask=at < width, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=at < width, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    if HAS_FACTOR:
        value = value * tl.load(factor + row)
    tl.store(out + row * width + at, value.to(out.dtype.element_ty), mask=at < width)


def swiglu(gate_up: Tensor, factor: Tensor | None = None) -> Tensor:
    """[t, 2 f] -> [t, f]: `silu(gate) * up`, times [t, 1] float32 where given."""
    rows, width = gate_up.shape[0], gate_up.shape[-1] // 2
    out = gate_up.new_empty(rows, width)
    if rows:
        chunk = min(1024, triton.next_power_of_2(width))
        grid = (rows, triton.cdiv(width, chunk))
        _swiglu[grid](gate_up.contiguous(), factor, out, width, HAS_FACTOR=factor is not None, CHUNK=chunk, num_warps=WARPS)
    return out
