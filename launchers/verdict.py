"""How an attempt ended, and what follows from it: a pure function of the run's history."""

import json
import shlex
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from miles_hpc import durable, statement
from miles_hpc.paths import RunPaths

RESTART = {"rank_died", "peer_lost", "hang", "out_of_memory", "bug"}
"""A fault of the program or of one process: the allocation is still good."""
REQUEUE = {"preempted", "time_limit", "node_failure", "bad_node"}
"""The allocation is gone, going, or has a node that is no good."""
STOP = {"user_error", "diverged"}
"""The next attempt would end in the same way."""
KEYS_MEND = STOP | {"out_of_memory"}
"""What another value of a key may mend."""
NOT_ITS_FAULT = {"preempted", "bad_node"}
"""An attempt that was given no time says nothing about the run."""
ATTEMPTS_WITHOUT_PROGRESS = 3


@dataclass(frozen=True)
class Attempt:
    """One line of a run's history."""

    number: int
    kind: str
    first_step: int
    """Steps that were complete when it started; -1: not even the first weights were saved."""
    last_step: int
    """Steps that were complete when it ended."""
    nodes: tuple[str, ...] = ()
    """Nodes that its verdict names."""


@dataclass(frozen=True)
class Situation:
    """What a decision depends on."""

    history: tuple[Attempt, ...]
    """Attempts since the user's last `run` or `resume`, oldest first."""
    max_restarts: int
    job_state: str = ""
    slurm: bool = True
    replaceable: bool = True
    """The allocation has enough nodes without those to be avoided."""
    others: bool = True
    """The partitions have enough nodes without them."""


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
    frame: str = ""
    """The deepest line of this project that an error went through."""
    nodes: tuple[str, ...] = ()
    """Nodes that failed, where that is more than the node of one rank."""
    bad_nodes: tuple[str, ...] = ()
    """Nodes that Slurm calls down."""
    avoided: tuple[str, ...] = ()
    """Nodes that the next job is kept off."""
    action: str = ""
    """What followed: done, restart, requeue or stop."""
    job_state: str = ""
    """What Slurm made of the job, CANCELLED also where a run without Slurm got TERM."""
    traceback: str = field(default="", repr=False)

    @property
    def word(self) -> str:
        """The kind, in the words of somebody who may have asked for it."""
        return "cancelled" if (self.kind, self.job_state) == ("preempted", "CANCELLED") else self.kind

    @property
    def last(self) -> bool:
        """True if no other attempt follows in this allocation; the job is about to end."""
        return self.action != "restart" if self.action else self.kind in STOP | {"done"}

    @property
    def final(self) -> bool:
        """True if none follows at all, unless the user types `resume`; unknown, and so False, before the action is written."""
        return self.kind == "done" or self.action == "stop"

    def fields(self) -> dict[str, Any]:
        """What to write, without what is not known."""
        known = {k: v for k, v in asdict(self).items() if v not in ("", -1, ()) or k == "kind"}
        return {k: v for k, v in known.items() if k not in ("attempt", "time")}


def decide(now: Situation) -> str:
    """`done`, `restart` (in the same allocation), `requeue` or `stop`."""
    last = now.history[-1]
    if last.kind == "done":
        return "done"
    if last.kind in STOP or now.job_state == "CANCELLED" or stalled(now.history):
        return "stop"
    faults = sum(attempt.kind in RESTART for attempt in now.history)
    if (last.kind in RESTART and faults > now.max_restarts) or (last.kind == "bad_node" and not now.others):
        return "stop"
    if last.kind in RESTART and (now.replaceable or not now.others or not now.slurm):
        return "restart"
    if last.kind == "bad_node" and now.replaceable and now.slurm:  # a rank found it broken; a spare takes over
        return "restart"
    return "requeue" if now.slurm else "stop"


def avoided(history: tuple[Attempt, ...]) -> tuple[str, ...]:
    """Nodes to do without: one that failed its health check or whose GPU broke, or that two faults in a row name."""
    checked = {node for attempt in history if attempt.kind == "bad_node" for node in attempt.nodes}
    faults = [{*attempt.nodes} for attempt in history if attempt.kind in RESTART]
    return tuple(sorted(checked.union(*(a & b for a, b in pairwise(faults)))))


def pause_before_restart(history: tuple[Attempt, ...]) -> float:
    """Seconds: none after the first fault since the run got on, then 10, 20, 40, at most 60, for what mends itself (a port)."""
    faults = 0
    for attempt in reversed(history):
        faults += attempt.kind in RESTART
        if attempt.last_step > attempt.first_step:
            break
    return 0.0 if faults < 2 else min(60.0, 10.0 * 2 ** (faults - 2))


def stalled(history: tuple[Attempt, ...]) -> bool:
    """True where three attempts in a row brought no step that had not been done before; those that got no time aside."""
    count = 0
    for attempt in reversed(history):
        if attempt.last_step > attempt.first_step:
            return False
        count += attempt.kind not in NOT_ITS_FAULT
        if count == ATTEMPTS_WITHOUT_PROGRESS:
            return True
    return False


def read(paths: RunPaths, attempt: int) -> Verdict | None:
    """The verdict of an attempt, None where there is none, or no readable one."""
    return statement.of(Verdict, fields(paths, attempt))


def fields(paths: RunPaths, attempt: int) -> dict[str, Any]:
    """All that verdict.json says; empty where there is none, or no JSON object."""
    return statement.read(paths.verdict(attempt))


def amend(paths: RunPaths, attempt: int, **known: object) -> None:
    """Add to a verdict what only the launcher can know, or correct it."""
    durable.replace(paths.verdict(attempt), json.dumps(fields(paths, attempt) | known, indent=1))


def newest(paths: RunPaths) -> Verdict | None:
    """The verdict of the newest attempt, None before it has ended."""
    numbers = paths.attempt_numbers()
    return read(paths, numbers[-1]) if numbers else None


def sentence(found: Verdict) -> str:
    """One line: kind, who, where, doing what."""
    who = f"{found.role} rank {found.rank}".strip() if found.rank >= 0 else found.role
    place = f"on {found.node or found.host}" if found.node or found.host else ""
    doing = " ".join(
        part for part in (found.phase and f"in {found.phase}", f"at step {found.step}" if found.step >= 0 else "") if part
    )
    facts = ", ".join(part for part in (" ".join(p for p in (who, place) if p), doing) if part)
    return f"{found.word}{f' ({facts})' if facts else ''}{f': {found.error}' if found.error else ''}"


def resume(folder: Path, found: Verdict | None) -> str:
    """The command that goes on, with the way to change a key where that may be what the run lacks."""
    command = f"miles-submit resume {shlex.quote(str(folder))}"
    if found is None or found.kind not in KEYS_MEND:
        return command
    return f"{command}    (with --set SECTION.KEY=VALUE it changes a key of {RunPaths(folder).config} first)"
