"""Form and length of an answer."""

import re
from collections.abc import Mapping
from typing import Any


def pattern(prompt: str, answer: str, label: Any, metadata: Mapping[str, Any], regex: str = r"<think>.*?</think>.+") -> float:
    """1.0 if the whole answer matches the regular expression (`.` matches line breaks), else 0.0."""
    return float(re.fullmatch(regex, answer.strip(), re.DOTALL) is not None)


def finished(prompt: str, answer: str, label: Any, metadata: Mapping[str, Any]) -> float:
    """1.0 if the model ended its answer itself, 0.0 if it was cut at `rollout.max_new_tokens`."""
    return float(metadata["finished"])


def overlong(prompt: str, answer: str, label: Any, metadata: Mapping[str, Any], buffer: int = 0, limit: int = 0) -> float:
    """Soft overlong punishment of DAPO (arXiv 2503.14476, eq. 13): 0 up to `limit - buffer` tokens, then linear to -1.

    Args:
        buffer: tokens over which the punishment grows.
        limit: longest answer without full punishment, in tokens; 0: `rollout.max_new_tokens`.
    """
    longest = limit or metadata["max_new_tokens"]
    over = metadata["tokens"] - (longest - buffer)
    return -float(min(1.0, max(0.0, over / buffer if buffer else over > 0)))


def length(prompt: str, answer: str, label: Any, metadata: Mapping[str, Any], scale: float = 1000.0) -> float:
    """`-tokens / scale`: shorter is better. Give it a small weight, or it wins over being right."""
    return -metadata["tokens"] / scale
