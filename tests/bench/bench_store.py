"""Sample store against a raw write (fsync, rename, fsync of the folder) and a raw read of the same bytes, taking turns.

The budget of a write: the raw write at 80 % of its speed, and 0.02 ms per sample. Medians; `spread` is the interquartile range
over the median. Reading is from the page cache on both sides.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from miles_hpc.paths import RunPaths
from miles_hpc.samples import store
from miles_hpc.samples.schema import Samples

SIZES = ((64, 40), (512, 40), (512, 1024), (512, 8192))
REPEATS = 15


def samples(count: int, tokens: int) -> Samples:
    """`count` samples of `tokens` tokens, an eighth of them prompt; four characters of text per token."""
    rng, total = np.random.default_rng(0), count * tokens
    mask = np.tile((np.arange(tokens) >= tokens // 8).astype(np.uint8), count)
    return Samples(
        prompt_ids=np.arange(count) // 8,
        sample_index=(np.arange(count) % 8).astype(np.int32),
        offsets=np.arange(count + 1) * tokens,
        tokens=rng.integers(0, 150_000, total).astype(np.int32),
        loss_mask=mask,
        rollout_log_probs=(-rng.random(total) * mask).astype(np.float32),
        weight_versions=np.where(mask, 3, -1).astype(np.int32),
        rewards=rng.random(count).astype(np.float32),
        status=np.zeros(count, np.uint8),
        prompts=["what " * (tokens // 8)] * count,
        answers=["some" * (tokens - tokens // 8)] * count,
        labels=["4"] * count,
    )


def run() -> list[dict[str, Any]]:
    """One row per case."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        return [
            _case(f"{n} x {tokens:,} tokens", samples(n, tokens), RunPaths(Path(folder) / f"{n}-{tokens}"))
            for n, tokens in SIZES
        ]


def _case(name: str, data: Samples, paths: RunPaths) -> dict[str, Any]:
    paths.folder.mkdir()
    content = store.write(paths, 0, 0, 1, data).read_bytes()
    raw, shard = paths.step_samples(0) / "raw", paths.rollout_shard(0, 0, 0)
    stored, plain, loaded, read = [], [], [], []
    for _ in range(REPEATS):
        shard.unlink()
        plain.append(_seconds(lambda: _raw_write(raw, content)))
        stored.append(_seconds(lambda: store.write(paths, 0, 0, 1, data)))
        read.append(_seconds(lambda: raw.read_bytes()))
        loaded.append(_seconds(lambda: store.read(shard)))
    write, base = statistics.median(stored), statistics.median(plain)
    load, base_read = statistics.median(loaded), statistics.median(read)
    return {
        "case": name,
        "MB": len(content) / 1e6,
        "raw write MB/s": len(content) / base / 1e6,
        "store write MB/s": len(content) / write / 1e6,
        "write share": base / write,
        "write ms/sample beside raw": (write - base) / len(data) * 1e3,
        "of the budget": write / (base / 0.8 + 2e-5 * len(data)),
        "write spread": _spread(stored),
        "raw read MB/s": len(content) / base_read / 1e6,
        "store read MB/s": len(content) / load / 1e6,
        "read ms/sample beside raw": (load - base_read) / len(data) * 1e3,
        "read spread": _spread(loaded),
        "repeats": REPEATS,
    }


def _raw_write(final: Path, content: bytes) -> None:
    temporary = final.with_suffix(".tmp")
    with temporary.open("wb", buffering=0) as file:
        file.write(content)
        os.fsync(file.fileno())
    temporary.rename(final)
    store.fsync(final.parent)


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _spread(values: list[float]) -> float:
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / middle
