"""Advantages and loss of a critic, as pure functions; `critic.py` has the model."""

import torch
import torch.distributed as dist
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
    follower, advantage = values.new_zeros(len(values)), values.new_zeros(len(values))
    advantages = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        here = mask[:, t].to(values.dtype)
        current = rewards[:, t] + gamma * follower - values[:, t] + gamma * lam * advantage
        advantage = here * current + (1 - here) * advantage
        follower = here * values[:, t] + (1 - here) * follower
        advantages[:, t] = here * advantage
    return advantages, (advantages + values) * mask


def gae_of_answers(rewards: Tensor, values: Tensor, lengths: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """`gae` on flat answer tokens, with each sample's reward paid at its last one.

    Args:
        rewards: [samples] float32.
        values: [answer tokens] float32, sample after sample.
        lengths: [samples] int64, answer tokens of each.
        gamma, lam: as in `gae`.

    Returns:
        Advantages and returns, [answer tokens] float32.
    """
    mask = torch.arange(int(lengths.max()) if len(lengths) else 0) < lengths[:, None]
    grid, paid = torch.zeros(mask.shape), torch.zeros(mask.shape)
    grid[mask] = values
    some = torch.nonzero(lengths)[:, 0]
    paid[some, lengths[some] - 1] = rewards[some]
    advantages, returns = gae(paid, grid, mask, gamma, lam)
    return advantages[mask], returns[mask]


def whiten(values: Tensor, mask: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """`(x - mean) / sqrt(var + 1e-8)` with mean and unbiased variance over the mask; 0 outside it and where there is no spread.

    Args:
        values: float32, any shape.
        mask: the same shape.
        group: ranks that hold the rest of the values; None: all of them are here.
    """
    count = _total(mask.sum(), group)
    if count < 2:
        return torch.zeros_like(values)
    mean = (_total((values * mask).sum(), group) / count).to(values.dtype)
    variance = (_total(((values - mean).square() * mask).sum(), group) / (count - 1)).to(values.dtype)
    return (values - mean) * torch.rsqrt(variance + 1e-8) * mask


def explained(values: Tensor, returns: Tensor, group: dist.ProcessGroup | None = None) -> float:
    """Share of the returns' variance that the values explain: 1 is perfect, 0 no better than the mean; 0 without variance.

    Args:
        values, returns: [tokens] float32.
        group: as in `whiten`.
    """
    count = _total(torch.tensor(len(returns)), group).clamp(min=1)
    mean = _total(returns.sum(), group) / count
    spread = _total((returns - mean).square().sum(), group)
    return float(1 - _total((returns - values).square().sum(), group) / spread) if spread > 0 else 0.0


def _total(part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[] float64, the sum over the ranks of `group`."""
    if group is None:
        return part.double()
    from miles_hpc.device import device

    whole = part.double().to(device())
    dist.all_reduce(whole, group=group)
    return whole.to(part.device)


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
