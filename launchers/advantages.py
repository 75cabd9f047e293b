"""The formulas of `train.advantage`, written apart from the trainer's for `audit`: float64, sample by sample."""

from collections.abc import Callable

import numpy as np

from miles_hpc.config import Train
from miles_hpc.launchers.recount import Key, Step


def _group_std(rewards: np.ndarray) -> np.ndarray:
    """arXiv 2402.03300, eq. 3."""
    return (rewards - rewards.mean()) / (np.std(rewards, ddof=1) + 1e-6)


def _group_mean(rewards: np.ndarray) -> np.ndarray:
    """arXiv 2503.20783."""
    return rewards - rewards.mean()


def _rloo(rewards: np.ndarray) -> np.ndarray:
    """arXiv 2402.14740: each against the mean of the others."""
    return np.array([reward - np.delete(rewards, i).mean() for i, reward in enumerate(rewards)])


def _itself(rewards: np.ndarray) -> np.ndarray:
    return rewards


FORMULAS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "group_std": _group_std,
    "group_mean": _group_mean,
    "rloo": _rloo,
    "reward": _itself,
    "gae": _itself,
    "none": np.zeros_like,
    "reinforce_pp": _itself,
    "reinforce_pp_baseline": _group_mean,
}
"""Of one group; those of REINFORCE++ (arXiv 2501.03262) are whitened over all tokens of the step afterwards."""


def always(train: Train) -> bool:
    """True if samples with an advantage of 0 are trained too: by a critic, a teacher, a KL penalty or an entropy bonus."""
    return train.advantage == "gae" or bool(train.teacher) or train.kl_coef > 0 or train.entropy_coef > 0


def recount(step: Step, kind: str) -> dict[Key, float]:
    """Advantages of the accepted samples of a step, by the formula of `kind`."""
    found: dict[Key, float] = {}
    for prompt_id, indices in step.groups.items():
        if not step.refusal(prompt_id):
            values = _of_group(step.rewards(prompt_id), kind)
            found |= {(prompt_id, i): float(value) for i, value in zip(indices, values, strict=True)}
    return _whitened(found, step) if kind.startswith("reinforce_pp") else found


def _of_group(rewards: np.ndarray, kind: str) -> np.ndarray:
    relative = kind not in ("reward", "gae", "reinforce_pp")
    return np.zeros(len(rewards)) if relative and (rewards == rewards[0]).all() else FORMULAS[kind](rewards)


def _whitened(values: dict[Key, float], step: Step) -> dict[Key, float]:
    lengths = [int((step.rollout[key].values["loss_mask"] > 0).sum()) for key in values]
    tokens = np.repeat(list(values.values()), lengths)
    if len(tokens) < 2 or (tokens == tokens[0]).all():
        return dict.fromkeys(values, 0.0)
    return {key: float((value - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)) for key, value in values.items()}
