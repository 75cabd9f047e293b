"""Exact numerics on the training side: megatron-core's layers computed by `kernels`, and the proof at the first step.

Parameters keep their names and places, so checkpoints, weight sync and export do not notice.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from miles_hpc.errors import NumericsError
from miles_hpc.kernels import flash, moe, selftest
from miles_hpc.kernels.attention import Grid, varlen
from miles_hpc.kernels.linear import linear, linear_float
from miles_hpc.kernels.segments import SEGMENT, Plan, plan
from miles_hpc.kernels.tiles import Tiles, tiles
from miles_hpc.samples.schema import Samples
from miles_hpc.train.attention import CoreAttention, Packed


class ExactAttention(CoreAttention):
    """One order of addition for every key, whatever the pack."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, pack: Packed) -> Tensor:
        """With rotated queries and keys -> [t, heads, head_dim]."""
        if query.is_cuda:
            sequences = flash.Sequences(pack.cu_seqlens_q, pack.max_seqlen_q, pack.plan)
            return flash.varlen(query, key, value, sequences, self.scale)
        assert pack.tiles  # made by `Policy` on a CPU
        return varlen(query, key, value, pack.tiles, Grid(pack.rows, pack.cells, pack.max_seqlen_q), self.scale)


class Router(TopKRouter):
    """The engine's choice of experts, bit for bit."""

    def forward(self, hidden: Tensor, *unused: Any) -> tuple[Tensor, Tensor, Tensor]:
        """[t, hidden] -> probabilities [t, k], map [t, experts] bool (what was chosen), expert ids [t, k]."""
        logits = linear_float(hidden, self.weight)
        probs, ids = moe.route(logits, self.config.moe_router_topk, not self.config.moe_router_pre_softmax)
        if self.router_replay:
            self.router_replay.compare(ids)
        return probs, torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True), ids


class MoE(MoELayer):
    """All experts on this rank: tokens are not exchanged."""

    def forward(self, hidden: Tensor, *unused: Any, **more: Any) -> tuple[Tensor, None]:
        """[t, 1, hidden] -> [t, 1, hidden], and no bias."""
        x = hidden.flatten(0, -2)
        probs, _, ids = self.router(x)
        experts = self.experts.local_experts
        up, down = [e.linear_fc1.weight for e in experts], [e.linear_fc2.weight for e in experts]
        return moe.experts(x, probs, ids, up, down).view_as(hidden), None


def exchange(block: Any) -> Any:
    """Put these modules into megatron's block specification; returns it."""
    from megatron.core.transformer.moe.moe_layer import MoESubmodules

    for layer in block.layer_specs:
        parts = layer.submodules
        parts.self_attn_bda = parts.mlp_bda = _add
        parts.self_attention.submodules.core_attention = ExactAttention
        submodules = parts.mlp.keywords["submodules"]  # the builder is a partial
        if isinstance(submodules, MoESubmodules):
            submodules.router = Router
            parts.mlp = partial(MoE, **parts.mlp.keywords)
    return block


def _add(training: bool, fused: bool) -> Any:
    """Megatron's bias, dropout and residual: there is neither bias nor dropout, and the residual stays in float32."""
    return lambda output, residual, dropout: residual + output[0]


def exchange_linear(module: torch.nn.Module) -> torch.nn.Module:
    """Let megatron's linear layers use the row-invariant product; returns the module. `Policy` does the output layer's."""
    for layer in module.modules():
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            layer._forward_impl = _linear
    return module


def _linear(input: Tensor, weight: Tensor, **unused: Any) -> Tensor:
    return linear(input, weight)


def tiles_of(pack: Any, group: int) -> Tiles:
    """Query tiles of a `packing.Pack`; its keys lie in the order of its tokens."""
    return tiles(pack.bounds.diff().tolist(), pack.positions, _table(pack), group)


def segments_of(pack: Any) -> Plan | None:
    """The sequences of a `packing.Pack` in segments; None if none is longer than one."""
    if pack.longest <= SEGMENT:
        return None
    lengths = pack.bounds.diff().cpu().numpy()
    return plan(np.zeros_like(lengths), lengths, _table(pack))


def _table(pack: Any) -> Tensor:
    """[b, longest] int64, token of each position of each sequence."""
    bounds = pack.bounds.long()
    return (bounds[:-1, None] + torch.arange(pack.longest, device=bounds.device)).clamp(max=int(bounds[-1]) - 1)


def check_linear(module: torch.nn.Module, core_config: Any) -> None:
    """Refuse shapes of this model that this machine does not compute row by row alike.

    Raises:
        NumericsError.
    """
    weights = [p for name, p in module.named_parameters() if p.dim() == 2]
    shapes = {(p.shape[1], p.shape[0]) for p in weights}
    group = core_config.num_attention_heads // core_config.num_query_groups
    selftest.check(shapes, core_config.kv_channels, group, core_config.params_dtype, weights[0].device)


def prove(samples: Samples, own: np.ndarray, log_probs: np.ndarray) -> None:
    """Compare the trainer's log-probs of sampled tokens with the sampler's, bit for bit.

    Args:
        samples: of the step.
        own: [m] int64, samples that this rank scored.
        log_probs: [tokens] float32, aligned with `samples.tokens`.

    Raises:
        NumericsError: names the first token that differs.
    """
    answers = samples.answers_of(own)
    different = answers[log_probs[answers] != samples.rollout_log_probs[answers]]
    if not len(different):
        return
    token = int(different[0])
    sample = int(np.searchsorted(samples.offsets, token, side="right")) - 1
    position = token - samples.offsets[sample]
    where = f"prompt {samples.prompt_ids[sample]}, sample {samples.sample_index[sample]}, position {position}"
    values = f"{log_probs[token]!r} in training, {samples.rollout_log_probs[token]!r} in the sampler"
    raise NumericsError(
        f"exact numerics: {len(different)} of {len(answers)} sampled tokens have other log-probs; the first: {values}",
        where=where,
        next_step="miles-submit compare-numerics RUN names the first layer and operation that differ; "
        'run.numerics = "native" goes on with the difference',
    )
