"""What a small JSON file of a run states, read by a program that did not write it: a crash, a full disk or a hand may have
been there in between.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")
_ADAPTERS: dict[type, TypeAdapter[Any]] = {}


def parsed(text: str | bytes) -> dict[str, Any] | None:
    """The JSON object in a text, None where there is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # no JSON, no UTF-8, thousands of digits; thousands of brackets
        return None
    return found if isinstance(found, dict) else None


def read(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is no file, or none in it.

    Raises:
        OSError: the file is there and cannot be read.
    """
    try:
        return parsed(file.read_bytes()) or {}
    except FileNotFoundError:
        return {}


def of(kind: type[T], values: Mapping[str, Any]) -> T | None:
    """The values as a dataclass, without those that it does not know; None where one is missing or of another type."""
    adapter = _ADAPTERS.get(kind) or _ADAPTERS.setdefault(kind, TypeAdapter(kind))
    try:
        return adapter.validate_python({name: value for name, value in values.items() if value is not None})
    except ValidationError:
        return None
