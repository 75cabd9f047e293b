"""Causal attention over packed sequences, with rotary positions, as a megatron-core module.

The model is built without megatron's own rotary embedding: it splits a pack into its sequences in every layer. Here the cosines
and sines of a pack's tokens are looked up once (`kernels.rope`) and travel with the pack.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from miles_hpc.kernels import flash
from miles_hpc.kernels.rope import rotate
from miles_hpc.kernels.segments import Plan
from miles_hpc.kernels.tiles import Tiles


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
    """[t, 1, head_dim] float32, negative in the first half (see `rope.rotate`)."""
    tiles: Tiles | None = None
    """Query tiles, in exact numerics on a CPU."""
    plan: Plan | None = None
    """In exact numerics on a GPU, if a sequence is longer than a segment."""


class CoreAttention(MegatronModule):
    """megatron-core's `core_attention` for packs: FlashAttention on a GPU, else one scaled-dot-product call per pack and layer.

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
        mask: Tensor | None,
        *unused: Any,
        packed_seq_params: Packed,
        **more: Any,
    ) -> Tensor:
        """[t, heads, head_dim], [t, groups, head_dim] twice -> [t, heads * head_dim]."""
        pack = packed_seq_params
        return self.attend(rotate(query, pack.cos, pack.sin), rotate(key, pack.cos, pack.sin), value, pack).flatten(1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, pack: Packed) -> Tensor:
        """With rotated queries and keys -> [t, heads, head_dim]."""
        if flash.usable(query):
            sequences = flash.Sequences(pack.cu_seqlens_q, pack.max_seqlen_q)
            return flash.varlen(query, key, value, sequences, self.scale, repeatable=False)
        q, k, v = (_grid(x, pack) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2).flatten(0, 1)[pack.cells]


def _grid(x: Tensor, pack: Packed) -> Tensor:
    """[t, heads, d] -> [b, heads, L, d]. A padded cell comes after its sequence, so no real token sees it."""
    return x[pack.rows].view(-1, pack.max_seqlen_q, *x.shape[1:]).transpose(1, 2)
