"""How an attempt ended, as the rank that knows writes it: `attempts/NNN/verdict.json`. The first verdict stands."""

import json
import os
import shlex
import time
import traceback
import uuid
from pathlib import Path
from typing import Any

from miles_hpc import statement
from miles_hpc.errors import EngineDied, MilesError
from miles_hpc.paths import RunPaths

BROKEN_GPU = (
    "uncorrectable ecc error",
    "uncorrectable nvlink error",
    "hardware stack error",
    "fallen off the bus",
    "gpu is lost",
    "busy or unavailable",
    "system not yet initialized",
)
"""Of CUDA's and NVML's messages those that no program can cause. A failed assertion or launch and an illegal address are not
among them: they may be the program's own, on every node."""
SAID = {
    "out_of_memory": ("out of memory",),
    "bad_node": BROKEN_GPU,
    "hang": ("timed out waiting", "collective operation timeout"),
    "peer_lost": ("connection closed by peer", "connection reset by peer", "remote process exited"),
}
"""What torch, gloo and NCCL say in a RuntimeError, lower case, by kind."""


def write(paths: RunPaths, attempt: int, /, *, kind: str, **fields: object) -> bool:
    """Write the verdict of `attempt` unless there is one; True if this one stands.

    Args:
        kind: done, preempted, time_limit, node_failure, bad_node, rank_died, peer_lost, out_of_memory, hang, diverged,
            user_error or bug.
        fields: rank, role, host, node, phase, step, signal, exit_code, error, where, frame, next, traceback.
    """
    final = paths.verdict(attempt)
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f".verdict.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            json.dump({**fields, "kind": kind, "attempt": attempt, "time": time.time()}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, final)
    except FileExistsError:
        return False
    except OSError as error:
        error.filename = str(final)  # not the temporary one; a write that fails names none
        raise
    finally:
        temporary.unlink(missing_ok=True)
    return True


def kind_of(paths: RunPaths, attempt: int) -> str:
    """The kind of the verdict that stands; empty if there is none."""
    try:
        return str(statement.read(paths.verdict(attempt)).get("kind", ""))
    except OSError:
        return ""


def logs(run: Path, role: str, rank: int = -1, attempt: int = 0) -> str:
    """The command that prints the log of a rank in one attempt, or with the role `job` that of the batch script."""
    which = f" --rank {rank} --attempt {attempt}" if role != "job" else ""
    return f"miles-submit logs {shlex.quote(str(run))} --role {role}{which}"


def of_error(error: BaseException, logs: str) -> dict[str, Any]:
    """Fields of a verdict for an exception: kind, error, where, next, frame and, unless it is the user's, the traceback.

    Args:
        logs: the command to type next where the error itself names nothing.
    """
    if isinstance(error, MilesError):
        fields: dict[str, Any] = {"kind": _kind(error), "error": error.what, "where": error.where}
        fields["next"] = error.next_step or logs
    else:
        fields = {"kind": _kind(error), "error": f"{type(error).__name__}: {error}", "next": logs}
    frame = _innermost(error)
    if frame:
        fields["frame"] = frame
    if fields["kind"] != "user_error":
        fields["traceback"] = "".join(traceback.format_exception(error))[-8000:]
    return fields


def _kind(error: BaseException) -> str:
    said = str(error).lower()
    if isinstance(error, MilesError):
        broken = isinstance(error, EngineDied) and any(words in said for words in BROKEN_GPU)
        return "bad_node" if broken else error.kind
    if isinstance(error, MemoryError):
        return "out_of_memory"
    found = (kind for kind, texts in SAID.items() if any(words in said for words in texts))
    return next(found, "bug") if isinstance(error, RuntimeError) else "bug"


def _innermost(error: BaseException) -> str:
    """The deepest frame inside this project, as file:line function."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "miles_hpc" in f.filename or "/kernels/" in f.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno} {frames[-1].name}" if frames else ""
