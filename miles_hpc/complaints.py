"""What is wrong with a configuration, in a user's words: the key, the line or the `--set` to blame, what would be right."""

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from miles_hpc.errors import ConfigError
from miles_hpc.sections import EDGE, RUN_NAME, Section

PATTERNS = {
    EDGE: "module:function is needed",
    RUN_NAME: "only letters, digits, '.', '_' and '-', a letter or a digit first",
}
SAID = {"model_type": "this is a section, keys are set in it", "model_attributes_type": "this is a section, keys are set in it"}
"""In place of pydantic's words."""
NEXT = "correct it there; docs/configuration.md has every key with its type and default"


def of(error: ValidationError, model: type[Section], file: str, text: str, overrides: Sequence[str]) -> ConfigError:
    """All complaints as one error.

    Args:
        model: what was validated.
        text: the file's, in which lines are looked for.
        overrides: `--set` of the command line.
    """
    # of `Edge | Literal[""]` only the first has something to say
    errors = [e for e in error.errors() if e.get("ctx", {}).get("expected") != "''"]
    said = [(_path(e), _say(e, model)) for e in errors]
    places = dict.fromkeys(_place(path, message, file, text, overrides) for path, message in said)
    return ConfigError("\n".join(message for _, message in said), where="; ".join(places), next_step=NEXT)


def _path(error: Any) -> list[str]:
    return [str(p) for p in error["loc"] if not str(p).startswith(("literal[", "constrained-str"))]  # of a union


def _say(error: Any, model: type[Section]) -> str:
    """One line for one pydantic error: key, what is wrong, the nearest valid names."""
    path = _path(error)
    key = ".".join(path)
    if error["type"] == "extra_forbidden":
        names = _names(model, path[:-1])
        near = difflib.get_close_matches(path[-1], names, n=3) or names
        return f"{key}: unknown key; did you mean {', '.join('.'.join([*path[:-1], n]) for n in near)}?"
    if error["type"] == "missing":
        return f"{key}: missing"
    if error["type"] == "value_error":  # from a validator of ours, which names the keys
        return error["msg"].removeprefix("Value error, ")
    message = SAID.get(error["type"], error["msg"])
    if error["type"] == "string_pattern_mismatch":
        message = PATTERNS.get(error["ctx"]["pattern"], error["msg"])
    got = "a section" if isinstance(error["input"], dict) else repr(error["input"])
    return f"{key}: {message} (got {got})"


def _place(path: list[str], message: str, file: str, text: str, overrides: Sequence[str]) -> str:
    """The `--set` that sets what a message names, else the line of the file."""
    key = ".".join(path)
    named = [key] if key and message.startswith(f"{key}: ") else re.findall(r"[a-z_]+(?:\.[a-z_]+)+", message)
    blamed = [o for o in overrides if any(_about(o.partition("=")[0].strip(), name) for name in named)]
    if blamed:
        return f"{', '.join(f'--set {o}' for o in blamed)}, on top of {file}"
    lines = (_line(text, name.split(".")) for name in named)
    return next((f"{file}, line {line}" for line in lines if line), file)


def _about(key: str, name: str) -> bool:
    """One of the two is the other, or a section that holds it."""
    return f"{key}.".startswith(f"{name}.") or f"{name}.".startswith(f"{key}.")


def _line(text: str, path: list[str]) -> int:
    """Number of the line with the key, or with the table that it is in or that it is; 0: not to be seen."""
    table: list[str] = []
    tables = Counter[str]()
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*(\[{1,2})\s*([\w.-]+)\s*\]", line):
            name = header[2]
            table = [*name.split("."), *([str(tables[name])] if header[1] == "[[" else [])]
            tables[name] += 1
            if table == path:
                return number
        elif key := re.match(r"\s*([\w.-]+)\s*=", line):
            found = [*table, *key[1].split(".")]
            if found == path[: len(found)]:
                return number
    return 0


def _names(model: Any, path: list[str]) -> list[str]:
    """Valid keys of the section at `path`."""
    for part in path:
        if not part.isdigit():  # an index into a list of sections
            model = next(_sections(model.model_fields[part].annotation))
    return list(model.model_fields)


def _sections(annotation: Any) -> Iterator[type[Section]]:
    """The sections within an annotation such as `list[Filter]` or `WarmStart | None`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _sections(argument)
