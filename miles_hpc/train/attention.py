"""Causal attention over packed sequences, with rotary positions, as a megatron-core module.

The model is built without megatron's own rotary embedding: it splits a pack into its sequences in every layer. Here the cosines
and sines of a pack's tokens are looked up once (`Rotary.of`) and travel with the pack.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from miles_hpc.train.convert import head_dim


@dataclass
class Packed(PackedSeqParams):
    """Where the sequences of a pack lie, computed once per pack and used in every layer.

    `t` tokens in `b` sequences of at most `L` tokens.
    """

    rows: Tensor = None  # type: ignore[assignment]
    """[b * L] int64: token at each cell of the padded [b, L] grid; padding repeats token 0."""
    cells: Tensor = None  # type: ignore[assignment]
    """[t] int64: grid cell of each token."""
    cos: Tensor = None  # type: ignore[assignment]
    """[t, 1, head_dim] float32."""
    sin: Tensor = None  # type: ignore[assignment]
    """[t, 1, head_dim] float32, negative in the first half (see `rotate`)."""


class Rotary:
    """Table of rotary embeddings (arXiv 2104.09864) for every position of the context.

    Args:
        config: a transformers configuration; its rope type and scaling are transformers' own.
        length: positions.
        where: device of the table.
    """

    def __init__(self, config: Any, length: int, where: torch.device) -> None:
        frequencies, scale = _frequencies(config)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
        self.cos = (torch.cat([angles, angles], -1).cos() * scale).to(where)
        self.sin = (torch.cat([-angles, angles], -1).sin() * scale).to(where)

    def of(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [t, 1, head_dim] of positions [t] int64."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def _frequencies(config: Any) -> tuple[Tensor, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    size = head_dim(config)
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    return 1.0 / parameters["rope_theta"] ** exponents, 1.0


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [t, heads, head_dim], in float32: `x cos + swap(x) sin`, where `swap` exchanges the two halves."""
    y = x.float()
    return (y * cos + y.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


class CoreAttention(MegatronModule):
    """megatron-core's `core_attention` for packs: one scaled-dot-product call per pack and layer.

    Sequences of a pack have similar lengths (see `packing`), so the padded grid wastes little.
    """

    def __init__(self, config: Any, *unused: Any, softmax_scale: float | None = None, **more: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *unused: Any,
        packed_seq_params: Packed,
        **more: Any,
    ) -> Tensor:
        """[t, heads, head_dim], [t, groups, head_dim] twice -> [t, heads * head_dim]."""
        pack = packed_seq_params
        query = rotate(query, pack.cos, pack.sin)
        key = rotate(key, pack.cos, pack.sin)
        q, k, v = (_grid(x, pack) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2).flatten(0, 1)[pack.cells].flatten(1)


def _grid(x: Tensor, pack: Packed) -> Tensor:
    """[t, heads, d] -> [b, heads, L, d]. A padded cell comes after its sequence, so no real token sees it."""
    return x[pack.rows].view(-1, pack.max_seqlen_q, *x.shape[1:]).transpose(1, 2)
