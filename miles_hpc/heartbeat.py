"""What a rank is doing right now, in a small file that anyone can read when the rank no longer can say.

The watchdog's thread rewrites it all the time: it stands still only if the process is stopped or its interpreter is blocked.
Whether the rank gets anywhere is said by the phase, the step, a count of what was done in the phase, and by whom it waits for.
"""

import contextlib
import json
import os
import resource
import socket
import threading
import time
from pathlib import Path
from typing import Any

from miles_hpc.position import position_of

INTERVAL_SECONDS = 1.0


class Heartbeat:
    """One rank's heartbeat file, rewritten at most once a second and at every change of phase."""

    def __init__(self, file: Path, role: str, rank: int, attempt: int) -> None:
        self.file, self.role, self.rank = file, role, rank
        self.phase, self.step, self.progress = "start", -1, 0
        self.node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
        self._who = {
            "role": role,
            "rank": rank,
            "attempt": attempt,
            "host": socket.gethostname(),
            "node": self.node,
            "pid": os.getpid(),
        }
        self._beats, self._next, self._lock = 0, 0.0, threading.Lock()
        file.parent.mkdir(parents=True, exist_ok=True)

    def enter(self, phase: str, step: int | None = None) -> None:
        """Name what begins now."""
        self.phase, self.progress, self._next = phase, 0, 0.0
        self.step = self.step if step is None else step
        self.beat()

    def advance(self) -> None:
        """A part of the phase is done."""
        self.progress += 1

    def beat(self) -> None:
        """Write the file if the last one is older than a second; from any thread, cheap enough for every poll."""
        now = time.monotonic()
        if now < self._next:
            return
        with self._lock:
            self._next = now + INTERVAL_SECONDS
            self._write()

    def _write(self) -> None:
        self._beats += 1
        at, waits_for = position_of(threading.main_thread().ident)
        signs = {"beats": self._beats, "progress": self.progress, "at": at, "waits_for": waits_for}
        temporary = self.file.with_suffix(".tmp")
        # A full disk is for the samples and checkpoints to report, which say what to do.
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps(self.state() | signs), encoding="utf-8")
            temporary.replace(self.file)

    def state(self) -> dict[str, Any]:
        """Who, where, phase, step, time and peak memory of this rank."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        return {**self._who, "phase": self.phase, "step": self.step, "time": time.time(), "peak_memory_mib": peak}
