"""Prompts: where they come from, their order, and their tokens.

A prompt id (int64) is `epoch * rows + row`. The order of an epoch is a permutation keyed by (seed, epoch), so the prompts of
a step depend on the configuration only, never on attempts or engines.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from miles_hpc import edges, records
from miles_hpc.config import Config, Data, is_edge
from miles_hpc.errors import DataError, ModelError
from miles_hpc.records import Row

Split = Literal["train", "eval"]
SPARE_EPOCHS = 1 << 31
"""Epochs from here on are of prompts that replace refused ones."""


class Prompts:
    """The prompts of one split.

    Args:
        rows: at least one.
        tokenizer: of the model (`tokenizer_of`), or None if no tokens are needed.
        chat: render with the tokenizer's chat template.
        seed: of the order.
        source: file or edge, for messages.
    """

    def __init__(self, rows: list[Row], tokenizer: Any, *, chat: bool, seed: int, source: str) -> None:
        self.rows, self.tokenizer, self.chat, self.seed, self.source = rows, tokenizer, chat, seed, source
        self._orders: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, prompt_id: int) -> Row:
        """The row of a prompt id; ids count on over the epochs."""
        return self.rows[prompt_id % len(self.rows)]

    def order(self, epoch: int) -> np.ndarray:
        """The rows in the order of `epoch`, int64 [rows]."""
        if epoch not in self._orders:
            self._orders = {epoch: np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))}
        return self._orders[epoch]

    def ids_of_step(self, step: int, count: int) -> np.ndarray:
        """Prompt ids of a step of `count` prompts, int64 [count]; steps follow each other across epochs without gap or repeat.

        `step` counts from 0 and `count` is the same for every step of a run.
        """
        return self._ids(np.arange(step * count, (step + 1) * count, dtype=np.int64))

    def spare_ids(self, step: int, count: int, tries: int) -> np.ndarray:
        """Prompt ids to try where a filter refuses a group: int64 [count, tries], one row per place of `ids_of_step`.

        They come from an order of their own, far behind every epoch, so that refusals do not move the prompts of later steps:
        what is drawn depends on (seed, step, place, try) alone.
        """
        places = (step * count + np.arange(count, dtype=np.int64))[:, None] * tries + np.arange(tries)
        return self._ids(places.reshape(-1), SPARE_EPOCHS).reshape(places.shape)

    def _ids(self, places: np.ndarray, first_epoch: int = 0) -> np.ndarray:
        """Prompt ids at ascending places of the endless sequence of epochs."""
        epochs, places = np.divmod(places, len(self.rows))
        epochs += first_epoch
        parts = [self.order(int(epoch))[places[epochs == epoch]] for epoch in np.unique(epochs)]
        return epochs * len(self.rows) + np.concatenate([np.zeros(0, np.int64), *parts])

    def text(self, row: int) -> str:
        """What the model sees: the prompt, rendered with the chat template if `chat`."""
        return text_of(self.rows[row].prompt, self.tokenizer, self.chat)

    def tokens(self, row: int) -> list[int]:
        """Token ids of `text(row)`."""
        return tokens_of(self.rows[row].prompt, self.tokenizer, self.chat)

    def check(self, limit: int) -> int:
        """The longest prompt in tokens.

        Raises:
            DataError: a prompt of more than `limit` tokens, of none, or that the chat template refuses; the first is named.
        """
        if self.chat and not self.tokenizer.chat_template:
            raise DataError(
                "data.chat = true, but the model's tokenizer has no chat template",
                where=self.source,
                next_step="set data.chat = false, or use an instruction-tuned model",
            )
        longest = 0
        for row in range(len(self.rows)):
            count = self._count(row)
            if not count:
                raise DataError(f"prompt {row} is empty: it has no tokens", where=f"{self.source}, row {row}")
            if count > limit:
                raise DataError(
                    f"prompt {row} has {count} tokens; at most {limit} fit (model.context_length - rollout.max_new_tokens)",
                    where=f"{self.source}, row {row}",
                    next_step="raise model.context_length, lower rollout.max_new_tokens, or shorten the prompt",
                )
            longest = max(longest, count)
        return longest

    def _count(self, row: int) -> int:
        try:
            return len(self.tokens(row))
        except Exception as error:  # a template raises what it likes: roles in a wrong order, a message without a text
            what = f"prompt {row} has no tokens: {edges.describe(error)[:300]}"
            raise DataError(what, where=f"{self.source}, row {row}") from error


def text_of(prompt: str | list[dict[str, Any]], tokenizer: Any, chat: bool) -> str:
    """What the model sees of a prompt or of the messages of one, rendered with the chat template if `chat`."""
    if not chat:
        return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def tokens_of(prompt: str | list[dict[str, Any]], tokenizer: Any, chat: bool) -> list[int]:
    """Token ids of `text_of`; a template brings its own special tokens."""
    return tokenizer(text_of(prompt, tokenizer, chat), add_special_tokens=not chat)["input_ids"]


def load(config: Config, split: Split, tokenizer: Any = None) -> Prompts:
    """The prompts of `data.prompts` or `data.eval`.

    Raises:
        DataError: missing file or column, no rows, not UTF-8, not JSON, a prompt of the wrong type. EdgeError.
    """
    source = config.data.prompts if split == "train" else config.data.eval
    rows = list(_rows(config, source, split))
    if not rows:
        raise DataError("there are no prompts", where=source)
    return Prompts(rows, tokenizer, chat=config.data.chat, seed=config.run.seed, source=source)


def tokenizer_of(model_folder: Path) -> Any:
    """The tokenizer of a checkpoint, from its own files only.

    Raises:
        ModelError: the folder has none that transformers can read.
    """
    from transformers import AutoTokenizer

    from miles_hpc import device

    device.define_torchvision_operators()
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_folder, local_files_only=True)
    except Exception as error:  # transformers lets through whatever a broken file brings up
        raise ModelError(f"no usable tokenizer: {edges.describe(error)[:300]}", where=str(model_folder)) from None
    if not tokenizer("abc ABC 012 .,+-=")["input_ids"]:  # transformers makes an empty one up where the files are missing
        raise ModelError("no usable tokenizer: it has no tokens (tokenizer.json is missing?)", where=str(model_folder))
    return tokenizer


def _rows(config: Config, source: str, split: Split) -> Iterator[Row]:
    if is_edge(source):
        yield from _from_edge(config, source, split)
        return
    file = Path(source)
    if not file.is_file():
        raise DataError("no such file", where=source, next_step="data.prompts and data.eval name a .jsonl or .parquet file")
    if not os.access(file, os.R_OK):
        raise DataError("the file may not be read", where=source, next_step="look at its permissions: ls -l")
    found = _parquet(file, config.data) if records.is_parquet(file) else records.jsonl(file)
    for number, record in found:
        yield records.row(record, config.data, f"{source}, {number}")


def _from_edge(config: Config, source: str, split: Split) -> Iterator[Row]:
    key = "data.prompts" if split == "train" else "data.eval"
    function = edges.load(source, config.run.edges_folder, key=key, arguments=("split", "seed"))
    items = edges.call(function, split, config.run.seed, key=f"{key} = {source!r}")
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise edges.wrong(key, function, "a list of dicts with prompt, label and metadata", items)
    columns = Data(prompts=source)
    for number, item in enumerate(items):
        yield records.row(item, columns, f"{source}, row {number}")


def _parquet(file: Path, columns: Data) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        parquet = pyarrow.parquet.ParquetFile(file)
        wanted = [columns.prompt_column, columns.label_column, columns.metadata_column]
        there = parquet.schema_arrow.names
        records.check_columns(columns, there, str(file))
        number = 0
        for batch in parquet.iter_batches(columns=[name for name in wanted if name in there]):
            for record in batch.to_pylist():
                yield f"row {number}", record
                number += 1
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        raise DataError(f"not a readable Parquet file: {edges.describe(error)[:300]}", where=str(file)) from None
