"""Weights of a sync into the engine's tensors, in each of its workers: what `plugin.py` puts in the place of SGLang's way.

SGLang's own loaders take 50 microseconds for each checkpoint tensor, of which a MoE has thousands, and its digests ask the GPU
once for each engine tensor. Here a bucket is one copy and a check one question. The digests say whether the places are right.
"""

import os
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from miles_hpc.digest import digests
from miles_hpc.layout import Layout

Named = Iterable[tuple[str, Tensor]]


class Loader:
    """Copies checkpoint tensors to their places.

    Args:
        model: SGLang's, in this worker.
        worker: number of this worker.
    """

    def __init__(self, model: torch.nn.Module, layout: Layout, worker: int) -> None:
        self.tensors, self.layout, self.worker = dict(model.named_parameters()), layout, worker
        self.places: dict[str, Tensor] = {}
        """By checkpoint name; they stay where they are, also over a sleep."""

    @torch.no_grad()
    def __call__(self, named: Named) -> None:
        """Raises: KeyError: the engine has no such tensor. RuntimeError: one of another shape."""
        parts = [(name, self.layout.part(name, tensor, self.worker)) for name, tensor in named]
        torch._foreach_copy_([self._place(name, part) for name, part in parts], [part for _, part in parts])

    def _place(self, name: str, part: Tensor) -> Tensor:
        if name not in self.places:
            whole = self.tensors[self.layout.place(name)[0]].data.view(-1)
            start = self.layout.start(name, part.numel(), len(whole))
            self.places[name] = whole[start : start + part.numel()].view(part.shape)
        return self.places[name]


def install() -> None:
    """In this process of the engine."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.utils.weight_checker import WeightChecker

    WeightUpdater._update_weights_from_flattened_bucket = _take
    WeightUpdater._update_bucketed_weights_from_distributed = _receive
    WeightChecker._compute_checksum = _checksums


def views(flat: Tensor, shapes: Sequence[Sequence[int]], kinds: Sequence[torch.dtype]) -> list[Tensor]:
    """The tensors that lie in [bytes] one after the other."""
    sizes = [torch.Size(shape).numel() * kind.itemsize for shape, kind in zip(shapes, kinds, strict=True)]
    parts = flat.split(sizes)
    return [part.view(kind).view(tuple(shape)) for part, kind, shape in zip(parts, kinds, shapes, strict=True)]


def _take(self: Any, flattened_tensor_bucket_dict: dict[str, Any]) -> tuple[bool, str]:
    """A bucket that lies in another process's memory."""
    flat, metadata = flattened_tensor_bucket_dict["flattened_tensor"], flattened_tensor_bucket_dict["metadata"]
    tensors = views(flat, [m.shape for m in metadata], [m.dtype for m in metadata])
    return _load(self, zip([m.name for m in metadata], tensors, strict=True))


def _receive(self: Any, names: list[str], dtypes: list[str], shapes: list[list[int]], group_name: str) -> tuple[bool, str]:
    """A bucket that is broadcast."""
    kinds = [getattr(torch, kind) for kind in dtypes]
    size = sum(torch.Size(shape).numel() * kind.itemsize for shape, kind in zip(shapes, kinds, strict=True))
    flat = torch.empty(size, dtype=torch.uint8, device=self.device)
    try:
        torch.distributed.broadcast(flat, src=0, group=self._model_update_group[group_name])
    except Exception as error:  # of whatever kind: the group is broken, the engine is not
        return False, f"{type(error).__name__}: {error}"
    return _load(self, zip(names, views(flat, shapes, kinds), strict=True))


def _load(self: Any, named: Named) -> tuple[bool, str]:
    try:
        _loader(self.get_model(), self.tp_rank)(named)
    except (KeyError, RuntimeError) as error:
        return False, f"weights that do not fit the engine's: {error}"
    return True, ""


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
