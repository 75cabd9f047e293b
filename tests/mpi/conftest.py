"""Programs in a real MPI world on this machine."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

World = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def mpi(tmp_path: Path) -> World:
    """Run a program beside this file: `mpi("world", "mode", train=1, rollout=2)`; its output is in `stdout`."""

    def run(
        program: str, *arguments: str, train: int, rollout: int, claim: int | None = None
    ) -> subprocess.CompletedProcess[str]:
        command = [Path(sys.executable).with_name("mpiexec"), "-launcher", "fork", "-hosts", "localhost"]
        for role, count in (("train", train), ("rollout", rollout)):
            size = claim or train + rollout
            rank = [sys.executable, Path(__file__).parent / f"{program}.py", role, str(size), str(tmp_path), *arguments]
            command += ["-n", str(count), *rank, ":"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(Path(__file__).parent)}
        return subprocess.run(command[:-1], capture_output=True, text=True, timeout=180, env=environment)

    return run
