"""What a checkpoint becomes in an engine: which of its tensors SGLang joins, and what each of its workers holds."""

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
VOCABULARY_MULTIPLE = 64  # SGLang fills its vocabulary tables up with zero rows
EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
QKV = re.compile(r"(.*\.self_attn)\.([qkv])_proj\.(weight|bias)")
GATE_UP = re.compile(r"(.*\.mlp)\.(gate|up)_proj\.weight")
COLUMNS = re.compile(r".*\.(o|down)_proj\.weight")


@dataclass(frozen=True)
class Layout:
    """Of an engine's tensors."""

    exact: bool = False
    """They are the checkpoint's, as in exact numerics."""
    workers: int = 1
    """Tensor-parallel processes of the engine."""
    groups: int = 1
    """Key-value heads of the model; if there are fewer than workers, several hold the same."""

    @classmethod
    def of(cls, numerics: str, workers: int, model: Any) -> "Layout":
        """From `run.numerics`, `rollout.tensor_parallel` and a transformers configuration."""
        return cls(numerics == "exact", workers, getattr(model, "num_key_value_heads", None) or model.num_attention_heads)

    def place(self, name: str) -> tuple[str, tuple[int, int]]:
        """The engine's tensor that a checkpoint tensor becomes part of, and its place there (expert, part)."""
        return (name, (0, 0)) if self.exact else engine_tensor(name)

    def part(self, name: str, tensor: "torch.Tensor", worker: int) -> "torch.Tensor":
        """What a worker holds of a checkpoint tensor."""
        if self.exact:
            return tensor
        if name in VOCABULARY:
            tensor = _filled(tensor)
        if self.workers == 1 or (tensor.dim() == 1 and not QKV.fullmatch(name)):
            return tensor
        if COLUMNS.fullmatch(name):
            return tensor.chunk(self.workers, 1)[worker]
        if name not in VOCABULARY and not any(joined.fullmatch(name) for joined in (QKV, GATE_UP, EXPERT)):
            return tensor
        own = min(self.workers, self.groups) if re.search(r"\.[kv]_proj\.", name) else self.workers
        return tensor.chunk(own)[worker * own // self.workers]

    def start(self, name: str, size: int, whole: int) -> int:
        """Index of a part's first element in a worker's tensor; `size` and `whole` count elements of both."""
        engine_name, (expert, part) = self.place(name)
        if part and ".qkv_proj." in engine_name:
            return whole - (3 - part) * size  # keys and values are of one size, queries are not
        return (expert * (2 if engine_name.endswith(".w13_weight") else 1) + part) * size


@cache
def engine_tensor(name: str) -> tuple[str, tuple[int, int]]:
    """The engine's tensor that a checkpoint tensor becomes part of, and its place there (expert, part).

    SGLang 0.5.16 joins q, k, v; gate, up; and the experts of a layer, each along the first dimension.
    """
    if match := EXPERT.fullmatch(name):
        prefix, expert, part = match.groups()
        fused = "w2_weight" if part == "down" else "w13_weight"
        return f"{prefix}.{fused}", (int(expert), int(part == "up"))
    if match := QKV.fullmatch(name):
        return f"{match[1]}.qkv_proj.{match[3]}", (0, "qkv".index(match[2]))
    if match := GATE_UP.fullmatch(name):
        return f"{match[1]}.gate_up_proj.weight", (0, int(match[2] == "up"))
    return name, (0, 0)


def _filled(table: "torch.Tensor") -> "torch.Tensor":
    """[vocabulary, hidden] as the engine holds it: filled up with zero rows."""
    import torch

    short = -len(table) % VOCABULARY_MULTIPLE
    return torch.nn.functional.pad(table, (0, 0, 0, short)) if short else table
