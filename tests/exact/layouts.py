"""One rank of `test_layouts`: python layouts.py FOLDER RANK SIZE writes FAMILY/NAME-RANK.pt for each layout of its size.

In FOLDER are a FAMILY/model each.
Scores the samples of `train_parts.samples` and trains two steps on them, in exact numerics.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[1] / "train"))
import train_parts

from miles_hpc.train import trainer as module
from miles_hpc.train.packing import pack

LAYOUTS = {"pack": (1, 4096, 1), "again": (1, 4096, 1), "alone": (1, 1, 1), "filled": (1, 100, 64), "two": (2, 256, 1)}
"""Data-parallel ranks, tokens per micro-batch, micro-batches filled up to a multiple of tokens."""


def main(folder: Path, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    mine = {name: sizes for name, (ranks, *sizes) in LAYOUTS.items() if ranks == size}
    for family in sorted(folder.iterdir()):
        for name, (tokens, multiple) in mine.items():
            module.pack = lambda s, i, _, where, m=multiple: pack(s, i, m, where)  # type: ignore[attr-defined,assignment]
            result = _train(family / "model", family / f"{name}.store", rank, size, tokens)
            torch.save(result, family / f"{name}-{rank}.pt")


def _train(model: Path, store: Path, rank: int, size: int, tokens: int) -> dict[str, Any]:
    """Weights, and log-probs of the first step [tokens] with NaN where other ranks have them."""
    settings = train_parts.config(ranks=size, micro_batch_tokens=tokens)
    settings = settings.model_copy(update={"run": settings.run.model_copy(update={"numerics": "exact"})})
    with train_parts.trainer(settings, model, store, rank, size) as made:
        made.proved = True  # the samples are made up
        result = train_parts.run_steps(made, 2)
    s = train_parts.samples()
    log_probs = np.full(len(s.tokens), np.nan, np.float32)
    log_probs[np.concatenate([np.arange(s.offsets[i], s.offsets[i + 1]) for i in result["own"][0]])] = result["log_probs"][0]
    return {"log_probs": log_probs, "weights": result["weights"]}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
