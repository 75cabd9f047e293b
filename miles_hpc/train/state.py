"""Everything a training step depends on, to and from a folder, by megatron-core's distributed checkpointing.

The format reshards: a run may resume with other numbers of data- or tensor-parallel ranks, not with another expert parallelism.
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from miles_hpc.errors import CheckpointError
from miles_hpc.train import optimizer as optimizers
from miles_hpc.train.megatron import Policy

# 'fully_sharded_model_space', the default, raises for the distributed optimizer of 0.19.2.
FORMAT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}


def save(folder: Path, policy: Policy, optimizer: Any, reference: Policy | None, extra: dict[str, Any]) -> None:
    """Write weights, optimizer, random states and `extra` (JSON-able); collective."""
    from megatron.core import dist_checkpointing

    common = {
        "extra": json.dumps(extra),
        "random": _random_states(),
        "expert_parallel": policy.groups.expert.size(),
        "has_reference": reference is not None,
    }
    # 'mcore' is megatron's own writer; the default asks for the package nvidia-resiliency-ext.
    dist_checkpointing.save(_sharded(policy, optimizer, reference, False) | common, str(folder), async_strategy="mcore")


def read_common(folder: Path) -> dict[str, Any]:
    """The part of a checkpoint that is the same for all ranks: `extra`, `random`, `expert_parallel`, `has_reference`."""
    from megatron.core import dist_checkpointing

    return dist_checkpointing.load_common_state_dict(str(folder))


def load(folder: Path, policy: Policy, optimizer: Any, reference: Policy | None) -> dict[str, Any]:
    """Restore what `save` wrote, in place; collective. Returns `extra`.

    Raises:
        CheckpointError: it was saved with another expert parallelism.
    """
    from megatron.core import dist_checkpointing

    common = read_common(folder)
    _check_experts(common["expert_parallel"], policy.groups.expert.size(), folder)
    loaded = dist_checkpointing.load(_sharded(policy, optimizer, reference, True), str(folder))
    policy.module.load_state_dict(loaded["model"])
    optimizers.load_state_dict(optimizer, loaded["optimizer"])
    if reference:
        reference.module.load_state_dict(loaded["reference"])
    _restore_random_states(common["random"])
    return json.loads(common["extra"])


def _sharded(policy: Policy, optimizer: Any, reference: Policy | None, loading: bool) -> dict[str, Any]:
    metadata = dict(FORMAT)  # megatron writes its groups into it
    module: Any = policy.module
    model = module.sharded_state_dict(metadata=metadata)
    state = {"model": model, "optimizer": optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)}
    if reference:
        module = reference.module
        state["reference"] = _prefixed(module.sharded_state_dict(metadata=metadata))
    return state


def _prefixed(state: dict[str, Any]) -> dict[str, Any]:
    """The reference's tensors under keys of their own."""
    from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

    add_prefix_for_sharding(state, "reference.")
    return state


def _check_experts(saved: int, current: int, folder: Path) -> None:
    # megatron keeps one optimizer with one expert-parallel rank and two with more; their states do not convert.
    if saved != current:
        raise CheckpointError(
            f"saved with train.expert_parallel = {saved}, cannot be read with {current}",
            where=str(folder),
            next_step=f"resume with train.expert_parallel = {saved}",
        )


def _random_states() -> dict[str, Any]:
    """Of the first rank. No step draws from them (shuffles are keyed by seed and step); edges of users may."""
    return {"torch": torch.random.get_rng_state(), "numpy": np.random.get_state(legacy=True), "python": random.getstate()}


def _restore_random_states(states: dict[str, Any]) -> None:
    torch.random.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
