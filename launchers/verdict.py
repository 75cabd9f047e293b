"""How an attempt ended, and what follows from it: a pure function of the run's history."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from miles_hpc.paths import RunPaths

RESTART = {"rank_died", "hang", "out_of_memory", "bug"}
"""A fault of the program or of one process: the allocation is still good."""
REQUEUE = {"preempted", "time_limit", "node_failure"}
"""The allocation is gone or going."""
STOP = {"user_error", "diverged"}
"""The next attempt would end in the same way."""
ATTEMPTS_WITHOUT_PROGRESS = 3


@dataclass(frozen=True)
class Attempt:
    """One line of a run's history."""

    number: int
    kind: str
    first_step: int
    """Newest checkpoint when it started; -1: none."""
    last_step: int
    """Newest checkpoint when it ended."""


@dataclass(frozen=True)
class Situation:
    """What a decision depends on."""

    history: tuple[Attempt, ...]
    """Attempts since the user's last `run` or `resume`, oldest first."""
    max_restarts: int
    job_state: str = ""
    slurm: bool = True


@dataclass(frozen=True)
class Verdict:
    """The fields of verdict.json that the launcher needs."""

    kind: str
    rank: int = -1
    role: str = ""
    host: str = ""
    node: str = ""
    phase: str = ""
    step: int = -1
    exit_code: int = 0
    signal: int = 0
    error: str = ""
    where: str = ""
    next: str = ""
    attempt: int = 0
    time: float = 0.0
    traceback: str = field(default="", repr=False)

    def fields(self) -> dict[str, Any]:
        """What to write, without what is not known."""
        known = {k: v for k, v in asdict(self).items() if v not in ("", -1) or k == "kind"}
        return {k: v for k, v in known.items() if k not in ("attempt", "time")}


def decide(now: Situation) -> str:
    """`done`, `restart` (in the same allocation), `requeue` or `stop`."""
    last = now.history[-1]
    if last.kind == "done":
        return "done"
    if last.kind in STOP or now.job_state == "CANCELLED" or stalled(now.history):
        return "stop"
    if last.kind in REQUEUE:
        return "requeue" if now.slurm else "stop"
    faults = sum(attempt.kind in RESTART for attempt in now.history)
    return "restart" if faults <= now.max_restarts else "stop"


def pause_before_restart(history: tuple[Attempt, ...]) -> float:
    """Seconds: none after the first fault since the run got on, then 10, 20, 40, at most 60, for what mends itself (a port)."""
    faults = 0
    for attempt in reversed(history):
        faults += attempt.kind in RESTART
        if attempt.last_step > attempt.first_step:
            break
    return 0.0 if faults < 2 else min(60.0, 10.0 * 2 ** (faults - 2))


def stalled(history: tuple[Attempt, ...]) -> bool:
    """True where the last three attempts brought no new checkpoint."""
    last = history[-ATTEMPTS_WITHOUT_PROGRESS:]
    return len(last) == ATTEMPTS_WITHOUT_PROGRESS and all(a.last_step <= a.first_step for a in last)


def read(paths: RunPaths, attempt: int) -> Verdict | None:
    """The verdict of an attempt, None where there is none."""
    try:
        values = json.loads(paths.verdict(attempt).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(values, dict) or "kind" not in values:
        return None
    return Verdict(**{k: v for k, v in values.items() if k in Verdict.__dataclass_fields__ and v is not None})


def rename(paths: RunPaths, attempt: int, kind: str) -> None:
    """Give a verdict another kind, for what only the launcher can know."""
    file = paths.verdict(attempt)
    values = json.loads(file.read_text(encoding="utf-8")) | {"kind": kind}
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(values, indent=1), encoding="utf-8")
    temporary.replace(file)


def newest(paths: RunPaths) -> Verdict | None:
    """The verdict of the newest attempt, None before it has ended."""
    numbers = paths.attempt_numbers()
    return read(paths, numbers[-1]) if numbers else None


def sentence(found: Verdict) -> str:
    """One line: kind, who, where, doing what."""
    who = f"{found.role} rank {found.rank}" if found.role else f"rank {found.rank}" if found.rank >= 0 else ""
    place = f"on {found.node or found.host}" if found.node or found.host else ""
    doing = " ".join(
        part for part in (found.phase and f"in {found.phase}", f"at step {found.step}" if found.step >= 0 else "") if part
    )
    facts = ", ".join(part for part in (" ".join(p for p in (who, place) if p), doing) if part)
    return f"{found.kind}{f' ({facts})' if facts else ''}{f': {found.error}' if found.error else ''}"
