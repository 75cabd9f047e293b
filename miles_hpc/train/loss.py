"""Losses over answer tokens, as pure functions.

All work on flat vectors of answer tokens and give one value per token. The mean over a mini-batch is a sum with weights that
the caller computes once from the whole mini-batch (`token_weights`), so that no loss depends on how the mini-batch is split
over micro-batches and ranks. `objective.py` puts loss, importance correction, KL penalty and entropy bonus together.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from miles_hpc.config import Train

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are cut here before `exp`, as verl and Miles do: beyond, the clip decides anyway."""


@dataclass(frozen=True)
class Tokens:
    """The answer tokens of one micro-batch; its samples are whole."""

    log_probs: Tensor
    """[tokens] float32, of the current weights, with gradient."""
    old_log_probs: Tensor
    """[tokens] float32, what the ratio is taken to: the sampler's, or with an importance correction the trainer's at the
    start of the step."""
    advantages: Tensor
    """[tokens] float32."""
    sample: Tensor
    """[tokens] int64, 0 .. samples - 1: which sample of the micro-batch the token belongs to."""
    samples: int
    rollout_log_probs: Tensor
    """[tokens] float32, of the sampler."""
    ref_log_probs: Tensor | None = None
    """[tokens] float32, of the reference policy; None without one."""
    entropy: Tensor | None = None
    """[tokens] float32, in nats, with gradient."""


class TokenLoss(NamedTuple):
    """Of each token."""

    values: Tensor
    """[tokens] float32, with gradient."""
    cut: Tensor
    """[tokens] bool, true where a clip took the gradient away or limited it."""


Loss = Callable[[Tokens, Train], TokenLoss]


def ppo(tokens: Tokens, train: Train) -> TokenLoss:
    """Clipped policy gradient: `-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` with `r = exp(log_probs - old_log_probs)`.

    PPO (arXiv 1707.06347, eq. 7) as used by GRPO (arXiv 2402.03300, eq. 3), with the separate upper clip of DAPO
    (arXiv 2503.14476, eq. 10) and, if `train.dual_clip` is c > 1, the lower bound `c A` where A < 0 (arXiv 1912.09729).
    """
    return _clipped(_ratio(tokens.log_probs - tokens.old_log_probs), tokens.advantages, train)


def gspo(tokens: Tokens, train: Train) -> TokenLoss:
    """`ppo` with the ratio of whole sequences, `s = exp(mean_t(log_probs - old_log_probs))`, in the token form
    `sg[s] exp(log_probs - sg[log_probs])` (GSPO-token, arXiv 2507.18071, section 4.3); meant for `loss_mean = "sequence"` and
    clips of a few 1e-4.
    """
    mean = sample_mean(tokens.log_probs.detach() - tokens.old_log_probs, tokens)
    log_ratio = mean[tokens.sample] + tokens.log_probs - tokens.log_probs.detach()
    return _clipped(_ratio(log_ratio), tokens.advantages, train)


def cispo(tokens: Tokens, train: Train) -> TokenLoss:
    """`-sg[clip(r, 1 - clip_low, 1 + clip_high)] A log_probs` (CISPO, arXiv 2506.13585): no token loses its gradient.

    The paper has no lower clip: `clip_low = 1`. `cut` marks the tokens whose weight was limited.
    """
    ratio = _ratio(tokens.log_probs.detach() - tokens.old_log_probs)
    clipped = ratio.clamp(1 - train.clip_low, 1 + train.clip_high)
    return TokenLoss(-clipped * tokens.advantages * tokens.log_probs, clipped != ratio)


def reinforce(tokens: Tokens, train: Train) -> TokenLoss:
    """`-A log_probs` (Williams 1992), without ratio or clip: for `mini_batches = 1`, where policy and sampler are the same."""
    return TokenLoss(-tokens.advantages * tokens.log_probs, torch.zeros_like(tokens.sample, dtype=torch.bool))


def supervised(tokens: Tokens, train: Train) -> TokenLoss:
    """Cross entropy of the sampled tokens, `-log_probs`: with a filter that keeps good samples, rejection-sampling SFT.

    Advantages count only where they are 0: such samples take no part.
    """
    return TokenLoss(-(tokens.advantages != 0).float() * tokens.log_probs, torch.zeros_like(tokens.sample, dtype=torch.bool))


LOSSES: dict[str, Loss] = {"ppo": ppo, "gspo": gspo, "cispo": cispo, "reinforce": reinforce, "supervised": supervised}
"""By the name in `train.loss`."""


def sample_mean(values: Tensor, tokens: Tokens) -> Tensor:
    """Mean over the tokens of each sample.

    Args:
        values: [tokens] float32.

    Returns:
        [samples] float32; 0 for a sample without tokens.
    """
    count = torch.bincount(tokens.sample, minlength=tokens.samples).clamp(min=1)
    return sample_sum(values, tokens) / count


def sample_sum(values: Tensor, tokens: Tokens) -> Tensor:
    """Sum over the tokens of each sample, [samples] float32."""
    return torch.zeros(tokens.samples, device=values.device).index_add(0, tokens.sample, values)


def _ratio(log_ratio: Tensor) -> Tensor:
    return torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def _clipped(ratio: Tensor, advantages: Tensor, train: Train) -> TokenLoss:
    clipped = ratio.clamp(1 - train.clip_low, 1 + train.clip_high)
    loss = torch.maximum(-ratio * advantages, -clipped * advantages)
    cut = torch.where(advantages > 0, ratio > 1 + train.clip_high, ratio < 1 - train.clip_low) & (advantages != 0)
    if train.dual_clip:
        bound = -train.dual_clip * advantages
        cut |= (advantages < 0) & (loss > bound)
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return TokenLoss(loss, cut)


def token_weights(answer_lengths: Tensor, kind: str, longest: int = 1) -> Tensor:
    """Weight of each token of a sample in the mean over a mini-batch.

    `token`: 1 / all answer tokens (DAPO, arXiv 2503.14476, eq. 8); `sequence`: 1 / (samples * the sample's answer tokens)
    (GRPO, arXiv 2402.03300, eq. 3); `constant`: 1 / (samples * longest answer allowed) (Dr. GRPO, arXiv 2503.20783).

    Args:
        answer_lengths: [samples] int64, answer tokens of every sample of the mini-batch (of all ranks).
        kind: `token`, `sequence` or `constant`.
        longest: `rollout.max_new_tokens`.

    Returns:
        [samples] float32; 0 for a sample without answer tokens, all 0 if there are none at all.

    Raises:
        ValueError: `kind` is unknown.
    """
    present = answer_lengths > 0
    count = present.sum().clamp(min=1)
    denominators = {
        "token": answer_lengths.sum().clamp(min=1),
        "sequence": answer_lengths.clamp(min=1) * count,
        "constant": count * longest,
    }
    if kind not in denominators:
        raise ValueError(f"loss_mean {kind!r} is none of {', '.join(denominators)}")
    return present.float() / denominators[kind]
