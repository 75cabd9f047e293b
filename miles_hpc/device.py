"""The device of this process, and a stand-in for the part of `torch.cuda` that megatron-core touches where there is no GPU.

megatron-core 0.19.2 runs on CPU, but asks `torch.cuda` for devices, streams, random states and type names on the way. `install`
answers these questions for the CPU. It changes nothing where CUDA is available, and `torch.cuda.is_available()` stays False.
Processes that run SGLang must not install it.
"""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._device import _device_constructors

CPU = torch.device("cpu")
FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "as_tensor", "empty_strided")
FACTORIES_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like")
# A library's operators go when it is collected.
_libraries: list[torch.library.Library] = []


def backend() -> str:
    """Name of the `torch.distributed` backend: nccl on GPUs, else gloo."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def device() -> torch.device:
    """This process's device."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU


def collect_shared() -> None:
    """Give memory back to the GPU that was shared to other processes by CUDA IPC and that they no longer use."""
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def free() -> float:
    """Bytes of this process's GPU that nobody holds; no end of them on a CPU."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else float("inf")


def others() -> int:
    """Bytes of this process's GPU that others hold (contexts included)."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def memory(when: str) -> dict[str, float]:
    """GiB of this process's GPU that it holds, and that others hold (contexts included), as figures; nothing on a CPU."""
    if not torch.cuda.is_available():
        return {}
    return {f"memory/{when}_own_gib": torch.cuda.memory_reserved() / 2**30, f"memory/{when}_others_gib": others() / 2**30}


def without_workspace() -> None:
    """Take cuBLAS's workspace away, and with it its split-K kernels, whose order of addition depends on the batch.

    Must come before the first use of CUDA in a process; children inherit it. Found with CUDA 13.0 (docs/numerics.md).
    """
    os.environ["CUBLASLT_WORKSPACE_SIZE"] = "0"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":0:0"


def install() -> bool:
    """Put the stand-in in place, once.

    Returns:
        True if it is in place, False where CUDA is available and nothing was changed.
    """
    if torch.cuda.is_available():
        return False
    if not getattr(torch.cuda, "is_stand_in", False):
        _devices()
        _streams()
        _random()
        _tensors()
        # megatron marks functions for torch.compile: on a CPU seconds of imports, then a C++ compiler, for nothing.
        _set("compile", _as_it_is, torch)
        torch.cuda.is_stand_in = True  # type: ignore[attr-defined]
    return True


def _as_it_is(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    """`torch.compile`, also as a decorator with options."""
    return function or _as_it_is


def install_dispatcher() -> None:
    """Let the all-to-all token dispatcher run on CPU; call after megatron-core is imported.

    It turns its split sizes into lists only if they are CUDA tensors, and `all_to_all_single` refuses tensors.
    """
    if torch.cuda.is_available():
        return
    from megatron.core.transformer.moe import token_dispatcher

    token_dispatcher.maybe_move_tensor_to_cpu = _to_numpy


def define_torchvision_operators() -> None:
    """Let transformers import torchvision on CPU; call before a configuration or model is loaded.

    PyPI's torchvision is a CUDA build: its Python part refers to operators that only its CUDA library would define.
    """
    if torch.version.cuda is not None or _libraries:
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)


def _to_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


class _Stream:
    """In place of `torch.cuda.Stream`: CPU work is done when the call returns, so there is nothing to wait for."""

    cuda_stream = 0
    stream_id = 0
    device = CPU

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def wait_stream(self, *args: Any) -> None: ...

    def wait_event(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        return event or _Event()

    def query(self) -> bool:
        return True

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *error: Any) -> None: ...


class _Event:
    """In place of `torch.cuda.Event`: wall-clock time, because megatron's timers subtract events."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.seconds = 0.0

    def record(self, *args: Any) -> None:
        self.seconds = time.perf_counter()

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "_Event") -> float:
        """Milliseconds, as CUDA events report."""
        return (other.seconds - self.seconds) * 1e3


@contextlib.contextmanager
def _in_stream(stream: Any) -> Iterator[None]:
    yield


def _returning(value: Any) -> Callable[..., Any]:
    return lambda *args, **options: value


def _set(names: str, value: Any, owner: Any = torch.cuda) -> None:
    for name in names.split():
        setattr(owner, name, value)


def _fill(names: str, value: Any, owner: Any = torch.cuda) -> None:
    """One function per name: torch.compile refuses one object under two names."""
    for name in names.split():
        setattr(owner, name, _returning(value))


def _devices() -> None:
    """Layers and buffers are made with `device=torch.cuda.current_device()`; the checkpoint writer divides by the count."""
    _fill("current_device", CPU)
    _fill("device_count", 1)
    _fill("get_device_capability", (0, 0))
    _fill("set_device empty_cache synchronize reset_peak_memory_stats", None)
    _fill("memory_allocated memory_reserved max_memory_allocated max_memory_reserved", 0)


def _streams() -> None:
    """Gradient buffers, dispatchers and the checkpoint writer order their work by streams."""
    stream = _Stream()
    _set("Stream", _Stream)
    _set("Event", _Event)
    _fill("current_stream default_stream", stream)
    _set("stream", _in_stream)
    _fill("is_current_stream_capturing", False)


def _random() -> None:
    """The tensor-parallel seeds are kept in the CUDA generator. `torch.manual_seed` calls `torch.cuda.manual_seed_all`, so
    neither may call back."""
    _set("manual_seed", lambda seed: torch.default_generator.manual_seed(int(seed)))
    _fill("manual_seed_all", None)
    for owner in (torch.cuda, torch.cuda.random):
        _set("get_rng_state", _get_rng_state, owner)
        _set("set_rng_state", _set_rng_state, owner)


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, device: Any = "cuda") -> None:
    torch.set_rng_state(state)


def _tensors() -> None:
    """`.cuda()` and `device="cuda"` literals; pinned memory; and `Tensor.type()`, which the optimizers compare with
    'torch.cuda.FloatTensor'."""
    _set("cuda", lambda self, *a, **k: self, torch.Tensor)
    _set("pin_memory", lambda self, *a, **k: self, torch.Tensor)
    _fill("record_stream", None, torch.Tensor)
    _set("cuda", lambda self, *a, **k: self, torch.nn.Module)
    _device_constructors()  # `with torch.device(...)` looks them up once, and must find the originals
    for name in (*FACTORIES, *FACTORIES_LIKE):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.to = _on_cpu(torch.Tensor.to)  # type: ignore[method-assign]
    torch.Tensor.type = _cuda_type(torch.Tensor.type)  # type: ignore[method-assign,assignment]


def _is_cuda(where: Any) -> bool:
    return (isinstance(where, torch.device) and where.type == "cuda") or (isinstance(where, str) and where.startswith("cuda"))


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        options.pop("pin_memory", None)
        if _is_cuda(options.get("device")):
            options["device"] = CPU
        return function(*(CPU if _is_cuda(a) else a for a in args), **options)

    return call


def _cuda_type(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        if args or options:
            return function(self, *args, **options)
        return function(self).replace("torch.", "torch.cuda.", 1)

    return call
