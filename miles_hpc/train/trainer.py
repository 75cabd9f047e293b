"""One training step: samples and advantages in, new weights and metrics out."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from miles_hpc import device
from miles_hpc.config import Config
from miles_hpc.samples.schema import Samples
from miles_hpc.train import architecture, export, optimizer, schedule, state, weights
from miles_hpc.train.critic import Critic, ValueModel
from miles_hpc.train.facts import Facts, at
from miles_hpc.train.hooks import Hooks
from miles_hpc.train.loss import token_weights
from miles_hpc.train.megatron import Groups, Policy, join, leave
from miles_hpc.train.metrics import Meter
from miles_hpc.train.objective import Objective
from miles_hpc.train.optimizer import AdamW
from miles_hpc.train.packing import Demonstrations, Pack
from miles_hpc.train.passes import Passes
from miles_hpc.train.sleep import Sleeper

WARM_START = AdamW(lr=2e-3, weight_decay=0.01)


@dataclass(frozen=True)
class Result:
    """Of one step, for this rank."""

    metrics: dict[str, float]
    """Reduced over all ranks."""
    own: np.ndarray
    """[m] int64, the samples that this rank records; each sample of the step is recorded by exactly one rank."""
    trained: np.ndarray
    """[n] bool, the samples of the step that an optimizer step took; the same on all ranks."""
    train_log_probs: np.ndarray
    """[tokens of own] float32, by the weights that sampled, aligned with `samples.take(own).tokens`; 0 on prompt tokens."""


@dataclass(frozen=True)
class Plan:
    """Who does what in a step; mini-batches are the same on all ranks, the rest is this rank's."""

    shares: list[np.ndarray]
    """Samples of each data-parallel rank."""
    mini_batches: list[list[np.ndarray]]
    """Per optimizer step, the samples of each data-parallel rank."""
    forward_only: list[np.ndarray]
    """Samples of each data-parallel rank whose log-probabilities no training forward gives."""
    trained: np.ndarray
    """[n] bool, the samples in mini-batches."""


