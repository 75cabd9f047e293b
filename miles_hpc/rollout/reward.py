"""The reward edge, called for one answer at a time and checked."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from miles_hpc import edges
from miles_hpc.config import Config
from miles_hpc.errors import EdgeError

ARGUMENTS = ("prompt", "answer", "label", "metadata")
EXCERPT = 200
LARGEST = 3.4e38


@dataclass(frozen=True)
class Score:
    """A reward, its components, and the seconds it took."""

    value: float
    parts: dict[str, float]
    seconds: float


class Reward:
    """`rollout.reward`: `(prompt, answer, label, metadata) -> float`, or `-> dict` of numbers with a key `reward`.

    `prompt` is the text the model saw, `answer` the decoded answer without special tokens, `metadata` the row's mapping plus
    `finished`: True if the model ended the answer itself, False if it was cut at `rollout.max_new_tokens`.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    @classmethod
    def of(cls, config: Config) -> "Reward":
        """Raises: EdgeError."""
        return cls(edges.load(config.rollout.reward, config.run.edges_folder, key="rollout.reward", arguments=ARGUMENTS))

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
        parts = dict(returned) if isinstance(returned, Mapping) else {"reward": returned}
        numbers = all(isinstance(key, str) and _is_number(value) for key, value in parts.items())
        if "reward" not in parts or not numbers:
            raise edges.wrong(name, self.function, "a finite number, or a dict of them with a key 'reward'", returned)
        value = float(parts.pop("reward"))
        return Score(value, {key: float(part) for key, part in parts.items()}, time.perf_counter() - started)


def _is_number(value: Any) -> bool:
    """True for an int, float, bool or numpy scalar that is finite as float32, which is what is stored."""
    try:
        return not isinstance(value, str | bytes) and abs(float(value)) <= LARGEST
    except (TypeError, ValueError, OverflowError):
        return False


def _excerpt(answer: str) -> str:
    return repr(answer if len(answer) <= EXCERPT else answer[:EXCERPT] + "...")


__all__ = ["ARGUMENTS", "EdgeError", "Reward", "Score"]
