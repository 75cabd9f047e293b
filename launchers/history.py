"""What a run did, from `events.jsonl` and `ledger.jsonl`: of a step that was done twice, only the one that the policy kept.

An attempt that resumes at step s undoes what earlier attempts had done from s on; their lines stay in the files.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    try:
        return int(json.loads(paths.removed_samples.read_text(encoding="utf-8"))["before"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def lines(file: Path) -> tuple[list[Line], int]:
    """The JSON objects in a file of lines that have all of their keys, and how many other lines there are."""
    if not file.exists():
        return [], 0
    texts = [text for text in file.read_text(encoding="utf-8", errors="replace").split("\n") if text.strip()]
    found = [line for text in texts if (line := _object(text)) is not None and _complete(line)]
    return found, len(texts) - len(found)


def undone(line: Line, starts: Iterable[Line], from_next: bool = False) -> bool:
    """True if a later attempt started at the line's step or before it (`from_next`: before it)."""
    last = line["step"] - from_next
    return any(start["attempt"] > line["attempt"] and start["step"] <= last for start in starts)


def _object(text: str) -> Line | None:
    try:
        line = json.loads(text)
    except json.JSONDecodeError:
        return None
    return line if isinstance(line, dict) else None


def _complete(line: Line) -> bool:
    """True if it has what its kind is read for; a line without `event` is the ledger's."""
    needed = NEEDED.get(str(line.get("event"))) if "event" in line else LEDGER
    return needed is None or needed <= line.keys()


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
