"""A training rank's part in the loop: what `loop.train` calls, in that order."""

import time
from dataclasses import dataclass, field

import numpy as np

from miles_hpc import device, evaluation, metrics, signals
from miles_hpc.checkpoint import Checkpoints
from miles_hpc.config import Config
from miles_hpc.handover import Lender
from miles_hpc.paths import RunPaths
from miles_hpc.samples import store
from miles_hpc.samples.exchange import FIRST_STEP, Collected, Inbox
from miles_hpc.samples.schema import Samples
from miles_hpc.sync import Sender
from miles_hpc.train.advantage import advantage_of
from miles_hpc.train.hooks import Hooks
from miles_hpc.train.trainer import Result, Trainer
from miles_hpc.train.warm_start import warm_start
from miles_hpc.world import World


@dataclass
class TrainRole:
    config: Config
    paths: RunPaths
    world: World
    attempt: int
    trainer: Trainer
    checkpoints: Checkpoints
    clock: metrics.Clock
    sender: Sender | Lender
    seconds: float
    """Deadline of a wait for the other role."""
    stopping: bool = False
    """All training ranks have agreed to end after the current version."""
    board: metrics.Board = field(init=False)
    """Of the first training rank only, from `start` on."""

    def __post_init__(self) -> None:
        self.inbox = Inbox(self.world, self.seconds)
        self.events, self.ledger = metrics.journals(self.paths)
        self.steps, self.group_size = self.config.run.steps, self.config.rollout.samples_per_prompt
        self.advantage, self.lead = advantage_of(self.config), self.world.leads
        self.figures: dict[str, float] = {}
        self.saved = 0
        """Version of the last checkpoint, or that the attempt began with."""
        self.hooks = Hooks.of(self.config)
        self.mark = time.monotonic()

    def start(self) -> int:
        """Resume from the newest checkpoint or begin; returns the first step."""
        with self.clock("resume", 0):
            step = self.checkpoints.resume(self.trainer)
        if step is None:
            step = self._begin()
        self.saved = step
        if self.lead:
            for rank in self.world.rollout:
                self.world.send(step, rank, FIRST_STEP, self.seconds, "an engine's rank to hear the first step")
            self.board = metrics.Board(self.paths.tensorboard("train"), step)
            self._event("start", step=step, ranks=len(self.world.train), engines=len(self.world.rollout))
        self.mark = time.monotonic()
        return step

    def publish(self, version: int) -> None:
        """Send the weights as `version`; learn how good they are where an evaluation is due."""
        self.stopping = version < self.steps and bool(self.world.agree(signals.noted()))
        if self.config.colocated:
            self._leave(version)
        with self.clock("sync", version):
            report = self.sender.send(version, stop=self.stopping)
        if not self.lead:
            return
        speed = report.size * len(self.world.rollout) / max(report.seconds, 1e-9) / 1e9
        self._event("sync", version=version, seconds=report.seconds, bytes=report.size, digests=report.digests)
        self.figures |= {"sync/seconds": report.seconds, "sync/gb_per_s": speed}
        if evaluation.due(self.config, version):
            with self.clock("evaluation", version):
                score = evaluation.collect(self.world, version, self.seconds)
            self._event("eval", step=version, accuracy=score.mean, prompts=score.prompts, seconds=score.seconds)
            self.board.scalars(version, {"eval/reward": score.mean})

    def collect(self, step: int) -> Collected:
        """Wait for all samples of `step`."""
        with self.clock("wait", step):
            collected = self.inbox.collect(step, step - self.config.rollout.staleness)
        if self.config.colocated:
            self._return(step)
        return collected

    def advantages(self, samples: Samples) -> np.ndarray:
        """One advantage per sample of the step, [n] float32."""
        with self.clock("edge"):
            return self.advantage(samples, self.group_size)

    def update(self, samples: Samples, advantages: np.ndarray, step: int) -> Result:
        """The optimizer steps of `step`."""
        self._hook("before", step, {})
        with self.clock("train", step):
            return self.trainer.step(samples, advantages, step)

    def keep(self, step: int, collected: Collected, advantages: np.ndarray, result: Result) -> None:
        """Write this rank's log-probs beside the shards; on the first rank, every prompt's fate and the step's figures."""
        own = collected.samples.take(result.own)
        with self.clock("keep", step):
            store.write_train(self.paths, step, self.world.rank, own, result.train_log_probs, advantages[result.own])
        if not self.lead:
            self._hook("after", step, {})
            return
        self.ledger.append(
            *metrics.fates(
                collected.samples, collected.dropped, advantages, self.group_size, step, self.attempt, collected.refused
            )
        )
        self.figures |= metrics.of_samples(collected.samples, advantages, self.group_size) | result.metrics
        if self.config.rollout.filters:
            places = self.config.rollout.prompts_per_step
            self.figures |= metrics.of_refused(collected.samples, collected.refused, self.group_size, places)
        self.figures["samples/bytes"] = float(collected.size)
        self.figures["groups/reward_error"] = float(len(collected.dropped))
        with self.clock("edge", step):
            self.figures |= self.hooks.metrics(collected.samples, advantages, self.group_size)
        self._hook("after", step, self.figures)
        self.generation = collected.seconds | {"tokens": collected.generated_tokens}

    def checkpoint(self, version: int) -> None:
        """Save if due: every n steps, at the end, and before stopping."""
        due = not version % self.config.checkpoint.every_steps or version == self.steps or self.stopping
        if due and version > self.saved:
            self._save(version)

    def report(self, step: int) -> None:
        """Figures of `step` for people (TensorBoard) and programs (events.jsonl)."""
        if not self.lead:
            return
        seconds = self._phases()
        trained = self.figures["train/tokens"] / max(seconds["train"], 1e-9)
        generated = self.generation["tokens"] / max(seconds["rollout"], 1e-9)
        self.figures |= {"speed/train_tokens_per_s": trained, "speed/rollout_tokens_per_s": generated}
        now = time.monotonic()
        total, self.mark = now - self.mark, now
        everything = self.figures | {f"seconds/{phase}": value for phase, value in seconds.items()}
        self.board.scalars(step, self.hooks.shown(step, everything))
        self._event("step", step=step, metrics=self.figures, phase_seconds=seconds, seconds=total)
        self.figures = {}

    def export(self) -> None:
        """The final policy as a Hugging Face checkpoint."""
        with self.clock("export", self.steps):
            self.trainer.export(self.paths.export)
        if self.lead:
            self._event("export", path=str(self.paths.export))
            self.board.close()

    def _hook(self, event: str, step: int, facts: dict[str, float]) -> None:
        """The user's own, which may take any time."""
        with self.clock("edge", step):
            self.hooks.step(event, step, facts)

    def _begin(self) -> int:
        """Warm start, if there is one; it is saved, since it may take longer than many steps."""
        if self.config.warm_start:
            with self.clock("warm_start", 0):
                losses = warm_start(self.trainer, self.config, self.paths, self.world.poll)
            if self.lead:
                self._event("warm_start", steps=len(losses), loss_first=losses[0], loss_last=losses[-1])
            self._save(0)
        return 0

    def _leave(self, version: int) -> None:
        """Leave the GPU to an engine; save first, while what is saved is here."""
        self.checkpoint(version)
        with self.clock("swap", version):
            self.trainer.sleep()

    def _return(self, step: int) -> None:
        """All engines have left the GPUs."""
        self.figures |= device.memory("asleep")
        with self.clock("swap", step):
            self.trainer.wake()

    def _save(self, version: int) -> None:
        with self.clock("checkpoint", version):
            started = time.monotonic()
            self.checkpoints.save(self.trainer, version)
        self.saved = version
        if self.lead:
            self._event("checkpoint", step=version, seconds=time.monotonic() - started)

    def _phases(self) -> dict[str, float]:
        """Seconds of the step by phase; what the trainer waited beyond generation and reward is `wait`."""
        mine, engine = self.clock.take(), self.generation
        seconds = {phase: mine.get(phase, 0.0) for phase in metrics.PHASES}
        seconds |= {"rollout": engine["rollout"], "reward": engine["reward"]}
        seconds["wait"] = max(0.0, seconds["wait"] - engine["rollout"] - engine["reward"] - engine["swap"])
        seconds["swap"] += engine["swap"]
        return seconds

    def _event(self, event: str, **fields: object) -> None:
        self.events.append({"event": event, "attempt": self.attempt, "time": time.time(), **fields})
