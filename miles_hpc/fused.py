"""Digests of an engine's tensors, which are joined checkpoint tensors (`layout.py`), as the sender expects them."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from miles_hpc.buckets import Bucket
from miles_hpc.layout import Layout

if TYPE_CHECKING:
    import torch


class Part(NamedTuple):
    """What a worker's tensor has of a checkpoint tensor."""

    worker: int
    name: str
    """Of the engine's tensor."""
    place: tuple[int, int]
    size: int
    """Bytes."""


class Fused:
    """All that follows from names and shapes, found once; what remains for a sync are sums of words, bucket by bucket.

    Raises:
        ValueError: a part that is no whole words and not the last one of its tensor.
    """

    def __init__(self, buckets: Sequence[Bucket], layout: Layout) -> None:
        self.layout = layout
        parts = [part for bucket in buckets for part in self._parts(bucket)]
        self.order = sorted(range(len(parts)), key=lambda i: parts[i][:3])
        """Of the sums, so that parts of a tensor follow each other."""
        self.tensors: list[tuple[int, str, int]] = []
        """Worker, name, bytes."""
        first: list[int] = []
        before: list[int] = []
        for (worker, name), group in groupby((parts[i] for i in self.order), key=lambda part: part[:2]):
            starts = np.cumsum([0, *(part.size for part in group)]).tolist()
            if any(start % 4 for start in starts[:-1]):
                raise ValueError(f"parts of {name} are no whole words")
            self.tensors.append((worker, name, starts.pop()))
            first.append(len(before))
            before += starts
        self.first, self.before = np.array(first), np.array(before, np.uint64) // np.uint64(4)
        """Number of each tensor's first part; words of its tensor before each part."""

    def sums(self, bucket: Bucket, flat: "torch.Tensor") -> "torch.Tensor":
        """[parts, 2] int64 of a bucket's bytes; a GPU is not waited for."""
        from miles_hpc.digest import sums

        if self.layout.workers == 1:  # it holds the bytes as they are; the rows that fill a vocabulary up are zero
            return sums(bucket.pieces(flat))
        return sums([self.layout.part(name, tensor, worker) for worker, name, tensor in self._each(bucket, bucket.views(flat))])

    def digests(self, sums: "Sequence[torch.Tensor]") -> list[dict[str, str]]:
        """Of each worker's tensors, by name, from the sums of all buckets; a GPU is asked once."""
        import torch

        from miles_hpc.digest import combined

        plain, placed = torch.cat(list(sums)).cpu().numpy().view(np.uint64)[self.order].T
        pairs = [np.add.reduceat(of_parts, self.first).tolist() for of_parts in (plain, placed + self.before * plain)]
        found: list[dict[str, str]] = [{} for _ in range(self.layout.workers)]
        for (worker, name, size), *pair in zip(self.tensors, *pairs, strict=True):
            found[worker][name] = combined(size, *pair)
        return found

    def _parts(self, bucket: Bucket) -> Iterator[Part]:
        """In the order of `sums`."""
        import torch

        shapes = [torch.empty(shape, dtype=bucket.kind, device="meta") for shape in bucket.shapes]
        for worker, name, tensor in self._each(bucket, shapes):
            yield Part(worker, *self.layout.place(name), self.layout.part(name, tensor, worker).nbytes)

    def _each(self, bucket: Bucket, tensors: "list[torch.Tensor]") -> "Iterator[tuple[int, str, torch.Tensor]]":
        for worker in range(self.layout.workers):
            for name, tensor in zip(bucket.names, tensors, strict=True):
                yield worker, name, tensor


def different(expected: list[dict[str, str]], held: list[dict[str, str]]) -> list[str]:
    """Engine tensors whose digests are not the expected ones, of all workers."""
    return sorted(
        name if len(expected) == 1 else f"{name} of worker {worker}"
        for worker, digests in enumerate(expected)
        for name, value in digests.items()
        if len(held) != len(expected) or held[worker].get(name) != value
    )
