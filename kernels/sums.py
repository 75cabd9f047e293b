"""The sums of `miles_hpc.digest` over many tensors as one Triton kernel. CUDA only."""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048
BLOCK = 32 * TILE
"""Words of one program: with fewer, the table of all programs takes the host longer than the sums the GPU."""


@triton.jit
def _sums(table, out, TILE: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    words = tl.load(table + 3 * block).to(tl.pointer_type(tl.int32))
    start, count = tl.load(table + 3 * block + 1), tl.load(table + 3 * block + 2)
    plain, placed = tl.zeros((TILE,), tl.int64), tl.zeros((TILE,), tl.int64)
    for first in range(0, tl.minimum(count, BLOCK), TILE):
        at = first + tl.arange(0, TILE)
        word = tl.load(words + at, mask=at < count, other=0).to(tl.int64)
        plain += word
        placed += word * (start + at)
    tl.store(out + 2 * block, tl.sum(plain, 0))
    tl.store(out + 2 * block + 1, tl.sum(placed, 0))


def sums(words: list[Tensor]) -> Tensor:
    """[n, 2] int64: of each [any] int32 tensor the sum of its words, and of word times position, modulo 2^64.

    Whoever owns the tensors keeps them until the stream has come so far.
    """
    lengths = np.array([len(w) for w in words], np.int64)
    blocks = -(-lengths // BLOCK)
    owner = np.repeat(np.arange(len(words)), blocks)
    start = BLOCK * (np.arange(len(owner)) - np.repeat(blocks.cumsum() - blocks, blocks))
    address = np.array([w.data_ptr() for w in words], np.int64)[owner] + 4 * start
    table = torch.from_numpy(np.stack([address, start, lengths[owner] - start], 1)).to(words[0].device)
    parts = table.new_empty(len(owner), 2)
    if len(owner):
        _sums[(len(owner),)](table, parts, TILE=TILE, BLOCK=BLOCK, num_warps=8)
    return table.new_zeros(len(words), 2).index_add_(0, torch.from_numpy(owner).to(table.device), parts)
