"""Log-probabilities: one formula for the sampler, which knows all logits, and for the trainer, which needs a gradient."""

from typing import Any

import torch
from torch import Tensor

from miles_hpc.kernels.rows import row_sum


def reference(logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """`log_softmax(logits / temperature)` at the targets, and its entropy in nats.

    Args:
        logits: [tokens, vocabulary].
        targets: [tokens] int64.
        temperature: [1] or [tokens, 1].

    Returns:
        [tokens], [tokens].
    """
    everything = torch.log_softmax(logits / temperature, -1)
    return everything.gather(-1, targets[:, None])[:, 0], -(everything.exp() * everything).sum(-1)


def log_softmax(logits: Tensor, temperature: Tensor) -> Tensor:
    """[tokens, vocabulary] float32 of all tokens, without gradient; what a sampler draws from."""
    shifted, _, log_total = _parts(logits, temperature)
    return shifted - log_total


def log_probs_and_entropy(logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """`reference` with the bits of `log_softmax`; float32, both with gradient."""
    return _LogProbs.apply(logits, targets, temperature)


def _parts(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits minus their maximum, exp of that, log of its sum.

    The temperature must be a tensor: CUDA divides by a Python number through its reciprocal.
    """
    scaled = logits.float() / temperature
    shifted = scaled - scaled.amax(-1, keepdim=True)
    exp = shifted.exp()
    return shifted, exp, row_sum(exp).log()


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        shifted, probs, log_total = _parts(logits, temperature)
        log_prob = (shifted.gather(-1, targets[:, None]) - log_total)[:, 0]
        probs /= log_total.exp()
        entropy = log_total[:, 0] - (probs * shifted).sum(-1)
        ctx.save_for_backward(probs, targets, temperature, entropy)
        ctx.dtype = logits.dtype
        ctx.set_materialize_grads(False)  # None where an output is not part of the loss
        return log_prob, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Tensor, None, None]:
        probs, targets, temperature, entropy = ctx.saved_tensors
        dlogits = torch.zeros_like(probs)
        if grad is not None:
            dlogits = probs * -grad[:, None]
            # One target per row: each element is written once, so the order does not matter.
            dlogits.scatter_add_(-1, targets[:, None], grad[:, None])
        if entropy_grad is not None:  # dH / dz_j = -p_j (log p_j + H)
            dlogits -= (torch.xlogy(probs, probs) + probs * entropy[:, None]) * entropy_grad[:, None]
        return (dlogits / temperature).to(ctx.dtype), None, None
