"""What is known of the tokens of a step, in flat arrays aligned with `samples.tokens`; each rank fills in its own share."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from miles_hpc import device
from miles_hpc.config import Train
from miles_hpc.samples.schema import Samples
from miles_hpc.train.distillation import distilled_advantages
from miles_hpc.train.loss import Tokens
from miles_hpc.train.packing import Pack


@dataclass
class Facts:
    """Each array is [total] float32; only answer tokens of this rank's samples count."""

    samples: Samples
    advantages: np.ndarray
    log_probs: np.ndarray
    """By the weights that sampled."""
    reference: np.ndarray | None = None
    """Log-probs of the reference policy."""
    teacher: np.ndarray | None = None
    """Log-probs of the teacher."""
    values: np.ndarray | None = None
    """The critic's, before the step."""
    returns: np.ndarray | None = None
    """What the critic learns."""

    @classmethod
    def of(cls, samples: Samples, advantages: np.ndarray) -> "Facts":
        """Args: advantages: [n] float32, the same for all tokens of a sample."""
        return cls(samples, np.repeat(advantages, samples.lengths), np.zeros(len(samples.tokens), np.float32))

    def tokens(self, batch: Pack, new: Tensor, entropy: Tensor, train: Train) -> Tokens:
        """What the objective sees of a micro-batch. With an importance correction, the ratio is to the trainer's own past."""
        numbers, sample = np.unique(batch.sample, return_inverse=True)
        rollout = at(self.samples.rollout_log_probs, batch.flat)
        old = rollout if train.correction == "none" else at(self.log_probs, batch.flat)
        advantages = at(self.advantages, batch.flat)
        if self.teacher is not None:
            advantages = distilled_advantages(advantages, old, at(self.teacher, batch.flat), train.teacher_coef)
        return Tokens(
            log_probs=new,
            old_log_probs=old,
            advantages=advantages,
            sample=torch.from_numpy(sample).to(new.device),
            samples=len(numbers),
            rollout_log_probs=rollout,
            ref_log_probs=None if self.reference is None else at(self.reference, batch.flat),
            entropy=entropy,
        )


def at(values: np.ndarray, index: np.ndarray) -> Tensor:
    """`values[index]` on this rank's device."""
    return torch.from_numpy(values[index]).to(device.device())
