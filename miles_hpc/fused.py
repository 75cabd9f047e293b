"""What a checkpoint becomes in an engine: which of its tensors SGLang joins, and the digests of the joined ones."""

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
VOCABULARY_MULTIPLE = 64  # SGLang fills its vocabulary tables up with zero rows


@dataclass
class Fused:
    """Digests of engine tensors, which are concatenations of checkpoint tensors."""

    exact: bool = False
    """The engine's tensors are the checkpoint's, as in exact numerics."""
    parts: dict[str, list[tuple[tuple[int, int], "torch.Tensor"]]] = field(default_factory=dict)

    def add(self, name: str, tensor: "torch.Tensor") -> None:
        """Take a checkpoint tensor by its name."""
        if self.exact:
            self.parts[name] = [((0, 0), tensor)]
            return
        engine_name, place = engine_tensor(name)
        self.parts.setdefault(engine_name, []).append((place, _filled(tensor) if name in VOCABULARY else tensor))

    def digests(self) -> dict[str, str]:
        """By engine tensor name."""
        import torch

        from miles_hpc.digest import digest

        joined = {}
        for name, parts in self.parts.items():
            ordered = [tensor.reshape(-1) for _, tensor in sorted(parts, key=lambda part: part[0])]
            joined[name] = digest(torch.cat(ordered) if len(ordered) > 1 else ordered[0])
        return joined


def _filled(table: "torch.Tensor") -> "torch.Tensor":
    """[vocabulary, hidden] as the engine holds it: filled up with zero rows."""
    import torch

    return torch.nn.functional.pad(table, (0, 0, 0, -len(table) % VOCABULARY_MULTIPLE))


def engine_tensor(name: str) -> tuple[str, tuple[int, int]]:
    """The engine's tensor that a checkpoint tensor becomes part of, and its place there (expert, part).

    SGLang 0.5.16 joins q, k, v; gate, up; and the experts of a layer, each along the first dimension.
    """
    if match := re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name):
        prefix, expert, part = match.groups()
        fused = "w2_weight" if part == "down" else "w13_weight"
        return f"{prefix}.{fused}", (int(expert), int(part == "up"))
    if match := re.fullmatch(r"(.*\.self_attn)\.([qkv])_proj\.(weight|bias)", name):
        return f"{match[1]}.qkv_proj.{match[3]}", (0, "qkv".index(match[2]))
    if match := re.fullmatch(r"(.*\.mlp)\.(gate|up)_proj\.weight", name):
        return f"{match[1]}.gate_up_proj.weight", (0, int(match[2] == "up"))
    return name, (0, 0)
