"""Where a run comes from: commit, versions, seed, machine. Written once, into the run folder."""

import platform
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import miles_hpc
from miles_hpc.config import Config

PACKAGES = (
    "miles-hpc",
    "torch",
    "megatron-core",
    "sglang",
    "sglang-kernel",
    "transformers",
    "tokenizers",
    "mpi4py",
    "mpich",
    "h5py",
    "numpy",
    "submitit",
    "pydantic",
    "tensorboard",
    "reasoning-gym",
    "math-verify",
)


def collect(config: Config) -> dict[str, Any]:
    """What `provenance.json` holds. `commit` is empty where this project runs from a wheel."""
    commit, dirty = _source()
    return {
        "commit": commit,
        "dirty": dirty,
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "python": platform.python_version(),
        "executable": sys.executable,
        "seed": config.run.seed,
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "command": sys.argv,
        "time": time.time(),
    }


def _source() -> tuple[str, bool]:
    """Commit of the checkout this package lies in, and whether tracked files differ from it."""
    folder = Path(miles_hpc.__file__).resolve().parent
    tracked = _git(folder, "ls-files", "--error-unmatch", "paths.py")
    if not tracked:
        return "", False
    return _git(folder, "rev-parse", "HEAD"), bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))


def _git(folder: Path, *arguments: str) -> str:
    try:
        result = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
