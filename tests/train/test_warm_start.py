"""The supervised phase before the first rollout, with the trainer and the tokenizer left out."""

import sys
from pathlib import Path
from typing import Any

import pytest
from train_parts import config

from miles_hpc import data
from miles_hpc.config import Config
from miles_hpc.errors import EdgeError, ModelError
from miles_hpc.paths import RunPaths
from miles_hpc.records import Row
from miles_hpc.train.warm_start import warm_start


class Letters:
    """A token per character, one before a text by itself, and 0 for the end."""

    eos_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + list(map(ord, text))

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text, add_special_tokens)}

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        return "".join(f"<{message['content']}>" for message in messages) + ":" * add_generation_prompt


class Trainer:
    """Notes what it is given."""

    def __init__(self) -> None:
        self.given: list[tuple[Any, ...]] = []

    def supervised_step(self, *given: Any) -> float:
        self.given.append(given)
        self.afresh = False
        return 0.5

    def reset_optimizer(self) -> None:
        self.afresh = True


def plan(folder: Path, monkeypatch: pytest.MonkeyPatch, rows: str, longest: int, tokenizer: Any = None) -> Config:
    monkeypatch.setattr(data, "tokenizer_of", lambda folder: tokenizer or Letters())
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"teacher_{abs(hash((folder, rows)))}"
    (folder / f"{name}.py").write_text(f"def show(seed, count):\n    return {rows}\n")
    made = config().model_dump(exclude_none=True)
    made["run"]["edges_folder"], made["model"]["context_length"] = str(folder), longest
    made["rollout"]["max_new_tokens"] = longest - 1
    return Config.model_validate(made | {"warm_start": {"data": f"{name}:show", "steps": 2, "batch_size": 2, "lr": 1.0}})


def test_every_demonstration_is_trained_on_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, trainer = plan(tmp_path, monkeypatch, "[(chr(97 + i), 'xy') for i in range(count)]", 5), Trainer()
    assert warm_start(trainer, made, RunPaths(tmp_path)) == [0.5, 0.5]
    assert trainer.afresh  # what is saved next is what RL starts from
    tokens, masks, rates = zip(*trainer.given, strict=True)
    assert sorted(tokens[0] + tokens[1]) == [[1, 97 + i, ord("x"), ord("y"), 0] for i in range(4)]
    assert masks[0] + masks[1] == [[0, 0, 1, 1, 1]] * 4 and rates == (0.05, 0.1)


def test_prompts_look_as_in_a_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rendered with the chat template where `data.chat` says so, without a second token for the beginning."""
    made, trainer = plan(tmp_path, monkeypatch, "[('a', 'xy')] * count", 7), Trainer()
    for chat in (True, False):
        made = made.model_copy(update={"data": made.data.model_copy(update={"chat": chat})})
        prompts = data.Prompts([Row("a", "", {})], Letters(), chat=chat, seed=0, source="")
        warm_start(trainer, made, RunPaths(tmp_path))
        prompt = prompts.tokens(0)
        assert trainer.given[-1][0][0] == [*prompt, ord("x"), ord("y"), 0]
        assert trainer.given[-1][1][0] == [0] * len(prompt) + [1] * 3
        assert prompt == (list(map(ord, "<a>:")) if chat else [1, ord("a")])


def test_a_tokenizer_that_has_no_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(Letters):
        eos_token_id = None

    made = plan(tmp_path, monkeypatch, "[('a', 'x')] * count", 5, Endless())
    with pytest.raises(ModelError, match="no end-of-sequence token") as caught:
        warm_start(Trainer(), made, RunPaths(tmp_path))
    assert "tokenizer_config.json" in caught.value.where


@pytest.mark.parametrize(
    ("rows", "said"), [("[('ab', 'xy')] * count", "5 fit"), ("[('a', 'x')]", "pairs of texts"), ("[('a', 1)] * count", "pairs")]
)
def test_demonstrations_that_cannot_be_trained_on_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: str, said: str
) -> None:
    with pytest.raises(EdgeError, match=f"warm_start.data .*{said}"):
        warm_start(Trainer(), plan(tmp_path, monkeypatch, rows, 5), RunPaths(tmp_path))
