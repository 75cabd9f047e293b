"""Triton kernels of the row-wise operations: one program per row, so a row's order of addition is fixed. CUDA only.

Both sides of a run call the same kernels, since compiled and eager code round differently. Where the engine joins what the
trainer does in two calls (`add_rms_norm`, `heads`), the operations are the same and no multiplication is contracted with an
addition (STRICT); that the bits are the same too is checked at start-up (`selftest`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096
WARPS = 4
STRICT = {"enable_fp_fusion": False}


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
def _rms_norm(x, added, weight, sums, out, scales, n, eps, ADD: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    value = tl.load(x + row * n + at, mask=at < n, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(added + row * n + at, mask=at < n, other=0.0).to(tl.float32)
        tl.store(sums + row * n + at, value, mask=at < n)
    scale = tl.rsqrt(tl.sum(value * value, 0) / n + eps)
    value = value * scale * tl.load(weight + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out + row * n + at, value.to(out.dtype.element_ty), mask=at < n)
    if not ADD:
        tl.store(scales + row, scale)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """[..., n] and [n] -> [..., n] in the type of `weight`, and the scale of each row [..., 1] float32."""
    x, n = x.contiguous(), x.shape[-1]
    out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    scales = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    if scales.numel():
        _rms_norm[(scales.numel(),)](x, None, weight, None, out, scales, n, eps, ADD=False, **_row(n))
    return out, scales


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """[t, n] float32 and [t, n] -> their sum [t, n] float32, and its `rms_norm`."""
    x, added, n = x.contiguous(), added.contiguous(), x.shape[-1]
    sums, out = torch.empty_like(x), torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    if len(x):
        _rms_norm[(len(x),)](x, added, weight, sums, out, None, n, eps, ADD=True, **_row(n))
    return sums, out


def _row(n: int) -> dict[str, int | bool]:
    """How a row of n is spread over the threads of a program; it decides the order of addition."""
    return {"WIDTH": triton.next_power_of_2(n), "num_warps": 1 if n <= 256 else WARPS, **STRICT}


@triton.jit
def _rms_norm_backward(x, weight, scales, dout, dx, sums, rows, n, SLAB: tl.constexpr, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)
    w = tl.load(weight + at, mask=at < n, other=0.0).to(tl.float32)
    total = tl.zeros((WIDTH,), tl.float32)
    first = tl.program_id(0).to(tl.int64) * SLAB
    for i in range(SLAB):
        row = first + i
        live = at < tl.where(row < rows, n, 0)
        scale = tl.load(scales + tl.minimum(row, rows - 1))
        normed = tl.load(x + row * n + at, mask=live, other=0.0).to(tl.float32) * scale
        d = tl.load(dout + row * n + at, mask=live, other=0.0).to(tl.float32)
        total += d * normed
        d = d * w
        d = scale * (d - normed * (tl.sum(d * normed, 0) / n))
        tl.store(dx + row * n + at, d.to(dx.dtype.element_ty), mask=live)
    tl.store(sums + tl.program_id(0) * n + at, total, mask=at < n)


def rms_norm_backward(x: Tensor, weight: Tensor, scales: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `rms_norm`'s x and weight; the weight's is added up in slabs of rows."""
    x, dout, n = x.contiguous(), dout.contiguous(), x.shape[-1]
    rows, dx = scales.numel(), torch.empty_like(x)
    slab = 8 if n > 256 else 32
    programs = triton.cdiv(rows, slab)
    sums = torch.empty(programs, n, dtype=torch.float32, device=x.device)
    if rows:
        _rms_norm_backward[(programs,)](x, weight, scales, dout, dx, sums, rows, n, SLAB=slab, **_row(n))
    return dx, sums.sum(0).to(weight.dtype)


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
        _rotate[(tokens * heads,)](x, cos.contiguous(), sin.contiguous(), out, heads, SIZE=size, num_warps=1, **STRICT)
    return out


