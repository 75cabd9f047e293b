"""Checks at start-up what no library promises: that a matrix product gives a row the same bits in any company."""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from miles_hpc.errors import NumericsError
from miles_hpc.kernels import flash, heads
from miles_hpc.kernels.linear import linear_float, product
from miles_hpc.kernels.norm import add_rms_norm, rms_norm
from miles_hpc.kernels.rows import ROWS
from miles_hpc.kernels.segments import SEGMENT, Call, Entries, plan
from miles_hpc.kernels.tiles import BLOCK, DECODE_ROWS

COUNTS = (1, 2, 3, 5, 7, 8, 17, 31, 33, 64, 65, 200)
MOST = 320
LENGTHS = (1, 100, SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT + 130)
"""Of sequences whose attention is compared."""


def check(shapes: Iterable[tuple[int, int]], head_dim: int, group: int, dtype: torch.dtype, where: torch.device) -> None:
    """Check the linear layers of a model, and its attention: on a CPU the products, on a GPU FlashAttention.

    Args:
        shapes: (inputs, outputs) of the linear layers.
        head_dim: size of a head.
        group: query heads per key-value head.
        dtype: of weights and activations.
        where: device.

    Raises:
        NumericsError: some shape depends on its company here.
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device="cpu", dtype=torch.float32)

    if where.type == "cuda" and dtype != torch.bfloat16:
        raise NumericsError(f"exact numerics on a GPU are in bfloat16, not {dtype}", next_step='set model.dtype = "bfloat16"')
    for k, n in sorted(set(shapes)):
        x, weight = random(MOST, k).to(where, dtype), random(n, k).to(where, dtype)
        _linear(product, x, weight)
        _linear(linear_float, x, weight)
    for width in {k for k, _ in shapes}:
        _joined(random(MOST, width).to(where), random(MOST, width).to(where, dtype), random(width).to(where, dtype))
    qkv, weights = random(MOST, 5, head_dim).to(where, dtype), random(2, head_dim).to(where, dtype)
    _heads(qkv, weights, random(2, MOST, 1, head_dim).to(where))
    if where.type == "cpu":
        for width in (head_dim, head_dim + DECODE_ROWS):
            _batched(random(40, ROWS, BLOCK), random(40, BLOCK, width))
        _batched(random(40, ROWS, head_dim), random(40, BLOCK, head_dim).transpose(1, 2))
    else:
        tokens = sum(LENGTHS)
        _attention(*(random(tokens, n, head_dim).to(where, dtype) for n in (2 * group, 2, 2)))


def _linear(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> None:
    whole = product(x, weight)
    half = len(weight) // 2
    for count in COUNTS:
        for first in (0, 3):
            if not torch.equal(product(x[first : first + count], weight), whole[first : first + count]):
                raise _refused(f"a linear layer {tuple(weight.shape)} gives {count} rows other bits than {MOST} rows")
    # The engine and the trainer keep q, k, v and gate, up in different orders.
    if half % 8 == 0 and not torch.equal(product(x, weight[half:]), whole[:, half:]):
        raise _refused(f"a linear layer {tuple(weight.shape)} gives other bits when it is split into two")


def _joined(x: Tensor, added: Tensor, weight: Tensor) -> None:
    sums, normed = add_rms_norm(x, added, weight, 1e-6)
    if not torch.equal(sums, x + added) or not torch.equal(normed, rms_norm(sums, weight, 1e-6)):
        raise _refused(f"residual and norm of {len(weight)} values in one kernel give other bits than in two")


def _heads(qkv: Tensor, weights: Tensor, angles: Tensor) -> None:
    cos, sin = angles
    for norms in (weights, None):
        parts = (f(qkv, norms, cos, sin, 1, 1e-6) for f in (heads.heads, heads.reference))
        if not all(torch.equal(a, b) for a, b in zip(*parts, strict=True)):
            raise _refused(f"norm and rotation of heads of {qkv.shape[-1]} in one kernel give other bits than in two")


def _batched(left: Tensor, right: Tensor) -> None:
    whole = torch.bmm(left, right)
    for count in (1, 2, 7, 40):
        for first in (0, 5):
            rows = slice(first, first + DECODE_ROWS)
            if not torch.equal(torch.bmm(left[:count, rows], right[:count]), whole[:count, rows]):
                raise _refused(f"a batched product {tuple(left.shape)} x {tuple(right.shape)} is not row-invariant")


def _attention(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Training, chunks, and decoding; the keys lie one after the other."""
    lengths, scale = np.array(LENGTHS), 0.1
    starts = np.cumsum(lengths) - lengths
    table = torch.from_numpy(starts[:, None] + np.arange(max(LENGTHS))).to(q.device).clamp(max=len(q) - 1).int()
    bounds = torch.from_numpy(np.append(starts, len(q))).to(q.device, torch.int32)
    whole = flash.varlen(q, k, v, flash.Sequences(bounds, max(LENGTHS), plan(0 * lengths, lengths, table)), scale)
    first = lengths * 2 // 3
    rows = np.concatenate([np.arange(s + f, s + n) for s, f, n in zip(starts, first, lengths, strict=True)])
    chunks = flash.paged(q[rows], k, v, plan(first, lengths - first, table), scale)
    short = int((lengths <= SEGMENT).sum())  # without segments, as SGLang calls it
    one = torch.arange(short + 1, device=q.device, dtype=torch.int32)
    held = torch.from_numpy(lengths[:short]).to(q.device, torch.int32)
    last = starts + lengths - 1
    usual = flash.over_pool(q[last[:short]], k, v, Call(one, 1, held, table[:short]), scale)[0]
    pairs = [(chunks, rows), (usual, last[:short]), (_decoded(q[last], k, v, lengths, table, scale), last)]
    if not all(torch.equal(part, whole[places]) for part, places in pairs):
        raise _refused(f"attention of heads of {q.shape[-1]} gives other bits in the engine than in training")


def _decoded(q: Tensor, k: Tensor, v: Tensor, lengths: np.ndarray, table: Tensor, scale: float) -> Tensor:
    from miles_hpc.kernels import merge

    entries = Entries.room(len(q), -(-int(lengths.max()) // SEGMENT) + 1, q.device)
    requests = torch.arange(len(q), device=q.device)
    merge.fill(entries, torch.from_numpy(lengths).to(q.device), requests, table)
    return flash.decode(q, k, v, entries, flash.schedule(entries, q.shape[1], k.shape[1], q.shape[2]), scale)


def _refused(what: str) -> NumericsError:
    return NumericsError(f"{what} on this machine", next_step='set run.numerics = "native"')
