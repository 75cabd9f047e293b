"""A run on this machine without Slurm: the same batch script under bash, the same ranks under `mpiexec`."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

from miles_hpc.errors import SiteError
from miles_hpc.launchers import script
from miles_hpc.launchers.spec import JobSpec
from miles_hpc.paths import RunPaths


def mpiexec(python: str) -> str:
    """mpiexec of the environment that the ranks run in, else the machine's.

    Raises:
        SiteError: there is none.
    """
    beside = Path(python).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if not found:
        raise SiteError("mpiexec not found", where=str(beside.parent), next_step="pip install mpich")
    return found


def environment() -> dict[str, str]:
    """The environment of the script; nothing of an outer Slurm job or MPI world, which would be taken for this one."""
    outer = ("SLURM_", "PMI_", "PMIX_", "HYDRA_", "MPI_")
    return {k: v for k, v in os.environ.items() if not k.startswith(outer)}


def start(spec: JobSpec) -> int:
    """Write the script and start it in the background; its process id, which is also its session's."""
    paths = RunPaths(spec.folder)
    paths.script.write_text(script.text(spec, mpiexec(spec.python)), encoding="utf-8")
    with paths.job_log.open("a") as log:
        process = subprocess.Popen(
            ["bash", str(paths.script)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment(),
            start_new_session=True,
        )
    return process.pid


def alive(pid: int, run: Path) -> bool:
    """True while the script of this run lives under this process id."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    # a process that is just becoming bash has no command line yet
    return state != "Z" and (words == [b""] or os.fsencode(RunPaths(run).script) in words)


def cancel(pid: int, run: Path) -> None:
    """Ask the script and its ranks to end; nothing where it does not live."""
    if alive(pid, run):
        os.killpg(pid, signal.SIGTERM)
