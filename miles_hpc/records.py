"""Records of prompts: lines of JSONL, their columns and what a row must be. The standard library alone: the login node looks at
them before the queue with the same eyes as the job.
"""

import json
import time
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from miles_hpc.config import Data
from miles_hpc.errors import DataError

HEAD_LINES, HEAD_SECONDS = 10_000, 1.0
"""Where `check_head` stops."""


@dataclass(frozen=True)
class Row:
    """One prompt as it was given."""

    prompt: str | list[dict[str, str]]
    """Text, or chat messages with `role` and `content`."""
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def copies(self) -> tuple[Any, dict[str, Any]]:
        """Label and metadata for a user's function: copies, for it may change what it gets."""
        return deepcopy(self.label), deepcopy(dict(self.metadata))


def is_parquet(file: Path) -> bool:
    """By its name; anything else is JSONL."""
    return file.suffix.lower() == ".parquet"


def check_head(file: Path, columns: Data) -> None:
    """The first lines of a JSONL file, as many as a second allows: `row` takes each of them.

    Raises:
        DataError: as `jsonl` and `row`; no line has anything on it.
    """
    end, number = time.monotonic() + HEAD_SECONDS, ""
    for number, record in islice(jsonl(file), HEAD_LINES):
        row(record, columns, f"{file}, {number}")
        if time.monotonic() > end:
            return
    if not number:
        raise DataError("there are no prompts", where=str(file))


def jsonl(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """'line N' and the object on it; blank lines are passed over.

    Raises:
        DataError: a line that is not UTF-8, not JSON, or no object.
    """
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"line {number}", _record(line, f"{file}, line {number}")


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig").rstrip("\r\n"))  # else what is missing at its end is missed on a next line
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8: byte {error.start} of the line is 0x{line[error.start]:02x}", where=where) from None
    except json.JSONDecodeError as error:
        what = f"not JSON: {error.msg} at column {error.colno}"
        raise DataError(what, where=where, next_step="mend the line: one JSON object on each") from None
    except (RecursionError, ValueError) as error:  # thousands of brackets, a number of thousands of digits
        raise DataError(f"not usable JSON: {type(error).__name__}: {str(error)[:200]}", where=where) from None
    if not isinstance(record, dict):
        raise DataError(f"a JSON object is needed, got {type(record).__name__}", where=where)
    return record


def row(record: Mapping[str, Any], columns: Data, where: str) -> Row:
    """A record by the columns that the configuration names.

    Raises:
        DataError: a missing column, a prompt or metadata of the wrong type, text that is not Unicode.
    """
    check_columns(columns, list(record), where)
    prompt = record[columns.prompt_column]
    if not (isinstance(prompt, str) or _is_messages(prompt)):
        raise DataError(f"{columns.prompt_column} must be a text or a list of messages with role and content", where=where)
    _check_text(prompt, columns.prompt_column, where)
    metadata = record.get(columns.metadata_column)
    if isinstance(metadata, str):
        metadata = _mapping(metadata, columns.metadata_column, where)
    if not isinstance(metadata, Mapping | None):
        raise DataError(f"{columns.metadata_column} must be a mapping, got {type(metadata).__name__}", where=where)
    return Row(prompt, record.get(columns.label_column), metadata or {})


def _check_text(prompt: str | list[dict[str, str]], column: str, where: str) -> None:
    """JSON can spell half a surrogate pair, which no tokenizer takes."""
    for text in [prompt] if isinstance(prompt, str) else [text for message in prompt for text in message.values()]:
        try:
            str(text).encode()
        except UnicodeEncodeError as error:
            found = f"half a surrogate pair at character {error.start}"
            raise DataError(f"{column} is not valid Unicode: {found}", where=where) from None


def _mapping(text: str, column: str, where: str) -> Any:
    """Parquet files often hold nested values as JSON text."""
    try:
        return json.loads(text)
    except (RecursionError, ValueError):
        raise DataError(f"{column} is a text that is not JSON", where=where) from None


def _is_messages(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(m, Mapping) and isinstance(m.get("content"), str) and isinstance(m.get("role"), str) for m in prompt)
    )


def check_columns(columns: Data, there: list[str], where: str) -> None:
    """The prompt must be there, and the label if the configuration names its column.

    Raises:
        DataError: one is not.
    """
    needed = {"prompt_column": columns.prompt_column}
    if columns.label_column != Data.model_fields["label_column"].default:
        needed["label_column"] = columns.label_column
    for key, column in needed.items():
        if column not in there:
            raise DataError(
                f"there is no column {column!r}; there are {', '.join(map(repr, there)) or 'none'}",
                where=where,
                next_step=f"name the column with data.{key}",
            )
