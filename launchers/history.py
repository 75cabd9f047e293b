"""What a run did, from `events.jsonl` and `ledger.jsonl`: of a step that was done twice, only the one that the policy kept.

An attempt that resumes at step s undoes what earlier attempts had done from s on; their lines stay in the files.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_hpc import statement
from miles_hpc.paths import RunPaths

Line = dict[str, Any]
NEEDED = {
    "start": {"step", "attempt"},
    "step": {"step", "attempt", "time", "metrics", "phase_seconds"},
    "eval": {"step", "attempt", "accuracy"},
    "sync": {"seconds", "bytes"},
    "micro_batch_tokens": {"tokens"},
}
LEDGER = {"step", "attempt", "prompt_id", "fate", "samples", "reward"}


def _counts(value: object, largest: int = 1 << 63) -> bool:
    return isinstance(value, int) and 0 <= value < largest


def _measures(value: object) -> bool:
    # NaN and infinity too: a run may diverge
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63)


def _measure_all(value: object) -> bool:
    return isinstance(value, dict) and all(map(_measures, value.values()))


TYPES: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("attempt", "prompt_id", "samples", "engines"), _counts),
    **dict.fromkeys(("seconds", "bytes", "tokens", "accuracy"), _measures),
    **dict.fromkeys(("metrics", "phase_seconds"), _measure_all),
    "step": lambda value: _counts(value, 1_000_000),
    "time": lambda value: isinstance(value, int | float) and 0 <= value < 1e11,
    "fate": lambda value: isinstance(value, str),
    "reward": lambda value: value is None or _measures(value),
}
"""What the values of these keys must be, whatever the kind of line."""


@dataclass(frozen=True)
class History:
    """The lines that count, by step."""

    steps: dict[int, Line]
    """The `step` event of every completed step, ascending."""
    evals: dict[int, Line]
    """The `eval` event by version of the weights, ascending."""
    ledger: dict[int, list[Line]]
    """The ledger's lines by step, ascending."""
    syncs: list[Line]
    """All `sync` events, undone ones too: their speed is real."""
    starts: list[Line]
    """The `start` event of every attempt that came so far."""
    events: list[Line]
    """Every readable line of events.jsonl."""
    removed: int
    """Samples of steps below this were removed by `checkpoint.keep_samples`."""
    damaged: int
    """Lines of both files that are no such JSON objects: cut by a crash or a full disk."""


def read(paths: RunPaths) -> History:
    """Read both files; either may be absent or end in the middle of a line."""
    events, damaged = lines(paths.events)
    ledger, damaged_too = lines(paths.ledger)
    starts = [e for e in events if e.get("event") == "start"]
    return History(
        steps=_newest(e for e in events if e.get("event") == "step" and not undone(e, starts)),
        # Weights s are the same before and after a resume at s, so an evaluation of them still counts.
        evals=_newest(e for e in events if e.get("event") == "eval" and not undone(e, starts, from_next=True)),
        ledger=_by_step(line for line in ledger if not undone(line, starts)),
        syncs=[e for e in events if e.get("event") == "sync"],
        starts=starts,
        events=events,
        removed=_removed(paths),
        damaged=damaged + damaged_too,
    )


def _removed(paths: RunPaths) -> int:
    before = statement.read(paths.removed_samples).get("before")
    return before if isinstance(before, int) else 0


def lines(file: Path) -> tuple[list[Line], int]:
    """The JSON objects in a file of lines that have all of their keys, and how many other lines there are."""
    if not file.exists():
        return [], 0
    texts = [text for text in file.read_text(encoding="utf-8", errors="replace").split("\n") if text.strip()]
    found = [line for text in texts if (line := statement.parsed(text)) is not None and _complete(line)]
    return found, len(texts) - len(found)


def undone(line: Line, starts: Iterable[Line], from_next: bool = False) -> bool:
    """True if a later attempt started at the line's step or before it (`from_next`: before it)."""
    last = line["step"] - from_next
    return any(start["attempt"] > line["attempt"] and start["step"] <= last for start in starts)


def _complete(line: Line) -> bool:
    """True if it has what its kind is read for, of the right types; a line without `event` is the ledger's."""
    needed = NEEDED.get(str(line.get("event")), set()) if "event" in line else LEDGER
    return needed <= line.keys() and all(fits(line[key]) for key, fits in TYPES.items() if key in line)


def _newest(events: Iterable[Line]) -> dict[int, Line]:
    """The last event of each step."""
    return dict(sorted({e["step"]: e for e in events}.items()))


def _by_step(ledger: Iterable[Line]) -> dict[int, list[Line]]:
    """The lines of each step's newest attempt."""
    found: dict[int, list[Line]] = {}
    for line in ledger:
        there = found.setdefault(line["step"], [])
        if there and there[0]["attempt"] < line["attempt"]:
            there.clear()
        there.append(line)
    return dict(sorted(found.items()))