@triton.jit
def _heads(qkv, weights, cos, sin, q, k, v, n, heads, groups, eps, NORM: tl.constexpr, SIZE: tl.constexpr):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, SIZE)
    swapped = (at + SIZE // 2) % SIZE
    row = qkv + (token * (heads + 2 * groups) + head) * SIZE
    value = tl.load(row + at).to(tl.float32)
    if head >= heads + groups:
        tl.store(v + (token * groups + head - heads - groups) * SIZE + at, value.to(v.dtype.element_ty))
    else:
        other = tl.load(row + swapped).to(tl.float32)
        if NORM:
            scale = tl.rsqrt(tl.sum(value * value, 0) / n + eps)
            weight = weights + tl.where(head < heads, 0, SIZE)
            value = (value * scale * tl.load(weight + at).to(tl.float32)).to(q.dtype.element_ty).to(tl.float32)
            other = (other * scale * tl.load(weight + swapped).to(tl.float32)).to(q.dtype.element_ty).to(tl.float32)
        value = value * tl.load(cos + token * SIZE + at) + other * tl.load(sin + token * SIZE + at)
        if head < heads:
            tl.store(q + (token * heads + head) * SIZE + at, value.to(q.dtype.element_ty))
        else:
            tl.store(k + (token * groups + head - heads) * SIZE + at, value.to(k.dtype.element_ty))


def heads(qkv: Tensor, weights: Tensor | None, cos: Tensor, sin: Tensor, groups: int, eps: float) -> tuple[Tensor, ...]:
    """`rms_norm` where there are weights, and `rotate`, of queries and keys; [t, heads + 2 groups, d] -> q, k, v."""
    tokens, every, size = qkv.shape
    count = every - 2 * groups
    q, k, v = (qkv.new_empty(tokens, n, size) for n in (count, groups, groups))
    if tokens:
        arguments = (qkv.contiguous(), weights, cos.contiguous(), sin.contiguous(), q, k, v, size, count, groups, eps)
        _heads[(tokens, every)](*arguments, NORM=weights is not None, SIZE=size, num_warps=1, **STRICT)
    return q, k, v


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


@triton.jit
def _swiglu_backward(gate_up, dout, factor, dgate_up, dfactor, width, HAS_FACTOR: tl.constexpr, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, width, CHUNK):
        at = start + tl.arange(0, CHUNK)
        gate = tl.load(gate_up + row * 2 * width + at, mask=at < width, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * width + width + at, mask=at < width, other=0.0).to(tl.float32)
        d = tl.load(dout + row * width + at, mask=at < width, other=0.0).to(tl.float32)
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        act = gate * sigmoid
        total += d * act * up
        if HAS_FACTOR:
            d = d * tl.load(factor + row)
        dgate = d * up * (sigmoid + act * (1.0 - sigmoid))
        tl.store(dgate_up + row * 2 * width + at, dgate.to(dgate_up.dtype.element_ty), mask=at < width)
        tl.store(dgate_up + row * 2 * width + width + at, (d * act).to(dgate_up.dtype.element_ty), mask=at < width)
    tl.store(dfactor + row, tl.sum(total, 0))


def swiglu_backward(gate_up: Tensor, dout: Tensor, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `activation.backward`; [t, 2 f] and [t, f] -> [t, 2 f], [t, 1] float32."""
    gate_up, dout, (rows, width) = gate_up.contiguous(), dout.contiguous(), dout.shape
    dgate_up, dfactor = torch.empty_like(gate_up), torch.empty(rows, 1, dtype=torch.float32, device=dout.device)
    if rows:
        chunk = min(1024, triton.next_power_of_2(width))
        arguments = (gate_up, dout, factor, dgate_up, dfactor, width)
        _swiglu_backward[(rows,)](*arguments, HAS_FACTOR=factor is not None, CHUNK=chunk, num_warps=WARPS)
    return dgate_up, dfactor


@triton.jit
def _softmax_sums(logits, temperature, peaks, totals, dots, n, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, CHUNK)
    heat = tl.load(temperature + row)
    peak = -1e30
    total = tl.zeros((CHUNK,), tl.float32)
    dot = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, n, CHUNK):
        z = tl.div_rn(tl.load(logits + row * n + start + at, mask=start + at < n, other=float("-inf")), heat)
        higher = tl.maximum(peak, tl.max(z, 0))
        scale = tl.exp(peak - higher)
        shifted = tl.where(start + at < n, z - higher, -1e30)
        exp = tl.exp(shifted)
        dot = (dot + total * (peak - higher)) * scale + exp * shifted
        total = total * scale + exp
        peak = higher
    tl.store(peaks + row, peak)
    tl.store(totals + row, tl.sum(total, 0))
    tl.store(dots + row, tl.sum(dot, 0))


def softmax_sums(logits: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
    """See `logprob.Sums`; [t, n] float32 and [1] or [t, 1] -> [t, 1] three times."""
    logits, (rows, n) = logits.contiguous(), logits.shape
    heat = temperature.float().reshape(-1, 1).expand(rows, 1).contiguous()
    sums = tuple(logits.new_empty(rows, 1) for _ in range(3))
    if rows:
        _softmax_sums[(rows,)](logits, heat, *sums, n, CHUNK=CHUNK, num_warps=8, **STRICT)
    return sums


@triton.jit
def _softmax_backward(logits, own, temperature, log_sum, entropy, grad, entropy_grad, out, n, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    heat, g = tl.load(temperature), tl.load(grad + row)
    log_p = tl.load(logits + row * n + at, mask=at < n, other=0.0) / heat - tl.load(log_sum + row)
    value = -tl.exp(log_p) * (g + tl.load(entropy_grad + row) * (log_p + tl.load(entropy + row)))
    value += tl.where(at == tl.load(own + row), g, 0.0)
    tl.store(out + row * n + at, (value / heat).to(out.dtype.element_ty), mask=at < n)


def softmax_backward(logits: Tensor, rows: tuple[Tensor, ...], kind: torch.dtype) -> Tensor:
    """See `logprob._backward`; [t, n] float32 and `logprob.Rows` -> [t, n]."""
    count, n = logits.shape
    out = torch.empty_like(logits, dtype=kind)
    if count:
        vectors = (vector.contiguous() for vector in rows)
        _softmax_backward[(count, triton.cdiv(n, 1024))](logits, *vectors, out, n, CHUNK=1024, num_warps=WARPS)
    return out
