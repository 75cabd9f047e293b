"""Triton kernels of attention in segments: parts made into one result in ascending order in float32. CUDA only."""

import triton
import triton.language as tl
from torch import Tensor

from miles_hpc.kernels.segments import Entries, Parts

STRICT = {"enable_fp_fusion": False}
AHEAD = 8
"""Parts that are loaded together; one after the other each would wait for memory."""


@triton.jit
def _add(peak, weight, total, log_sum, value):
    higher = tl.maximum(peak, log_sum)
    before, now = tl.exp(peak - higher), tl.exp(log_sum - higher)
    return higher, weight * before + now, total * before + value * now


@triton.jit
def _combine(
    parts,
    log_sums,
    queries,
    first,
    step,
    count,
    out,
    own,
    part_rows,
    rows,
    heads,
    OWN: tl.constexpr,
    AHEAD: tl.constexpr,
    SIZE: tl.constexpr,
):
    i, head, at = tl.program_id(0), tl.program_id(1), tl.arange(0, SIZE)
    number, part, stride = tl.load(count + i), tl.load(first + i).to(tl.int64), 1
    row = i.to(tl.int64)
    if OWN:
        row, stride = tl.load(queries + i).to(tl.int64), tl.load(step + i)
    peak, weight, total = -1e30, 0.0, tl.zeros((SIZE,), tl.float32)
    for start in range(0, number, AHEAD):
        for j in tl.static_range(AHEAD):
            live = start + j < number
            here = part + (start + j) * stride
            log_sum = tl.load(log_sums + head * part_rows + here, mask=live, other=float("-inf"))
            value = tl.load(parts + (here * heads + head) * SIZE + at, mask=at < tl.where(live, SIZE, 0), other=0.0)
            peak, weight, total = _add(peak, weight, total, log_sum, value.to(tl.float32))
    target = out + (row * heads + head) * SIZE + at
    if OWN:
        log_sum = tl.load(own + head * rows + row)
        peak, weight, total = _add(peak, weight, total, log_sum, tl.load(target).to(tl.float32))
        tl.store(own + head * rows + row, peak + tl.log(weight))
    tl.store(target, (total / weight).to(out.dtype.element_ty))


def add(parts: Tensor, log_sums: Tensor, where: Parts, out: Tensor, own: Tensor) -> None:
    """Put parts before what `out` and `own` hold of the last segment.

    Args:
        parts: [r, heads, d].
        log_sums: [heads, r] float32.
        where: the parts of each query.
        out: [t, heads, d], changed in place.
        own: [heads, t] float32, log of the sum of exponentials, changed in place.
    """
    grid = (len(where.queries), out.shape[1])
    sizes = (parts.shape[0], out.shape[0], out.shape[1])
    _combine[grid](parts, log_sums, *where, out, own, *sizes, OWN=True, AHEAD=AHEAD, SIZE=out.shape[2], num_warps=1, **STRICT)


def combine(parts: Tensor, log_sums: Tensor, first: Tensor, count: Tensor) -> Tensor:
    """[r, heads, d], [heads, r] float32, [m] int32 twice (the parts of each query, one after the other) -> [m, heads, d]."""
    out = parts.new_empty(len(first), *parts.shape[1:])
    sizes = (parts.shape[0], out.shape[0], out.shape[1])
    arguments = (parts, log_sums, None, first, None, count, out, None, *sizes)
    _combine[(len(first), out.shape[1])](*arguments, OWN=False, AHEAD=AHEAD, SIZE=out.shape[2], num_warps=1, **STRICT)
    return out


@triton.jit
def _spread(x, first, count, out, width, CHUNK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(x + row * width + at, mask=at < width, other=0.0)
    begin, number = tl.load(first + row).to(tl.int64), tl.load(count + row)
    for i in range(number):
        tl.store(out + (begin + i) * width + at, value, mask=at < width)


def spread(x: Tensor, first: Tensor, count: Tensor, rows: int) -> Tensor:
    """Copy each row where its parts are computed: [m, heads, d] -> [rows, heads, d]."""
    out = x.new_empty(rows, *x.shape[1:])
    width = x.shape[1] * x.shape[2]
    chunk = min(1024, triton.next_power_of_2(width))
    _spread[(len(x), triton.cdiv(width, chunk))](x, first, count, out, width, CHUNK=chunk, num_warps=4)
    return out


@triton.jit
def _fill(
    lengths, requests, slots, first, count, bounds, keys, table, queries, width, SEGMENT: tl.constexpr, MOST: tl.constexpr
):
    query, segment = tl.program_id(0), tl.program_id(1)
    at = tl.arange(0, MOST)
    numbers = tl.cdiv(tl.load(lengths + at, mask=at < queries, other=0).to(tl.int32), SEGMENT)
    begin, used = tl.sum(tl.where(at < query, numbers, 0), 0), tl.sum(numbers, 0)
    length = tl.load(lengths + query).to(tl.int32)
    entry = query * tl.num_programs(1) + segment  # any: every program looks after one
    tl.store(bounds + entry + 1, tl.minimum(entry + 1, used))
    if entry >= used:
        tl.store(keys + entry, 0)
    if segment == 0:
        tl.store(first + query, begin)
        tl.store(count + query, tl.cdiv(length, SEGMENT))
    held = tl.minimum(length - segment * SEGMENT, SEGMENT)
    if held > 0:
        tl.store(keys + begin + segment, held)
        source = slots + tl.load(requests + query).to(tl.int64) * width + segment * SEGMENT
        target = table + (begin + segment).to(tl.int64) * SEGMENT
        for start in range(0, held, 512):
            key = start + tl.arange(0, 512)
            tl.store(target + key, tl.load(source + key, mask=key < held, other=0), mask=key < held)


def fill(entries: Entries, lengths: Tensor, requests: Tensor, slots: Tensor) -> None:
    """Enter queries at the ends of sequences.

    Args:
        entries: of m queries, changed in place.
        lengths: [m] integer.
        requests: [m] integer, row of each in `slots`.
        slots: [n, width] int32, slot of the key at each position.
    """
    queries, count, segment = len(entries.first), len(entries.keys), entries.table.shape[1]
    grid, most = (queries, count // queries), triton.next_power_of_2(queries)
    _fill[grid](lengths, requests, slots, *entries, queries, slots.stride(0), SEGMENT=segment, MOST=most, num_warps=4)
