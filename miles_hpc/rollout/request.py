"""What goes to an engine and what comes back: plain data, picklable, no torch."""

from dataclasses import dataclass
from typing import Any

import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Output:
    """One answer."""

    tokens: list[int]
    """Sampled token ids, the stop token included."""
    log_probs: list[float]
    """Natural log-probability of each token under the softmax of logits / temperature (1 for greedy requests)."""
    stopped: bool
    """True if a stop token came, False if `max_new_tokens` was reached."""
    loss_mask: list[int] | None = None
    """1 on tokens of the model, 0 on those of a tool (`rollout.generate`); None: all are the model's."""
    reward: Any = None
    """What a generate or rollout function says it is worth; None: it is for `rollout.reward` to say."""
    removed: bool = False
    """Such a function keeps it out of the loss; the rest of its group is trained."""
    failure: str = ""
    """Status with which such a function gives no answer; empty: this is one."""
    routing: np.ndarray | None = None
    """[prompt and answer tokens, MoE layers, top_k] uint8 or uint16, see `Samples.routing`; None: not recorded."""

    whole: bool = True
    """False: it was interrupted; another request may go on behind its last token."""

    @property
    def mask(self) -> list[int]:
        """[tokens] 0 or 1: which tokens are the model's."""
        return [1] * len(self.tokens) if self.loss_mask is None else self.loss_mask

    @property
    def carrying(self) -> list[int]:
        """[tokens] 0 or 1: which tokens carry the loss."""
        return [0] * len(self.tokens) if self.removed else self.mask


@dataclass(frozen=True)
class Draft:
    """What an attempt that was interrupted had of an answer; the whole of it where only its group was not finished."""

    sample: tuple[int, int]
    """Prompt id and sample index."""
    prompt: list[int]
    """Token ids before it."""
    output: Output
    versions: list[int]
    """Of the weights that gave each of its tokens."""


@dataclass(frozen=True)
class Request:
    """One answer to generate.

    `prompt_id` and `sample_index` (with the run's seed) key the sampling noise: the same pair gives the same noise in any
    batch, engine and attempt.
    """

    tokens: list[int]
    prompt_id: int
    sample_index: int
    max_new_tokens: int
    greedy: bool = False
    draft: Draft | None = None
    """To go on with."""

    @property
    def begun(self) -> Output:
        """The beginning of the answer, which is there already."""
        return self.draft.output if self.draft else Output([], [], False, whole=False)

    @property
    def name(self) -> str:
        """In a trace."""
        return f"{self.prompt_id}-{self.sample_index}"


def sampling_seed(run_seed: int, prompt_id: int, sample_index: int) -> int:
    """A 63-bit key of (run seed, prompt id, sample index): a chain of splitmix64 steps (Steele, Lea, Flood 2014)."""
    key = 0
    for part in (run_seed, prompt_id, sample_index):
        key = _splitmix64(key ^ (part & _MASK))
    return key >> 1


def _splitmix64(x: int) -> int:
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
