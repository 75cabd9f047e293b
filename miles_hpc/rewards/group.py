"""Rewards of a whole group (`rollout.group_reward`): what one answer is worth beside the others."""

from collections.abc import Sequence

import numpy as np

from miles_hpc.sample import Sample


def ranked(samples: Sequence[Sample]) -> list[float]:
    """Rank of each reward in the group, from -1 (lowest) to 1 (highest); equal rewards have the mean of their ranks.

    Makes rewards of any scale comparable.
    """
    rewards = np.array([sample.value for sample in samples], np.float64)
    below = (rewards[:, None] > rewards[None]).sum(1)
    equal = (rewards[:, None] == rewards[None]).sum(1)
    return ((2 * below + equal) / len(rewards) - 1).tolist()


def shortest_right(samples: Sequence[Sample]) -> list[float]:
    """The reward, less up to half of it for right answers longer than the shortest right one (cf. arXiv 2501.12599)."""
    lengths = [sample.response_length for sample in samples if sample.value > 0]
    if not lengths or min(lengths) == max(lengths):
        return [sample.value for sample in samples]
    span = max(lengths) - min(lengths)
    return [
        s.value * (1 - 0.5 * max(0.0, (s.response_length - min(lengths)) / span)) if s.value > 0 else s.value for s in samples
    ]