class Trainer:
    """The policy under training, on one of the training ranks. Every method is collective over them.

    Args:
        config: of the run.
        model_folder: Hugging Face checkpoint.
        rank: within training.
        size: training ranks.
        rendezvous: a store that all training ranks share, or `tcp://host:port` or `file://path`.

    Raises:
        ModelError: a checkpoint that cannot be trained, or not with this many ranks.
    """

    def __init__(self, config: Config, model_folder: Path, rank: int, size: int, rendezvous: str | dist.Store) -> None:
        self.config, self.folder, self.rank, self.size = config.train, model_folder, rank, size
        self.seed, self.exact, self.proved = config.run.seed, config.run.numerics == "exact", False
        self.advance: Callable[[], None] = lambda: None
        """Called at every micro-batch."""
        self.may_leave: Callable[[], None] = lambda: None
        """Called at every micro-batch before the weights change; what it raises on all ranks alike leaves them as they were."""
        self.changed = False
        """The weights of a step that is not finished."""
        self.longest_answer, self.objective, self.hooks = config.rollout.max_new_tokens, Objective.of(config), Hooks.of(config)
        self.model_config = architecture.read(model_folder)
        tp, ep = config.train.tensor_parallel, config.train.expert_parallel
        architecture.check_parallel(self.model_config, tp, ep)
        weights.check(self.model_config, model_folder)
        self.dtype = architecture.DTYPES[config.model.dtype]
        self.length, self.temperature = config.model.context_length, config.rollout.temperature
        if self.exact:
            device.without_workspace()
        join(rank, size, rendezvous, tp, ep, config.patience_seconds)
        try:
            self._build()
        except BaseException:
            leave()
            raise

    def _build(self) -> None:
        self.groups = Groups()
        self.policy = self._policy(self.config.routing_replay)
        weights.read(self.policy.module, self.model_config, self.folder, self.groups)
        self.ddp = self.policy.wrap()
        self.stream = weights.Stream(self.policy.module, self.model_config, self.groups)
        self.optimizer = optimizer.build(self.ddp, self.dtype)
        self.sleeper = Sleeper(self.ddp, self.optimizer, self.config.offload)
        self.passes = Passes(self.groups, self.config.micro_batch_tokens, self._between)
        self.reference: Policy | None = None
        self.critic: Critic | None = None
        self.teacher = self._teacher(Path(self.config.teacher)) if self.config.teacher else None

    def _policy(self, replay: bool = False) -> Policy:
        return Policy(self.model_config, self.dtype, self.groups, self.length, self.exact, replay)

    def _teacher(self, folder: Path) -> Policy:
        """A frozen model of any supported architecture, split over the ranks as the policy is."""
        model_config = architecture.read(folder)
        architecture.check_parallel(model_config, self.config.tensor_parallel, self.config.expert_parallel)
        weights.check(model_config, folder)
        teacher = Policy(model_config, self.dtype, self.groups, self.length, self.exact)
        weights.read(teacher.module, model_config, folder, self.groups)
        return teacher

    def _critic(self) -> Critic:
        model = ValueModel(self.model_config, self.dtype, self.groups, self.length, self.exact)
        model.start_from(self.policy)
        return Critic(self.config, model, self.dtype)

    @property
    def replicas(self) -> int:
        """Data-parallel ranks."""
        return self.groups.data.size()

    def step(self, samples: Samples, advantages: np.ndarray, step: int) -> Result:
        """One rollout step of policy gradient.

        Args:
            samples: all samples of the step, sorted, the same on all ranks.
            advantages: [n] float32.
            step: counted from 0; keys the shuffle and the learning-rate warm-up.

        Raises:
            Diverged: a loss or gradient norm that is not finite.
            NumericsError: the first step, in exact numerics, where trainer and sampler differ.
            SampleError: `train.routing_replay` without a record of the experts.
        """
        self._start_of_rl()
        plan, facts, meter = self._plan(samples, advantages, step), Facts.of(samples, advantages), Meter(self.groups)
        share = plan.shares[self.groups.data.rank()]
        self.policy.load.clear()
        if replays := self.policy.replays:
            replays.begin(samples)
        self._prove(samples, plan)
        self._score(self.policy, samples, plan.forward_only, facts.log_probs, meter)
        if replays:
            replays.count(on=len(plan.mini_batches) == 1)  # later forwards are of other weights than the engine's
        judged = self._ask_others(facts, plan, share, advantages, meter)
        hyperparameters = self._hyperparameters(step)
        optimizer.set_hyperparameters(self.optimizer, hyperparameters)
        for shares in plan.mini_batches:
            self._mini_batch(facts, shares, meter, only=len(plan.mini_batches) == 1)
            self.changed = True
            self._critic_mini_batch(facts, shares, meter, hyperparameters)
        self.changed = False
        meter.compare(samples, share, facts.log_probs)
        metrics = meter.reduced() | {"train/lr": hyperparameters.lr} | self._expert_load() | judged
        metrics |= {"train/routing_mismatch": replays.mismatch()} if replays else {}
        own = share if self.groups.writes_samples else share[:0]
        return Result(metrics, own, plan.trained, facts.log_probs[samples.tokens_of(own)])

    def _plan(self, samples: Samples, advantages: np.ndarray, step: int) -> Plan:
        """Mini-batches first, then each is spread over the ranks, so that they do not depend on the number of ranks."""
        everything = np.arange(len(samples))
        keep = (samples.answer_lengths > 0) & (self.objective.every_token | (advantages != 0))
        lengths = samples.lengths
        sets = schedule.mini_batches(everything[keep], self.config.mini_batches, self.seed, step)
        mini = [schedule.balanced(s, lengths, self.replicas) for s in sets if len(s)]
        idle = schedule.balanced(everything[~keep], lengths, self.replicas)
        shares = [np.sort(np.concatenate([idle[r], *(m[r] for m in mini)])) for r in range(self.replicas)]
        return Plan(shares, mini, idle if len(mini) == 1 else shares, keep)

    def _hyperparameters(self, step: int) -> AdamW:
        c = self.config
        warm = min(1.0, (step + 1) / c.lr_warmup_steps) if c.lr_warmup_steps else 1.0
        return self.hooks.hyperparameters(step, AdamW(c.lr * warm, c.beta1, c.beta2, c.weight_decay, c.clip_grad))

    def _between(self) -> None:
        """At every micro-batch."""
        self.advance()
        if not self.changed:
            self.may_leave()

    def _sums(self, meter: Meter | None) -> list[Tensor]:
        """What forwards add to."""
        of_policy = self.policy.load.counts + ([self.policy.replays.counts] if self.policy.replays else [])
        return of_policy + (list(meter.sums.values()) if meter else [])

    @torch.no_grad()
    def _score(self, policy: Policy, samples: Samples, shares: list[np.ndarray], into: np.ndarray, meter: Meter | None) -> None:
        """Log-probabilities without gradient, written to their places in the flat array."""

        def score(batch: Pack) -> None:
            log_probs, entropy = policy.log_probs(batch, self.temperature)
            into[batch.flat] = log_probs.cpu().numpy()
            if meter:
                meter.entropy(entropy)

        self.passes.over(samples, shares, score, sums=self._sums(meter))

    def _prove(self, samples: Samples, plan: Plan) -> None:
        """In exact numerics, the first step goes on only if trainer and sampler agree bit for bit."""
        if not self.exact or self.proved:
            return
        from miles_hpc.train.exact import prove

        log_probs = np.zeros(len(samples.tokens), np.float32)
        self._score(self.policy, samples, plan.shares, log_probs, None)
        prove(samples, plan.shares[self.groups.data.rank()], log_probs)
        self.proved = True

    def _ask_others(
        self, facts: Facts, plan: Plan, share: np.ndarray, advantages: np.ndarray, meter: Meter
    ) -> dict[str, float]:
        """What reference, teacher and critic say about this rank's samples; returns the critic's metrics."""
        samples = facts.samples
        facts.reference, facts.teacher = (
            self._frozen_log_probs(model, samples, plan) for model in (self.reference, self.teacher)
        )
        if facts.teacher is not None:
            meter.teacher(samples, share, facts.teacher)
        if self.critic is None:
            return {}
        return self.critic.assess(facts, self.passes, plan.shares, share, advantages)

    def _frozen_log_probs(self, model: Policy | None, samples: Samples, plan: Plan) -> np.ndarray | None:
        if model is None:
            return None
        log_probs = np.zeros(len(samples.tokens), np.float32)
        self._score(model, samples, plan.shares, log_probs, None)
        return log_probs

    def _mini_batch(self, facts: Facts, shares: list[np.ndarray], meter: Meter, only: bool) -> None:
        """One optimizer step. If it is the only one, `facts` take its log-probabilities, else they have them already."""
        token_weight = self._token_weights(facts.samples.answer_lengths, np.concatenate(shares))

        def learn(batch: Pack) -> None:
            new, entropy = self.policy.log_probs(batch, self.temperature)
            if only:
                facts.log_probs[batch.flat] = new.detach().cpu().numpy()
                meter.entropy(entropy)
            terms = self.objective(facts.tokens(batch, new, entropy, self.config), at(token_weight, batch.sample))
            terms.loss.backward()
            meter.loss(terms, len(batch.flat))

        self.passes.over(facts.samples, shares, learn, self._forget, self._sums(meter))
        meter.optimizer_step(optimizer.step(self.ddp, self.optimizer))

    def _forget(self) -> None:
        optimizer.zero(self.ddp, self.optimizer)

    def _critic_mini_batch(self, facts: Facts, shares: list[np.ndarray], meter: Meter, hyperparameters: AdamW) -> None:
        if self.critic is None:
            return
        token_weight = self._token_weights(facts.samples.answer_lengths, np.concatenate(shares), "token")
        rate = self.config.critic_lr * (hyperparameters.lr / self.config.lr if self.config.lr else 1.0)
        meter.critic_step(*self.critic.update(facts, self.passes, shares, token_weight, hyperparameters._replace(lr=rate)))

    def _token_weights(self, answer_lengths: np.ndarray, chosen: np.ndarray, kind: str = "") -> np.ndarray:
        """[n] float32, weight of a token of each sample in the mean over the chosen ones."""
        token_weight = np.zeros(len(answer_lengths), np.float32)
        lengths = torch.from_numpy(answer_lengths[chosen])
        token_weight[chosen] = token_weights(lengths, kind or self.config.loss_mean, self.longest_answer).numpy()
        return token_weight

    def _expert_load(self) -> dict[str, float]:
        load = self.policy.load.max_over_mean()
        return {} if load is None else {"train/expert_load_max_over_mean": load}

    def supervised_step(self, tokens: list[list[int]], masks: list[list[int]], lr: float) -> float:
        """One optimizer step of cross entropy on the masked tokens (warm start).

        Args:
            tokens: prompt and answer of each demonstration; the same on all ranks.
            masks: 1 on answer tokens.
            lr: learning rate.

        Returns:
            Mean negative log-likelihood per answer token, in nats.

        Raises:
            Diverged: the gradient norm is not finite.
        """
        data = Demonstrations.of(tokens, masks)
        everything = np.arange(len(tokens))
        answer_lengths = np.add.reduceat(data.loss_mask.astype(np.int64), data.offsets[:-1])
        token_weight = self._token_weights(answer_lengths, everything, "token")
        optimizer.set_hyperparameters(self.optimizer, WARM_START._replace(lr=lr))
        total = torch.zeros((), device=device.device())

        def learn(batch: Pack) -> None:
            loss = -(self.policy.log_probs(batch)[0] * at(token_weight, batch.sample)).sum()
            loss.backward()
            total.add_(loss.detach())

        shares = schedule.balanced(everything, np.diff(data.offsets), self.replicas)
        self.passes.over(data, shares, learn, self._forget, [total])
        optimizer.step(self.ddp, self.optimizer)
        dist.all_reduce(total, group=self.groups.data)
        return float(total)

    def reset_optimizer(self) -> None:
        """Forget all moments and step counters, as after a warm start."""
        optimizer.reset(self.optimizer)

    def _start_of_rl(self) -> None:
        """Reference and critic come from the policy that RL starts from."""
        if self.config.kl_coef > 0 and self.reference is None:
            self.reference = self._policy()
            self.reference.module.load_state_dict(self.policy.module.state_dict())
        if self.config.advantage == "gae" and self.critic is None:
            self.critic = self._critic()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors under Hugging Face checkpoint names, in a fixed order, on every rank. Exhaust it on all ranks."""
        return iter(self.stream)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Architecture and sizes; a checkpoint with another one is of another model."""
        return weights.sizes(self.model_config)

    def sleep(self, give_back: bool = True) -> None:
        """Leave the GPU to an engine, but for the weights; until `wake` no other method than `weights` and `export` will do.

        Args:
            give_back: at once; else what is free waits in torch's cache for the next `device.collect_shared`.
        """
        for sleeper in self._sleepers():
            sleeper.sleep(give_back)

    def wake(self) -> None:
        """Undo `sleep`; nothing if awake."""
        for sleeper in self._sleepers():
            sleeper.wake()

    def _sleepers(self) -> list[Sleeper]:
        return [self.sleeper, self.critic.sleeper] if self.critic else [self.sleeper]

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        """Write weights, optimizer, random states and `extra` (JSON-able) into an existing folder."""
        state.save(folder, self._held, extra)

    def load(self, folder: Path) -> dict[str, Any]:
        """Restore what `save` wrote; returns `extra`.

        Raises:
            CheckpointError: it was saved with another expert parallelism.
        """
        common = state.read_common(folder)
        if self.config.kl_coef > 0 and common["has_reference"]:
            self.reference = self._policy()
        if self.config.advantage == "gae" and common.get("has_critic"):
            self.critic = self._critic()
        return state.load(folder, self._held)

    @property
    def _held(self) -> state.Held:
        return state.Held(self.policy, self.optimizer, self.reference, self.critic)

    def gather(self, value: Any) -> list[Any]:
        """The `value` of every training rank, on every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face checkpoint that transformers loads. `folder` appears whole or not at all."""
        export.write(folder, self.folder, self.weights(), self.rank == 0)
        dist.barrier()

    def close(self) -> None:
        """Leave all groups. They lie in reference cycles, and each has a gloo thread that wakes a hundred times a second."""
        for trained in (self.ddp, *([self.critic.ddp] if self.critic else [])):
            vars(trained).clear()  # hooks of autograd hold it for ever once there was a backward
        leave()
        gc.collect()
