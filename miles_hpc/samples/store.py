"""Sample shards on the shared filesystem: written whole under a temporary name, fsynced, renamed.

A shard that has its final name is complete: an HDF5 file, and behind it a seal with the checksum of all its bytes. It is
verified before HDF5 sees them, which hands out a flipped bit without a word, and at some ends the process (SIGSEGV, seen with
h5py 3.16). Other programs open a shard as any HDF5 file. Readers open only final names, announced over MPI; a folder is listed
only at a restart.
"""

import errno
import io
import os
import re
import struct
import time
import uuid
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import h5py
import numpy as np

from miles_hpc.durable import fsync
from miles_hpc.errors import SampleError
from miles_hpc.paths import RunPaths
from miles_hpc.samples.schema import ARRAYS, PER_SAMPLE, PER_TOKEN, TEXT, Samples

# A rename announced over MPI may reach a network filesystem's client later than the message (ENOENT, ESTALE).
VISIBLE_SECONDS = 30.0

# Somebody may make room while the ranks wait; to end the world at once would cost all of them another start.
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
FULL_SECONDS, RETRY_SECONDS = 30.0, 0.5

MAGIC, SEAL = b"shard crc", struct.Struct("<9sI")

# What h5py raises for a file whose structure is broken, besides OSError.
DAMAGE = (KeyError, ValueError, RuntimeError, IndexError, TypeError, AttributeError, OverflowError, MemoryError)


def write(paths: RunPaths, step: int, rank: int, attempt: int, samples: Samples, drafts: bool = False) -> Path:
    """Write one rollout shard of `step`, or one of drafts, and return its final name.

    Raises:
        SampleError: the filesystem refused (read-only, gone, full for half a minute); nothing is left behind under the final
            name.
    """
    folder, name_of = paths.step_samples(step), paths.drafts if drafts else paths.rollout_shard
    arrays = {name: getattr(samples, name) for name in ARRAYS}
    arrays |= {f"reward_{_escaped(name)}": values for name, values in samples.reward_parts.items()}
    if samples.routing is not None:
        arrays["routing"] = samples.routing
    texts = {name: getattr(samples, name) for name in TEXT}
    index = 0
    try:
        _make(folder)
        while name_of(step, rank, index).exists():
            index += 1
    except OSError as error:
        raise _refused(error, folder) from error
    final = name_of(step, rank, index)
    _commit(final, arrays, texts, {"step": step, "rank": rank, "attempt": attempt})
    return final


def write_train(
    paths: RunPaths, step: int, rank: int, samples: Samples, train_log_probs: np.ndarray, advantages: np.ndarray
) -> Path:
    """Write what one training rank computed for its own samples of `step`.

    Args:
        train_log_probs: [total] float32, of the weights that sampled.
        advantages: [n] float32.
    """
    names = ("prompt_ids", "sample_index", "offsets", "loss_mask", "rollout_log_probs")
    arrays = {name: getattr(samples, name) for name in names}
    arrays |= {"train_log_probs": np.asarray(train_log_probs, np.float32), "advantages": np.asarray(advantages, np.float32)}
    final = paths.train_shard(step, rank)
    try:
        _make(final.parent)
    except OSError as error:
        raise _refused(error, final.parent) from error
    _commit(final, arrays, {}, {"step": step, "rank": rank})
    return final


def read(shard: Path, deadline: float = VISIBLE_SECONDS) -> Samples:
    """Read a rollout shard, waiting up to `deadline` seconds for it to become visible.

    Raises:
        SampleError: absent after the deadline, truncated, or arrays that do not fit together.
    """
    end = time.monotonic() + deadline
    while True:
        try:
            return _load(shard)
        except OSError as error:
            # ENOENT and ESTALE pass on a network filesystem; a damaged file does not.
            if time.monotonic() >= end or not _passing(error):
                raise SampleError(f"shard cannot be read: {error}", where=str(shard)) from error
            time.sleep(0.05)
        except DAMAGE as error:
            raise SampleError(f"shard is damaged: {error}", where=str(shard)) from error


def opened(shard: Path) -> h5py.File:
    """Any shard, for reading, once its bytes were found to be those that were written.

    Raises:
        ValueError: they are not.
    """
    data = shard.read_bytes()
    if data[-SEAL.size :] != seal(memoryview(data)[: -SEAL.size]):
        raise ValueError("its bytes do not have the checksum they were written with")
    return h5py.File(io.BytesIO(data), "r")


def on_disk(paths: RunPaths, step: int, drafts: bool = False) -> list[Path]:
    """Final rollout shards of `step`, or those of drafts, by name; used only at a restart."""
    kind = "drafts" if drafts else "rollout"
    folder = paths.step_samples(step)
    return sorted(p for p in folder.glob(f"{kind}-*.h5") if re.fullmatch(rf"{kind}-\d+-\d+\.h5", p.name))


