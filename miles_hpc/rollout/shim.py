"""Import shim for SGLang on a CPU: `sgl_kernel`'s bookkeeping functions in plain torch, torchvision's missing operators.

PyPI has no CPU build of `sgl_kernel`. What SGLang imports of it unconditionally is allocation bookkeeping (no model
mathematics); without AMX it computes with its own torch layers. `install` must run before sglang is imported, in spawned
children too.
"""

import os
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

import torch

from miles_hpc.device import define_torchvision_operators
from miles_hpc.rollout.plugin import ENGINE

_UNSUPPORTED = (
    "copy_all_layer_kv_cache_cpu",
    "rotate_input_ids_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "assign_draft_cache_locs_contiguous_cpu",
    "build_tree_kernel_efficient_cpu",
    "verify_tree_greedy_cpu",
)


def install() -> None:
    """Make `import sglang` work without CUDA; without CUDA in place of the CUDA-only packages."""
    if os.environ.get(ENGINE):
        # With megatron importable, accelerate loads it: seconds in each of the engine's processes, for nothing.
        sys.modules["megatron"] = None  # type: ignore[assignment]
    if torch.cuda.is_available() or "sgl_kernel" in sys.modules:
        return
    sys.modules["sgl_kernel"] = _module()
    define_torchvision_operators()


def _module() -> types.ModuleType:
    module: Any = types.ModuleType("sgl_kernel")
    module.__version__ = "0+miles_hpc.shim"
    module.__path__ = []
    module.__spec__ = ModuleSpec("sgl_kernel", None, is_package=True)
    for name in _UNSUPPORTED:
        setattr(module, name, _unsupported(name))
    module.assign_req_to_token_pool_cpu = assign_req_to_token_pool_cpu
    module.assign_extend_cache_locs_cpu = assign_extend_cache_locs_cpu
    return module


def _unsupported(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} needs the CUDA build of sgl_kernel (speculative decoding on a CPU)")

    return refuse


def assign_req_to_token_pool_cpu(rows, table, start, end, out, pool_len):
    """Write the newly allocated cache slots `out` into row i of `table` at `[start[i], end[i])`."""
    done = 0
    for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        table[row, first:last] = out[done : done + last - first].to(table.dtype)
        done += last - first


def assign_extend_cache_locs_cpu(rows, table, start, end, out, pool_len):
    """Read the cache slots of row i at `[start[i], end[i])` into `out`, one row after the other."""
    done = 0
    for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        out[done : done + last - first] = table[row, first:last].to(out.dtype)
        done += last - first
