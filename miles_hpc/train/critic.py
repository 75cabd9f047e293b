"""The critic of PPO: a model of the policy's shape whose output layer gives one value per token, with an optimizer of its own.

It starts from the policy that RL starts from, with a head of zeros. Per rank it takes the memory of a second policy under
training: weights, float32 gradients and its share of the optimizer's state.
"""

from copy import copy
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from miles_hpc import device
from miles_hpc.config import Train
from miles_hpc.train import optimizer
from miles_hpc.train.facts import Facts, at
from miles_hpc.train.megatron import Groups, Policy
from miles_hpc.train.optimizer import AdamW
from miles_hpc.train.packing import Pack
from miles_hpc.train.passes import Passes
from miles_hpc.train.sleep import Sleeper
from miles_hpc.train.value import explained, gae_of_answers, value_loss, whiten


class ValueHead(nn.Module):
    """One number per token in place of the vocabulary's logits; float32, weights 0 at first.

    Under sequence parallelism each rank has a slice of the tokens: values are gathered, gradients of the weights summed.
    """

    def __init__(self, hidden: int, dtype: torch.dtype, sequence_parallel: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden, dtype=dtype, device=device.device()))
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined] # megatron sums such gradients over ranks
        self.sequence_parallel = sequence_parallel

    def forward(self, hidden: Tensor, weight: Any = None, runtime_gather_output: Any = None) -> tuple[Tensor, None]:
        """[t, 1, hidden] -> [all t, 1, 1]; called as megatron calls an output layer."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        values = F.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            # every rank goes on with all values alike: their gradient is cut into slices, not summed
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


class ValueModel(Policy):
    """The trunk of a policy with a `ValueHead`."""

    def __init__(self, config: Any, dtype: torch.dtype, groups: Groups, length: int, exact: bool) -> None:
        trunk = copy(config)
        trunk.tie_word_embeddings = True  # megatron makes no output weights then
        super().__init__(trunk, dtype, groups, length, exact)
        self.module.output_layer = ValueHead(config.hidden_size, dtype, self.core_config.sequence_parallel)
        self.module.share_embeddings_and_output_weights = False

    def values(self, pack: Pack) -> Tensor:
        """[answer tokens] float32, the value before each answer token."""
        return self.wrapped(pack.tokens, None, None, packed_seq_params=self._packed(pack))[0][pack.before, 0]

    def start_from(self, policy: Policy) -> None:
        """Take over a policy's weights, all but its output layer."""
        trunk = {name: value for name, value in policy.module.state_dict().items() if not name.startswith("output_layer.")}
        self.module.load_state_dict(trunk, strict=False)


class Critic:
    """Values, advantages from them, and their training. Every method is collective over the training ranks.

    Args:
        train: section of the configuration.
        model: with the weights to start from.
        dtype: of the weights.
    """

    def __init__(self, train: Train, model: ValueModel, dtype: torch.dtype) -> None:
        self.train, self.model = train, model
        self.ddp = model.wrap()
        self.optimizer = optimizer.build(self.ddp, dtype)
        self.sleeper = Sleeper(self.ddp, self.optimizer, train.offload)

    @torch.no_grad()
    def assess(
        self, facts: Facts, passes: Passes, shares: list[np.ndarray], own: np.ndarray, rewards: np.ndarray
    ) -> dict[str, float]:
        """Fill in values, returns and advantages (GAE, whitened over all answer tokens of the step).

        Args:
            shares: samples of each data-parallel rank.
            own: [m] int64, this rank's samples.
            rewards: [n] float32, paid at the last answer token of every sample.

        Returns:
            Metrics.
        """
        values = np.zeros(len(facts.samples.tokens), np.float32)

        def score(batch: Pack) -> None:
            values[batch.flat] = self.model.values(batch).cpu().numpy()

        passes.over(facts.samples, shares, score)
        samples, group = facts.samples, self.model.groups.data
        answers = samples.answers_of(own)
        lengths = torch.from_numpy(samples.answer_lengths[own])
        here, train = torch.from_numpy(values[answers]), self.train
        advantages, returns = gae_of_answers(torch.from_numpy(rewards[own]), here, lengths, train.gamma, train.gae_lambda)
        facts.values, facts.returns = values, np.zeros_like(values)
        facts.returns[answers] = returns.numpy()
        facts.advantages[answers] = whiten(advantages, torch.ones_like(advantages), group).numpy()
        return {"train/value_explained": explained(here, returns, group)}

    def update(
        self, facts: Facts, passes: Passes, shares: list[np.ndarray], token_weight: np.ndarray, values: AdamW
    ) -> tuple[Tensor, float]:
        """One optimizer step on a mini-batch.

        Args:
            shares: samples of each data-parallel rank.
            token_weight: [n] float32, weight of a token of each sample.
            values: hyperparameters.

        Returns:
            This rank's part of the weighted loss, [] float32, and the gradient norm.

        Raises:
            Diverged: the norm is not finite.
        """
        then, goals = facts.values, facts.returns
        assert then is not None and goals is not None
        optimizer.set_hyperparameters(self.optimizer, values)
        total = torch.zeros((), device=device.device())

        def learn(batch: Pack) -> None:
            old, returns = at(then, batch.flat), at(goals, batch.flat)
            per_token = value_loss(self.model.values(batch), old, returns, self.train.value_clip)
            loss = (per_token * at(token_weight, batch.sample)).sum()
            loss.backward()
            total.add_(loss.detach())

        passes.over(facts.samples, shares, learn, lambda: optimizer.zero(self.ddp, self.optimizer), [total])
        return total, optimizer.step(self.ddp, self.optimizer)
