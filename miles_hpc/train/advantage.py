"""From the rewards of a group to one advantage per sample."""

import numpy as np

EPSILON = 1e-6


def group_advantages(rewards: np.ndarray, group_size: int, kind: str = "group_std") -> np.ndarray:
    """Advantages relative to the mean of the sample's group.

    `group_std` is GRPO (arXiv 2402.03300, eq. 3): `(r - mean) / (std + 1e-6)` with the unbiased standard deviation;
    `group_mean` is Dr. GRPO (arXiv 2503.20783): `r - mean`.

    Args:
        rewards: [samples] float32; the samples of one group lie together.
        group_size: samples per group.
        kind: `group_std` or `group_mean`.

    Returns:
        [samples] float32. A group of identical rewards (or of one sample) gives exactly 0.

    Raises:
        ValueError: the samples do not fill whole groups, or `kind` is unknown.
    """
    if kind not in ("group_std", "group_mean"):
        raise ValueError(f"advantage {kind!r} is neither group_std nor group_mean")
    if group_size < 1 or rewards.size % group_size:
        raise ValueError(f"{rewards.size} rewards do not fill groups of {group_size}")
    groups = np.asarray(rewards, np.float64).reshape(-1, group_size)
    advantages = groups - groups.mean(1, keepdims=True)
    if kind == "group_std" and group_size > 1:
        advantages /= groups.std(1, ddof=1, keepdims=True) + EPSILON
    # The mean of n equal numbers may be off by a rounding error; "no signal" must be exactly 0 to be dropped.
    advantages[(groups == groups[:, :1]).all(1)] = 0.0
    return advantages.reshape(-1).astype(np.float32)
