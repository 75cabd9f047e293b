"""Qwen3 checkpoints of real shapes with random bfloat16 weights: what a benchmark of speed needs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 32000,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
EXPERTS = {
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": COMMON
    | {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 20,
    },
    "moe": COMMON
    | EXPERTS
    | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
    },
}
"""1.14 B parameters; 745 M, of which 205 M are active."""


def write(config: dict[str, Any], folder: Path) -> int:
    """Write a checkpoint; returns the parameters that a token is multiplied with (no input embeddings, chosen experts only)."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    g = torch.Generator("cuda").manual_seed(0)
    weights, active = {}, 0
    for name, shape in _shapes(config):
        if len(shape) == 1:
            weights[name] = torch.ones(shape, dtype=torch.bfloat16)
            continue
        weights[name] = (torch.randn(shape, device="cuda", generator=g) * 0.02).bfloat16().cpu()
        share = config["num_experts_per_tok"] / config["num_experts"] if ".experts." in name else 1
        active += 0 if name.startswith("model.embed") else round(weights[name].numel() * share)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return active


def _shapes(c: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, size = c["hidden_size"], c["head_dim"]
    query, key = c["num_attention_heads"] * size, c["num_key_value_heads"] * size
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden)
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for norm, width in (("input_layernorm", hidden), ("post_attention_layernorm", hidden)):
            yield f"{layer}{norm}.weight", (width,)
        for norm in ("q_norm", "k_norm"):
            yield f"{layer}self_attn.{norm}.weight", (size,)
        for part, shape in (("q", (query, hidden)), ("k", (key, hidden)), ("v", (key, hidden)), ("o", (hidden, query))):
            yield f"{layer}self_attn.{part}_proj.weight", shape
        experts = c.get("num_experts", 0)
        if experts:
            yield f"{layer}mlp.gate.weight", (experts, hidden)
        inner = c["moe_intermediate_size"] if experts else c["intermediate_size"]
        for prefix in [f"experts.{e}." for e in range(experts)] or [""]:
            for part, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
                yield f"{layer}mlp.{prefix}{part}_proj.weight", shape
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (c["vocab_size"], hidden)
