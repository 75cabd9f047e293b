"""Digests of an engine's tensors, which are joined checkpoint tensors (`layout.py`), as the sender expects them."""

from collections import defaultdict
from typing import TYPE_CHECKING

from miles_hpc.buckets import BUCKET_MIB
from miles_hpc.layout import Layout

if TYPE_CHECKING:
    import torch


class Fused:
    """Takes a checkpoint's tensors, in any order, and lets go of them bucket by bucket."""

    def __init__(self, layout: Layout | None = None) -> None:
        self.layout = layout or Layout()
        self.parts: list[tuple[int, str, tuple[int, int], int]] = []
        """Worker, engine tensor, place in it, bytes; in the order of `sums`."""
        self.sums: list[torch.Tensor] = []
        self.waiting: list[torch.Tensor] = []
        self.size = 0
        """Bytes that wait."""

    def add(self, name: str, tensor: "torch.Tensor") -> None:
        """Take a checkpoint tensor by its name."""
        engine_name, place = self.layout.place(name)
        for worker in range(self.layout.workers):
            part = self.layout.part(name, tensor, worker)
            self.parts.append((worker, engine_name, place, part.nbytes))
            self.waiting.append(part)
            self.size += part.nbytes
        if self.size >= BUCKET_MIB[tensor.device.type] << 20:
            self._count()

    def digests(self) -> list[dict[str, str]]:
        """Of each worker's tensors, by engine tensor name; a GPU is asked once, since an answer takes longer than a sum."""
        import torch

        from miles_hpc.digest import Sums

        self._count()
        joined: dict[tuple[int, str], list[tuple[tuple[int, int], Sums]]] = defaultdict(list)
        pairs = torch.cat(self.sums).tolist() if self.sums else []
        for (worker, name, place, size), pair in zip(self.parts, pairs, strict=True):
            joined[worker, name].append((place, Sums(size, *pair)))
        found: list[dict[str, str]] = [{} for _ in range(self.layout.workers)]
        for (worker, name), parts in joined.items():
            ordered = sorted(parts, key=lambda part: part[0])
            found[worker][name] = sum((part for _, part in ordered), Sums(0, 0, 0)).digest
        return found

    def _count(self) -> None:
        from miles_hpc.digest import sums

        if self.waiting:
            self.sums.append(sums(self.waiting))
        self.waiting, self.size = [], 0


def different(expected: list[dict[str, str]], held: list[dict[str, str]]) -> list[str]:
    """Engine tensors whose digests are not the expected ones, of all workers."""
    return sorted(
        name if len(expected) == 1 else f"{name} of worker {worker}"
        for worker, digests in enumerate(expected)
        for name, value in digests.items()
        if len(held) != len(expected) or held[worker].get(name) != value
    )
