"""What one node says about itself before ranks start on it: `python -m miles_hpc.launchers.node RUN ATTEMPT STAMP`.

Run once per node by `health` through srun; prints one line of JSON. Standard library only, and no judgement: what is good
enough is decided on the batch host. Processes that an earlier attempt of this run has left here are ended.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from miles_hpc.paths import RunPaths

SIGHT_SECONDS = 10.0
"""How long a shared file system may take to show a new file."""
GONE_SECONDS = 5.0
PROBE_BYTES = 1 << 20
NVIDIA = ("nvidia-smi", "--format=csv,noheader,nounits", "--query-gpu=index,ecc.errors.uncorrected.volatile.total")

XID = re.compile(r"(\S+) .*NVRM: Xid \((?:PCI:)?([^)]+)\): (\d+),? ?(.*)")
"""2026-11-29T16:01:23,000000+00:00 NVRM: Xid (PCI:0000:3b:00): 79, pid=7, name=python, GPU has fallen off the bus."""
BROKEN = {48, 62, 64, 74, 79, 95, 119, 120, 140}
"""Xids after which a GPU needs a reset, a reboot or a repair (NVIDIA's Xid catalogue): double-bit and uncontained memory
errors, a halted controller, no spare rows, NVLink, off the bus, no answer from the GPU's own processor. Not those that
programs cause (13, 31, 43, 45), nor a contained memory error (94), after which the GPU goes on."""


def main(run: Path, attempt: int, stamp: str) -> None:
    """Print this node's report."""
    report: dict[str, Any] = {"node": os.environ.get("SLURMD_NODENAME", socket.gethostname()), "time": time.time()}
    report["scratch"] = [said for folder in (run, _scratch()) if (said := unwritable(folder))]
    report["sees_run"] = sees(RunPaths(run).start(attempt), stamp)
    report["free_memory_mib"] = free_memory_mib()
    report |= gpus()
    report["gpu_faults"] += xids(since(RunPaths(run), attempt))
    left = [f"{pid} {line}" for pid, line in stale(run) if end(pid)]
    report |= {"stale": left, "stuck": [f"cannot end {pid} {line}" for pid, line in still(run)] if left else []}
    print(json.dumps(report), flush=True)


def _scratch() -> Path:
    """TMPDIR as it is: Python itself would quietly take another folder for one that is missing."""
    return Path(os.environ.get("TMPDIR") or tempfile.gettempdir())


def unwritable(folder: Path) -> str:
    """Why a file cannot be written in a folder and read back; empty where it can."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".health-") as file:
            file.write(os.urandom(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"{folder}: {error.strerror or error}"
    return ""


def sees(file: Path, stamp: str) -> bool:
    """True once this node sees what the batch host has just written."""
    deadline = time.monotonic() + SIGHT_SECONDS
    while True:
        try:
            if str(json.loads(file.read_text(encoding="utf-8"))["time"]) == stamp:
                return True
        except (OSError, ValueError, KeyError):
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


def free_memory_mib() -> int:
    """What the kernel could give to new processes."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("MemAvailable"))


def gpus() -> dict[str, Any]:
    """`gpus`, their number, None where nvidia-smi is not installed; `gpu_faults`, what is wrong with them."""
    if not shutil.which(NVIDIA[0]):
        return {"gpus": None, "gpu_faults": []}
    try:
        said = subprocess.run(NVIDIA, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"gpus": 0, "gpu_faults": [f"nvidia-smi: {error}"]}
    if said.returncode:
        return {"gpus": 0, "gpu_faults": [f"nvidia-smi: {(said.stdout + said.stderr).strip()[:200]}"]}
    lines = [line.strip() for line in said.stdout.splitlines() if line.strip()]
    rows = [[word.strip() for word in line.split(",")] for line in lines if "," in line]
    faults = [f"GPU {row[0]}: {row[1]} uncorrected ECC errors" for row in rows if _count(row[1])]
    faults += [f"nvidia-smi: {line[:200]}" for line in lines if "," not in line]
    return {"gpus": len(rows), "gpu_faults": faults}


def since(paths: RunPaths, attempt: int) -> float:
    """When the attempt before began; infinity for the first: what a GPU did in the jobs of others may have been mended."""
    try:
        return float(json.loads(paths.start(attempt - 1).read_text(encoding="utf-8"))["time"])
    except (OSError, ValueError, KeyError):
        return float("inf")


def xids(begin: float) -> list[str]:
    """GPUs that the kernel has reported as broken since a time, once each; none where its log is closed to users."""
    try:
        log = subprocess.run(("dmesg", "--time-format", "iso"), capture_output=True, text=True, errors="replace", timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [found.groups() for line in log.stdout.splitlines() if (found := XID.match(line))]
    new = [line for line in lines if int(line[2]) in BROKEN and datetime.fromisoformat(line[0]).timestamp() >= begin]
    return list({(gpu, code): f"GPU {gpu}: Xid {code}, {said}" for _, gpu, code, said in reversed(new)}.values())


def _count(text: str) -> int:
    """A number of nvidia-smi; `[N/A]` on a GPU that does not count."""
    return int(text) if text.isdigit() else 0


def stale(run: Path) -> Iterator[tuple[int, str]]:
    """This user's processes of an earlier attempt of this run: its ranks by their command line, what they started by their
    environment."""
    rank, mark = [b"--run", os.fsencode(run), b"--attempt"], b"MILES_RANK_OF=" + os.fsencode(run)
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            if process.stat().st_uid != os.getuid():
                continue
            words = (process / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            ours = any(words[i : i + 3] == rank for i in range(len(words))) if b"--attempt" in words else False
            if ours or mark in (process / "environ").read_bytes().split(b"\0"):
                yield int(process.name), b" ".join(words).decode(errors="replace")[:200]
        except OSError:  # gone
            continue


def still(run: Path) -> Iterator[tuple[int, str]]:
    """Those that a KILL does not end, such as one that waits for a dead device."""
    deadline = time.monotonic() + GONE_SECONDS
    while list(stale(run)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return stale(run)


def end(pid: int) -> bool:
    """Kill a process; False where it had gone by itself."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
