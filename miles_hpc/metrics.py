"""What a run says about itself: TensorBoard for people, `events.jsonl` and `ledger.jsonl` for programs.

One TensorBoard writer per role and folder: with two in one folder the data server drops points. Everything is flushed every
step, so that a killed rank loses nothing it had said.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from miles_hpc.heartbeat import Heartbeat
from miles_hpc.paths import RunPaths
from miles_hpc.samples.schema import TRUNCATED, Samples

PHASES = ("rollout", "reward", "train", "sync", "swap", "checkpoint", "wait")
"""Whose seconds every step reports."""


class Board:
    """The TensorBoard writer of a role; a later attempt replaces the points from its first step on."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Points of one step, on disk when this returns."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """No more points."""
        self._writer.close()


class Journal:
    """Append-only JSON lines, each written whole and at once."""

    def __init__(self, file: Path) -> None:
        self.file, self._begun = file, False

    def append(self, *lines: Mapping[str, object]) -> None:
        """Add lines and make them durable."""
        text = "".join(json.dumps(line) + "\n" for line in lines)
        with self.file.open("ab") as stream:
            if not self._begun and self._torn():
                text = "\n" + text
            self._begun = True
            stream.write(text.encode())
            stream.flush()
            os.fsync(stream.fileno())

    def read(self) -> Iterator[dict]:
        """Every whole line, oldest first."""
        for line in self.file.read_bytes().splitlines() if self.file.exists() else []:
            with suppress(ValueError):
                yield json.loads(line)

    def _torn(self) -> bool:
        """True if a rank died in the middle of the last line; ours must not become its end."""
        with self.file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            return size > 0 and (stream.seek(size - 1), stream.read(1))[1] != b"\n"


class Clock:
    """Seconds per phase of the current step."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.heartbeat = heartbeat
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str, step: int | None = None) -> Iterator[None]:
        self.heartbeat.enter(phase, step)
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - started

    def take(self) -> dict[str, float]:
        """Seconds since the last call, by phase."""
        seconds, self.seconds = self.seconds, {}
        return seconds


def of_samples(samples: Samples, trained: np.ndarray, group_size: int) -> dict[str, float]:
    """Reward, length and group statistics of a step; `trained` as in `fates`."""
    lengths = samples.generated
    groups = [_fate(samples, trained, group) for group in _groups(samples, group_size)]
    given = {name: values[~np.isnan(values)] for name, values in samples.reward_parts.items()}
    parts = {f"reward/{name}": float(values.mean()) for name, values in given.items() if len(values)}
    return {
        **parts,  # first: a component called `mean` must not pass for the mean reward
        "reward/mean": float(samples.rewards.mean()),
        "reward/std": float(samples.rewards.std()),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated": float((samples.status == TRUNCATED).mean()),
        "response/removed": float((samples.answer_lengths == 0).mean()),
        "groups/zero_variance": groups.count("zero_variance") / len(groups),
    }


def of_refused(samples: Samples, refused: Samples, group_size: int, prompts: int) -> dict[str, float]:
    """What filters did to a step of `prompts` places: groups tried, refused by reason, places left empty.

    `reward/mean` is of the accepted groups; `reward/all_mean` is of all that were generated.
    """
    groups = len(samples) // group_size
    reasons = Counter(refused.refusals[::group_size])
    rewards = np.concatenate([samples.rewards, refused.rewards])
    return {
        "groups/tried": float(groups + reasons.total()),
        "groups/refused": float(reasons.total()),
        "groups/empty_places": float(prompts - groups),
        "reward/all_mean": float(rewards.mean()),
        **{f"filter/{reason}": float(count) for reason, count in reasons.items()},
    }


def fates(
    samples: Samples,
    dropped: list[int],
    trained: np.ndarray,
    group_size: int,
    step: int,
    attempt: int,
    refused: Samples | None = None,
) -> list[dict]:
    """Ledger lines of a step: every prompt id and what became of it.

    Args:
        trained: [n] bool, samples that an optimizer step took.
    """
    lines = []
    for group in _groups(samples, group_size):
        fate, first = _fate(samples, trained, group), group.start
        reward = round(float(samples.rewards[group].mean()), 6)
        lines.append({"prompt_id": int(samples.prompt_ids[first]), "fate": fate, "samples": group_size, "reward": reward})
    lines += _refused(refused, group_size) if refused else []
    lines += [{"prompt_id": prompt_id, "fate": "reward_error", "samples": 0, "reward": None} for prompt_id in dropped]
    return [{"step": step, **line, "attempt": attempt} for line in lines]


def _groups(samples: Samples, group_size: int) -> list[slice]:
    return [slice(first, first + group_size) for first in range(0, len(samples), group_size)]


def _fate(samples: Samples, trained: np.ndarray, group: slice) -> str:
    if trained[group].any():
        return "trained"
    return "zero_variance" if samples.answer_lengths[group].any() else "removed"


def _refused(samples: Samples, group_size: int) -> list[dict]:
    lines = []
    for first in range(0, len(samples), group_size):
        reward = round(float(samples.rewards[first : first + group_size].mean()), 6)
        lines.append({"prompt_id": int(samples.prompt_ids[first]), "fate": "refused", "samples": group_size, "reward": reward})
        lines[-1]["reason"] = samples.refusals[first]
    return lines


def journals(paths: RunPaths) -> tuple[Journal, Journal]:
    """Events and ledger of a run."""
    return Journal(paths.events), Journal(paths.ledger)
