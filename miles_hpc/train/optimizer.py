"""megatron-core's distributed AdamW, with three cures for resuming it where neither Transformer Engine nor apex is installed.

The cures concern `megatron/core/optimizer/distrib_optimizer.py` of 0.19.2; `tests/train/test_optimizer.py` fails without each.
"""

import math
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from miles_hpc.errors import Diverged


class AdamW(NamedTuple):
    """Hyperparameters of one optimizer step."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    clip_grad: float = 1.0


def build(ddp: Any, dtype: torch.dtype) -> Any:
    """The optimizer of a wrapped model; its state is sharded over data-parallel ranks, in float32."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam",
        lr=0.0,
        weight_decay=1.0,  # groups keep a multiplier of it; `set_hyperparameters` sets the value
        use_distributed_optimizer=True,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )
    optimizer = get_megatron_optimizer(config, [ddp])
    for part in parts(optimizer):
        _accept_missing_step(part)
    reset(optimizer)
    return optimizer


def set_hyperparameters(optimizer: Any, values: AdamW) -> None:
    """Set them for the next step; norms and biases have no weight decay."""
    for part in parts(optimizer):
        part.config.clip_grad = values.clip_grad
        for group in part.optimizer.param_groups:
            group["lr"] = values.lr
            group["betas"] = (values.beta1, values.beta2)
            group["weight_decay"] = values.weight_decay * group["wd_mult"]


def zero(ddp: Any, optimizer: Any) -> None:
    """Forget gradients."""
    ddp.zero_grad_buffer()
    optimizer.zero_grad()


def step(ddp: Any, optimizer: Any) -> float:
    """Sum gradients over ranks, clip, update. Returns the gradient norm before the clip.

    Raises:
        Diverged: the norm is not finite (a loss that is not finite shows here too, on all ranks alike).
    """
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads([ddp])
    _, norm, _ = optimizer.step()
    if norm is None or not math.isfinite(norm):
        raise Diverged(
            f"gradient norm is {norm}",
            where=f"train rank {dist.get_rank()}",
            next_step="resume from the last checkpoint with a lower train.lr",
        )
    return float(norm)


def reset(optimizer: Any) -> None:
    """Forget all moments and step counters.

    Cure 1: the state is filled in at once instead of at the first step. Saving asserts on an empty state, and megatron's own
    filling before a load leaves out `step`, which then ends in KeyError.
    """
    for part in parts(optimizer):
        part.optimizer.state.clear()
        for group in part.optimizer.param_groups:
            for param in group["params"]:
                part.optimizer.state[param] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }


def load_state_dict(optimizer: Any, state: dict[str, Any]) -> None:
    """Restore a state loaded by `megatron.core.dist_checkpointing`.

    Cure 3: megatron gives all parameters one and the same step tensor. AdamW would count it up once per parameter in every
    step, silently, and the bias correction of all steps after a resume would be wrong.
    """
    optimizer.load_state_dict(state)
    for part in parts(optimizer):
        for values in part.optimizer.state.values():
            values["step"] = values["step"].clone()


def parts(optimizer: Any) -> list[Any]:
    """megatron keeps one optimizer for dense and one for expert parameters."""
    return [part for part in optimizer.chained_optimizers if not getattr(part, "is_stub_optimizer", False)]


def _accept_missing_step(part: Any) -> None:
    """Cure 2: on load, the tensors of a parameter come without `step` (it is kept once for all), but megatron looks it up."""
    original = part._set_main_param_and_optimizer_states

    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        original(model_param, {"step": None, **tensors})

    part._set_main_param_and_optimizer_states = MethodType(set_states, part)
