"""What is decided about a whole group once its answers are scored: group rewards and filters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from miles_hpc import attach, edges
from miles_hpc.config import Config
from miles_hpc.rollout.reward import is_number
from miles_hpc.sample import Sample, refuse_removal


@dataclass(frozen=True)
class Judgement:
    """Of one group."""

    rewards: list[float] | None = None
    """What replaces the rewards of the answers, if there is a group reward."""
    refusal: str = ""
    """Why a filter refuses the group; empty: it is trained on."""


class Judge:
    """`rollout.group_reward` and `rollout.filters`, in this order.

    Args:
        group_reward: `(samples) -> one number per sample`, None without one.
        filters: each `(samples) -> reason`, empty to keep the group; the first reason counts.
    """

    def __init__(self, group_reward: Callable[..., Any] | None = None, filters: Sequence[Callable[..., Any]] = ()) -> None:
        self.group_reward, self.filters = group_reward, filters

    @classmethod
    def of(cls, config: Config) -> "Judge":
        """With the functions that the configuration names. Raises: EdgeError if one cannot be loaded."""
        rollout = config.rollout
        group_reward = attach.attach(config, "rollout.group_reward", rollout.group_reward) if rollout.group_reward else None
        filters = [attach.attach(config, "rollout.filters", part.function, part.options) for part in rollout.filters]
        return cls(group_reward, filters)

    def __call__(self, samples: list[Sample], filtering: bool = True) -> Judgement:
        """Judge a scored group.

        Raises:
            EdgeError: a function raised, returned something else than its protocol says, or set `remove_sample`.
        """
        rewards = self._rewards(samples) if self.group_reward else None
        for sample, reward in zip(samples, rewards or (), strict=False):
            sample.reward = reward
        reasons = (self._refusal(function, samples) for function in self.filters if filtering)
        return Judgement(rewards, next(filter(None, reasons), ""))

    def _rewards(self, samples: list[Sample]) -> list[float]:
        key, function = f"rollout.group_reward (prompt {samples[0].group_index})", self.group_reward
        assert function
        rewards = _call(function, samples, key)
        try:
            numbers = list(rewards)
        except TypeError:
            numbers = []
        if len(numbers) != len(samples) or not all(map(is_number, numbers)):
            raise edges.wrong(key, function, f"{len(samples)} finite numbers", rewards)
        return [float(number) for number in numbers]

    def _refusal(self, function: Callable[..., Any], samples: list[Sample]) -> str:
        key = f"rollout.filters (prompt {samples[0].group_index})"
        reason = _call(function, samples, key)
        if not isinstance(reason, str):
            raise edges.wrong(key, function, "a reason as text, empty to keep the group", reason)
        return reason


def _call(function: Callable[..., Any], samples: list[Sample], key: str) -> Any:
    before = [sample.remove_sample for sample in samples]
    returned = edges.call(function, samples, key=key)
    refuse_removal(key, samples, before)
    return returned
