"""From rewards to one advantage per sample."""

from collections.abc import Callable

import numpy as np

from miles_hpc import attach, edges
from miles_hpc.config import Config, is_edge
from miles_hpc.samples.schema import Samples

EPSILON = 1e-6
WHITEN_EPSILON = 1e-8
"""Under the root, as in verl's `masked_whiten`."""

Advantage = Callable[[Samples, int], np.ndarray]
"""`(samples, group_size) -> advantages [samples] float32`; samples are sorted, those of one group lie together."""


def group_advantages(rewards: np.ndarray, group_size: int, kind: str = "group_std") -> np.ndarray:
    """Advantages relative to the other samples of the group.

    `group_std` is GRPO (arXiv 2402.03300, eq. 3): `(r - mean) / (std + 1e-6)` with the unbiased standard deviation;
    `group_mean` is Dr. GRPO (arXiv 2503.20783): `r - mean`; `rloo` (arXiv 2402.14740) takes the mean of the others:
    `r_i - mean_{j != i} r_j = n / (n - 1) * (r_i - mean)`.

    Args:
        rewards: [samples] float32; the samples of one group lie together.
        group_size: samples per group.
        kind: `group_std`, `group_mean` or `rloo`.

    Returns:
        [samples] float32. A group of identical rewards (or of one sample) gives exactly 0.

    Raises:
        ValueError: the samples do not fill whole groups, or `kind` is unknown.
    """
    if kind not in ("group_std", "group_mean", "rloo"):
        raise ValueError(f"advantage {kind!r} is none of group_std, group_mean and rloo")
    groups = _groups(rewards, group_size)
    advantages = groups - groups.mean(1, keepdims=True)
    if kind == "group_std" and group_size > 1:
        advantages /= groups.std(1, ddof=1, keepdims=True) + EPSILON
    if kind == "rloo" and group_size > 1:
        advantages *= group_size / (group_size - 1)
    # The mean of n equal numbers may be off by a rounding error; "no signal" must be exactly 0 to be dropped.
    advantages[(groups == groups[:, :1]).all(1)] = 0.0
    return advantages.reshape(-1).astype(np.float32)


def reinforce_pp(rewards: np.ndarray, answer_lengths: np.ndarray) -> np.ndarray:
    """REINFORCE++ (arXiv 2501.03262) without discount: the reward at every token, whitened over all tokens.

    `(r - mean) / sqrt(var + 1e-8)`, mean and unbiased variance over answer tokens. The paper's KL in the reward is
    `train.kl_coef` in the loss here.

    Args:
        rewards: [samples] float32.
        answer_lengths: [samples] int64.

    Returns:
        [samples] float32; exactly 0 if all rewards are equal or there is no token.
    """
    return _whitened(np.asarray(rewards, np.float64), answer_lengths)


def reinforce_pp_baseline(rewards: np.ndarray, answer_lengths: np.ndarray, group_size: int) -> np.ndarray:
    """REINFORCE++-baseline (arXiv 2501.03262): `r - group mean`, then whitened over all answer tokens.

    Args, Returns: as `reinforce_pp`.

    Raises:
        ValueError: the samples do not fill whole groups.
    """
    groups = _groups(rewards, group_size)
    centred = groups - groups.mean(1, keepdims=True)
    centred[(groups == groups[:, :1]).all(1)] = 0.0
    return _whitened(centred.reshape(-1), answer_lengths)


def identity(rewards: np.ndarray) -> np.ndarray:
    """The reward itself, [samples] float32: for rewards that are advantages already, for supervised training, and for `gae`,
    where the critic makes an advantage for every token of it."""
    return np.asarray(rewards, np.float32)


ADVANTAGES: dict[str, Advantage] = {
    "group_std": lambda s, size: group_advantages(s.rewards, size, "group_std"),
    "group_mean": lambda s, size: group_advantages(s.rewards, size, "group_mean"),
    "rloo": lambda s, size: group_advantages(s.rewards, size, "rloo"),
    "reinforce_pp": lambda s, size: reinforce_pp(s.rewards, s.answer_lengths),
    "reinforce_pp_baseline": lambda s, size: reinforce_pp_baseline(s.rewards, s.answer_lengths, size),
    "reward": lambda s, size: identity(s.rewards),
    "gae": lambda s, size: identity(s.rewards),
    "none": lambda s, size: np.zeros(len(s), np.float32),
}
"""By the name in `train.advantage`."""


def advantage_of(config: Config) -> Advantage:
    """The named advantage, or the edge of that name with its answers checked.

    Raises:
        EdgeError: it cannot be loaded.
    """
    name = config.train.advantage
    if not is_edge(name):
        return ADVANTAGES[name]
    function = attach.attach(config, "train.advantage", name)

    def checked(samples: Samples, group_size: int) -> np.ndarray:
        answer = edges.call(function, samples.read_only(), group_size, key="train.advantage")
        if not isinstance(answer, np.ndarray) or answer.shape != (len(samples),) or not _finite(answer):
            raise edges.wrong("train.advantage", function, f"{len(samples)} finite numbers as a numpy array", answer)
        return answer.astype(np.float32)

    return checked


def _finite(values: np.ndarray) -> bool:
    """True for numbers that are finite as float32, in which they are used."""
    with np.errstate(over="ignore"):
        return values.dtype.kind in "biuf" and bool(np.isfinite(values.astype(np.float32)).all())


def _groups(rewards: np.ndarray, group_size: int) -> np.ndarray:
    if group_size < 1 or rewards.size % group_size:
        raise ValueError(f"{rewards.size} rewards do not fill groups of {group_size}")
    return np.asarray(rewards, np.float64).reshape(-1, group_size)


def _whitened(values: np.ndarray, answer_lengths: np.ndarray) -> np.ndarray:
    tokens = answer_lengths.sum()
    seen = values[answer_lengths > 0]
    if tokens < 2 or (seen == seen[0]).all():
        return np.zeros(len(values), np.float32)
    mean = (values * answer_lengths).sum() / tokens
    variance = ((values - mean) ** 2 * answer_lengths).sum() / (tokens - 1)
    return ((values - mean) / np.sqrt(variance + WHITEN_EPSILON)).astype(np.float32)
