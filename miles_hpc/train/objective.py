"""What an optimizer step minimises: policy loss, importance correction, KL penalty and entropy bonus, chosen once."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from miles_hpc import attach, edges
from miles_hpc.config import Config, Train, is_edge
from miles_hpc.errors import EdgeError
from miles_hpc.train.correction import CORRECTIONS, Correction
from miles_hpc.train.divergence import ESTIMATORS, Estimator
from miles_hpc.train.loss import LOSSES, Loss, TokenLoss, Tokens


class PolicyLoss(NamedTuple):
    """Weighted sums over the tokens given."""

    loss: Tensor
    """[] float32, with gradient."""
    kl: Tensor
    """[] float32, estimate of the KL to the reference; without one, k3 to the old weights."""
    clip_fraction: Tensor
    """[] float32, share of tokens that the loss marks as cut."""
    correction: Tensor
    """[] float32, mean of the importance weights."""


@dataclass(frozen=True)
class Objective:
    """`sum_t weight_t * (correction_t * loss_t + kl_coef * kl_t - entropy_coef * entropy_t)`."""

    train: Train
    loss: Loss
    correction: Correction
    kl: Estimator

    @classmethod
    def of(cls, config: Config) -> "Objective":
        """The objective that the configuration names.

        Raises:
            EdgeError: `train.loss` is an edge that cannot be loaded.
        """
        train = config.train
        return cls(train, loss_of(config), CORRECTIONS[train.correction], ESTIMATORS[train.kl])

    @property
    def every_token(self) -> bool:
        """True if samples without an advantage have a gradient too."""
        train = self.train
        return train.kl_coef > 0 or train.entropy_coef > 0 or train.advantage == "gae" or bool(train.teacher)

    def __call__(self, tokens: Tokens, weights: Tensor) -> PolicyLoss:
        """Weighted sums over a micro-batch.

        Args:
            weights: [tokens] float32, from `token_weights`.
        """
        values, cut = self.loss(tokens, self.train)
        correction = self.correction(tokens, self.train)
        terms = correction * values
        anchor = tokens.old_log_probs if tokens.ref_log_probs is None else tokens.ref_log_probs
        estimate = self.kl if tokens.ref_log_probs is not None else ESTIMATORS["k3"]
        kl = estimate(tokens.log_probs, anchor, tokens.old_log_probs)
        if tokens.ref_log_probs is not None:
            terms = terms + self.train.kl_coef * kl
        if self.train.entropy_coef and tokens.entropy is not None:
            terms = terms - self.train.entropy_coef * tokens.entropy
        sums = [(x.detach() * weights).sum() for x in (kl, cut.float(), correction)]
        return PolicyLoss((terms * weights).sum(), *sums)


def loss_of(config: Config) -> Loss:
    """The named loss, or the edge of that name with its answers checked.

    Raises:
        EdgeError: it cannot be loaded.
    """
    name = config.train.loss
    if not is_edge(name):
        return LOSSES[name]
    function = attach.attach(config, "train.loss", name)

    def checked(tokens: Tokens, train: Train) -> TokenLoss:
        try:
            answer = edges.call(function, tokens, train, key="train.loss")
        except EdgeError as error:
            if isinstance(error.__cause__, torch.OutOfMemoryError):
                raise error.__cause__ from None  # the micro-batch is too large, whoever asked last
            raise
        values, cut = answer if isinstance(answer, tuple) else (answer, torch.zeros_like(tokens.sample, dtype=torch.bool))
        if not isinstance(values, Tensor) or values.shape != tokens.log_probs.shape:
            shape = tuple(tokens.log_probs.shape)
            raise edges.wrong("train.loss", function, f"a tensor [tokens] = {shape}, or a TokenLoss", answer)
        return TokenLoss(values, cut)

    return checked
