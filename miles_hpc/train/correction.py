"""Weights that correct for a sampler which does not compute the trainer's probabilities.

`w = exp(old_log_probs - rollout_log_probs)`, where old ones are the trainer's, at the weights of the start of the step. All are
exactly 1 where the two are equal, so they change nothing in exact mode. They carry no gradient.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from miles_hpc.config import Train
from miles_hpc.train.loss import LOG_RATIO_LIMIT, Tokens, sample_mean, sample_sum

Correction = Callable[[Tokens, Train], Tensor]
"""`(tokens, train) -> weights [tokens] float32`, multiplied into the policy loss, not into penalty or bonus."""


def none(tokens: Tokens, train: Train) -> Tensor:
    """1 for every token."""
    return torch.ones_like(tokens.old_log_probs)


def tis(tokens: Tokens, train: Train) -> Tensor:
    """Truncated importance sampling: `clamp(w, correction_low, correction_high)` (Yao et al. 2025,
    https://fengyao.notion.site/off-policy-rl)."""
    return _weight(_difference(tokens)).clamp(train.correction_low, train.correction_high)


def icepop(tokens: Tokens, train: Train) -> Tensor:
    """Masked importance sampling of tokens: w inside [correction_low, correction_high], 0 outside (IcePop,
    arXiv 2510.18855)."""
    return _inside(_weight(_difference(tokens)), train)


def sequence_tis(tokens: Tokens, train: Train) -> Tensor:
    """`tis` with the product of w over the sample (Liu et al. 2025, "When speed kills stability", sequence-level TIS)."""
    whole = _weight(sample_sum(_difference(tokens), tokens))
    return whole.clamp(train.correction_low, train.correction_high)[tokens.sample]


def sequence_mis(tokens: Tokens, train: Train) -> Tensor:
    """`icepop` with the product of w over the sample: a sample counts as a whole or not at all (same source)."""
    return _inside(_weight(sample_sum(_difference(tokens), tokens)), train)[tokens.sample]


def geometric_mis(tokens: Tokens, train: Train) -> Tensor:
    """`icepop` with the geometric mean of w over the sample, which does not grow with its length (same source)."""
    return _inside(_weight(sample_mean(_difference(tokens), tokens)), train)[tokens.sample]


CORRECTIONS: dict[str, Correction] = {
    "none": none,
    "tis": tis,
    "icepop": icepop,
    "sequence_tis": sequence_tis,
    "sequence_mis": sequence_mis,
    "geometric_mis": geometric_mis,
}
"""By the name in `train.correction`."""


def _difference(tokens: Tokens) -> Tensor:
    return tokens.old_log_probs.detach() - tokens.rollout_log_probs


def _weight(log_weight: Tensor) -> Tensor:
    return torch.exp(log_weight.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def _inside(weight: Tensor, train: Train) -> Tensor:
    return torch.where((weight >= train.correction_low) & (weight <= train.correction_high), weight, 0.0)
