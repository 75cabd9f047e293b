"""A step's shards as `audit` reads them: straight from HDF5, by the documented names; only the checksum is the writer's."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from miles_hpc.samples import store

Key = tuple[int, int]
"""Prompt id and sample index."""

ROLLOUT = {"tokens", "rollout_log_probs", "loss_mask", "weight_versions"}
TRAIN = {"rollout_log_probs", "loss_mask", "train_log_probs"}
PER_SAMPLE = {"prompt_ids", "sample_index", "rewards", "advantages", "refusals"}

MEANS = ("logp_abs_diff_mean", "rollout_kl_k1", "rollout_kl_k3", "ratio_outside")
"""Distances between trainer and sampler that are means over answer tokens."""


class Damaged(Exception):
    """A shard that cannot be counted; the text names file and reason."""


@dataclass(frozen=True)
class Row:
    """One sample in one shard."""

    file: Path
    values: dict[str, np.ndarray]
    """Token arrays of the sample, and its reward or advantage."""
    refusal: str = ""
    """Why a filter refused its group; in rollout shards only."""


@dataclass(frozen=True)
class Step:
    """All shards of a step; what follows from them is worked out once, when they are all there."""

    rollout: dict[Key, Row]
    """Of every group that was generated."""
    train: dict[Key, list[Row]]
    """More than one row where tensor-parallel ranks hold the same sample."""
    problems: list[str] = field(default_factory=list)
    """Damaged shards and samples that are there twice."""

    @cached_property
    def accepted(self) -> dict[Key, Row]:
        """Samples of groups that no filter refused."""
        return {key: row for key, row in self.rollout.items() if not row.refusal}

    def refusal(self, prompt_id: int) -> str:
        """Why the group was refused; empty: it was trained on."""
        return self.rollout[prompt_id, self.groups[prompt_id][0]].refusal

    @cached_property
    def groups(self) -> dict[int, list[int]]:
        """Sample indices by prompt id, ascending."""
        found: dict[int, list[int]] = {}
        for prompt_id, index in sorted(self.rollout):
            found.setdefault(prompt_id, []).append(index)
        return found

    def rewards(self, prompt_id: int) -> np.ndarray:
        """Of one group, by sample index, float64."""
        return np.array([self.rollout[prompt_id, i].values["rewards"] for i in self.groups[prompt_id]], np.float64)


def read(folder: Path) -> Step:
    """Count the shards in the folder of one step."""
    step = Step({}, {})
    for file in sorted(folder.glob("rollout-*.h5")):
        for key, row in _rows(file, ROLLOUT, "rewards", step.problems):
            if key in step.rollout:
                step.problems.append(f"{file}: sample {key} is also in {step.rollout[key].file.name}")
            step.rollout[key] = row
    for file in sorted(folder.glob("train-*.h5")):
        for key, row in _rows(file, TRAIN, "advantages", step.problems):
            step.train.setdefault(key, []).append(row)
    return step


def distances(step: Step) -> dict[str, float]:
    """How far p_train is from p_rollout, over the answer tokens of the train shards, by the metrics' names."""
    rows = [row.values for rows in step.train.values() for row in rows]
    d = [(v["train_log_probs"].astype(np.float64) - v["rollout_log_probs"])[v["loss_mask"] > 0] for v in rows]
    log_ratio = np.concatenate([np.zeros(0), *d])
    ratio = np.exp(log_ratio)
    values = np.abs(log_ratio), -log_ratio, ratio - 1 - log_ratio, (ratio < 0.9) | (ratio > 1.1)
    means = {name: float(value.mean()) if len(value) else 0.0 for name, value in zip(MEANS, values, strict=True)}
    return {"logp_abs_diff_max": float(np.abs(log_ratio).max(initial=0.0))} | means


def unrouted(step: Step) -> list[str]:
    """Samples with a token before the last that went to no experts on record, or twice to the same one."""
    found = []
    for key, row in step.rollout.items():
        experts = np.sort(row.values["routing"][:-1], -1) if "routing" in row.values else None
        if experts is None:
            found.append(f"{row.file}: there is no record of experts")
        elif experts.shape[-1] > 1 and (experts[..., 1:] == experts[..., :-1])[row.values["loss_mask"][1:] > 0].any():
            found.append(f"{row.file}: sample {key} has a token without experts of its own")
    return found


def _rows(file: Path, per_token: set[str], value: str, problems: list[str]) -> Iterator[tuple[Key, Row]]:
    try:
        arrays = _arrays(file, per_token | {"prompt_ids", "sample_index", "offsets", value})
    except Damaged as error:
        problems.append(str(error))
        return
    offsets = arrays["offsets"]
    refusals = [text.decode() for text in arrays.get("refusals", [b""] * len(offsets))]
    for i, key in enumerate(zip(arrays["prompt_ids"].tolist(), arrays["sample_index"].tolist(), strict=True)):
        tokens = {name: arrays[name][offsets[i] : offsets[i + 1]] for name in arrays.keys() & {*per_token, "routing"}}
        yield key, Row(file, {**tokens, value: arrays[value][i]}, refusals[i])


def _arrays(file: Path, names: set[str]) -> dict[str, np.ndarray]:
    try:
        with store.opened(file) as shard:
            optional = {"routing", "refusals"} & shard.keys()
            arrays = {name: shard[name][()] for name in sorted(names | optional)}
        _check(arrays)
    except (OSError, *store.DAMAGE) as error:
        raise Damaged(f"{file}: cannot be read: {error}") from None
    return arrays


def _check(arrays: dict[str, np.ndarray]) -> None:
    offsets, samples = arrays["offsets"], len(arrays["prompt_ids"])
    if len(offsets) != samples + 1 or offsets[0] != 0 or (np.diff(offsets) < 0).any():
        raise ValueError(f"offsets do not fit {samples} samples")
    for name in sorted(arrays.keys() - {"offsets"}):
        expected = samples if name in PER_SAMPLE else offsets[-1]
        if len(arrays[name]) != expected:
            raise ValueError(f"{name} has {len(arrays[name])} entries, expected {expected}")
