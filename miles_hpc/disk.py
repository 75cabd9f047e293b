"""How much of the disk a run takes, and whether the next checkpoint will still fit.

Free space is what the file system tells (`df`); a quota that it does not tell is not known here.
"""

import json
import os
import shutil
from pathlib import Path

from miles_hpc.paths import RunPaths

ROOM = 2
"""Checkpoints that should fit: the next one, which is written before an old one goes, and one more as a warning in time."""


def size(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; what vanishes meanwhile counts nothing."""
    try:
        if path.is_symlink() or not path.is_dir():
            return path.lstat().st_size
        with os.scandir(path) as entries:
            return sum(size(Path(entry)) for entry in entries)
    except OSError:
        return 0


def checkpoint_bytes(paths: RunPaths) -> int:
    """Size of the newest checkpoint, by its manifest; 0 before there is one."""
    for step in reversed(paths.saved_steps()):
        try:
            files = json.loads((paths.checkpoint(step) / "manifest.json").read_text(encoding="utf-8"))["files"]
            return sum(int(length) for length, _ in files.values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return 0


def shortage(paths: RunPaths) -> str:
    """A warning where the disk will soon be too full for a checkpoint; empty where it will not."""
    needed, free = checkpoint_bytes(paths), shutil.disk_usage(paths.folder).free
    if free >= ROOM * needed:
        return ""
    return (
        f"{text(free)} are free in {paths.folder}, a checkpoint takes {text(needed)}: make room,"
        " lower checkpoint.keep, or set checkpoint.keep_samples"
    )


def text(count: float) -> str:
    """Bytes for a human."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
