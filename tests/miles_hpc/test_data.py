"""Prompts: files, columns, order, and what is wrong with them."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest

from miles_hpc import data
from miles_hpc.config import Config
from miles_hpc.data import Prompts
from miles_hpc.errors import DataError, EdgeError
from miles_hpc.records import Row


class Words:
    """A tokenizer of one token per word."""

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [0] * add_special_tokens + [len(word) for word in text.split()]}

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        return " ".join(f"<{m['role']}> {m['content']}" for m in messages) + " <assistant>"


def config(source: Path | str, **fields: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "t", "steps": 1, "seed": 3},
            "model": {"path": "m"},
            "data": {"prompts": str(source)} | fields,
            "rollout": {"prompts_per_step": 1, "samples_per_prompt": 2, "max_new_tokens": 8, "reward": "a:b"},
            "train": {"lr": 0.1},
        }
    )


def jsonl(tmp_path: Path, *rows: Any) -> Path:
    file = tmp_path / "my prompts.jsonl"
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return file


def parquet(tmp_path: Path, columns: dict[str, list[Any]]) -> Path:
    import pyarrow
    import pyarrow.parquet

    file = tmp_path / "prompts.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file


def test_jsonl_with_named_columns(tmp_path: Path) -> None:
    file = jsonl(tmp_path, {"q": "Größe?", "a": 3, "more": {"x": 1}}, "", {"q": "b", "a": [1]})
    prompts = data.load(config(file, prompt_column="q", label_column="a", metadata_column="more"), "train")
    assert prompts.rows == [Row("Größe?", 3, {"x": 1}), Row("b", [1], {})]


def test_parquet_is_the_same_as_jsonl(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "label": "1", "metadata": {"x": 1}}, {"prompt": "b", "label": "2", "metadata": {"x": 2}}]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    assert (
        data.load(config(parquet(tmp_path, columns)), "train").rows == data.load(config(jsonl(tmp_path, *rows)), "train").rows
    )


def test_parquet_messages_and_json_metadata(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    file = parquet(tmp_path, {"prompt": [messages], "metadata": ['{"x": 1}'], "unused": [0]})
    assert data.load(config(file), "train").rows == [Row(messages, None, {"x": 1})]


def test_an_edge_as_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data_edge.py").write_text(
        "def prompts(split, seed):\n    return [dict(prompt=f'{split} {seed}', label=1, metadata={})]\n"
        "def bad(split, seed):\n    return 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "data_edge", raising=False)
    assert data.load(config("data_edge:prompts", eval="data_edge:prompts"), "eval").rows == [Row("eval 3", 1, {})]
    with pytest.raises(EdgeError, match="must return a list of dicts"):
        data.load(config("data_edge:bad"), "train")


@pytest.mark.parametrize(
    ("content", "what", "where"),
    [
        (b"", "there are no prompts", "p.jsonl"),
        (b"\n \n", "there are no prompts", "p.jsonl"),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}', "not UTF-8: byte 12 of the line is 0xff", "line 2"),
        (b'{"prompt": "a"}\n\n{"prompt": "b"', "not JSON", "line 3"),
        (b'{"prompt": "a"}\n{"prompt": "b"\r\n{"prompt": "c"}\n', "not JSON: Expecting ',' delimiter at column 15", "line 2"),
        (b"[1, 2]", "a JSON object is needed, got list", "line 1"),
        (b'{"question": "a", "label": 1}', "no column 'prompt'; there are 'question', 'label'", "line 1"),
        (b'{"prompt": 3}', "must be a text or a list of messages", "line 1"),
        (b'{"prompt": [{"role": "user"}]}', "must be a text or a list of messages", "line 1"),
        (b'{"prompt": "a", "metadata": [1]}', "metadata must be a mapping, got list", "line 1"),
        (b'{"prompt": "a", "metadata": "x"}', "not JSON", "line 1"),
        (b"[" * 100_000, "not usable JSON: RecursionError", "line 1"),
        (b'{"prompt": "a", "metadata": "' + b"[" * 100_000 + b'"}', "not JSON", "line 1"),
        (b'{"prompt": "a", "label": ' + b"9" * 5000 + b"}", "not usable JSON", "line 1"),
        (b'{"prompt": "a \\ud800"}', "not valid Unicode: half a surrogate pair at character 2", "line 1"),
        (b'{"prompt": [{"role": "user", "content": "\\ud800"}]}', "not valid Unicode", "line 1"),
    ],
)
def test_bad_jsonl(tmp_path: Path, content: bytes, what: str, where: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(content)
    with pytest.raises(DataError, match=what) as caught:
        data.load(config(file), "train")
    assert where in caught.value.where


def test_a_label_column_that_is_named_must_be_there(tmp_path: Path) -> None:
    for file in (jsonl(tmp_path, {"prompt": "a", "answer": 1}), parquet(tmp_path, {"prompt": ["a"], "answer": [1]})):
        assert data.load(config(file), "train").rows == [Row("a")]
        assert data.load(config(file, label_column="answer"), "train").rows == [Row("a", 1)]
        with pytest.raises(DataError, match="no column 'anwser'; there are 'prompt', 'answer'"):
            data.load(config(file, label_column="anwser"), "train")


def test_a_byte_order_mark_is_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n')
    assert data.load(config(file), "train").rows == [Row("a")]


def test_missing_file_and_column_and_garbage(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        data.load(config(tmp_path / "none.jsonl"), "train")
    with pytest.raises(DataError, match="no column 'prompt'; there are 'text'"):
        data.load(config(parquet(tmp_path, {"text": ["a"]})), "train")
    with pytest.raises(DataError, match="there are no prompts"):
        data.load(config(parquet(tmp_path, {"prompt": []})), "train")
    (tmp_path / "garbage.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        data.load(config(tmp_path / "garbage.parquet"), "train")


def test_a_damaged_parquet_file_is_named_or_harmless(tmp_path: Path) -> None:
    good = parquet(tmp_path, {"prompt": [f"text {i}" for i in range(50)]}).read_bytes()
    file = tmp_path / "DAMAGED.PARQUET"
    for start in range(4, len(good), 23):
        file.write_bytes(good[:start] + b"\xff" * 8 + good[start + 8 :])
        with contextlib.suppress(DataError):
            data.load(config(file), "train")
        file.write_bytes(good[:start])
        with pytest.raises(DataError, match="Parquet"):
            data.load(config(file), "train")


def prompts(count: int, seed: int = 0, **fields: Any) -> Prompts:
    settings = {"chat": False, "seed": seed, "source": "here"} | fields
    return Prompts([Row(f"w{i} " * (i + 1)) for i in range(count)], Words(), **settings)


@pytest.mark.parametrize(("rows", "count"), [(10, 4), (10, 5), (7, 7), (3, 8), (1, 4)])
def test_steps_follow_each_other_across_epochs(rows: int, count: int) -> None:
    p = prompts(rows)
    steps = 12
    ids = np.concatenate([p.ids_of_step(step, count) for step in range(steps)])
    assert ids.dtype == np.int64 and len(set(ids.tolist())) == steps * count
    for epoch in range(steps * count // rows):
        assert sorted(ids[epoch * rows : (epoch + 1) * rows]) == list(range(epoch * rows, (epoch + 1) * rows))


def test_order_depends_on_seed_and_epoch_only() -> None:
    late_first = prompts(50)
    later = late_first.ids_of_step(9, 8)
    fresh = prompts(50)
    assert [fresh.ids_of_step(step, 8).tolist() for step in range(10)][9] == later.tolist()
    assert not np.array_equal(fresh.order(0), fresh.order(1))
    assert not np.array_equal(fresh.order(0), prompts(50, seed=1).order(0))


def test_prompts_that_are_too_long_or_empty() -> None:
    assert prompts(3).check(4) == 4  # the longest: three words and one special token
    with pytest.raises(DataError, match="prompt 2 has 4 tokens; at most 3 fit") as caught:
        prompts(5).check(3)
    assert caught.value.where == "here, row 2"
    no_tokens = Prompts([Row("a")], lambda text, add_special_tokens: {"input_ids": []}, chat=False, seed=0, source="here")
    with pytest.raises(DataError, match="prompt 0 is empty"):
        no_tokens.check(3)


def test_chat_templates() -> None:
    rows = [Row("hi"), Row([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])]
    chat = Prompts(rows, Words("template"), chat=True, seed=0, source="here")
    assert [chat.text(0), chat.text(1)] == ["<user> hi <assistant>", "<system> s <user> u <assistant>"]
    assert len(chat.tokens(0)) == 3  # the template brings its own special tokens
    with pytest.raises(DataError, match="no chat template"):
        Prompts(rows, Words(), chat=True, seed=0, source="here").check(10)


class Strict(Words):
    """With a template that wants a user to speak first, as many do."""

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        if messages[0]["role"] != "user":
            raise jinja2.TemplateError("Conversation roles must alternate user/assistant/user/...")
        return super().apply_chat_template(messages, tokenize, add_generation_prompt)


def test_a_prompt_that_the_chat_template_refuses_is_named() -> None:
    rows = [Row("hi"), Row([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])]
    with pytest.raises(DataError, match="prompt 1 has no tokens: TemplateError: Conversation roles must alternate") as caught:
        Prompts(rows, Strict("template"), chat=True, seed=0, source="here").check(10)
    assert caught.value.where == "here, row 1" and caught.value.kind == "user_error"
