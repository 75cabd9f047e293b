"""A thread in every rank that shows that the rank lives, and leaves when the attempt has failed.

In the first rank of each role it also watches all ranks, each other included, over the shared file system. Who finds a rank
that hangs writes the verdict; every rank that sees it writes down its stacks and leaves without a word to MPI, which may be
what hangs. The launcher kills the rest, which also ends a process that is stopped.
"""

import contextlib
import faulthandler
import json
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from miles_hpc import verdicts
from miles_hpc.heartbeat import INTERVAL_SECONDS, Heartbeat
from miles_hpc.paths import RunPaths
from miles_hpc.watch import Seen, Watch

LEAVE_SECONDS = 3.0
"""For others to see the verdict too: the first that leaves ends the world."""
RANKS_PER_SECOND = 100
"""Heartbeat files read by a watcher; a larger world is looked at less often."""
LOOKS = 5
"""Before a rank is called silent or late."""
FINE = ("", "done", "preempted", "time_limit")
BEREFT = ("Terminating StepId=", "Terminating job step")
"""What srun says once it has lost a rank, before it sends TERM, which does not reach every rank. After scancel, a requeue or a
time limit it comes later."""
CANCELLED = "CANCELLED AT"


class Watchdog:
    """The thread.

    Args:
        heartbeat: of this rank.
        paths: of the run.
        attempt: its number.
        watch: all ranks, and how long each may stand still; the limits also time this rank's own stacks.
        watching: this rank looks at the others.
    """

    def __init__(self, heartbeat: Heartbeat, paths: RunPaths, attempt: int, watch: Watch, watching: bool) -> None:
        self.heartbeat, self.paths, self.attempt, self.watch, self.watching = heartbeat, paths, attempt, watch, watching
        self.interval = INTERVAL_SECONDS * max(1.0, len(watch.roles) / RANKS_PER_SECOND)
        watch.limits = watch.limits.at_least(LOOKS * self.interval)
        self._file = paths.stacks(attempt, heartbeat.role, heartbeat.rank)
        self._own = 0
        """Beats of this rank that are on disk."""
        self._looked, self._over = time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to beat and, on a rank that watches, to look at the others."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._stacks = self._file.open("a", encoding="utf-8")  # now: a blocked interpreter cannot open it
        self._arm()
        self._thread.start()

    def stop(self) -> None:
        """The rank ends well."""
        self._over.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        self._stacks.close()
        if not self._file.stat().st_size:
            self._file.unlink()

    def _run(self) -> None:
        while not self._over.wait(self.interval):
            self._arm()
            self.heartbeat.beat()
            if self.watching:
                self._look()
            self._obey()

    def _arm(self) -> None:
        """Stacks are written if this does not come again in time: by C, which a blocked interpreter does not hold up."""
        faulthandler.dump_traceback_later(self.watch.limits.silent / 2, file=self._stacks)

    def _look(self) -> None:
        """A look at all ranks. Time in which this rank itself did not look does not count, nor while its own heartbeat does not
        reach the disk: a full or vanished file system is no rank that hangs."""
        last, self._looked = self._looked, time.monotonic()
        beats = self._beats()
        before, self._own = self._own, beats.get(self.heartbeat.rank, {}).get("beats", self._own)
        if self._own == before:
            return
        self.watch.look(beats, min(self._looked - last, 2 * self.interval))
        if found := self.watch.hanging(tolerance=2 * self.interval):
            self._condemn(found)

    def _beats(self) -> dict[int, Mapping[str, Any]]:
        """Of this attempt, as far as they can be read."""
        beats: dict[int, Mapping[str, Any]] = {}
        for rank in self.watch.roles:
            try:
                beat = json.loads(self.paths.heartbeat(rank).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            if beat["attempt"] == self.attempt:
                beats[rank] = beat
        return beats

    def _condemn(self, found: list[Seen]) -> None:
        first = found[0]
        beats = self._beats()
        beat = beats.get(first.rank, {})
        fields = {"rank": first.rank, "role": first.role, "phase": first.phase, "step": first.step, **beat}
        logs = verdicts.logs(self.paths.folder, first.role, first.rank, self.attempt)
        fields = {key: value for key, value in fields.items() if key not in ("attempt", "time", "beats")}
        fields |= {
            "error": describe(found),
            "where": beat.get("at", ""),
            "found_by": self.heartbeat.rank,
            "heartbeats": list(beats.values()),  # now: Slurm wakes a stopped process before it ends it
            "next": f"{logs}; stacks of all ranks are in {self.paths.stacks(self.attempt, '', 0).parent}",
        }
        with contextlib.suppress(OSError):  # a disk that takes no verdict may take the next look's; the thread must live
            verdicts.write(self.paths, self.attempt, kind="hang", **fields)

    def _obey(self) -> None:
        """Leave if the attempt has failed."""
        if self._bereft():
            os._exit(1)  # a world without a rank can save nothing; to wait for it would last until Slurm kills
        if (kind := verdicts.kind_of(self.paths, self.attempt)) in FINE:
            return
        if kind == "hang":
            faulthandler.dump_traceback(self._stacks)
        time.sleep(LEAVE_SECONDS)
        os._exit(1)

    def _bereft(self) -> bool:
        """True if srun ends the step because a rank has died."""
        try:
            said = self.paths.launcher_log(self.attempt).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        return any(text in said.split(CANCELLED)[0] for text in BEREFT)


def describe(found: list[Seen]) -> str:
    """One sentence on the rank that hangs, and on those that may be meant instead."""
    first = found[0]
    if first.gone:
        what = f"gave no sign of life for {first.silent:.0f} s: stopped, blocked outside of Python, or its node is gone"
    else:
        what = f"made no progress for {first.still:.0f} s, {first.limit:.0f} s are allowed"
    others = ", ".join(str(s.rank) for s in found[1:6])
    return what + (f"; so did ranks {others}{', ...' * (len(found) > 6)}" if others else "")
