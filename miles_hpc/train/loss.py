"""Losses over answer tokens, as pure functions.

All work on flat vectors of answer tokens. The mean over a mini-batch is a sum with weights that the caller computes once from
the whole mini-batch, so that the loss does not depend on how it is split over micro-batches and ranks.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

LOG_RATIO_LIMIT = 20.0


class PolicyLoss(NamedTuple):
    """Weighted sums over the tokens given."""

    loss: Tensor
    """[] float32, with gradient."""
    kl: Tensor
    """[] float32, k3 estimate to the reference; without one, to the weights that sampled."""
    clip_fraction: Tensor
    """[] float32, share of tokens whose gradient the clip cut off."""


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    kl_coef: float = 0.0,
    ref_log_probs: Tensor | None = None,
) -> PolicyLoss:
    """Clipped policy-gradient loss: `sum_t w_t * (-min(r A, clip(r, 1 - low, 1 + high) A) + kl_coef * k3)`.

    `r = exp(log_probs - old_log_probs)`.

    PPO (arXiv 1707.06347, eq. 7) as used by GRPO (arXiv 2402.03300, eq. 3), with the separate upper clip of DAPO
    (arXiv 2503.14476, eq. 10).

    Args:
        log_probs: [tokens] float32, of the current weights.
        old_log_probs: [tokens] float32, of the weights that sampled.
        advantages: [tokens] float32.
        weights: [tokens] float32, from `token_weights`.
        clip_low: the ratio is clipped below at 1 - clip_low.
        clip_high: the ratio is clipped above at 1 + clip_high.
        kl_coef: weight of the KL penalty.
        ref_log_probs: [tokens] float32, of the reference; without it there is no penalty.
    """
    ratio = torch.exp((log_probs - old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -(torch.minimum(ratio * advantages, clipped * advantages) * weights).sum()
    anchor = old_log_probs if ref_log_probs is None else ref_log_probs
    kl = (k3(log_probs, anchor) * weights).sum()
    if ref_log_probs is not None:
        loss = loss + kl_coef * kl
    cut = torch.where(advantages > 0, ratio > 1 + clip_high, ratio < 1 - clip_low) & (advantages != 0)
    return PolicyLoss(loss, kl.detach(), (cut * weights).sum().detach())


def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """KL(policy || reference) per token, estimator k3 `exp(ref - logp) - 1 - (ref - logp)`: unbiased and never negative.

    Source: J. Schulman, "Approximating KL divergence", 2020, http://joschu.net/blog/kl-approx.html.

    Args:
        log_probs: [tokens] float32.
        ref_log_probs: [tokens] float32.

    Returns:
        [tokens] float32.
    """
    difference = (ref_log_probs - log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(difference) - difference


def token_weights(answer_lengths: Tensor, kind: str) -> Tensor:
    """Weight of each token of a sample in the mean over a mini-batch.

    `token`: 1 / all answer tokens (DAPO, arXiv 2503.14476, eq. 8); `sequence`: 1 / (samples * the sample's answer tokens)
    (GRPO, arXiv 2402.03300, eq. 3).

    Args:
        answer_lengths: [samples] int64, answer tokens of every sample of the mini-batch (of all ranks).
        kind: `token` or `sequence`.

    Returns:
        [samples] float32; 0 for a sample without answer tokens, all 0 if there are none at all.

    Raises:
        ValueError: `kind` is unknown.
    """
    present = answer_lengths > 0
    if kind == "token":
        return present.float() / answer_lengths.sum().clamp(min=1)
    if kind == "sequence":
        return present.float() / (answer_lengths.clamp(min=1) * present.sum().clamp(min=1))
    raise ValueError(f"loss_mean {kind!r} is neither token nor sequence")


def log_probs_and_entropy(logits: Tensor, targets: Tensor, first: int = 0, group: dist.ProcessGroup | None = None):
    """Log-probability of the targets and entropy of the distribution, from logits whose vocabulary may be split over ranks.

    Args:
        logits: [tokens, own vocabulary] any float type; computed in float32.
        targets: [tokens] int64, ids in the whole vocabulary.
        first: id of the first own vocabulary entry.
        group: ranks that hold the rest of the vocabulary; None: all of it is here.

    Returns:
        log_probs [tokens] float32 with gradient, entropy [tokens] float32 in nats without.
    """
    return _LogProbs.apply(logits.float(), targets, first, group)


class _LogProbs(torch.autograd.Function):
    """log_softmax and gather, with one exponential that serves the gradient and the entropy too."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, first: int, group):
        shifted = logits - _reduced(logits.amax(-1, keepdim=True), dist.ReduceOp.MAX, group)
        probs = shifted.exp()
        total = _reduced(probs.sum(-1, keepdim=True), dist.ReduceOp.SUM, group)
        probs /= total
        log_total = total.log().squeeze(-1)
        own = targets - first
        here = (own >= 0) & (own < logits.shape[-1])
        own = torch.where(here, own, 0)
        chosen = _reduced(shifted.gather(-1, own[:, None]).squeeze(-1) * here, dist.ReduceOp.SUM, group)
        entropy = log_total - _reduced((probs * shifted).sum(-1), dist.ReduceOp.SUM, group)
        ctx.save_for_backward(probs, own, here)
        ctx.mark_non_differentiable(entropy)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx, grad: Tensor, _entropy: Tensor):
        probs, own, here = ctx.saved_tensors
        logits = probs * -grad[:, None]
        logits.scatter_add_(-1, own[:, None], (grad * here)[:, None])
        return logits, None, None, None


def _reduced(values: Tensor, operation, group) -> Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(values, operation, group)
    return values
