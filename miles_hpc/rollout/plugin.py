"""The SGLang plugin (entry-point group `sglang.srt.plugins`): SGLang loads it in each of its processes and calls `register`."""

import os
import sys
import traceback
from pathlib import Path
from typing import Any

ENGINE = "MILES_HPC_ENGINE"
"""Environment variable set by our engine host; other programs that use SGLang in this environment are left alone."""
NUMERICS = "MILES_HPC_NUMERICS"
"""Environment variable with the run's `run.numerics`."""
TRACE = "MILES_HPC_TRACE"
"""Environment variable with the folder that takes every forward's results, see `trace.py`."""
EXACT_MODELS = "miles_hpc.rollout.models"
"""Package of the model classes of exact numerics."""


def register() -> None:
    """Install sampler, loading of weights and attention of exact numerics, and what SGLang asks of CUDA where there is none.

    SGLang logs a failing plugin and goes on without it; samples would then silently depend on the batch. So a failure here
    ends the process.
    """
    if not os.environ.get(ENGINE):
        return
    try:
        _register()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(70)


def _register() -> None:
    import torch
    from sglang.srt.layers.sampler import register_sampler_backend
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    from miles_hpc.rollout import loading
    from miles_hpc.rollout.sampler import ExactSampler, KeyedSampler, carry_seeds

    exact = os.environ.get(NUMERICS) == "exact"
    # SGLang forces the backend name "pytorch" on a CPU; custom factories win over built-in names.
    register_sampler_backend("pytorch", ExactSampler if exact else KeyedSampler)
    if exact:
        _exact(torch)
    if folder := os.environ.get(TRACE):
        from miles_hpc.rollout import trace

        trace.install(Path(folder))
    SamplingBatchInfo.adjusted_from_schedule_batch = carry_seeds
    loading.install()
    if not torch.cuda.is_available():
        _without_cuda(torch)


def _exact(torch: Any) -> None:
    """Our attention under a name that SGLang knows: for any other it takes Triton bookkeeping kernels, also on a CPU."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from miles_hpc.rollout import attention

    if torch.cuda.is_available():
        register_attention_backend("fa3")(attention.flash)
    else:
        register_attention_backend("torch_native")(attention.ExactAttention)


def _without_cuda(torch: Any) -> None:
    from sglang.srt.platforms.cpu import CpuSRTPlatform
    from sglang.srt.state_capturer import base

    # A garbage collection of the whole heap at every flush of the cache: 0.37 s of a weight sync of 0.43 s.
    CpuSRTPlatform.empty_cache = lambda _: None
    base.BaseHostCache.__init__ = _pageable_cache
    torch.cuda.synchronize = lambda *_: None  # utils/weight_checker.py calls it whatever the device


def _pageable_cache(self: Any, num_tokens: int, num_layers: int, topk_size: int, name: str) -> None:
    """`BaseHostCache.__init__` without pinned memory, which needs CUDA."""
    import torch

    self.buffer = torch.zeros((num_tokens, num_layers, topk_size), dtype=torch.int32)
    self.num_tokens, self.num_layers, self.topk_size, self.name = num_tokens, num_layers, topk_size, name
