"""Weights of a sync into the engine's tensors, in each of its workers: what `plugin.py` puts in the place of SGLang's way.

SGLang's own loaders take 50 microseconds for each checkpoint tensor, of which a MoE has thousands, and its digests ask the GPU
once for each engine tensor. Here a bucket is one copy and a check one question. The digests say whether the places are right.
"""

import os
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from miles_hpc.buckets import Bucket
from miles_hpc.digest import digests
from miles_hpc.layout import Layout


class Loader:
    """Copies checkpoint tensors to their places.

    Args:
        model: SGLang's, in this worker.
        worker: number of this worker.
    """

    def __init__(self, model: torch.nn.Module, layout: Layout, worker: int) -> None:
        self.tensors, self.layout, self.worker = dict(model.named_parameters()), layout, worker
        self.places: dict[Bucket, list[Tensor]] = {}
        """They stay where they are, also over a sleep."""

    @torch.no_grad()
    def __call__(self, bucket: Bucket, flat: Tensor) -> None:
        """Raises: KeyError: the engine has no such tensor. RuntimeError: one of another shape."""
        parts = [self.layout.part(n, t, self.worker) for n, t in zip(bucket.names, bucket.views(flat), strict=True)]
        if bucket not in self.places:
            self.places[bucket] = [self._place(name, part) for name, part in zip(bucket.names, parts, strict=True)]
        torch._foreach_copy_(self.places[bucket], parts)

    def _place(self, name: str, part: Tensor) -> Tensor:
        whole = self.tensors[self.layout.place(name)[0]].data.view(-1)
        start = self.layout.start(name, part.numel(), len(whole))
        return whole[start : start + part.numel()].view(part.shape)


def install() -> None:
    """In this process of the engine."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.utils.weight_checker import WeightChecker

    WeightUpdater._update_weights_from_flattened_bucket = _take
    WeightUpdater._update_bucketed_weights_from_distributed = _receive
    WeightChecker._compute_checksum = _checksums


def _take(self: Any, flattened_tensor_bucket_dict: dict[str, Any]) -> tuple[bool, str]:
    """A bucket that lies in another process's memory."""
    shared = flattened_tensor_bucket_dict
    return _load(self, [(_bucket(shared["metadata"]), shared["flattened_tensor"])])


def _receive(self: Any, names: list[str], dtypes: list[str], shapes: list[list[int]], group_name: str) -> tuple[bool, str]:
    """Buckets that are broadcast one after the other; `names` are their texts."""
    return _load(self, _broadcasts(list(map(_bucket, names)), self._model_update_group[group_name], self.device))


def _broadcasts(buckets: list[Bucket], group: Any, device: str) -> Iterator[tuple[Bucket, Tensor]]:
    """Each with its bytes; the next one is on its way before this one is used."""
    started = (_start(bucket, group, device) for bucket in buckets)
    coming = next(started, None)
    while coming:
        (bucket, flat, work), coming = coming, next(started, None)
        work.wait()
        yield bucket, flat


def _start(bucket: Bucket, group: Any, device: str) -> tuple[Bucket, Tensor, Any]:
    flat = torch.empty(bucket.size, dtype=torch.uint8, device=device)
    return bucket, flat, dist.broadcast(flat, src=0, group=group, async_op=True)


def _load(self: Any, arriving: Iterable[tuple[Bucket, Tensor]]) -> tuple[bool, str]:
    try:
        loader = _loader(self.get_model(), self.tp_rank)
        for bucket, flat in arriving:
            loader(bucket, flat)
    except Exception as error:  # of whatever kind: the group is broken, or the weights do not fit; the engine is well
        return False, f"weights were not loaded: {type(error).__name__}: {error}"
    return True, ""


@cache
def _bucket(text: str) -> Bucket:
    """Read once: it is the same in every sync."""
    return Bucket.read(text)


@cache
def _loader(model: torch.nn.Module, worker: int) -> Loader:
    from sglang.srt.distributed import get_tensor_model_parallel_world_size

    from miles_hpc.rollout.plugin import NUMERICS

    layout = Layout.of(os.environ[NUMERICS], get_tensor_model_parallel_world_size(), model.config)
    return Loader(model, layout, worker)


def _checksums(self: Any) -> dict[str, Any]:
    """Of all parameters at once, in the form of SGLang's."""
    tensors = dict(self._get_model().named_parameters())
    found = dict(zip(tensors, digests([tensor.data for tensor in tensors.values()]), strict=True))
    return {"checksums": found, "per_gpu_checksum": "", "parallelism_info": self._parallelism_info().model_dump()}
