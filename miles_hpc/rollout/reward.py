"""The reward edge, called for one answer at a time and checked."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from miles_hpc import attach, edges
from miles_hpc.config import Config

EXCERPT = 200
LARGEST = 3.4e38


@dataclass(frozen=True)
class Score:
    """A reward, its components, and the seconds it took."""

    value: float
    parts: dict[str, float]
    seconds: float


@dataclass(frozen=True)
class Sum:
    """`rollout.rewards`: the weighted sum of several, each kept under its name."""

    functions: dict[str, Callable[..., Any]]
    weights: dict[str, float]

    def __call__(self, prompt: str, answer: str, label: Any, metadata: dict[str, Any]) -> dict[str, float]:
        """All parts and their sum. Raises: EdgeError naming the part that raised or returned something else than numbers."""
        found: dict[str, float] = {}
        for name, function in self.functions.items():
            parts = numbers_of(edges.call(function, prompt, answer, label, metadata, key=f"reward {name}"), function, name)
            found[name] = parts.pop("reward")
            found |= {f"{name}.{part}": value for part, value in parts.items()}
        return found | {"reward": sum(self.weights[name] * found[name] for name in self.functions)}


class Reward:
    """`rollout.reward`: `(prompt, answer, label, metadata) -> float`, or `-> dict` of numbers with a key `reward`.

    `prompt` is the text the model saw, `answer` the decoded answer without special tokens, `metadata` the row's mapping plus
    `finished`: True if the model ended the answer itself, False if it was cut at `rollout.max_new_tokens`, the number of its
    `tokens`, and `max_new_tokens`. Several functions are `rollout.rewards`; without any, every answer is worth 0 before the
    group reward.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    @classmethod
    def of(cls, config: Config) -> "Reward":
        """With the functions that the configuration names. Raises: EdgeError if one cannot be loaded."""
        rollout = config.rollout
        if rollout.reward:
            return cls(attach.attach(config, "rollout.reward", rollout.reward))
        parts = {part.name: attach.attach(config, "rollout.rewards", part.function, part.options) for part in rollout.rewards}
        return cls(Sum(parts, {part.name: part.weight for part in rollout.rewards}))

    def __call__(self, prompt: str, answer: str, label: Any, metadata: Mapping[str, Any], sample: str) -> Score:
        """Score one answer.

        Args:
            sample: which one it is, for messages.

        Raises:
            EdgeError: the function raised, or returned something else than finite numbers; names the sample.
        """
        started = time.perf_counter()
        name = f"rollout.reward ({sample}, answer {_excerpt(answer)})"
        returned = edges.call(self.function, prompt, answer, label, dict(metadata), key=name)
        return _score(returned, self.function, name, time.perf_counter() - started)


def given(reward: Any, function: Callable[..., Any], sample: str) -> Score:
    """What a generate or rollout function says its answer is worth. Raises: EdgeError if that is no number."""
    return _score(reward, function, f"sample.reward of {sample}", 0.0)


def _score(returned: Any, function: Callable[..., Any], name: str, seconds: float) -> Score:
    parts = numbers_of(returned, function, name)
    return Score(parts.pop("reward"), parts, seconds)


def numbers_of(returned: Any, function: Callable[..., Any], name: str) -> dict[str, float]:
    """What a reward returned, as numbers with the key `reward`. Raises: EdgeError if it is something else."""
    parts = dict(returned) if isinstance(returned, Mapping) else {"reward": returned}
    numbers = all(isinstance(key, str) and is_number(value) for key, value in parts.items())
    if "reward" not in parts or not numbers:
        raise edges.wrong(name, function, "a finite number, or a dict of them with a key 'reward'", returned)
    return {key: float(part) for key, part in parts.items()}


def is_number(value: Any) -> bool:
    """True for an int, float, bool or numpy scalar that is finite as float32, which is what is stored."""
    try:
        return not isinstance(value, str | bytes) and abs(float(value)) <= LARGEST
    except (TypeError, ValueError, OverflowError):
        return False


def _excerpt(answer: str) -> str:
    return repr(answer if len(answer) <= EXCERPT else answer[:EXCERPT] + "...")
