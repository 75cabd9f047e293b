"""Passes over a rank's samples in micro-batches; where a rank runs out of memory all make the pass again, with smaller ones.

Losses have the denominators of a whole mini-batch, so the second pass gives, bit for bit, what it would have given with the
smaller limit from the start.
"""

import gc
from collections.abc import Callable, Iterable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from miles_hpc import device
from miles_hpc.errors import OutOfMemory
from miles_hpc.train import schedule
from miles_hpc.train.megatron import Groups
from miles_hpc.train.packing import Pack, Sequences, pack


class Passes:
    """What walks through the micro-batches. Every call is collective over the training ranks.

    Args:
        groups: of ranks.
        limit: tokens of a micro-batch (`train.micro_batch_tokens`).
        between: called at every micro-batch; may be collective.
    """

    def __init__(self, groups: Groups, limit: int, between: Callable[[], None]) -> None:
        self.groups, self.limit, self.between = groups, limit, between
        self.lowered: Callable[[int], None] = lambda before: None
        """Called with the limit before, once memory has lowered it."""

    @property
    def tied(self) -> bool:
        """Ranks meet within a micro-batch, so that one that ran out of memory cannot leave it without the others."""
        return self.groups.tensor.size() > 1 or self.groups.expert.size() > 1

    def over(
        self,
        sequences: Sequences,
        shares: list[np.ndarray],
        work: Callable[[Pack], None],
        start: Callable[[], None] = lambda: None,
        sums: Iterable[Tensor] = (),
    ) -> None:
        """Do `work` on each of this rank's micro-batches.

        Args:
            sequences: samples or demonstrations.
            shares: samples of each data-parallel rank.
            work: may add to gradients and to `sums`.
            start: called before each pass, to forget gradients.
            sums: put back before another pass.

        Raises:
            OutOfMemory: in a single sample, or where ranks are `tied`; there the limit is lowered for the next attempt.
        """
        kept = [(total, total.clone()) for total in sums]
        start()
        while not self._pass(sequences, shares, work):
            self._lower(sequences, shares)
            for total, before in kept:
                total.copy_(before)
            start()

    def _pass(self, sequences: Sequences, shares: list[np.ndarray], work: Callable[[Pack], None]) -> bool:
        """True if no rank ran out of memory. One that did still comes along, since the others meet it in `between`."""
        fits = True
        for indices in schedule.rank_micro_batches(shares, _lengths(sequences), self.limit, self.groups.data.rank()):
            self.between()
            fits = fits and self._fits(sequences, shares, indices, work)
        if self.tied:
            return fits
        least = torch.tensor(float(fits), device=device.device())
        dist.all_reduce(least, dist.ReduceOp.MIN, self.groups.data)
        return bool(least)

    def _fits(self, sequences: Sequences, shares: list[np.ndarray], indices: np.ndarray, work: Callable[[Pack], None]) -> bool:
        try:
            work(pack(sequences, indices, self.groups.tensor.size(), device.device()))
        except torch.OutOfMemoryError as error:
            if not self.tied:
                return False
            self._lower(sequences, shares)
            hint = f"nothing: the next attempt trains in micro-batches of {self.limit} tokens (train.micro_batch_tokens)"
            raise _out_of_memory("a micro-batch whose layers are split over ranks", hint) from error
        return True

    def _lower(self, sequences: Sequences, shares: list[np.ndarray]) -> None:
        """Halve it until the largest micro-batch is split; not below the longest sample, which cannot be."""
        before, lengths = self.limit, _lengths(sequences)
        largest = max(lengths[b].sum() for share in shares for b in schedule.micro_batches(share, lengths, before))
        longest = int(lengths[np.concatenate(shares)].max())
        limit = before // 2
        while limit >= largest:
            limit //= 2
        limit = max(limit, longest)
        if limit >= before:
            hint = "lower rollout.max_new_tokens or model.context_length, or split the model: train.tensor_parallel"
            raise _out_of_memory(f"a micro-batch of {before} tokens, and a single sample has {longest}", hint)
        self.limit = limit
        self.lowered(before)
        gc.collect()  # frames of the exception may lie in cycles
        torch.cuda.empty_cache()


def _out_of_memory(where: str, next_step: str) -> OutOfMemory:
    return OutOfMemory(f"out of memory in {where}", where=f"train rank {dist.get_rank()}", next_step=next_step)


def _lengths(sequences: Sequences) -> np.ndarray:
    return np.diff(sequences.offsets)