def remove_unfinished(paths: RunPaths, step: int) -> None:
    """Remove what ranks were writing for `step` when they were killed; used only at a restart, before any rank writes."""
    for file in paths.step_samples(step).glob(".*.h5.*.tmp"):
        file.unlink(missing_ok=True)


def set_aside(shard: Path) -> Path:
    """Take a damaged shard out of the run, keeping its bytes beside it for a look."""
    aside = shard.with_suffix(".damaged")
    shard.rename(aside)
    return aside


def _make(folder: Path) -> None:
    """The folder of a step; not the run's own: where a mount has gone, a new one would be of the local disk."""
    for new in (folder.parent, folder):
        new.mkdir(exist_ok=True)
        fsync(new.parent)  # also where another rank has just made it, and has not come to this yet


def _commit(
    final: Path, arrays: Mapping[str, np.ndarray], texts: Mapping[str, list[str]], attributes: Mapping[str, int]
) -> None:
    """Write and rename; where the disk is full, again and again for a while."""
    end, told = time.monotonic() + FULL_SECONDS, False
    while True:
        try:
            return _write(final, arrays, texts, attributes)
        except OSError as error:
            if error.errno not in FULL or time.monotonic() >= end:
                raise _refused(error, final) from error
            if not told:
                print(f"shard cannot be written, trying again for {FULL_SECONDS:.0f} s: {error}: {final}", flush=True)
            told = True
        time.sleep(RETRY_SECONDS)


def _write(
    final: Path, arrays: Mapping[str, np.ndarray], texts: Mapping[str, list[str]], attributes: Mapping[str, int]
) -> None:
    temporary = final.with_name(f".{final.name}.{uuid.uuid4().hex}.tmp")
    image = _image(arrays, texts, attributes)
    try:
        # The checksum costs about as much as the write; both let go of the interpreter lock.
        with ThreadPoolExecutor(1) as pool, temporary.open("xb") as file:
            checksum = pool.submit(seal, image)
            file.write(image)
            file.write(checksum.result())
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(final)
        fsync(final.parent)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _image(arrays: Mapping[str, np.ndarray], texts: Mapping[str, list[str]], attributes: Mapping[str, int]) -> memoryview:
    """The bytes of an HDF5 file, made in memory: HDF5 cannot close a file that it cannot write."""
    image = io.BytesIO()
    with h5py.File(image, "w") as file:
        for name, values in arrays.items():
            file.create_dataset(name, data=values)
        for name, strings in texts.items():
            file.create_dataset(name, data=[_storable(text) for text in strings], dtype=h5py.string_dtype())
        file.attrs.update(attributes)
    return image.getbuffer()


def seal(image: bytes | memoryview) -> bytes:
    """What stands behind an HDF5 file of these bytes."""
    return SEAL.pack(MAGIC, zlib.crc32(image))


def _refused(error: OSError, where: Path) -> SampleError:
    hint = "check quota and space (df -h, lfs quota), then miles-submit resume"
    return SampleError(f"shard cannot be written: {error}", where=str(where), next_step=hint)


def _load(shard: Path) -> Samples:
    with opened(shard) as file:
        arrays: dict[str, Any] = {name: file[name][()] for name in ARRAYS}
        texts: dict[str, Any] = {name: [text.decode() for text in file[name][()]] for name in TEXT}
        parts = {name: file[name][()] for name in file if name.startswith("reward_")}
        arrays |= {"routing": file["routing"][()]} if "routing" in file else {}
    samples = Samples(
        **arrays, **texts, reward_parts={unquote(name.removeprefix("reward_")): part for name, part in parts.items()}
    )
    _check(samples)
    return samples


def _storable(text: str) -> str:
    """`text` without what an HDF5 string cannot hold: NUL becomes U+FFFD, half a surrogate pair `?`."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def _escaped(name: str) -> str:
    """The name of a reward's component as an HDF5 name, in which `/` would make a group and NUL end it; `unquote` undoes it."""
    for sign in "%/\0":
        name = name.replace(sign, f"%{ord(sign):02X}")
    return _storable(name)


def _check(samples: Samples) -> None:
    parts = {f"reward_{name}": values for name, values in samples.reward_parts.items()}
    total, found = int(samples.offsets[-1]), vars(samples) | parts
    expected = {"offsets": len(samples) + 1} | dict.fromkeys((*PER_SAMPLE, *TEXT, *parts), len(samples))
    expected |= dict.fromkeys(PER_TOKEN if samples.routing is None else (*PER_TOKEN, "routing"), total)
    for name, length in expected.items():
        if len(found[name]) != length:
            raise ValueError(f"{name} has {len(found[name])} entries, expected {length}")


def _passing(error: OSError) -> bool:
    return error.errno in (errno.ENOENT, errno.ESTALE)
