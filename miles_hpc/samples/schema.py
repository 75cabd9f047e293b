"""What a sample is: flat arrays over tokens, with offsets, the same in memory and in a shard.

n samples, `total` tokens (prompt and answer). A prompt id is `epoch * rows + row`, where `rows` is the number of training
prompts; a group is all samples of one prompt id.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np

STOPPED, TRUNCATED, BEGUN = 0, 1, 2

PER_SAMPLE = {"prompt_ids": np.int64, "sample_index": np.int32, "rewards": np.float32, "status": np.uint8}
PER_TOKEN = {"tokens": np.int32, "loss_mask": np.uint8, "rollout_log_probs": np.float32, "weight_versions": np.int32}
TEXT = ("prompts", "answers", "labels", "refusals")


@dataclass(frozen=True)
class Samples:
    """Samples of one or more groups.

    Token arrays are flat: sample i owns `[offsets[i], offsets[i + 1])`.
    """

    prompt_ids: np.ndarray
    """[n] int64."""
    sample_index: np.ndarray
    """[n] int32, 0 .. samples_per_prompt - 1."""
    offsets: np.ndarray
    """[n + 1] int64."""
    tokens: np.ndarray
    """[total] int32, prompt then answer."""
    loss_mask: np.ndarray
    """[total] uint8, 1 on answer tokens; none in a sample that a function keeps out of the loss."""
    rollout_log_probs: np.ndarray
    """[total] float32, natural log at the sampling temperature, 0 on prompt tokens."""
    weight_versions: np.ndarray
    """[total] int32, weights that sampled the token, -1 on prompt tokens."""
    rewards: np.ndarray
    """[n] float32."""
    status: np.ndarray
    """[n] uint8, STOPPED or TRUNCATED; BEGUN among drafts only."""
    prompts: list[str]
    answers: list[str]
    labels: list[str]
    """[n] JSON texts."""
    refusals: list[str] = field(default_factory=list)
    """[n] why a filter refused the sample's group; empty: it is trained on."""
    reward_parts: dict[str, np.ndarray] = field(default_factory=dict)
    """Components of the reward by name, each [n] float32."""
    routing: np.ndarray | None = None
    """[total, MoE layers, top_k] uint8, or uint16 with more than 256 experts: the experts that the engine chose, ascending.

    A row of zeros: the engine did not compute the token (a sample's last, and what a tool said after it). None: not recorded.
    """

    def __post_init__(self) -> None:
        if not self.refusals:
            object.__setattr__(self, "refusals", [""] * len(self.prompt_ids))

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def accepted(self) -> Self:
        """The samples that are trained on."""
        return self.take([i for i, refusal in enumerate(self.refusals) if not refusal])

    @property
    def refused(self) -> Self:
        """The samples of groups that a filter refused."""
        return self.take([i for i, refusal in enumerate(self.refusals) if refusal])

    @property
    def lengths(self) -> np.ndarray:
        """[n] int64, tokens per sample."""
        return np.diff(self.offsets)

    @property
    def answer_lengths(self) -> np.ndarray:
        """[n] int64, answer tokens per sample; 0 of one that a function keeps out of the loss."""
        return self._counted(self.loss_mask)

    @property
    def generated(self) -> np.ndarray:
        """[n] int64, tokens of the model per sample, whether they carry the loss or not."""
        return self._counted(self.weight_versions >= 0)

    def _counted(self, flags: np.ndarray) -> np.ndarray:
        before = np.concatenate([[0], np.cumsum(flags, dtype=np.int64)])
        return np.diff(before[self.offsets])

    def tokens_of(self, indices: np.ndarray) -> np.ndarray:
        """[tokens] int64, where the tokens of the samples at `indices` [m] int64 lie."""
        return spans(self.offsets[indices], self.lengths[indices])

    def answers_of(self, indices: np.ndarray) -> np.ndarray:
        """[answer tokens] int64, where the answer tokens of the samples at `indices` [m] int64 lie."""
        tokens = self.tokens_of(indices)
        return tokens[self.loss_mask[tokens] != 0]

    def take(self, indices: Sequence[int] | np.ndarray) -> Self:
        """The samples at `indices`, in that order."""
        index = np.asarray(indices, np.int64)
        lengths, tokens = self.lengths[index], self.tokens_of(index)
        columns: dict[str, Any] = {name: getattr(self, name)[index] for name in PER_SAMPLE}
        columns |= {name: getattr(self, name)[tokens] for name in PER_TOKEN}
        columns |= {name: [getattr(self, name)[i] for i in index] for name in TEXT}
        return replace(
            self,
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            **columns,
            reward_parts={name: values[index] for name, values in self.reward_parts.items()},
            routing=None if self.routing is None else self.routing[tokens],
        )

    def read_only(self) -> Self:
        """The same for a user's function: arrays that refuse to be changed, lists of its own."""
        shown: dict[str, Any] = {name: value[:] for name, value in vars(self).items() if isinstance(value, list | np.ndarray)}
        parts = {name: values[:] for name, values in self.reward_parts.items()}
        for array in (*shown.values(), *parts.values()):
            if isinstance(array, np.ndarray):
                array.flags.writeable = False
        return replace(self, **shown, reward_parts=parts)

    def sorted(self) -> Self:
        """In the order the trainer uses: by prompt id, then sample index."""
        return self.take(np.lexsort((self.sample_index, self.prompt_ids)))

    @classmethod
    def concat(cls, parts: Sequence["Samples"]) -> "Samples":
        """All samples of `parts`, in order; a reward component absent from a part is NaN there."""
        lengths = np.concatenate([p.lengths for p in parts]) if parts else np.zeros(0, np.int64)
        names = sorted({name for p in parts for name in p.reward_parts})
        kinds: dict[str, type] = {**PER_SAMPLE, **PER_TOKEN}
        columns: dict[str, Any] = {name: _join([getattr(p, name) for p in parts], kind) for name, kind in kinds.items()}
        columns |= {name: [text for p in parts for text in getattr(p, name)] for name in TEXT}
        return cls(
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            **columns,
            reward_parts={
                name: _join([p.reward_parts.get(name, np.full(len(p), np.nan, np.float32)) for p in parts], np.float32)
                for name in names
            },
            routing=_routing(parts),
        )


def spans(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[sum(lengths)] int64: `starts[0] .. starts[0] + lengths[0] - 1`, `starts[1] ..`, ..."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(total)


def flat(parts: Sequence[tuple[Sequence[Any], Sequence[Any]]], kind: type) -> np.ndarray:
    """Prompt and answer values of all samples, one after the other."""
    return np.concatenate([np.asarray([*prompt, *answer], kind) for prompt, answer in parts])


def _routing(parts: Sequence[Samples]) -> np.ndarray | None:
    """Of all parts, if every one has it."""
    found = [part.routing for part in parts if part.routing is not None]
    return np.concatenate(found) if found and len(found) == len(parts) else None


def _join(arrays: list[np.ndarray], kind: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, kind), *arrays]).astype(kind, copy=False)


ARRAYS = tuple(f.name for f in fields(Samples) if f.name not in (*TEXT, "reward_parts", "routing"))
