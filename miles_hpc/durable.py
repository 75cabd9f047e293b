"""Making files durable: a rename is only as good as the fsync before and after it."""

import os
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
