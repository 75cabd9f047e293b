"""What a training rank takes off its GPU while an engine has it, and how it comes back.

Storages are emptied and filled again under the tensors that use them, so that every view and every reference stays what it was.
"""

from collections.abc import Iterator
from typing import Any

import torch


class Sleeper:
    """Gradients are given up, since every mini-batch begins with zeros; the optimizer's state waits in pinned host memory.

    Args:
        ddp: megatron's wrapper of the model.
        optimizer: megatron's, of that model.
        offload: whether the optimizer's state goes too.
    """

    def __init__(self, ddp: Any, optimizer: Any, offload: bool) -> None:
        self.ddp, self.optimizer, self.offload = ddp, optimizer, offload
        self.asleep = False
        self.storages: list[torch.UntypedStorage] = []
        self.sizes: list[int] = []
        self.host = torch.empty(0, dtype=torch.uint8)
        """[bytes] of all storages; kept, since pinning memory takes longer than copying."""

    def sleep(self, give_back: bool = True) -> None:
        """Between steps; the model's weights stay. What is free is given back to the GPU, or waits in torch's cache."""
        if self.asleep:
            return
        self.optimizer.zero_grad()
        if self.offload:
            self._copy_out()
        self.ddp.offload_grad_buffers(empty_cache=give_back)
        self.asleep = True

    def wake(self) -> None:
        """Everything where it was, gradients zero."""
        if not self.asleep:
            return
        self.ddp.restore_grad_buffers()
        if self.offload:
            self._copy_back()
        self.asleep = False

    def _copy_out(self) -> None:
        self.storages = list(self._storages())
        self.sizes = [storage.nbytes() for storage in self.storages]
        if not len(self.host):
            self.host = _pinned(sum(self.sizes))
        for storage, copy in self._copies():
            copy.copy_(_bytes(storage), non_blocking=True)
        torch.cuda.synchronize()
        for storage in self.storages:
            storage.resize_(0)

    def _copy_back(self) -> None:
        for storage, copy in self._copies():
            storage.resize_(len(copy))
            _bytes(storage).copy_(copy, non_blocking=True)
        torch.cuda.synchronize()

    def _copies(self) -> Iterator[tuple[torch.UntypedStorage, torch.Tensor]]:
        """Each storage and its place on the host."""
        return zip(self.storages, self.host.split(self.sizes), strict=True)

    def _storages(self) -> Iterator[torch.UntypedStorage]:
        """Of all the optimizer's tensors, each once, but those that are the model's own (float32 weights)."""
        here = next(self.ddp.parameters()).device
        seen = {param.untyped_storage().data_ptr() for param in self.ddp.parameters()}
        for tensor in _tensors(self.optimizer):
            storage = tensor.untyped_storage()
            if tensor.device == here and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage


def _tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    from miles_hpc.train.optimizer import parts

    for part in parts(optimizer):
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for values in part.optimizer.state.values():
            yield from (value for value in values.values() if torch.is_tensor(value))


def _pinned(size: int) -> torch.Tensor:
    """[size] bytes; torch's own pinned memory comes in powers of two."""
    memory = torch.empty(size, dtype=torch.uint8)
    if torch.cuda.is_available():
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0))
    return memory


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
