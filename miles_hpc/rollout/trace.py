"""What an engine computes between its layers, written to files for `compare-numerics`. Imported inside SGLang's processes only.

Every forward of the model becomes one file: `{op: [tokens, n]}` in the order of computation, and for each token its request and
position. Names of ops are those of `comparison.OPS`, with the layer before them.
"""

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from torch import Tensor, nn

from miles_hpc.kernels import moe


class Trace:
    """Records one model's forwards.

    Args:
        model: SGLang's own or of exact numerics.
        folder: where the files go.
    """

    def __init__(self, model: Any, folder: Path) -> None:
        self.folder, self.layer = folder, 0
        self.values: dict[tuple[int, str], Tensor] = {}
        self.experts = model.config.num_experts if hasattr(model.config, "num_experts") else 0
        for i, layer in enumerate(model.model.layers):
            self._watch(i, layer)
        model.logits_processor.register_forward_pre_hook(self._end, with_kwargs=True)
        moe.route = self._routing(moe.route)

    def _watch(self, i: int, layer: nn.Module) -> None:
        attention: Any = layer.self_attn
        core = next(m for m in attention.modules() if isinstance(m, RadixAttention))
        attention.register_forward_pre_hook(lambda m, a, k: self._begin(i, _hidden(a, k)), with_kwargs=True)
        core.register_forward_pre_hook(lambda m, a: self._heads(i, *a[:3]))
        core.register_forward_hook(lambda m, a, out: self._keep(i, "attention", out))
        attention.register_forward_hook(lambda m, a, out: self._keep(i, "o_proj", out))
        mlp: Any = layer.mlp
        mlp.register_forward_pre_hook(
            lambda m, a, k: self._keep(i, "post_attention_layernorm", _hidden(a, k)), with_kwargs=True
        )
        mlp.register_forward_hook(lambda m, a, out: self._keep(i, "mlp", out))
        if hasattr(mlp, "topk"):
            mlp.topk.register_forward_hook(lambda m, a, out: self._chosen(i, out))

    def _begin(self, i: int, hidden: Tensor) -> None:
        self.layer = i
        self._keep(i, "input_layernorm", hidden)

    def _heads(self, i: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        for op, value in (("qkv_proj", v), ("q_norm_rope", q), ("k_norm_rope", k)):
            self._keep(i, op, value)

    def _routing(self, route: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any) -> Any:
            probs, ids = route(*arguments)
            self._routed(self.layer, probs, ids)
            return probs, ids

        return watched

    def _chosen(self, i: int, output: Any) -> None:
        """SGLang's router; with some kernels for experts it hands on logits only."""
        if hasattr(output, "topk_ids"):
            self._routed(i, output.topk_weights, output.topk_ids)

    def _routed(self, i: int, probs: Tensor, ids: Tensor) -> None:
        dense = torch.zeros(len(probs), self.experts, device=probs.device)
        self._keep(i, "router", dense.scatter(1, ids.long(), probs.float()))

    def _keep(self, i: int, op: str, value: Any) -> None:
        whole = value[0] if isinstance(value, tuple) else value
        self.values[i, op] = whole.detach().flatten(1).to("cpu", copy=True)

    def _end(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """The last thing of a forward: write it."""
        _, hidden, _, batch = arguments[:4]
        self._keep(-1, "norm", hidden)
        decode = batch.forward_mode.is_decode()
        lengths = [1] * batch.batch_size if decode else [int(n) for n in batch.extend_seq_lens]
        rids = [rid for rid, length in zip(batch.rids, lengths, strict=True) for _ in range(length)]
        file = self.folder / uuid.uuid4().hex
        torch.save({"rids": rids, "positions": batch.positions.tolist(), "values": self.values}, file)
        file.rename(file.with_suffix(".pt"))
        self.values = {}


def _hidden(arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The hidden states among a module's arguments: by name, or the first floating-point tensor."""
    if "hidden_states" in named:
        return named["hidden_states"]
    return next(a for a in arguments if isinstance(a, Tensor) and a.is_floating_point())


def install(folder: Path) -> None:
    """Record every model that SGLang loads in this process."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    load = ModelRunner.load_model

    def load_model(self: Any) -> None:
        load(self)
        Trace(self.model, folder)

    ModelRunner.load_model = load_model
