"""Sizes that a model's config.json states, taken only if a model can have them: what is wrong names file, key and value."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_hpc.errors import ModelError

NEEDED = ("max_position_embeddings", "vocab_size")
COUNTS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "decoder_sparse_step",
)
"""Each may be left out (null): then the architecture's own default holds."""
POSITIVE = ("rms_norm_eps", "rope_theta")


def check(facts: Mapping[str, Any], file: Path) -> None:
    """Look at sizes one by one, then at those that must fit together.

    Raises:
        ModelError: one that no model has, or two that do not fit.
    """
    for key in (*NEEDED, *COUNTS, "num_experts"):
        least = 0 if key == "num_experts" else 1
        if not _whole(facts.get(key), least) and (key in NEEDED or facts.get(key) is not None):
            raise _wrong(facts, file, key, f"a whole number of at least {least} is needed")
    for key in POSITIVE:
        if facts.get(key) is not None and not _number(facts[key]):
            raise _wrong(facts, file, key, "a positive number is needed")
    _check_heads(facts, file)
    experts, chosen = facts.get("num_experts"), facts.get("num_experts_per_tok")
    if experts and chosen and chosen > experts:
        raise _wrong(facts, file, "num_experts_per_tok", f"but num_experts = {experts}")


def check_tokens(facts: Mapping[str, Any], file: Path, tokenizer: Mapping[str, int], ends: list[int]) -> None:
    """Look whether the model has every token of the tokenizer, and every one that ends an answer.

    Args:
        tokenizer: ids of all its tokens.
        ends: `stop_tokens` of the model.

    Raises:
        ModelError: an id beyond the vocabulary.
    """
    if (highest := max(tokenizer.values(), default=0)) >= facts["vocab_size"]:
        raise _wrong(facts, file, "vocab_size", f"but the tokenizer has ids up to {highest}")
    for end in ends:
        if not 0 <= end < facts["vocab_size"]:
            raise _wrong(facts, file, "vocab_size", f"but eos_token_id = {end}")


def _check_heads(facts: Mapping[str, Any], file: Path) -> None:
    heads, groups = facts.get("num_attention_heads"), facts.get("num_key_value_heads")
    hidden, size = facts.get("hidden_size"), facts.get("head_dim")
    if heads and groups and heads % groups:
        raise _wrong(facts, file, "num_attention_heads", f"which num_key_value_heads = {groups} does not divide")
    if heads and hidden and not size and hidden % heads:
        raise _wrong(facts, file, "hidden_size", f"which num_attention_heads = {heads} does not divide")
    if (size or (hidden or 0) // (heads or 1)) % 2:
        raise _wrong(facts, file, "head_dim", "an even number is needed: rotary positions turn pairs")


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 32


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _wrong(facts: Mapping[str, Any], file: Path, key: str, why: str) -> ModelError:
    return ModelError(f"{key} = {facts.get(key)!r:.80}, {why}", where=str(file))
