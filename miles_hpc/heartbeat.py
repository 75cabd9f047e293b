"""What a rank is doing right now, in a small file that anyone can read when the rank no longer can say."""

import contextlib
import json
import os
import resource
import socket
import time
from pathlib import Path
from typing import Any

INTERVAL_SECONDS = 1.0


class Heartbeat:
    """One rank's heartbeat file, rewritten at most once a second and at every change of phase."""

    def __init__(self, file: Path, role: str, rank: int, attempt: int) -> None:
        self.file, self.phase, self.step = file, "start", -1
        self._who = {
            "role": role,
            "rank": rank,
            "attempt": attempt,
            "host": socket.gethostname(),
            "node": os.environ.get("SLURMD_NODENAME", socket.gethostname()),
            "pid": os.getpid(),
        }
        self._next = 0.0
        file.parent.mkdir(parents=True, exist_ok=True)

    def enter(self, phase: str, step: int | None = None) -> None:
        """Name what begins now."""
        self.phase, self._next = phase, 0.0
        self.step = self.step if step is None else step
        self.beat()

    def beat(self) -> None:
        """Write the file if the last one is older than a second. Cheap enough for every poll."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + INTERVAL_SECONDS
        text = json.dumps(self.state())
        temporary = self.file.with_suffix(".tmp")
        # A full disk is for the samples and checkpoints to report, which say what to do.
        with contextlib.suppress(OSError):
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self.file)

    def state(self) -> dict[str, Any]:
        """Who, where, phase, step, time and peak memory of this rank."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        return {**self._who, "phase": self.phase, "step": self.step, "time": time.time(), "peak_memory_mib": peak}
