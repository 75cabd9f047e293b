"""From a Hugging Face model folder to megatron-core's configuration, and what is refused on the way."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from miles_hpc.device import define_torchvision_operators
from miles_hpc.errors import ModelError
from miles_hpc.sections import ARCHITECTURES
from miles_hpc.train import convert

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def read(folder: Path) -> Any:
    """The transformers configuration of a model folder.

    Raises:
        ModelError: no folder, no readable config.json, or an architecture or option that is not supported.
    """
    from transformers import AutoConfig

    define_torchvision_operators()
    if not (folder / "config.json").is_file():
        raise ModelError("no Hugging Face checkpoint: config.json is missing", where=str(folder))
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers lets through whatever a broken file brings up
        what = f"config.json cannot be read: {error}; supported: {', '.join(ARCHITECTURES)}"
        raise ModelError(what, where=str(folder)) from None
    problem = _unsupported(config)
    if problem:
        raise ModelError(problem, where=str(folder / "config.json"))
    return config


def _unsupported(config: Any) -> str:
    names = config.architectures or []
    if not set(names) & set(ARCHITECTURES):
        return f"architecture {', '.join(names) or config.model_type} is not supported; supported: {', '.join(ARCHITECTURES)}"
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        return "attention_bias and mlp_bias are not supported"
    if getattr(config, "use_sliding_window", False):
        return "use_sliding_window is not supported"
    if config.hidden_act != "silu":
        return f"hidden_act = {config.hidden_act!r} is not supported; supported: silu"
    rope = config.rope_parameters
    if rope.get("rope_type", "default") not in ROPE_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"rope_parameters = {rope} is not supported; supported: whole heads, rope_type {', '.join(ROPE_TYPES)}"
    return ""


def check_parallel(config: Any, tensor_parallel: int, expert_parallel: int) -> None:
    """Refuse a split that the model's sizes do not allow.

    Raises:
        ModelError: heads, key-value heads, MLP width or experts are not divisible.
    """
    sizes = {"num_attention_heads": tensor_parallel, "num_key_value_heads": tensor_parallel}
    if all(convert.is_moe_layer(config, i) for i in range(config.num_hidden_layers)):
        sizes["num_experts"] = expert_parallel
    else:
        sizes["intermediate_size"] = tensor_parallel
    for key, parts in sizes.items():
        if getattr(config, key) % parts:
            setting = "expert_parallel" if key == "num_experts" else "tensor_parallel"
            what = f"{key} = {getattr(config, key)} is not divisible by train.{setting} = {parts}"
            raise ModelError(what, next_step=f"set train.{setting} to a divisor of {getattr(config, key)}")
    if expert_parallel > 1 and not getattr(config, "num_experts", 0):
        what = f"train.expert_parallel = {expert_parallel}, but the model has no experts"
        raise ModelError(what, next_step="set train.expert_parallel = 1")


def transformer_config(config: Any, dtype: torch.dtype, tensor_parallel: int, expert_parallel: int, exact: bool = False) -> Any:
    """megatron-core's `TransformerConfig` for a transformers configuration.

    Sequence parallelism comes with tensor parallelism (megatron-core requires it for MoE), and experts are never split by
    tensor parallelism. `calculate_per_token_loss` makes gradients plain sums over ranks: the loss has global weights already.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=convert.head_dim(config),
        ffn_hidden_size=config.intermediate_size,
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=convert.has_qk_norm(config),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp32_residual_connection=exact and dtype != torch.float32,
        tensor_model_parallel_size=tensor_parallel,
        sequence_parallel=tensor_parallel > 1,
        expert_model_parallel_size=expert_parallel,
        expert_tensor_parallel_size=1,
        **_FIXED,
        **_moe(config, tensor_parallel * expert_parallel == 1),
    )


_FIXED: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "calculate_per_token_loss": True,
    # Every weight is read from the checkpoint: drawing initial ones would be thrown away.
    "perform_initialization": False,
    "use_cpu_initialization": not torch.cuda.is_available(),
    # Fusions of Transformer Engine and apex, neither of which is used.
    "persist_layer_norm": False,
    "bias_activation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
}


def _moe(config: Any, alone: bool) -> dict[str, Any]:
    if not getattr(config, "num_experts", 0):
        return {}
    return {
        "num_moe_experts": config.num_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_layer_freq": [int(convert.is_moe_layer(config, i)) for i in range(config.num_hidden_layers)],
        # On one rank 'allgather' exchanges nothing and 'alltoall' still copies every token four times.
        "moe_token_dispatcher_type": "allgather" if alone else "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        # norm_topk_prob: softmax over the chosen experts only.
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": False,
    }
