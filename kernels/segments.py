"""Attention to long contexts: keys in segments at absolute positions, each attended to by itself, then combined in order.

Without a fixed cut a single sequence keeps a single processor per head busy. The cut depends on the position of a key alone and
the parts of a query are added in ascending order in float32, so decode, prefill, chunks and training agree bit for bit. What a
query sees of the first SEGMENT keys needs no combination: shorter contexts are computed as if there were no segments.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SEGMENT = 2048
"""A multiple of FlashAttention's tile. With 1,024 keys large batches and training are slower, with 4,096 single sequences."""
ROWS = 1 << 16
"""Queries of one call, counted once per segment that they see: bounds the memory of their parts."""


class Parts(NamedTuple):
    """Where the parts of m queries are among the rows of a call, in ascending order of their segments."""

    queries: Tensor
    """[m] int32, row of the result."""
    first: Tensor
    """[m] int32, row of the first part."""
    step: Tensor
    """[m] int32, rows between a part and the next."""
    number: Tensor
    """[m] int32."""


class Entries(NamedTuple):
    """The segments of m decoded sequences, room for as many of each: e entries, of which the first are used.

    An entry has one row, the query again, and none where it is not used: FlashAttention then skips it, and a CUDA graph of one
    shape serves every length.
    """

    first: Tensor
    """[m] int32, first entry of each sequence."""
    number: Tensor
    """[m] int32."""
    bounds: Tensor
    """[e + 1] int32, first row of each entry."""
    keys: Tensor
    """[e] int32."""
    table: Tensor
    """[e, SEGMENT] int32, slot of each key."""

    @classmethod
    def room(cls, sequences: int, most: int, where: torch.device) -> "Entries":
        """For sequences of at most that many segments."""
        entries = sequences * most
        sizes = ((sequences,), (sequences,), (entries + 1,), (entries,), (entries, SEGMENT))
        return cls(*(torch.zeros(size, dtype=torch.int32, device=where) for size in sizes))

    def part(self, sequences: int) -> "Entries":
        """Room for the first sequences alone, in the same memory."""
        n = sequences * (len(self.keys) // len(self.first))
        return Entries(self.first[:sequences], self.number[:sequences], self.bounds[: n + 1], self.keys[:n], self.table[:n])


class Call(NamedTuple):
    """One call of FlashAttention: e entries, each some queries and keys in one segment of a sequence."""

    bounds: Tensor
    """[e + 1] int32, first query of each entry."""
    longest: int
    """Most queries of an entry."""
    keys: Tensor
    """[e] int32."""
    table: Tensor
    """[e, SEGMENT] int32, slot of each key; anything after the last."""


class Round(NamedTuple):
    """A call of r rows for the sake of m queries; a row is a query for one segment before its own, of which it sees all."""

    rows: Tensor
    """[r] int64, query of each row."""
    call: Call
    parts: Parts


class Plan(NamedTuple):
    """The queries of one forward, cut where segments begin."""

    own: Call
    """Every query and its own segment."""
    rounds: list[Round]


class _Pieces(NamedTuple):
    """[p] int64 each."""

    sequence: np.ndarray
    segment: np.ndarray
    first: np.ndarray
    """Query."""
    queries: np.ndarray
    keys: np.ndarray

    def take(self, chosen: np.ndarray) -> "_Pieces":
        return _Pieces(*(x[chosen] for x in self))


def plan(starts: np.ndarray, lengths: np.ndarray, table: Tensor) -> Plan:
    """Cut the queries of a forward.

    Args:
        starts: [b] int64, position of the first query of each sequence.
        lengths: [b] int64, queries of each sequence, all > 0.
        table: [b, at least the longest sequence] int32, slot of the key at each position.
    """
    pieces = _cut(starts, lengths)
    own = _call(pieces.queries, pieces.keys, pieces.sequence, pieces.segment, table)
    return Plan(own, [_round(some, table) for some in _rounds(pieces)])


def _call(queries: np.ndarray, keys: np.ndarray, sequence: np.ndarray, segment: np.ndarray, table: Tensor) -> Call:
    """All [e] int64."""
    at = _device(segment * SEGMENT, table, torch.int64)[:, None] + torch.arange(SEGMENT, device=table.device)
    slots = table[_device(sequence, table, torch.int64)[:, None], at.clamp(max=table.shape[1] - 1)].int()
    bounds = _device(np.append(0, np.cumsum(queries)), table, torch.int32)
    return Call(bounds, int(queries.max()), _device(keys, table, torch.int32), slots)


def combined(values: Tensor, log_sums: Tensor) -> tuple[Tensor, Tensor]:
    """What `merge` computes for one query: [parts, heads, d] and [parts, heads] float32 -> [heads, d], [heads]."""
    weights = torch.softmax(log_sums, 0)[..., None]
    return (values.float() * weights).sum(0), torch.logsumexp(log_sums, 0)


def _cut(starts: np.ndarray, lengths: np.ndarray) -> _Pieces:
    first, ends = starts // SEGMENT, starts + lengths
    n = (ends - 1) // SEGMENT - first + 1
    sequence = np.repeat(np.arange(len(n)), n)
    segment = np.arange(len(sequence)) - np.repeat(np.cumsum(n) - n, n) + first[sequence]
    begin = np.maximum(segment * SEGMENT, starts[sequence])
    end = np.minimum((segment + 1) * SEGMENT, ends[sequence])
    count = end - begin
    return _Pieces(sequence, segment, np.cumsum(count) - count, count, end - segment * SEGMENT)


def _rounds(pieces: _Pieces) -> Iterator[_Pieces]:
    """Pieces that have segments before them, as many at a time as ROWS allow."""
    later = pieces.take(np.flatnonzero(pieces.segment))
    number = np.cumsum(later.queries * later.segment) // ROWS
    for i in np.unique(number):
        yield later.take(np.flatnonzero(number == i))


def _round(pieces: _Pieces, table: Tensor) -> Round:
    n = pieces.segment
    entries, first = np.repeat(np.arange(len(n)), n), np.cumsum(n) - n
    segment, queries = np.arange(len(entries)) - first[entries], pieces.queries[entries]
    call = _call(queries, np.full_like(queries, SEGMENT), pieces.sequence[entries], segment, table)
    rows, starts = _spans(pieces.first[entries], queries), np.cumsum(queries) - queries
    step, number = (np.repeat(x, pieces.queries) for x in (pieces.queries, n))
    parts = (_spans(pieces.first, pieces.queries), _spans(starts[first], pieces.queries), step, number)
    return Round(_device(rows, table, torch.int64), call, Parts(*(_device(x, table, torch.int32) for x in parts)))


def _spans(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1])


def _device(x: np.ndarray, like: Tensor, kind: torch.dtype) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x)).to(like.device, kind)
