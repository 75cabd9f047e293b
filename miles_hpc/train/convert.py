"""Hugging Face checkpoint names <-> megatron-core parameters, for Qwen3, Qwen3-MoE and Llama.

A table of rules says which Hugging Face tensors make a megatron parameter and how they are laid out and split over
tensor-parallel ranks. Experts are whole on their expert-parallel rank.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dims:
    """Sizes that the layouts need."""

    heads: int
    groups: int
    """Key-value heads."""
    head_dim: int
    vocab: int

    @classmethod
    def of(cls, config: Any) -> "Dims":
        """From a transformers configuration."""
        return cls(config.num_attention_heads, config.num_key_value_heads, head_dim(config), config.vocab_size)


def head_dim(config: Any) -> int:
    """Size of an attention head; some configurations leave it out."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class Layout(NamedTuple):
    """How one parameter is made of Hugging Face tensors."""

    shard: Callable[[Sequence[Tensor], Dims, int, int], Tensor]
    """(tensors, dims, rank, size) -> this rank's part."""
    whole: Callable[[Sequence[Tensor], Dims], list[Tensor]]
    """(parts of all ranks, dims) -> tensors."""
    split: bool
    """Whether the parts differ between tensor-parallel ranks."""


def _chunk(tensor: Tensor, dim: int, rank: int, size: int) -> Tensor:
    return tensor.chunk(size, dim)[rank]


def _pad_rows(tensor: Tensor, multiple: int) -> Tensor:
    missing = -len(tensor) % multiple
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


def _shard_qkv(tensors: Sequence[Tensor], dims: Dims, rank: int, size: int) -> Tensor:
    """Rows ordered by key-value group: its query heads, its key head, its value head."""
    grouped = [t.reshape(dims.groups, -1, t.shape[-1]) for t in tensors]
    return _chunk(torch.cat(grouped, 1), 0, rank, size).reshape(-1, tensors[0].shape[-1])


def _whole_qkv(parts: Sequence[Tensor], dims: Dims) -> list[Tensor]:
    whole = _join(parts)
    grouped = whole.reshape(dims.groups, -1, whole.shape[-1])
    sizes = [dims.heads // dims.groups * dims.head_dim, dims.head_dim, dims.head_dim]
    return [t.reshape(-1, whole.shape[-1]) for t in grouped.split(sizes, 1)]


def _shard_gate_up(tensors: Sequence[Tensor], dims: Dims, rank: int, size: int) -> Tensor:
    return torch.cat([_chunk(t, 0, rank, size) for t in tensors])


def _whole_gate_up(parts: Sequence[Tensor], dims: Dims) -> list[Tensor]:
    halves = [part.chunk(2) for part in parts]
    return [_join([h[i] for h in halves]) for i in (0, 1)]


def _join(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """A part that is alone is not copied: most weights of a sync then never are."""
    return torch.cat(list(parts), dim) if len(parts) > 1 else parts[0]


COPY = Layout(lambda t, d, r, n: t[0], lambda p, d: [p[0]], split=False)
ROWS = Layout(lambda t, d, r, n: _chunk(t[0], 0, r, n), lambda p, d: [_join(p)], split=True)
COLUMNS = Layout(lambda t, d, r, n: _chunk(t[0], 1, r, n), lambda p, d: [_join(p, 1)], split=True)
VOCAB = Layout(lambda t, d, r, n: _chunk(_pad_rows(t[0], n), 0, r, n), lambda p, d: [_join(p)[: d.vocab]], split=True)
QKV = Layout(_shard_qkv, _whole_qkv, split=True)
GATE_UP = Layout(_shard_gate_up, _whole_gate_up, split=True)


class Rule(NamedTuple):
    """One parameter. `{layer}` and `{expert}` in names are filled in."""

    name: str
    sources: tuple[str, ...]
    layout: Layout
    expert: int = -1
    """Expert in the whole layer; -1: not an expert's parameter."""


def _attention(*names: str) -> tuple[str, ...]:
    return tuple(f"self_attn.{name}.weight" for name in names)


EMBEDDING = Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), VOCAB)
FINAL_NORM = Rule("decoder.final_layernorm.weight", ("model.norm.weight",), COPY)
HEAD = Rule("output_layer.weight", ("lm_head.weight",), VOCAB)
ATTENTION = (
    Rule("input_layernorm.weight", ("input_layernorm.weight",), COPY),
    Rule("self_attention.linear_qkv.weight", _attention("q_proj", "k_proj", "v_proj"), QKV),
    Rule("self_attention.linear_proj.weight", _attention("o_proj"), COLUMNS),
    Rule("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), COPY),
)
QK_NORM = (
    Rule("self_attention.q_layernorm.weight", _attention("q_norm"), COPY),
    Rule("self_attention.k_layernorm.weight", _attention("k_norm"), COPY),
)
DENSE = (
    Rule("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), GATE_UP),
    Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), COLUMNS),
)
ROUTER = Rule("mlp.router.weight", ("mlp.gate.weight",), COPY)
EXPERT = (
    Rule(
        "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
        GATE_UP._replace(split=False),
    ),
    Rule(
        "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        ("mlp.experts.{expert}.down_proj.weight",),
        COLUMNS._replace(split=False),
    ),
)


def is_moe_layer(config: Any, layer: int) -> bool:
    """Whether the layer's MLP is a mixture of experts (a transformers Qwen3-MoE configuration may leave some dense)."""
    if not getattr(config, "num_experts", 0):
        return False
    return layer not in (config.mlp_only_layers or []) and (layer + 1) % config.decoder_sparse_step == 0


def rules(config: Any) -> Iterator[Rule]:
    """All parameters of a model in their fixed order, with names filled in.

    Args:
        config: a transformers configuration (Qwen3, Qwen3-MoE, Llama).
    """
    yield EMBEDDING
    for layer in range(config.num_hidden_layers):
        for rule in _layer(config, layer):
            sources = tuple(f"model.layers.{layer}.{s}" for s in rule.sources)
            yield rule._replace(name=f"decoder.layers.{layer}.{rule.name}", sources=sources)
    yield FINAL_NORM
    if not config.tie_word_embeddings:
        yield HEAD


def _layer(config: Any, layer: int) -> Iterator[Rule]:
    yield from ATTENTION
    if has_qk_norm(config):
        yield from QK_NORM
    if not is_moe_layer(config, layer):
        yield from DENSE
        return
    yield ROUTER
    for expert in range(config.num_experts):
        for rule in EXPERT:
            sources = tuple(s.format(expert=expert) for s in rule.sources)
            yield rule._replace(sources=sources, expert=expert)


def has_qk_norm(config: Any) -> bool:
    """Queries and keys are normalised before the rotation."""
    return config.model_type.startswith("qwen3")
