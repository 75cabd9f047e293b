"""Example: a tiny Qwen3-MoE learns sums of four one-digit numbers from a teacher that is right one time in three.

Prompts and the verifier are reasoning-gym's `chain_sum`. An answer is a visible chain, `1 - 3 = -2 + 5 = 3 - 4 = -1`; what
follows the last ` = ` is judged. The warm start imitates a teacher whose last number is off by one in two of three
demonstrations, so the policy starts near a pass rate of one third; reinforcement learning has to find out which of its
endings are right.
"""

import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

TERMS = 4
HELD_OUT = 256
POOL = 40_000
TEACHER_ERRORS = 2 / 3
SPECIAL = ["<pad>", "<eos>", "<unk>"]

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 160,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.0,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "torch_dtype": "float32",
}
DENSE = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_experts": 0}


def prompts(split: str, seed: int) -> list[dict[str, Any]]:
    """Questions of one split ("train" or "eval"); the same for every seed, and none in both splits."""
    entries = _questions()
    chosen = entries[:HELD_OUT] if split == "eval" else entries[HELD_OUT:]
    return [
        {"prompt": e["question"], "label": e["answer"], "metadata": {"expression": e["metadata"]["expression"]}} for e in chosen
    ]


def demonstrations(seed: int, count: int) -> list[tuple[str, str]]:
    """`count` training questions with the teacher's chains, drawn with replacement; the teacher errs anew each time."""
    rng = random.Random(seed)
    rows = rng.choices(_questions()[HELD_OUT:], k=count)
    return [(row["question"], _teacher(row["metadata"]["expression"], rng)) for row in rows]


def reward(prompt: str, answer: str, label: Any, metadata: dict[str, Any]) -> float:
    """1.0 if the answer ended by itself and its last number gets full marks from reasoning-gym's verifier, else 0.0.

    Full marks only: the verifier's partial credit pays for long answers that contain the right number.
    """
    if not metadata["finished"] or " = " not in answer:
        return 0.0
    return float(_dataset(1).score_answer(answer.rsplit(" = ", 1)[1], {"answer": label}) >= 1.0)


def model(folder: Path, seed: int) -> None:
    """Write a randomly initialised model of 0.5 M parameters with its tokenizer, in the Hugging Face file format."""
    _write(folder, seed, CONFIG)


def dense_model(folder: Path, seed: int) -> None:
    """The same without experts: Qwen3."""
    _write(folder, seed, CONFIG | DENSE)


def _write(folder: Path, seed: int, config: dict[str, Any]) -> None:
    from safetensors.numpy import save_file

    weights = dict(_weights(np.random.default_rng(seed), config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "pad_token_id": 0}))
    _tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(), indent=1))


@cache
def _dataset(size: int) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(
        "chain_sum", size=size, seed=1234, min_terms=TERMS, max_terms=TERMS, min_digits=1, max_digits=1
    )


@cache
def _questions() -> list[dict[str, Any]]:
    """Distinct questions in a fixed random order."""
    distinct = {entry["question"]: entry for entry in _dataset(POOL)}
    entries = list(distinct.values())
    random.Random(0).shuffle(entries)
    return entries


def chain(expression: str) -> str:
    """'1 - 3 + 5' -> '1 - 3 = -2 + 5 = 3': the sum from left to right, every total written down."""
    first, *rest = expression.split()
    total, text = int(first), first
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        total += int(term) if sign == "+" else -int(term)
        text += f" {sign} {term} = {total}"
    return text


def _teacher(expression: str, rng: random.Random) -> str:
    text = chain(expression)
    if rng.random() >= TEACHER_ERRORS:
        return text
    return re.sub(r"-?\d+$", lambda last: str(int(last.group()) + rng.choice([-1, 1])), text)


def _weights(rng: np.random.Generator, c: dict[str, Any]) -> Any:
    """Names and initial values as transformers' Qwen3 and Qwen3-MoE have them: normal(0, initializer_range), norms one."""
    hidden, heads = c["hidden_size"], c["head_dim"]
    inner = c["moe_intermediate_size"] if c["num_experts"] else c["intermediate_size"]
    query, key = c["num_attention_heads"] * heads, c["num_key_value_heads"] * heads

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * c["initializer_range"]).astype(np.float32)

    yield "model.embed_tokens.weight", normal(c["vocab_size"], hidden)
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name, size in (("input_layernorm", hidden), ("post_attention_layernorm", hidden)):
            yield f"{layer}{name}.weight", np.ones(size, np.float32)
        for name in ("q_norm", "k_norm"):
            yield f"{layer}self_attn.{name}.weight", np.ones(heads, np.float32)
        for name, size in (("q", query), ("k", key), ("v", key)):
            yield f"{layer}self_attn.{name}_proj.weight", normal(size, hidden)
        yield f"{layer}self_attn.o_proj.weight", normal(hidden, query)
        if c["num_experts"]:
            yield f"{layer}mlp.gate.weight", normal(c["num_experts"], hidden)
        for part in [f"experts.{e}." for e in range(c["num_experts"])] or [""]:
            expert = f"{layer}mlp.{part}"
            yield f"{expert}gate_proj.weight", normal(inner, hidden)
            yield f"{expert}up_proj.weight", normal(inner, hidden)
            yield f"{expert}down_proj.weight", normal(hidden, inner)
    yield "model.norm.weight", np.ones(hidden, np.float32)
    yield "lm_head.weight", normal(c["vocab_size"], hidden)


def _tokenizer() -> Any:
    """A lossless BPE: a run of words is one token after merging (the fixed phrase of the question), every digit its own."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    words = r"[A-Za-z][A-Za-z ]*[A-Za-z]|[A-Za-z]|\d| ?[^A-Za-z0-9 ] ?|\s"
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(words), "isolated")
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=SPECIAL,
        initial_alphabet=[chr(code) for code in range(32, 127)],
        show_progress=False,
    )
    rows = _questions()[HELD_OUT : HELD_OUT + 4000]
    tokenizer.train_from_iterator([row["question"] + chain(row["metadata"]["expression"]) for row in rows], trainer)
    return tokenizer


def _tokenizer_config() -> dict[str, Any]:
    pad, eos, unk = SPECIAL
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "eos_token": eos,
        "unk_token": unk,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG["max_position_embeddings"],
    }
