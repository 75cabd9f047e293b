"""Sizes that no model can have are named; those that models do have pass."""

from pathlib import Path

import pytest

from miles_hpc import shape
from miles_hpc.errors import ModelError
from miles_hpc.examples import arithmetic

FILE = Path("model/config.json")
NUMBERS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step",
    "max_position_embeddings", "vocab_size",
)  # fmt: skip
ABSURD = [
    *((key, value, f"{key} = {value!r}, a whole number") for key in NUMBERS for value in (-1, 0.5, "x", True, 1 << 70, [1])),
    *((key, 0, f"{key} = 0, a whole number of at least 1") for key in NUMBERS if key != "num_experts"),
    *(
        (key, value, f"{key} = {value!r}, a pos")
        for key in ("rope_theta", "rms_norm_eps")
        for value in (0, -1.0, "x", float("inf"))
    ),
    ("num_attention_heads", 5, "num_attention_heads = 5, which num_key_value_heads = 2 does not divide"),
    ("num_experts_per_tok", 9, "num_experts_per_tok = 9, but num_experts = 8"),
    ("head_dim", 31, "head_dim = 31, an even number"),
]


@pytest.mark.parametrize(("key", "value", "what"), ABSURD)
def test_an_absurd_size_is_named(key, value, what):
    with pytest.raises(ModelError) as caught:
        shape.check(arithmetic.CONFIG | {key: value}, FILE)
    assert caught.value.what.startswith(what) and caught.value.where == str(FILE)


def test_heads_must_share_the_hidden_size_only_where_theirs_is_left_out():
    shape.check(arithmetic.CONFIG | {"hidden_size": 130}, FILE)
    with pytest.raises(ModelError, match="hidden_size = 130, which num_attention_heads = 4 does not divide"):
        shape.check(arithmetic.CONFIG | {"hidden_size": 130, "head_dim": None}, FILE)


@pytest.mark.parametrize("key", shape.COUNTS + shape.POSITIVE + ("num_experts",))
def test_what_an_architecture_has_a_default_for_may_be_left_out(key):
    shape.check({name: value for name, value in arithmetic.CONFIG.items() if name != key}, FILE)
    shape.check(arithmetic.CONFIG | {key: None}, FILE)


@pytest.mark.parametrize(("ends", "highest"), [([-1], 5), ([160], 5), ([1, 999], 5), ([1], 160)])
def test_a_token_beyond_the_vocabulary_is_named(ends, highest):
    shape.check_tokens(arithmetic.CONFIG, FILE, {"a": 159}, [1])
    with pytest.raises(ModelError, match="vocab_size = 160, but"):
        shape.check_tokens(arithmetic.CONFIG, FILE, {"a": highest}, ends)
