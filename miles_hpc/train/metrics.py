"""Sums of one step, reduced over ranks in two collectives."""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from miles_hpc import device
from miles_hpc.samples.schema import Samples
from miles_hpc.train.megatron import Groups
from miles_hpc.train.objective import PolicyLoss

SUMS = ("loss", "kl", "clip_fraction", "correction", "entropy", "scored", "answers", "tokens", "trained_tokens")
DISTANCES = ("train/logp_abs_diff_mean", "train/rollout_kl_k1", "train/rollout_kl_k3", "train/ratio_outside")
"""Means over answer tokens, of how far the trainer's probabilities are from the sampler's."""
RATIO = (0.9, 1.1)
"""Where p_train / p_rollout is called close."""
MORE_SUMS = ("value_loss", "teacher_kl", "taught")
"""Of critic and teacher."""


class Meter:
    """Collects while a step runs; `reduced` is collective over the data-parallel ranks."""

    def __init__(self, groups: Groups) -> None:
        self.group = groups.data
        self.sums = {
            name: torch.zeros((), dtype=torch.float64, device=device.device()) for name in SUMS + MORE_SUMS + DISTANCES
        }
        self.largest = 0.0
        self.norms: list[float] = []
        self.value_norms: list[float] = []

    def loss(self, terms: PolicyLoss, tokens: int) -> None:
        """Of one micro-batch of `tokens` answer tokens."""
        for name, value in terms._asdict().items():
            self.sums[name] += value.detach()
        self.sums["trained_tokens"] += tokens

    def entropy(self, entropy: Tensor) -> None:
        """[answer tokens], of one micro-batch, in nats."""
        self.sums["entropy"] += entropy.detach().sum()
        self.sums["scored"] += len(entropy)

    def critic_step(self, loss: Tensor, grad_norm: float) -> None:
        """Loss and gradient norm of one step of the critic."""
        self.sums["value_loss"] += loss
        self.value_norms.append(grad_norm)

    def teacher(self, samples: Samples, own: np.ndarray, log_probs: np.ndarray) -> None:
        """Estimate of KL(sampler || teacher), over this rank's answer tokens."""
        answers = samples.answers_of(own)
        self.sums["teacher_kl"] += float((samples.rollout_log_probs[answers] - log_probs[answers]).sum(dtype=np.float64))
        self.sums["taught"] += len(answers)

    def optimizer_step(self, grad_norm: float) -> None:
        """Norm of the gradient before clipping."""
        self.norms.append(grad_norm)

    def compare(self, samples: Samples, own: np.ndarray, log_probs: np.ndarray) -> None:
        """Distance between the log-probabilities of trainer and sampler, over this rank's answer tokens."""
        answers = samples.answers_of(own)
        log_ratio = log_probs[answers].astype(np.float64) - samples.rollout_log_probs[answers]
        self.largest = float(np.abs(log_ratio).max(initial=0.0))
        for name, values in distances(log_ratio).items():
            self.sums[name] += values.sum()
        self.sums["answers"] += len(answers)
        self.sums["tokens"] += int(samples.lengths[own].sum())

    def reduced(self) -> dict[str, float]:
        """Means over the step: loss, kl and clip fraction per optimizer step, entropy and distances per answer token."""
        names = list(self.sums)
        total = torch.stack([self.sums[name] for name in names])
        largest = torch.tensor(self.largest, dtype=torch.float64, device=total.device)
        dist.all_reduce(total, group=self.group)
        dist.all_reduce(largest, dist.ReduceOp.MAX, self.group)
        s = dict(zip(names, total.tolist(), strict=True))
        steps = max(1, len(self.norms))
        return {
            "train/loss": s["loss"] / steps,
            "train/kl": s["kl"] / steps,
            "train/clip_fraction": s["clip_fraction"] / steps,
            "train/correction": s["correction"] / steps,
            "train/entropy": s["entropy"] / max(1.0, s["scored"]),
            "train/grad_norm": sum(self.norms) / steps,
            "train/logp_abs_diff_max": largest.item(),
            **{name: s[name] / max(1.0, s["answers"]) for name in DISTANCES},
            "train/tokens": s["tokens"],
            "train/trained_tokens": s["trained_tokens"],
            "train/optimizer_steps": float(len(self.norms)),
            **self._of_other_models(s),
        }

    def _of_other_models(self, s: dict[str, float]) -> dict[str, float]:
        """Of critic and teacher, where there is one."""
        found = {"train/teacher_kl": s["teacher_kl"] / s["taught"]} if s["taught"] else {}
        if steps := len(self.value_norms):
            found |= {"train/value_loss": s["value_loss"] / steps, "train/value_grad_norm": sum(self.value_norms) / steps}
        return found


def distances(log_ratio: np.ndarray) -> dict[str, np.ndarray]:
    """Of each token, by the names in `DISTANCES`.

    `d = log p_train - log p_rollout`: |d|; the estimators of KL(sampler || trainer) from the sampler's own tokens, k1 = -d and
    k3 = exp(d) - 1 - d (J. Schulman, "Approximating KL divergence", 2020); and whether the ratio exp(d) leaves [0.9, 1.1].

    Args:
        log_ratio: [tokens] float64.
    """
    outside = (log_ratio < np.log(RATIO[0])) | (log_ratio > np.log(RATIO[1]))
    values = np.abs(log_ratio), -log_ratio, np.expm1(log_ratio) - log_ratio, outside.astype(np.float64)
    return dict(zip(DISTANCES, values, strict=True))
