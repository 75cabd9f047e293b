"""One sample as users' functions see it. Names and meanings are those of Miles' and slime's `Sample`, so their files fit."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from miles_hpc.errors import EdgeError


@dataclass
class Sample:
    """A prompt with one answer; a function that is called with it may change it only where its documentation says so."""

    class Status(Enum):
        """How the answer ended."""

        PENDING = "pending"
        """Nobody has said: as the last answer of the engine in it ended."""
        COMPLETED = "completed"
        """The model ended its answer."""
        TRUNCATED = "truncated"
        """The answer was cut at the longest length."""
        ABORTED = "aborted"
        FAILED = "failed"
        """As ABORTED: there is no answer, which is for `rollout.reward_error` as a reward that fails."""

    group_index: int | None = None
    """The prompt id."""
    index: int | None = None
    """Number of the sample within its group."""
    prompt: Any = ""
    """The text the model saw."""
    tokens: list[int] = field(default_factory=list)
    """Prompt, then answer."""
    response: str = ""
    response_length: int = 0
    """Tokens of the answer."""
    label: Any = None
    reward: Any = None
    """A number, or a mapping of numbers; None before it is known."""
    loss_mask: list[int] | None = None
    """[response_length], 1 on tokens of the model; None: all of them."""
    weight_versions: list[Any] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    """[response_length], of the sampler."""
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    remove_sample: bool = False
    """True: its reward counts in its group, but none of its tokens carries the loss; whatever its status."""

    @property
    def value(self) -> float:
        """The reward as a number; of a mapping, its `reward`."""
        reward = self.reward.get("reward", 0.0) if isinstance(self.reward, dict) else self.reward
        return float(reward or 0.0)

    def get_reward_value(self, args: Any) -> Any:
        """The reward, or the entry `args.reward_key` of it."""
        key = getattr(args, "reward_key", None)
        return self.reward[key] if key else self.reward

    @property
    def effective_response_length(self) -> int:
        """Answer tokens that carry the loss."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)


def refuse_removal(key: str, samples: Sequence[Sample], before: Sequence[bool] | None = None) -> None:
    """After a function that sees samples but cannot remove one: it would believe that it had.

    Args:
        key: of the function.
        before: `remove_sample` of each before its call; None: all False.

    Raises:
        EdgeError: it has set `remove_sample`.
    """
    for sample, removed in zip(samples, before or [False] * len(samples), strict=True):
        if bool(sample.remove_sample) != removed:
            what = f"{key} sets remove_sample, which only a rollout.generate or rollout.function can do"
            raise EdgeError(what, where=f"prompt {sample.group_index}, sample {sample.index}")
