"""Filters in the box (`rollout.filters`): each says why a group is not worth training on, or nothing to keep it."""

from collections.abc import Sequence

from miles_hpc.sample import Sample


def zero_variance(samples: Sequence[Sample]) -> str:
    """Refuses a group of equal rewards: its advantages are 0 (dynamic sampling of DAPO, arXiv 2503.14476, eq. 11)."""
    first = samples[0].value
    if any(sample.value != first for sample in samples):
        return ""
    return f"zero_variance_{first:g}"


def answer_length(samples: Sequence[Sample], shortest: int = 0, longest: int = 0, truncated: float = 1.0) -> str:
    """Refuses a group by the lengths of its answers.

    Args:
        shortest: smallest mean length, in tokens.
        longest: largest mean length, in tokens; 0: none.
        truncated: largest share of answers that were cut.
    """
    mean = sum(sample.response_length for sample in samples) / len(samples)
    cut = sum(sample.status is Sample.Status.TRUNCATED for sample in samples) / len(samples)
    if cut > truncated:
        return "truncated"
    if mean < shortest:
        return "too_short"
    return "too_long" if longest and mean > longest else ""


def mean_reward(samples: Sequence[Sample], lowest: float = -1e30, highest: float = 1e30) -> str:
    """Refuses a group whose mean reward is outside [lowest, highest]: too hard, or too easy."""
    mean = sum(sample.value for sample in samples) / len(samples)
    if mean < lowest:
        return "too_hard"
    return "too_easy" if mean > highest else ""
