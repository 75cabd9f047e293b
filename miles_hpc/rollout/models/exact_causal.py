"""Qwen3, Qwen3-MoE and Llama for SGLang, computed by `kernels` as the trainer does (`train/exact.py`).

Parameters carry the checkpoint's names, so every way to load and update weights is a checked copy. What one matrix product
reads lies together: the parameters are parts of a larger tensor.
"""

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer
from torch import Tensor, nn

from miles_hpc.kernels import moe, selftest
from miles_hpc.kernels.activation import swiglu
from miles_hpc.kernels.heads import heads
from miles_hpc.kernels.linear import linear, linear_float
from miles_hpc.kernels.norm import add_rms_norm
from miles_hpc.kernels.rope import Rotary
from miles_hpc.train.convert import has_qk_norm, head_dim, is_moe_layer


class Weight(nn.Module):
    """A parameter by the name `weight`."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(tensor, requires_grad=False)


def stack(owner: nn.Module, columns: int, **rows: int) -> Tensor:
    """[sum of rows, columns]; `owner.NAME.weight` are its parts from top to bottom."""
    whole = torch.empty(sum(rows.values()), columns)
    for name, part in zip(rows, whole.split(list(rows.values())), strict=True):
        owner.add_module(name, Weight(part))
    return whole


class Attention(nn.Module):
    """Grouped-query attention, with query and key norms where the model has them."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.size, self.eps = head_dim(config), config.rms_norm_eps
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        kv = self.groups * self.size
        self.qkv = stack(self, config.hidden_size, q_proj=self.heads * self.size, k_proj=kv, v_proj=kv)
        self.o_proj = Weight(torch.empty(config.hidden_size, self.heads * self.size))
        self.norms: Tensor | None = None
        if has_qk_norm(config):
            self.norms = torch.empty(2, self.size)
            self.q_norm, self.k_norm = Weight(self.norms[0]), Weight(self.norms[1])
        self.attend = RadixAttention(self.heads, self.size, self.size**-0.5, self.groups, layer_id=layer)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, batch: Any) -> Tensor:
        """[t, hidden] -> [t, hidden]."""
        qkv = linear(x, self.qkv).view(len(x), -1, self.size)
        q, k, v = heads(qkv, self.norms, cos, sin, self.groups, self.eps)
        return linear(self.attend(q.flatten(1), k, v, batch), self.o_proj.weight)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.intermediate_size
        self.up = stack(self, config.hidden_size, gate_proj=width, up_proj=width)
        self.down_proj = Weight(torch.empty(config.hidden_size, width))

    def forward(self, x: Tensor) -> Tensor:
        """[t, hidden] -> [t, hidden]."""
        return linear(swiglu(linear(x, self.up)), self.down_proj.weight)


class Expert(nn.Module):
    """Names of one expert's parts of the stacked weights, for loading."""

    def __init__(self, up: Tensor, down: Tensor) -> None:
        super().__init__()
        gate, up = up.chunk(2)
        self.gate_proj, self.up_proj, self.down_proj = Weight(gate), Weight(up), Weight(down)


