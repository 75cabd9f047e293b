"""The run that faults are done to, as seen from outside: its files, its processes, its job."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from miles_hpc.launchers import history, state
from miles_hpc.launchers.cluster import Cluster
from miles_hpc.paths import RunPaths

Line = dict[str, Any]
LOOK_SECONDS = 5.0
LOOKER = ThreadPoolExecutor(1, "asks Slurm")
"""Beside the one who waits: the moment to be met may be shorter than Slurm's answer takes."""


class GaveUp(AssertionError):
    """What should have happened did not happen in time."""


@dataclass(frozen=True)
class Subject:
    """A submitted run on a private Slurm."""

    paths: RunPaths
    cluster: Cluster
    planned: dict[str, int]
    """Prompt ids on which the reward misbehaves, by what it does."""

    @property
    def job_id(self) -> str:
        return json.loads(self.paths.job.read_text())["job_id"]

    @property
    def attempt(self) -> int:
        return max(self.paths.attempt_numbers(), default=0)

    def beat(self, rank: int) -> Line:
        """The rank's heartbeat of the newest attempt; empty before its first."""
        found = _json(self.paths.heartbeat(rank))
        return found if found.get("attempt") == self.attempt else {}

    def verdict(self, attempt: int) -> Line:
        """Empty before there is one."""
        return _json(self.paths.verdict(attempt))

    def events(self, kind: str) -> list[Line]:
        return [line for line in history.lines(self.paths.events)[0] if line["event"] == kind]

    def ledger(self) -> list[Line]:
        return history.lines(self.paths.ledger)[0]

    def misbehaved(self) -> dict[str, float]:
        """When the reward misbehaved for the first time, by what it did."""
        lines, _ = history.lines(self.paths.folder.parent / "misbehaved.jsonl")
        return {line["what"]: line["time"] for line in reversed(lines)}

    def says(self, rank: int, text: str) -> bool:
        """True if the rank's log of this attempt holds `text`."""
        beat = self.beat(rank)
        return bool(beat) and text in self.paths.log(beat["attempt"], beat["role"], rank).read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Every process of every rank, engines included."""
        beats = [self.beat(rank) for rank in range(len(list(self.paths.heartbeat(0).parent.glob("rank-*.json"))))]
        return [process for beat in beats if beat for process in family(beat["pid"])]

    def engine(self, rank: int, name: str) -> psutil.Process:
        """Of the rank's engine, the process whose title holds `name`: `rollout.sglang` is its host, `scheduler` its worker."""
        for process in family(self.beat(rank)["pid"])[1:]:
            if name in " ".join(process.cmdline()):
                return process
        raise GaveUp(f"rank {rank} has no process called {name}")

    @contextlib.contextmanager
    def shell_held(self) -> Iterator[None]:
        """What the batch shell does when the ranks have ended is done at the end of this."""
        script = f"job{int(self.job_id):05}/slurm_script"
        shells = [process for process in psutil.process_iter() if script in " ".join(_command(process))]
        for shell in shells:
            shell.suspend()
        try:
            yield
        finally:
            for shell in shells:
                shell.resume()

    def until(self, reached: Callable[[], Any], what: str, seconds: float = 300.0) -> Any:
        """The first true value of `reached`.

        Raises:
            GaveUp: not in time, or the run has ended before.
        """
        end = time.monotonic() + seconds
        look, found = time.monotonic() + LOOK_SECONDS, None
        while not (value := reached()):
            if (now := time.monotonic()) > end:
                raise GaveUp(f"not within {seconds:.0f} s: {what}")
            if found and found.done():
                if found.result().ended and not reached():
                    raise GaveUp(f"the run ended ({found.result().word}) before {what}")
                look, found = now + LOOK_SECONDS, None
            elif now > look and not found:
                found = LOOKER.submit(state.state_of, self.paths.folder)
            time.sleep(0.005)
        return value


def family(pid: int) -> list[psutil.Process]:
    """A process and all below it."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still run; a zombie does not."""
    return [p for p in processes if p.is_running() and _status(p) != psutil.STATUS_ZOMBIE]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _status(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def _json(file: Path) -> Line:
    try:
        return json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
        return {}
