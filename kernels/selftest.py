"""Checks at start-up what no library promises: that a matrix product gives a row the same bits in any company."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from miles_hpc.errors import NumericsError
from miles_hpc.kernels import heads
from miles_hpc.kernels.linear import linear_float, product
from miles_hpc.kernels.norm import add_rms_norm, rms_norm
from miles_hpc.kernels.rows import ROWS
from miles_hpc.kernels.tiles import BLOCK, DECODE_ROWS

COUNTS = (1, 2, 3, 5, 7, 8, 17, 31, 33, 64, 65, 200)
MOST = 320


def check(shapes: Iterable[tuple[int, int]], head_dim: int, dtype: torch.dtype, where: torch.device) -> None:
    """Check the linear layers of a model, and on a CPU the products of the attention.

    Args:
        shapes: (inputs, outputs) of the linear layers.
        head_dim: size of a head.
        dtype: of weights and activations.
        where: device.

    Raises:
        NumericsError: some shape is not row-invariant here.
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


def _refused(what: str) -> NumericsError:
    return NumericsError(f"{what} on this machine", next_step='set run.numerics = "native"')