class MoE(nn.Module):
    """Top-k of SwiGLU experts, in the trainer's order of addition."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.layer = layer
        count, width, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
        self.top_k, self.renormalise = config.num_experts_per_tok, config.norm_topk_prob
        self.gate = Weight(torch.empty(count, hidden))
        self.up, self.down = torch.empty(count, 2 * width, hidden), torch.empty(count, hidden, width)
        self.experts = nn.ModuleList(Expert(u, d) for u, d in zip(self.up, self.down, strict=True))

    def forward(self, x: Tensor) -> Tensor:
        """[t, hidden] -> [t, hidden]."""
        probs, ids = moe.route(linear_float(x, self.gate.weight), self.top_k, self.renormalise)
        if capturer := get_global_experts_capturer():
            capturer.capture(self.layer, ids)
        return moe.experts(x, probs, ids, self.up, self.down)


class Layer(nn.Module):
    """Attention and MLP on a float32 residual stream."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.input_layernorm = Weight(torch.empty(config.hidden_size))
        self.post_attention_layernorm = Weight(torch.empty(config.hidden_size))
        self.self_attn = Attention(config, index)
        self.mlp = MoE(config, index) if is_moe_layer(config, index) else MLP(config)

    def forward(self, x: Tensor, added: Tensor, cos: Tensor, sin: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Residual stream [t, hidden] float32, and what is still to be added to it [t, hidden]; both again."""
        x, hidden = add_rms_norm(x, added, self.input_layernorm.weight, self.eps)
        x, hidden = add_rms_norm(x, self.self_attn(hidden, cos, sin, batch), self.post_attention_layernorm.weight, self.eps)
        return x, self.mlp(hidden)


class Decoder(nn.Module):
    """Tokens and positions to hidden states."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.embed_tokens = Weight(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Weight(torch.empty(config.hidden_size))
        self.rotary = Rotary(config, config.max_position_embeddings, self.norm.weight.device)
        # As buffers the tables outlive a sleep of the engine, in which all other memory of the model is lost.
        self.register_buffer("rotary_cos", self.rotary.cos, persistent=False)
        self.register_buffer("rotary_sin", self.rotary.sin, persistent=False)

    def forward(self, ids: Tensor, positions: Tensor, batch: Any) -> Tensor:
        """[t] int64 twice -> [t, hidden]."""
        added = self.embed_tokens.weight[ids]
        x = torch.zeros_like(added, dtype=torch.float32)
        cos, sin = self.rotary.of(positions)
        for layer in self.layers:
            x, added = layer(x, added, cos, sin, batch)
        return add_rms_norm(x, added, self.norm.weight, self.eps)[1]


class Logits(LogitsProcessor):
    """SGLang's processor with the row-invariant product, in float32."""

    def _compute_lm_head(self, hidden_states: Tensor, lm_head: Any, embedding_bias: Any = None) -> Tensor:
        return linear_float(hidden_states, lm_head.weight)


class ExactModel(nn.Module):
    """What SGLang asks of a model class."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        tied = config.tie_word_embeddings
        self.lm_head = self.model.embed_tokens if tied else Weight(torch.empty(config.vocab_size, config.hidden_size))
        self.logits_processor = Logits(config)
        shapes = {(p.shape[1], p.shape[0]) for p in self.parameters() if p.dim() == 2}
        here = self.lm_head.weight
        group = config.num_attention_heads // config.num_key_value_heads
        selftest.check(shapes, head_dim(config), group, here.dtype, here.device)

    @torch.no_grad()
    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: Any, **unused: Any) -> Any:
        """[t] int64 twice -> SGLang's `LogitsProcessorOutput`."""
        hidden = self.model(input_ids, positions, forward_batch)
        return self.logits_processor(input_ids, hidden, self.lm_head, forward_batch)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy tensors by checkpoint name.

        Raises:
            KeyError, ValueError: a name or shape that the model does not have; SGLang's own classes only log unknown names.
        """
        own = dict(self.named_parameters())
        for name, value in weights:
            if name == "lm_head.weight" and self.config.tie_word_embeddings:
                continue
            if name not in own:
                raise KeyError(f"{name} is not a parameter of {type(self).__name__}")
            if own[name].shape != value.shape:
                raise ValueError(f"{name}: {tuple(value.shape)} given, {tuple(own[name].shape)} wanted")
            own[name].data.copy_(value)


class Qwen3ForCausalLM(ExactModel):
    """SGLang finds the class by this name."""


class Qwen3MoeForCausalLM(ExactModel):
    """SGLang finds the class by this name."""


class LlamaForCausalLM(ExactModel):
    """SGLang finds the class by this name."""


EntryClass = [Qwen3ForCausalLM, Qwen3MoeForCausalLM, LlamaForCausalLM]
