"""Making files durable: a rename is only as good as the fsync before and after it."""

import os
import uuid
from pathlib import Path


def fsync(path: Path) -> None:
    """Force a file's bytes, or a folder's entries, to the disk.

    Raises:
        OSError: the filesystem refused.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(file: Path, text: str) -> None:
    """Write a text file anew: whoever reads it finds the old text or the new one.

    Raises:
        OSError: the filesystem refused.
    """
    temporary = file.with_suffix(".tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        fsync(temporary)
        temporary.replace(file)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = str(file)  # not the temporary one; a write that fails names none
        raise
    fsync(file.parent)


def swap(new: Path, folder: Path) -> None:
    """Give the folder `new` the name `folder`; one that had it stays beside it, hidden, as `.NAME.<anything>.old`.

    Raises:
        OSError: the filesystem refused.
    """
    if folder.exists():
        folder.rename(folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.old"))
    new.rename(folder)
    fsync(folder.parent)
