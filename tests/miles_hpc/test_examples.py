"""The two examples: their functions, their files, and that they fit the rest."""

import json
import re
from pathlib import Path

import pytest

from miles_hpc import config, data, prepare
from miles_hpc.examples import arithmetic, smollm2

FOLDER = Path(__file__).parents[2] / "docs" / "examples"
FILES = sorted(FOLDER.glob("*.toml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_file_is_short_and_valid(file: Path) -> None:
    assert len([line for line in file.read_text().splitlines() if line.strip()]) < 25
    assert config.load(file).run.name == file.stem


def test_arithmetic_prompts_are_distinct_and_held_out_ones_apart() -> None:
    train, held_out = arithmetic.prompts("train", 0), arithmetic.prompts("eval", 0)
    questions = [row["prompt"] for row in train + held_out]
    assert len(questions) == len(set(questions)) > 30_000 and len(held_out) == arithmetic.HELD_OUT
    assert arithmetic.prompts("train", 7) == train


def test_arithmetic_labels_are_right() -> None:
    for row in arithmetic.prompts("eval", 0):
        expression = row["prompt"].rsplit(": ", 1)[1].removesuffix(" =")
        assert expression == row["metadata"]["expression"] and str(eval(expression)) == row["label"]
        assert arithmetic.chain(expression).endswith(f" = {row['label']}")


def test_the_teacher_is_right_one_time_in_three() -> None:
    labels = {row["prompt"]: row["label"] for row in arithmetic.prompts("train", 0)}
    rows = arithmetic.demonstrations(0, 6000)
    right = [answer.rsplit(" = ", 1)[1] == labels[prompt] for prompt, answer in rows]
    assert sum(right) / len(right) == pytest.approx(1 / 3, abs=0.03)
    off = {int(a.rsplit(" = ", 1)[1]) - int(labels[p]) for p, a in rows}
    assert off == {-1, 0, 1}
    assert arithmetic.demonstrations(0, 10) == arithmetic.demonstrations(0, 10) != arithmetic.demonstrations(1, 10)


@pytest.mark.parametrize(
    ("answer", "finished", "expected"),
    [
        ("1 - 3 = -2 + 5 = 3", True, 1.0),
        ("1 - 3 = -2 + 5 = 3", False, 0.0),  # cut off before it ended
        ("9 = 3", True, 1.0),
        ("1 - 3 = -2 + 5 = 4", True, 0.0),
        ("1 - 3 = -2 + 5 = 31", True, 0.0),  # reasoning-gym alone gives 0.5
        ("3", True, 0.0),
        ("", True, 0.0),
        (" = ", True, 0.0),
        ("x = three", True, 0.0),
    ],
)
def test_arithmetic_reward(answer: str, finished: bool, expected: float) -> None:
    assert arithmetic.reward("1 - 3 + 5 =", answer, "3", {"finished": finished}) == expected


@pytest.fixture(scope="module")
def arithmetic_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    arithmetic.model(folder, seed=0)
    return folder


def test_the_arithmetic_model_is_a_checkpoint(arithmetic_model: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    prepare.check_model(arithmetic_model, context_length=64)
    weights = load_file(arithmetic_model / "model.safetensors")
    assert sum(tensor.size for tensor in weights.values()) == pytest.approx(533_760, rel=0.01)
    for seed, same in ((0, True), (1, False)):
        (tmp_path / str(seed)).mkdir()
        arithmetic.model(tmp_path / str(seed), seed)
        again = load_file(tmp_path / str(seed) / "model.safetensors")
        assert all((again[name] == tensor).all() for name, tensor in weights.items()) == same


def test_the_arithmetic_tokenizer_loses_nothing(arithmetic_model: Path) -> None:
    tokenizer = data.tokenizer_of(arithmetic_model)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert len(tokenizer) <= arithmetic.CONFIG["vocab_size"]
    for prompt, answer in arithmetic.demonstrations(0, 300):
        ids = tokenizer(prompt)["input_ids"] + tokenizer(answer)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == prompt + answer
        assert len(tokenizer(prompt)["input_ids"]) == 10 and len(tokenizer(answer)["input_ids"]) < 24


def test_smollm2_prompts_and_reward() -> None:
    train, held_out = smollm2.prompts("train", 0), smollm2.prompts("eval", 0)
    assert len(held_out) == smollm2.HELD_OUT and not {r["prompt"] for r in train} & {r["prompt"] for r in held_out}
    for row in held_out:
        numbers = re.search(r"(\d+) ([+-]) (\d+)", row["prompt"])
        assert numbers and str(eval(numbers.group())) == row["label"]
    good = smollm2.reward("", "So 5 + 7 = 12.\nThe answer is 12.", "12", {"finished": True})
    assert good == {"reward": 1.0, "finished": 1.0}
    assert smollm2.reward("", "The answer is 13.", "12", {"finished": True})["reward"] == 0.0
    assert smollm2.reward("", "I do not know", "-3", {"finished": False}) == {"reward": 0.0, "finished": 0.0}
    assert smollm2.reward("", "It is -3.", "-3", {"finished": True})["reward"] == 1.0


@pytest.mark.long
def test_smollm2_model(tmp_path: Path) -> None:
    """Real weights, its chat template, and a sensible answer."""
    import torch
    from transformers import AutoModelForCausalLM

    smollm2.model(tmp_path, seed=0)
    prepare.check_model(tmp_path, context_length=512)
    tokenizer = data.tokenizer_of(tmp_path)
    assert tokenizer.eos_token == "<|im_end|>" and json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 2
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    answer = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
