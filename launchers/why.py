"""`miles-submit why`: the verdict of an attempt, for a human. Writes one first where the batch side could not."""

import shlex
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from miles_hpc import statement
from miles_hpc.errors import UserError
from miles_hpc.launchers import amendment, autopsy, controller, evidence, verdict
from miles_hpc.launchers.evidence import Heartbeat
from miles_hpc.launchers.state import state_of
from miles_hpc.launchers.verdict import Verdict
from miles_hpc.paths import RunPaths

FOLLOWS = {
    "done": "nothing, the run is complete",
    "restart": "another attempt in the same allocation",
    "requeue": "the job went back to the queue",
    "stop": "nothing until you type the next command",
}


def why(folder: Path, attempt: int | None) -> str:
    """Who ended an attempt (default: the newest that has ended), where, doing what, and what to type next.

    Raises:
        UserError: no such attempt, or it has not ended yet.
    """
    paths, now = RunPaths(folder), state_of(folder, controller.BRIEF)
    known = {n: verdict.fields(paths, n) for n in paths.attempt_numbers() if verdict.read(paths, n)}
    if now.ended and now.job["scheduler"] and now.slurm.state != "NO_ANSWER":
        known |= _closed(paths, now.slurm.state)
    number = attempt or max(known, default=0)
    if number not in known:
        what = f"attempt {number} has no verdict" if attempt else "no attempt has ended yet"
        ended = f"; ended so far: {', '.join(map(str, known))}" if known else ""
        raise UserError(f"{what}{ended}", where=str(folder), next_step=f"miles-submit status {shlex.quote(str(folder))}")
    return text(paths, number, known[number])


def _closed(paths: RunPaths, job_state: str) -> dict[int, dict[str, Any]]:
    """The verdict of the newest attempt where the batch side has left it open, by number; written if this user may."""
    if (found := autopsy.open_last(paths, job_state)) is None:
        return {}
    number, known = found
    try:
        autopsy.write(paths, number, known)
    except OSError as error:  # another user's run, a full disk: what is known can be said all the same
        known["note"] = f"this verdict is not in the run folder: {error.strerror}: {error.filename}"
    return {number: known}


def text(paths: RunPaths, number: int, known: Mapping[str, Any]) -> str:
    """One attempt's verdict: a row per fact, a row per rank, the command, the traceback."""
    found = statement.of(Verdict, known)
    assert found
    rows = [f"{name:8} {value}" for name, value in _rows(paths, number, found, known) if value]
    trace = [f"\n{found.traceback.rstrip()}"] if found.traceback else []
    return "\n".join([f"attempt {number} of {paths.folder}: {found.word}", *rows, *trace])


def _rows(paths: RunPaths, number: int, found: Verdict, known: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "changed", amendment.sentence(amendment.changes(paths, number))
    yield "what", found.error
    yield "where", found.where
    yield "frame", found.frame
    yield "who", _who(found)
    yield "doing", f"{found.phase}{f', step {found.step}' if found.step >= 0 else ''}"
    yield "end", _end(found)
    yield "nodes", ", ".join(found.nodes or found.bad_nodes)
    for beat in evidence.heartbeats_of(known.get("heartbeats")):
        yield "rank", _rank(beat, found)
    for file in sorted(paths.attempt(number).glob("stacks/*")):
        yield "stacks", str(file) if file.stat().st_size else ""
    without = f", without {', '.join(found.avoided)}" if found.avoided else ""
    yield "then", FOLLOWS.get(found.action, "") + without
    yield "next", found.next
    if found.action == "stop" and found.kind != "done":
        yield "next", verdict.resume(paths.folder, found)
    yield "note", str(known.get("note", ""))


def _who(found: Verdict) -> str:
    who = f"{found.role} rank {found.rank}" if found.rank >= 0 else found.role
    place = " ".join(
        part for part in (f"node {found.node}" if found.node else "", f"host {found.host}" if found.host else "") if part
    )
    return f"{who} on {place}" if who and place else who or place


def _end(found: Verdict) -> str:
    """Signal and exit code, as far as there were any."""
    name = signal.Signals(found.signal).name if found.signal in signal.Signals._value2member_map_ else ""
    parts = [f"signal {found.signal} {name}".strip()] if found.signal else []
    return ", ".join([*parts, *([f"exit code {found.exit_code}"] if found.exit_code else [])])


def _rank(beat: Heartbeat, found: Verdict) -> str:
    """What a rank last said; its age counts from the verdict."""
    age = max(0.0, found.time - beat.time)
    return (
        f"{beat.rank:5} {beat.role:8} {beat.node or beat.host}: {beat.phase}, step {beat.step},"
        f" {age:.0f} s before the end, peak {beat.peak_memory_mib} MiB"
    )
