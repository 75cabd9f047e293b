"""Advantages and loss of a critic, as pure functions. No critic is trained in the loop yet."""

import torch
from torch import Tensor


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16) over the masked tokens of padded sequences.

    `delta_t = r_t + gamma V_{t+1} - V_t`, `A_t = delta_t + gamma lam A_{t+1}`; tokens outside the mask (of a tool, of the
    padding) are skipped: the next masked token follows without decay. V is 0 after the last one.

    Args:
        rewards: [samples, length] float32.
        values: [samples, length] float32.
        mask: [samples, length], 1 on tokens of the policy.
        gamma: discount.
        lam: lambda.

    Returns:
        Advantages (not whitened) and returns (advantages + values), [samples, length] float32, 0 outside the mask.
    """
    follower, advantage = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    advantages = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        here = mask[:, t].to(values.dtype)
        current = rewards[:, t] + gamma * follower - values[:, t] + gamma * lam * advantage
        advantage = here * current + (1 - here) * advantage
        follower = here * values[:, t] + (1 - here) * follower
        advantages[:, t] = here * advantage
    return advantages, (advantages + values) * mask


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """`(x - mean) / sqrt(var + 1e-8)` with mean and unbiased variance over the mask; 0 outside it and where there is no spread.

    Args:
        values: float32, any shape.
        mask: the same shape.
    """
    count = mask.sum()
    if count < 2:
        return torch.zeros_like(values)
    mean = (values * mask).sum() / count
    variance = ((values - mean).square() * mask).sum() / (count - 1)
    return (values - mean) * torch.rsqrt(variance + 1e-8) * mask


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Clipped value loss of PPO per token: `max((V - R)**2, (clip(V, V_old - clip, V_old + clip) - R)**2) / 2`.

    Source: OpenAI baselines, ppo2/model.py; not in the paper.

    Args:
        values: [tokens] float32, with gradient.
        old_values: [tokens] float32, at the start of the step.
        returns: [tokens] float32, from `gae`.
        clip: largest change that counts.

    Returns:
        [tokens] float32.
    """
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())
