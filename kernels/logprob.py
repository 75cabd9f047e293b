"""Log-probabilities and entropy: one formula for the sampler, which knows all logits, and for the trainer, which goes from
hidden states to log-probabilities without ever holding [tokens, vocabulary].

The trainer computes logits for a few tokens at a time, forward, and again for a few vocabulary entries at a time, backward.
Logits are float32 sums of products in the type of the weights.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from miles_hpc.kernels.linear import product_float
from miles_hpc.kernels.rows import ROWS, row_sum

FORWARD, BACKWARD = 2**25, 2**24
"""Logits held at once: 134 and 67 MB."""


def reference(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """`log_softmax(hidden weight^T / temperature)` at the targets, and its entropy in nats.

    Args:
        hidden: [tokens, hidden].
        weight: [vocabulary, hidden].
        targets: [tokens] int64.
        temperature: [1].

    Returns:
        [tokens], [tokens].
    """
    everything = torch.log_softmax(hidden @ weight.t() / temperature, -1)
    return everything.gather(-1, targets[:, None])[:, 0], -(everything.exp() * everything).sum(-1)


def log_softmax(logits: Tensor, temperature: Tensor) -> Tensor:
    """[tokens, vocabulary] float32 of all tokens, without gradient; what a sampler draws from.

    Args:
        logits: [tokens, vocabulary] float32.
        temperature: [1] or [tokens, 1]; a tensor, since CUDA divides by a Python number through its reciprocal.
    """
    sums = _sums(logits, temperature)
    return logits / temperature - sums.peak - sums.total.log()


def log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    first: int = 0,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference` with the bits of `log_softmax` for logits from `linear_float`; float32, both with gradient.

    Args:
        hidden: [tokens, hidden]; its gradient is this rank's part.
        weight: [own vocabulary, hidden].
        targets: [tokens] int64, ids in the whole vocabulary.
        temperature: [1] float32.
        first: id of the first own vocabulary entry.
        group: ranks that hold the rest of the vocabulary; None: all of it is here.
    """
    return _LogProbs.apply(hidden, weight, targets - first, temperature, group)


class Sums(NamedTuple):
    """Over the vocabulary, of z = logits / temperature; [tokens, 1] float32 each."""

    peak: Tensor
    """Largest z."""
    total: Tensor
    """Sum of exp(z - peak)."""
    dot: Tensor
    """Sum of exp(z - peak) (z - peak)."""


def _sums(logits: Tensor, temperature: Tensor) -> Sums:
    if logits.is_cuda:
        from miles_hpc.kernels import fused

        return Sums(*fused.softmax_sums(logits, temperature))
    scaled = logits / temperature
    peak = scaled.amax(-1, keepdim=True)
    shifted = scaled - peak
    exp = shifted.exp()
    return Sums(peak, row_sum(exp), row_sum(exp * shifted))


def _of_tokens(
    hidden: Tensor, weight: Tensor, own: Tensor, temperature: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, ...]:
    """Log-prob of the target, log of the sum of exp(z), entropy: [tokens] each."""
    logits = product_float(hidden, weight)
    sums = _sums(logits, temperature)
    here = (own >= 0) & (own < len(weight))
    chosen = logits.gather(-1, torch.where(here, own, 0)[:, None]) / temperature
    if group is not None and group.size() > 1:
        sums, chosen = _over_ranks(sums, chosen.masked_fill(~here[:, None], -torch.inf), group)
    log_total = sums.total.log()
    parts = (chosen - sums.peak - log_total, sums.peak + log_total, log_total - sums.dot / sums.total)
    return tuple(x[:, 0] for x in parts)


def _over_ranks(sums: Sums, chosen: Tensor, group: dist.ProcessGroup) -> tuple[Sums, Tensor]:
    """Sums of the whole vocabulary, added in the order of the ranks; and the logit that one of them has."""
    own = torch.cat([*sums, chosen], 1)
    every = own.new_empty(group.size(), *own.shape)
    dist.all_gather(list(every), own, group=group)
    peaks, totals, dots, logits = every.split(1, -1)
    peak = peaks.amax(0)
    lower = peaks - peak
    scale = lower.exp()
    return Sums(peak, (totals * scale).sum(0), ((dots + totals * lower) * scale).sum(0)), logits.amax(0)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, own: Tensor, temperature: Tensor, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        rows = max(1, FORWARD // len(weight) // ROWS) * ROWS
        pieces = zip(hidden.split(rows), own.split(rows), strict=True)
        parts = [_of_tokens(h, weight, t, temperature, group) for h, t in pieces]
        log_probs, log_sum, entropy = (torch.cat(x) for x in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, own, temperature, log_sum, entropy)
        ctx.set_materialize_grads(False)  # None where an output is not part of the loss
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, own, temperature, log_sum, entropy = ctx.saved_tensors
        grad = torch.zeros_like(log_sum) if grad is None else grad
        entropy_grad = torch.zeros_like(log_sum) if entropy_grad is None else entropy_grad
        dhidden, dweight = torch.zeros_like(hidden, dtype=torch.float32), torch.empty_like(weight)
        columns = max(1, BACKWARD // max(1, len(hidden)) // ROWS) * ROWS
        for start in range(0, len(weight), columns):
            part = weight[start : start + columns]
            logits = product_float(hidden, part)
            rows = Rows(own - start, temperature, log_sum, entropy, grad, entropy_grad)
            dlogits = _backward(logits, rows, weight.dtype)
            torch.mm(dlogits.t(), hidden, out=dweight[start : start + columns])
            dhidden += product_float(dlogits, part.t())
        return dhidden.to(hidden.dtype), dweight, None, None, None


class Rows(NamedTuple):
    """What the gradient of a row of logits depends on; [tokens] each, but for the temperature."""

    own: Tensor
    """int64, the target, counted from the first of these logits."""
    temperature: Tensor
    """[1] float32."""
    log_sum: Tensor
    """float32, log of the sum of exp(z) over the whole vocabulary."""
    entropy: Tensor
    """float32."""
    grad: Tensor
    """float32, of the log-prob."""
    entropy_grad: Tensor
    """float32, of the entropy."""


def _backward(logits: Tensor, rows: Rows, kind: torch.dtype) -> Tensor:
    """Gradient, of type `kind`, of logits [tokens, some of the vocabulary].

    With z = logits / temperature and p = exp(z - log_sum): d log p_i / dz_j = [i = j] - p_j, dH / dz_j = -p_j (log p_j + H).
    """
    if logits.is_cuda:
        from miles_hpc.kernels import fused

        return fused.softmax_backward(logits, rows, kind)
    own, temperature, log_sum, entropy, grad, entropy_grad = rows
    log_p = logits / temperature - log_sum[:, None]
    d = -log_p.exp() * (grad[:, None] + entropy_grad[:, None] * (log_p + entropy[:, None]))
    here = torch.nonzero((own >= 0) & (own < logits.shape[-1]))[:, 0]
    d[here, own[here]] += grad[here]
    return (d / temperature).to(kind)
