"""Scorers of reasoning-gym, for prompts whose metadata name the task."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from miles_hpc.rewards.answers import final_answer


def score(
    prompt: str, answer: str, label: Any, metadata: Mapping[str, Any], task: str = "", marker: str = "", full_only: bool = True
) -> float:
    """reasoning-gym's score of the final answer.

    Args:
        task: the dataset's name; empty: `metadata["source_dataset"]`, which reasoning-gym's own entries have.
        marker: the answer is what follows its last occurrence.
        full_only: 1.0 or 0.0. The partial credit of many scorers pays for long answers that contain the right one.
    """
    entry = {**metadata, "answer": label, "metadata": dict(metadata)}
    value = float(_dataset(task or metadata["source_dataset"]).score_answer(final_answer(answer, marker), entry))
    return float(value >= 1.0) if full_only else value


@cache
def _dataset(task: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=1, seed=0)
