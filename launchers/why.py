"""`miles-submit why`: the verdict of an attempt, for a human. Writes one first where the batch side could not."""

import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

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
    if now.ended and now.job["scheduler"] and now.slurm.state != "NO_ANSWER":
        autopsy.close_last(paths, now.slurm.state)
    ended = [n for n in paths.attempt_numbers() if verdict.read(paths, n)]
    number = attempt or max(ended, default=0)
    if (found := verdict.read(paths, number)) is None:
        what = f"attempt {number} has no verdict" if attempt else "no attempt has ended yet"
        known = f"; ended so far: {', '.join(map(str, ended))}" if ended else ""
        raise UserError(f"{what}{known}", where=str(folder), next_step=f"miles-submit status {shlex.quote(str(folder))}")
    return text(paths, number, found)


def text(paths: RunPaths, number: int, found: Verdict) -> str:
    """One attempt's verdict: a row per fact, a row per rank, the command, the traceback."""
    rows = [f"{name:8} {value}" for name, value in _rows(paths, number, found) if value]
    trace = [f"\n{found.traceback.rstrip()}"] if found.traceback else []
    return "\n".join([f"attempt {number} of {paths.folder}: {found.word}", *rows, *trace])


def _rows(paths: RunPaths, number: int, found: Verdict) -> Iterator[tuple[str, str]]:
    yield "changed", amendment.sentence(amendment.changes(paths, number))
    yield "what", found.error
    yield "where", found.where
    yield "frame", found.frame
    yield "who", _who(found)
    yield "doing", f"{found.phase}{f', step {found.step}' if found.step >= 0 else ''}"
    yield "end", _end(found)
    yield "nodes", ", ".join(found.nodes or found.bad_nodes)
    for beat in evidence.heartbeats_of(verdict.fields(paths, number).get("heartbeats")):
        yield "rank", _rank(beat, found)
    for file in sorted(paths.attempt(number).glob("stacks/*")):
        yield "stacks", str(file) if file.stat().st_size else ""
    without = f", without {', '.join(found.avoided)}" if found.avoided else ""
    yield "then", FOLLOWS.get(found.action, "") + without
    yield "next", found.next
    if found.action == "stop" and found.kind != "done":
        yield "next", verdict.resume(paths.folder, found)


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
