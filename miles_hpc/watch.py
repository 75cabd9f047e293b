"""Which rank hangs: what a watcher sees of all heartbeats, and what it concludes. No threads, no clocks, no files.

A rank is alive while its heartbeat changes, whatever it does; it gets on while phase, step or count change. Times are those of
the watcher, and only while it looks: neither clocks that differ nor a suspended job make a hang. How long a phase may stand
still follows from how long it did so before; a phase that no rank of the role has been through has a long deadline.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from miles_hpc.position import RANKS

STARTING = ("start", "build", "engine start")
"""Phases in which loading a library may block an interpreter for minutes."""
UNKNOWN = ("edge", "export")
"""Phases that come once, or in which a user's function runs."""


@dataclass(frozen=True)
class Limits:
    """Seconds."""

    silent: float = 30.0
    """Without any sign of life."""
    still: float = 60.0
    """Without progress, at least; a phase that stood still for longer before may do so again."""
    factor: float = 5.0
    """Times the longest standstill seen in the phase."""
    long: float = 1800.0
    """Without progress, in a phase not seen before; without a sign of life, at start."""

    def at_least(self, seconds: float) -> "Limits":
        """None shorter than that."""
        return replace(self, silent=max(self.silent, seconds), still=max(self.still, seconds), long=max(self.long, seconds))


@dataclass(frozen=True)
class Seen:
    """One rank."""

    rank: int
    role: str
    phase: str = "start"
    step: int = -1
    progress: int = 0
    waits_for: str = ""
    """`ranks`: stands still because others do. `engine`, `reward`: the rank itself has a deadline there."""
    beats: int = 0
    silent: float = 0.0
    """Seconds without any sign of life."""
    still: float = 0.0
    """Seconds without progress."""
    silent_limit: float = 0.0
    limit: float = 0.0

    @property
    def place(self) -> tuple[int, str, int]:
        """Step, phase and progress: what must change."""
        return self.step, self.phase, self.progress

    @property
    def gone(self) -> bool:
        """No sign of life for too long."""
        return self.silent > self.silent_limit

    @property
    def overdue(self) -> bool:
        """No progress for too long."""
        return self.still > self.limit


def hanging(seen: list[Seen], tolerance: float) -> list[Seen]:
    """The rank that hangs first; with it those of which it cannot be told apart. Empty: none.

    Args:
        seen: every rank.
        tolerance: seconds within which two standstills count as simultaneous.
    """
    if gone := [s for s in seen if s.gone]:
        return _first(gone, tolerance, lambda s: s.silent)
    if late := [s for s in seen if s.overdue and not s.waits_for]:
        return _first(late, tolerance, lambda s: s.still)
    # All wait for each other: a message was lost, or they are in different collectives.
    if seen and all(s.overdue and s.waits_for == RANKS for s in seen):
        return _first(seen, tolerance, lambda s: s.still)
    return []


def _first(found: list[Seen], tolerance: float, seconds: Any) -> list[Seen]:
    """Those that stopped first, as far as can be told; of the same phase those that got least far."""
    longest = max(map(seconds, found))
    first = [s for s in found if seconds(s) >= longest - tolerance]
    least = min((s.step, s.progress) for s in first)
    behind = [s for s in first if (s.step, s.progress) == least] if len({(s.role, s.phase) for s in first}) == 1 else first
    return sorted(behind, key=lambda s: (-seconds(s), s.rank))


@dataclass
class Watch:
    """The memory of a watcher.

    Args:
        roles: of every rank.
        limits: deadlines.
    """

    roles: Mapping[int, str]
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        self.seen = {rank: Seen(rank, role) for rank, role in self.roles.items()}
        self.longest: dict[tuple[str, str], float] = {}
        """Standstills, by role and phase."""
        self.passed: set[tuple[str, str]] = set()
        """Roles and phases that some rank has been through."""

    def look(self, beats: Mapping[int, Mapping[str, Any]], seconds: float) -> None:
        """Take in all heartbeats, `seconds` of watching after the last look. Ranks that cannot be read are left out."""
        for rank, before in self.seen.items():
            now = replace(_read(before, beats.get(rank)), silent=before.silent + seconds, still=before.still + seconds)
            if now.beats != before.beats:
                now = replace(now, silent=0.0)
            if now.place != before.place:
                self._measure(before, now)
                now = replace(now, still=0.0)
            self.seen[rank] = now

    def hanging(self, tolerance: float) -> list[Seen]:
        """See `hanging`."""
        return hanging([self._limited(s) for s in self.seen.values()], tolerance)

    def limit(self, role: str, phase: str) -> float:
        """Seconds that a rank may stand still in a phase."""
        if (role, phase) not in self.passed or phase in (*STARTING, *UNKNOWN):
            return self.limits.long
        return min(self.limits.long, max(self.limits.still, self.limits.factor * self.longest[role, phase]))

    def _limited(self, s: Seen) -> Seen:
        silent = self.limits.long if s.phase in STARTING else self.limits.silent
        return replace(s, silent_limit=silent, limit=self.limit(s.role, s.phase))

    def _measure(self, before: Seen, now: Seen) -> None:
        key = before.role, before.phase
        self.longest[key] = max(self.longest.get(key, 0.0), before.still)
        if now.phase != before.phase:
            self.passed.add(key)


def _read(before: Seen, beat: Mapping[str, Any] | None) -> Seen:
    if beat is None:
        return before
    return replace(before, **{key: beat[key] for key in ("phase", "step", "progress", "waits_for", "beats") if key in beat})
