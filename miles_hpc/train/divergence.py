"""Estimators of KL(policy || reference) per token, from the log-probabilities of the sampled tokens.

With `d = log_probs - ref_log_probs`: k1, k2 and k3 are J. Schulman's, "Approximating KL divergence", 2020,
http://joschu.net/blog/kl-approx.html. As a term of the loss only `k2`, `k3_k2` and `k3_unbiased` have the gradient of the KL
(arXiv 2510.01555): that of `k1` is zero on average, that of `k3` belongs to the reverse divergence.
"""

from collections.abc import Callable

import torch
from torch import Tensor

LIMIT = 20.0

Estimator = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`(log_probs, ref_log_probs, old_log_probs) -> kl`, each [tokens] float32; `log_probs` and the result with gradient."""


def k1(log_probs: Tensor, ref_log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """`d`: unbiased, may be negative."""
    return log_probs - ref_log_probs


def k2(log_probs: Tensor, ref_log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """`d**2 / 2`: biased, low variance."""
    return 0.5 * (log_probs - ref_log_probs).square()


def k3(log_probs: Tensor, ref_log_probs: Tensor, old_log_probs: Tensor | None = None) -> Tensor:
    """`exp(-d) - 1 + d`: unbiased and never negative (GRPO, arXiv 2402.03300, eq. 4)."""
    difference = (ref_log_probs - log_probs).clamp(-LIMIT, LIMIT)
    return torch.expm1(difference) - difference


def k3_k2(log_probs: Tensor, ref_log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2 (verl's `k3+`)."""
    straight = k2(log_probs, ref_log_probs, old_log_probs)
    return straight + (k3(log_probs, ref_log_probs) - straight).detach()


def k3_unbiased(log_probs: Tensor, ref_log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """`r k3` with `r = exp(log_probs - old_log_probs)`: unbiased off policy too (DeepSeek-V3.2, arXiv 2512.02556)."""
    ratio = torch.exp((log_probs - old_log_probs).clamp(-LIMIT, LIMIT))
    return ratio * k3(log_probs, ref_log_probs)


ESTIMATORS: dict[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3, "k3_k2": k3_k2, "k3_unbiased": k3_unbiased}
"""By the name in `train.kl`."""
