"""Everything a training step depends on, to and from a folder, by megatron-core's distributed checkpointing.

The format reshards: a run may resume with other numbers of data- or tensor-parallel ranks, not with another expert parallelism.
"""

import json
import queue
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from miles_hpc.errors import CheckpointError
from miles_hpc.train import optimizer as optimizers
from miles_hpc.train.critic import Critic
from miles_hpc.train.megatron import Policy

# 'fully_sharded_model_space', the default, raises for the distributed optimizer of 0.19.2.
FORMAT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}


class Held(NamedTuple):
    """Models and optimizers that change or that cannot be had again."""

    policy: Policy
    optimizer: Any
    reference: Policy | None
    critic: Critic | None


def save(folder: Path, held: Held, extra: dict[str, Any]) -> None:
    """Write weights, optimizer, random states and `extra` (JSON-able); collective."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # Megatron would start a process for the queue of its writers, which outlives a rank that is killed. They are threads here.
    filesystem_async._results_queue = queue.Queue()
    common = {
        "extra": json.dumps(extra),
        "random": _random_states(),
        "expert_parallel": held.policy.groups.expert.size(),
        "has_reference": held.reference is not None,
        "has_critic": held.critic is not None,
    }
    # 'mcore' is megatron's own writer; the default asks for the package nvidia-resiliency-ext.
    dist_checkpointing.save(_sharded(held, False) | common, str(folder), async_strategy="mcore")


def read_common(folder: Path) -> dict[str, Any]:
    """The part of a checkpoint that is the same for all ranks: `extra`, `random`, `expert_parallel`, `has_...`."""
    from megatron.core import dist_checkpointing

    return dist_checkpointing.load_common_state_dict(str(folder))


def load(folder: Path, held: Held) -> dict[str, Any]:
    """Restore what `save` wrote, in place; collective. Returns `extra`.

    Raises:
        CheckpointError: it was saved with another expert parallelism.
    """
    from megatron.core import dist_checkpointing

    common = read_common(folder)
    _check_experts(common["expert_parallel"], held.policy.groups.expert.size(), folder)
    loaded = dist_checkpointing.load(_sharded(held, True), str(folder))
    held.policy.module.load_state_dict(loaded["model"])
    optimizers.load_state_dict(held.optimizer, loaded["optimizer"])
    if held.reference:
        held.reference.module.load_state_dict(loaded["reference"])
    if held.critic:
        held.critic.model.module.load_state_dict(loaded["critic"])
        optimizers.load_state_dict(held.critic.optimizer, loaded["critic_optimizer"])
    _restore_random_states(common["random"])
    return json.loads(common["extra"])


def _sharded(held: Held, loading: bool) -> dict[str, Any]:
    model = _sharded_model(held.policy)
    state = {"model": model, "optimizer": _sharded_optimizer(held.optimizer, model, loading)}
    if held.reference:
        state["reference"] = _prefixed(_sharded_model(held.reference), "reference.")
    if held.critic:
        model = _sharded_model(held.critic.model)
        values = _sharded_optimizer(held.critic.optimizer, model, loading)
        state |= {"critic": _prefixed(model, "critic."), "critic_optimizer": _prefixed(values, "critic.")}
    return state


def _sharded_model(policy: Policy) -> dict[str, Any]:
    module: Any = policy.module
    return module.sharded_state_dict(metadata=dict(FORMAT))  # megatron writes its groups into it


def _sharded_optimizer(optimizer: Any, model: dict[str, Any], loading: bool) -> dict[str, Any]:
    return optimizer.sharded_state_dict(model, is_loading=loading, metadata=dict(FORMAT))


def _prefixed(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The tensors of a further model under keys of their own."""
    from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

    add_prefix_for_sharding(state, prefix)
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
