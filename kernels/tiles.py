"""How the queries of one forward are cut into tiles and where their keys lie."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from miles_hpc.kernels.rows import ROWS

DECODE_ROWS = 8
BLOCK = 64
"""Keys per block, counted from position 0 of the sequence."""


@dataclass(frozen=True)
class Tiles:
    """n tiles of `per` tokens of one sequence; a row of a tile is one token and one query head of a key-value group."""

    group: int
    """Query heads per key-value head."""
    rows: int
    """Rows of a tile, per * group filled up."""
    tokens: Tensor
    """[n, per] int64, token of each place; padding repeats another token."""
    cells: Tensor
    """[t] int64, place of each token among the n * per."""
    positions: Tensor
    """[n, rows] int64, absolute position of each row; padding sees key 0, since a row without keys would be 0 / 0."""
    last: Tensor
    """[n] int64, highest position."""
    slots: Tensor
    """[n, blocks, BLOCK] int64, where each key lies; beyond the end of a sequence any valid slot."""
    select: list[Tensor]
    """Per block, the tiles that reach it."""

    @property
    def per(self) -> int:
        """Queries of a tile."""
        return self.tokens.shape[1]


def tiles(lengths: Sequence[int], positions: Tensor, table: Tensor, group: int) -> Tiles:
    """Tiles of the queries of several sequences.

    Args:
        lengths: tokens of each sequence in this forward, all > 0.
        positions: [t] int64, absolute.
        table: [sequences, at least the longest sequence] integer, slot of the key at each position.
        group: query heads per key-value head.
    """
    multiple = DECODE_ROWS if max(lengths) == 1 else ROWS
    per = max(1, multiple // group) if max(lengths) > 1 else 1
    rows = -(-per * group // multiple) * multiple
    tokens, valid, sequence, cells = (torch.from_numpy(a).to(positions.device) for a in _cut(np.asarray(lengths), per))
    at = torch.where(valid, positions[tokens], 0).long()
    last = at.amax(1)
    blocks = int(last.max()) // BLOCK + 1
    slots = table[:, : blocks * BLOCK].long()
    slots = torch.nn.functional.pad(slots, (0, blocks * BLOCK - slots.shape[1])).view(len(table), blocks, BLOCK)
    of_rows = torch.nn.functional.pad(at.repeat_interleave(group, 1), (0, rows - per * group))
    select = [(last >= j * BLOCK).nonzero()[:, 0] for j in range(blocks)]
    return Tiles(group, rows, tokens, cells, of_rows, last, slots[sequence], select)


def _cut(lengths: np.ndarray, per: int) -> tuple[np.ndarray, ...]:
    """Tokens [n, per] of each tile, which of them are real, sequence [n] of each tile, place [t] of each token."""
    counts = -(-lengths // per)
    starts, first_tile = np.cumsum(lengths) - lengths, np.cumsum(counts) - counts
    sequence = np.repeat(np.arange(len(lengths)), counts)
    inside = np.arange(len(sequence)) - first_tile[sequence]
    tokens = (starts[sequence] + inside * per)[:, None] + np.arange(per)
    valid = tokens < (starts + lengths)[sequence][:, None]
    cells = np.repeat(first_tile * per - starts, lengths) + np.arange(lengths.sum())
    return np.minimum(tokens, lengths.sum() - 1), valid, sequence, cells
