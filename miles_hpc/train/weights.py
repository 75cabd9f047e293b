"""Weights in and out of a model, one parameter at a time, as Hugging Face checkpoint tensors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from miles_hpc.errors import ModelError
from miles_hpc.train.convert import Dims, Rule, rules
from miles_hpc.train.megatron import Groups

SIZES = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
MORE_SIZES = ("num_key_value_heads", "tie_word_embeddings", "num_experts", "num_experts_per_tok", "moe_intermediate_size")
IGNORED = ("lm_head.weight", ".rotary_emb.inv_freq")


def read(module: torch.nn.Module, config: Any, folder: Path, groups: Groups) -> None:
    """Load this rank's part of a Hugging Face checkpoint that passed `check`.

    Raises:
        ModelError: a tensor of another shape.
    """
    params = dict(module.named_parameters())
    dims = Dims.of(config)
    with _Reader(_files(folder)) as reader, torch.no_grad():
        for rule in rules(config):
            name = local_name(rule, config, groups)
            if name is None:
                continue
            tensors = [reader.get(source) for source in rule.sources]
            rank, size = (groups.tensor.rank(), groups.tensor.size()) if rule.layout.split else (0, 1)
            try:
                part = rule.layout.shard(tensors, dims, rank, size)
                same = part.shape == params[name].shape
            except RuntimeError:  # rows that do not divide into heads
                same = False
            if not same:
                shapes = ", ".join(f"{s} {tuple(t.shape)}" for s, t in zip(rule.sources, tensors, strict=True))
                raise ModelError(f"tensor shapes do not fit config.json: {shapes}", where=str(folder))
            params[name].copy_(part)


def check(config: Any, folder: Path) -> None:
    """Compare a checkpoint's names with those that its configuration asks for.

    Raises:
        ModelError: no safetensors, a damaged file, missing or unexpected tensors.
    """
    files = _files(folder)
    wanted = {source for rule in rules(config) for source in rule.sources}
    missing = sorted(wanted - files.keys())
    unexpected = sorted(name for name in files.keys() - wanted if not name.endswith(IGNORED))
    kinds = {"missing": missing, "unexpected": unexpected}
    problems = [f"{kind} tensors: {_some(names)}" for kind, names in kinds.items() if names]
    if problems:
        raise ModelError("; ".join(problems), where=str(folder), next_step="compare config.json with the safetensors files")


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file."""
    from safetensors import SafetensorError, safe_open

    names: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as tensors:
                names.update(dict.fromkeys(tensors.keys(), file))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"damaged checkpoint file: {error}", where=str(file)) from None
    if not names:
        raise ModelError("no *.safetensors in the model folder", where=str(folder))
    return names


class _Reader:
    """Tensors by name, each file opened once."""

    def __init__(self, files: dict[str, Path]) -> None:
        self.files = files
        self.open: dict[Path, Any] = {}

    def get(self, name: str) -> Tensor:
        from safetensors import safe_open

        file = self.files[name]
        if file not in self.open:
            self.open[file] = safe_open(file, "pt").__enter__()
        return self.open[file].get_tensor(name)

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self.open.values():
            handle.__exit__(None, None, None)


def local_name(rule: Rule, config: Any, groups: Groups) -> str | None:
    """The parameter's name on this rank; None for an expert of another rank."""
    if rule.expert < 0:
        return rule.name
    per_rank = config.num_experts // groups.expert.size()
    owner, local = divmod(rule.expert, per_rank)
    return rule.name.format(expert=local) if owner == groups.expert.rank() else None


class Stream:
    """Whole tensors under Hugging Face checkpoint names, in the order of `convert.rules`, on every rank; collective.

    Holds one parameter at a time. Tied embeddings come once, as `model.embed_tokens.weight`.
    """

    def __init__(self, module: torch.nn.Module, config: Any, groups: Groups) -> None:
        self.dims, self.groups = Dims.of(config), groups
        self.per_rank = (getattr(config, "num_experts", 0) or 0) // groups.expert.size()
        params = dict(module.named_parameters())
        # All experts have the same shapes: for one of another rank the first local one stands.
        self.own = [(r, params[local_name(r, config, groups) or r.name.format(expert=0)]) for r in rules(config)]
        """Looked up once: for the thousand experts of a MoE that takes longer than to send them."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for rule, own in self.own:
            yield from zip(rule.sources, rule.layout.whole(self._parts(rule, own.detach()), self.dims), strict=True)

    def _parts(self, rule: Rule, own: Tensor) -> list[Tensor]:
        group = self.groups.tensor if rule.expert < 0 else self.groups.expert
        if group.size() == 1 or not (rule.layout.split or rule.expert >= 0):
            return [own]
        if rule.expert >= 0:
            return [self._from_owner(rule, own)]
        parts = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(parts, own.contiguous(), group)
        return parts

    def _from_owner(self, rule: Rule, own: Tensor) -> Tensor:
        """An expert's parameter, sent by the rank of the expert-parallel group that holds it."""
        group, owner = self.groups.expert, rule.expert // self.per_rank
        tensor = own.contiguous() if owner == group.rank() else torch.empty_like(own)
        dist.broadcast(tensor, dist.get_global_rank(group, owner), group)
        return tensor


def sizes(config: Any) -> dict[str, Any]:
    """What must be equal for a checkpoint to be of the same model."""
    return {key: getattr(config, key) for key in SIZES + MORE_SIZES if getattr(config, key, None) is not None}
