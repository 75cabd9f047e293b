"""Trained tokens per second, MFU, memory, and whether trainer and sampler agree."""

import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gpu_generation import Pair, config

from miles_hpc.samples.schema import Samples

if TYPE_CHECKING:
    from miles_hpc.train.trainer import Trainer

PEAK = 989e12
"""Dense bfloat16 products of an H100 or H200, FLOP/s."""
STEPS = 4


def samples(pairs: list[Pair]) -> Samples:
    """As the trainer gets them; rewards are made up."""
    lengths = np.array([[len(r.tokens), len(o.tokens)] for r, o in pairs])
    mask = np.concatenate([np.repeat([0, 1], pair) for pair in lengths]).astype(np.uint8)
    log_probs = np.zeros(len(mask), np.float32)
    log_probs[mask == 1] = np.concatenate([np.array(o.log_probs, np.float32) for _, o in pairs])
    n = len(pairs)
    return Samples(
        prompt_ids=np.array([r.prompt_id for r, _ in pairs]),
        sample_index=np.array([r.sample_index for r, _ in pairs], np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths.sum(1))]),
        tokens=np.concatenate([np.array(r.tokens + o.tokens, np.int32) for r, o in pairs]),
        loss_mask=mask,
        rollout_log_probs=log_probs,
        weight_versions=np.where(mask, 0, -1).astype(np.int32),
        rewards=(np.arange(n) * 7 % 5 / 5).astype(np.float32),
        status=np.zeros(n, np.uint8),
        prompts=[""] * n,
        answers=[""] * n,
        labels=["null"] * n,
    )


def measure(folder: Path, numerics: str, long: list[Pair], pairs: list[Pair], active: int, store: Path) -> dict[str, Any]:
    """One row: all samples are compared, the last 256 short ones trained on for some steps.

    MFU counts 6 FLOP per active parameter and token; attention is left out.
    """
    import torch

    from miles_hpc.train.trainer import Trainer

    used = used_gib()
    trainer = Trainer(config(folder, numerics), folder, 0, 1, f"file://{store}/{numerics}-{os.getpid()}")
    compared = {f"long {key}": value for key, value in _compare(trainer, samples(long)).items()}
    compared |= _compare(trainer, samples(pairs))
    built = used_gib()
    batch = samples(pairs[-256:])
    advantages, seconds = batch.rewards - np.float32(0.4), []
    trainer.proved = True
    torch.cuda.reset_peak_memory_stats()
    for step in range(STEPS + 1):
        torch.cuda.synchronize()
        started = time.monotonic()
        trainer.step(batch, advantages, step)
        torch.cuda.synchronize()
        seconds.append(time.monotonic() - started)
    peak = torch.cuda.max_memory_allocated() / 2**30
    trainer.close()
    rate = len(batch.tokens) / statistics.median(seconds[1:])
    return {
        "numerics": numerics,
        **compared,
        "trained tokens/s": rate,
        "MFU %": 100 * 6 * active * rate / PEAK,
        "step s": statistics.median(seconds[1:]),
        "slowest s": max(seconds[1:]),
        "tokens": len(batch.tokens),
        "GiB built": built - used,
        "GiB peak": peak,
    }


def _compare(trainer: "Trainer", every: Samples) -> dict[str, Any]:
    """Log-probs of trainer and sampler, of all answer tokens."""
    found = np.zeros(len(every.tokens), np.float32)
    trainer._score(trainer.policy, every, [np.arange(len(every))], found, None)
    answers = every.loss_mask == 1
    difference = np.abs(found[answers].astype(np.float64) - every.rollout_log_probs[answers])
    return {"compared": int(answers.sum()), "differ": int((difference != 0).sum()), "largest": float(difference.max())}


def used_gib() -> float:
    """Memory of the GPU that is in use, by whomever."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30
