"""A daemon that is known by its pid file: started, looked at and stopped without ever touching a stranger's process."""

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from miles_hpc.errors import SiteError

GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Daemon:
    """One daemon; `program` is the folder or file its executable must lie in for a pid to count as ours."""

    name: str
    command: tuple[str, ...]
    pid_file: Path
    log: Path
    program: Path

    @property
    def pid(self) -> int | None:
        """Its process id, or None where it does not run (a zombie does not)."""
        try:
            pid = int(self.pid_file.read_text())
        except (FileNotFoundError, ValueError):
            return None
        return pid if runs_from(pid, self.program) else None

    @property
    def memory_mb(self) -> float:
        """Resident memory in MB; 0 where it does not run."""
        if (pid := self.pid) is None:
            return 0.0
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def start(self, environment: dict[str, str]) -> None:
        """Start it and return; it puts itself into the background.

        Raises:
            SiteError: it said no at once; with the tail of its log.
        """
        if self.pid:
            return
        result = subprocess.run(self.command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if result.returncode:
            raise self.failure(result.stderr)

    def failure(self, said: str = "") -> SiteError:
        """The error for a daemon that did not come up, with the end of its log."""
        lines = self.log.read_text(errors="replace").splitlines()[-12:] if self.log.exists() else []
        text = "\n".join(f"    {line}" for line in [*said.strip().splitlines()[-4:], *lines])
        what, hint = f"{self.name} did not start; the end of its log:\n{text}", "miles-submit cluster down, then up"
        return SiteError(what, where=str(self.log), next_step=hint)

    def stop(self) -> None:
        """TERM, then KILL after GRACE_SECONDS; nothing where it does not run."""
        if pid := self.pid:
            end(pid, self.program, GRACE_SECONDS)
        self.pid_file.unlink(missing_ok=True)


def runs_from(pid: int, program: Path) -> bool:
    """True where the process lives and its executable is `program` or lies below it."""
    try:
        executable = Path(f"/proc/{pid}/exe").readlink()
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z" and executable.is_relative_to(program.resolve())


def end(pid: int, program: Path, grace_seconds: float) -> None:
    """TERM a process of ours, KILL it where it is still there after `grace_seconds`."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + grace_seconds
        while runs_from(pid, program) and time.monotonic() < deadline:
            time.sleep(0.02)


def processes_from(program: Path) -> list[int]:
    """All processes whose executable lies below `program`."""
    pids = (int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit())
    return [pid for pid in pids if runs_from(pid, program)]
