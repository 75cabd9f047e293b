"""Sequences packed into micro-batches without padding."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from miles_hpc.samples.schema import spans


class Sequences(Protocol):
    """What packing needs of samples or demonstrations; flat arrays over tokens."""

    @property
    def tokens(self) -> np.ndarray:
        """[total] int32."""

    @property
    def offsets(self) -> np.ndarray:
        """[n + 1] int64."""

    @property
    def loss_mask(self) -> np.ndarray:
        """[total] uint8, 1 on tokens that carry the loss."""

    @property
    def routing(self) -> np.ndarray | None:
        """[total, MoE layers, top_k], or None."""


@dataclass(frozen=True)
class Demonstrations:
    """Sequences of the warm start."""

    tokens: np.ndarray
    """[total] int32."""
    offsets: np.ndarray
    """[n + 1] int64."""
    loss_mask: np.ndarray
    """[total] uint8, 1 on answer tokens."""
    routing: None = None

    @classmethod
    def of(cls, tokens: list[list[int]], masks: list[list[int]]) -> "Demonstrations":
        """From the tokens and the mask of each sequence."""
        offsets = np.cumsum([0, *map(len, tokens)])
        flat = [np.fromiter((x for row in rows for x in row), kind) for rows, kind in ((tokens, np.int32), (masks, np.uint8))]
        return cls(flat[0], offsets, flat[1])


@dataclass(frozen=True)
class Pack:
    """One micro-batch: t tokens of b sequences, one after the other; a answer tokens in them carry the loss."""

    tokens: Tensor
    """[1, t] int64."""
    positions: Tensor
    """[t] int64, position in the sequence."""
    bounds: Tensor
    """[b + 1] int32, first token of each sequence."""
    longest: int
    rows: Tensor
    """[b * longest] int64, see `attention.Packed`."""
    cells: Tensor
    """[t] int64, see `attention.Packed`."""
    before: Tensor
    """[a] int64, the token before each answer token: its logits predict the answer token."""
    targets: Tensor
    """[a] int64."""
    flat: np.ndarray
    """[a] int64, where the answer tokens lie in the flat arrays of the sequences."""
    sample: np.ndarray
    """[a] int64, which sample each answer token belongs to."""
    routing: Tensor | None = None
    """[t, MoE layers, top_k] int16, see `Samples.routing`."""


def pack(sequences: Sequences, indices: np.ndarray, multiple: int, where: torch.device) -> Pack:
    """Pack the sequences at `indices`; none gives a pack with no answer tokens.

    Args:
        sequences: samples or demonstrations.
        indices: [b] int64.
        multiple: the number of tokens is filled up to a multiple of this by one more sequence without answer tokens
            (sequence parallelism splits a pack evenly).
        where: device.
    """
    lengths = np.diff(sequences.offsets)[indices]
    index = spans(sequences.offsets[indices], lengths)
    fill = -len(index) % multiple if len(index) else multiple
    padded = np.append(lengths, fill) if fill else lengths
    bounds = np.concatenate([[0], np.cumsum(padded)])
    positions = np.arange(bounds[-1]) - np.repeat(bounds[:-1], padded)
    answers = np.flatnonzero((sequences.loss_mask[index] != 0) & (positions[: len(index)] > 0))
    tokens = np.concatenate([sequences.tokens[index], np.zeros(fill, np.int32)]).astype(np.int64)
    rows, cells = _grid(bounds, padded)
    arrays = (tokens[None], positions, bounds.astype(np.int32), rows, cells, answers - 1, tokens[answers])
    t = [torch.from_numpy(np.ascontiguousarray(a)).to(where) for a in arrays]
    sample = np.repeat(indices, lengths)[answers]
    routing = _routing(sequences, index, fill, where)
    return Pack(t[0], t[1], t[2], int(padded.max()), t[3], t[4], t[5], t[6], index[answers], sample, routing)


def _routing(sequences: Sequences, index: np.ndarray, fill: int, where: torch.device) -> Tensor | None:
    if sequences.routing is None:
        return None
    rows = sequences.routing[index].astype(np.int16)
    return torch.from_numpy(np.concatenate([rows, np.zeros((fill, *rows.shape[1:]), np.int16)])).to(where)


def _grid(bounds: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Token of each cell of the padded [b, longest] grid, and cell of each token."""
    longest = int(lengths.max())
    cells = np.repeat(np.arange(len(lengths)) * longest - bounds[:-1], lengths) + np.arange(bounds[-1])
    rows = np.zeros(len(lengths) * longest, np.int64)
    rows[cells] = np.arange(bounds[-1])
    return rows, cells
