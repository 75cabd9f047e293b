"""A training rank's part in the loop: what `loop.train` calls, in that order."""

import math
import sys
import time
from dataclasses import asdict, dataclass, field

import numpy as np

from miles_hpc import device, evaluation, logline, metrics
from miles_hpc.checkpoint import Checkpoints
from miles_hpc.config import Config
from miles_hpc.errors import Stopped
from miles_hpc.handover import Giver, Lender
from miles_hpc.paths import RunPaths
from miles_hpc.rollout.restarts import DEATH
from miles_hpc.samples import store
from miles_hpc.samples.exchange import FIRST_STEP, Collected, Inbox
from miles_hpc.samples.schema import Samples
from miles_hpc.stop import Leaving, Stop, Vote
from miles_hpc.sync import Mailbox, Sender
from miles_hpc.train.advantage import advantage_of
from miles_hpc.train.hooks import Hooks
from miles_hpc.train.trainer import Result, Trainer
from miles_hpc.train.warm_start import warm_start
from miles_hpc.world import World

SAVE_MARGIN = 1.5
"""Times the last save: what a save is allowed to need."""


@dataclass
class TrainRole:
    """A training rank: collects samples, trains, sends weights, saves; the first one of them decides."""

    config: Config
    paths: RunPaths
    world: World
    attempt: int
    trainer: Trainer
    checkpoints: Checkpoints
    clock: metrics.Clock
    sender: Sender | Giver
    seconds: float
    """Deadline of a wait for the other role."""
    stop: Stop
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
        self.hooks = Hooks.of(self.config)
        self.mark = time.monotonic()
        self.version = self.saved = -1
        """Of the weights, and of the newest checkpoint or what the attempt began with."""
        self.asleep = False
        """Off the GPU, which an engine has."""
        self.longest_step, self.last_save = math.inf, self._earlier_save()
        """Seconds; a step that is not measured never fits."""
        self.vote = Vote(self.world)
        self.trainer.may_leave = self._may_leave
        self.trainer.passes.lowered = self._lowered
        self.limits: list[tuple[int, int]] = []
        """Tokens of a micro-batch that memory taught, each with the step from which on it holds."""

    def start(self) -> int:
        """Resume from the newest checkpoint or begin; returns the first step."""
        with self.clock("resume", 0):
            found = self.checkpoints.resume(self.trainer)
            self.limits = self.world.share(self._earlier_limits(), self.seconds, "what earlier attempts learned of memory")
        self._limit(-1)
        step = self._begin() if found is None else found
        self.version = self.saved = step
        if self.lead:
            for rank in self.world.rollout:
                self.world.send(step, rank, FIRST_STEP, self.seconds, "an engine's rank to hear the first step")
            self.board = metrics.Board(self.paths.tensorboard("train"), step)
            self._event("start", step=step, ranks=len(self.world.train), engines=len(self.world.rollout))
        self.mark = time.monotonic()
        return step

    def publish(self, version: int) -> None:
        """Send the weights as `version`, unless the run is asked to end; learn how good they are where an evaluation is due."""
        self.version = version
        self.stop.poll()
        if self._stops(self.stop.asked > 0):
            return
        if self.config.colocated:
            self._leave(version)
        with self.clock("sync", version):
            report = self.sender.send(version)
        if self.lead:
            speed = report.size * len(self.world.rollout) / max(report.seconds, 1e-9) / 1e9
            facts = {"bytes": report.size, "digests": report.digests, "given_up": report.given_up}
            self._event("sync", version=version, seconds=report.seconds, **facts)
            self.figures |= {"sync/seconds": report.seconds, "sync/gb_per_s": speed, "sync/given_up": float(report.given_up)}
        if evaluation.due(self.config, version):
            self._evaluate(version)

    def collect(self, step: int) -> Collected:
        """Wait for all samples of `step`.

        Raises:
            Stopped: they cannot be expected in time; on all training ranks.
        """
        with self.clock("wait", step):
            self.inbox.step = step
            if self.world.agree(self._await(self.inbox, f"samples of step {step}")):
                raise Stopped("the step could not be expected to end in time")
            collected = self.inbox.collect(step - self.config.rollout.staleness)
        if self.config.colocated:
            self._return(step)
        return collected

    def advantages(self, samples: Samples) -> np.ndarray:
        """One advantage per sample of the step, [n] float32."""
        with self.clock("edge"):
            return self.advantage(samples, self.group_size)

    def update(self, samples: Samples, advantages: np.ndarray, step: int) -> Result:
        """The optimizer steps of `step`.

        Raises:
            Stopped: before the first of them, if they cannot be expected to end in time; on all training ranks.
        """
        self._hook("before", step, {})
        self._limit(step)
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
                collected.samples, collected.dropped, result.trained, self.group_size, step, self.attempt, collected.refused
            )
        )
        self.figures |= metrics.of_samples(collected.samples, result.trained, self.group_size) | result.metrics
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

    def leave(self) -> None:
        """After `Stopped`: the engines leave too, and what is worth it is saved."""
        if self.lead:
            self.stop.tell()
        if self.version > self.saved and not self.asleep:
            self._save(self.version)

    def report(self, step: int) -> None:
        """Figures of `step` for people (TensorBoard) and programs (events.jsonl)."""
        if not self.lead:
            return
        seconds = self._phases()
        trained = self.figures["train/tokens"] / max(seconds["train"], 1e-9)
        generated = self.generation["tokens"] / max(seconds["rollout"], 1e-9)
        self.figures |= {"speed/train_tokens_per_s": trained, "speed/rollout_tokens_per_s": generated}
        self.figures["engine/restarts"] = float(self._restarts())
        now = time.monotonic()
        total, self.mark = now - self.mark, now
        self.longest_step = total if math.isinf(self.longest_step) else max(total, self.longest_step)
        everything = self.figures | {f"seconds/{phase}": value for phase, value in seconds.items()}
        with self.clock("edge", step):
            self.board.scalars(step, self.hooks.shown(step, everything))
        self._event("step", step=step, metrics=self.figures, phase_seconds=seconds, seconds=total)
        self.figures = {}

    def export(self) -> None:
        """The final policy as a Hugging Face checkpoint."""
        with self.clock("export", self.steps):
            self.trainer.export(self.paths.export)
        if self.lead:
            self._restarts()  # since the last step's report
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
                losses = warm_start(self.trainer, self.config, self.paths)
            if self.lead:
                self._event("warm_start", steps=len(losses), loss_first=losses[0], loss_last=losses[-1])
            self._save(0)
        return 0

    def _leave(self, version: int) -> None:
        """Leave the GPU to an engine; save first, while what is saved is here."""
        assert isinstance(self.sender, Lender)
        self.checkpoint(version)
        room = self.sender.prepare()
        with self.clock("swap", version):
            self.trainer.sleep(give_back=not room)
        self.asleep = True

    def _return(self, step: int) -> None:
        """All engines have left the GPUs."""
        self.figures |= device.memory("asleep")
        with self.clock("swap", step):
            self.trainer.wake()
        self.asleep = False

    def _save(self, version: int) -> None:
        """Save, unless that could not end in time."""
        with self.clock("checkpoint", version):
            if self.world.agree(self.lead and not self.stop.fits(SAVE_MARGIN * self.last_save)):
                return
            started = time.monotonic()
            self.checkpoints.save(self.trainer, version)
            self.saved, self.last_save = version, time.monotonic() - started
        if self.lead:
            self._event("checkpoint", step=version, seconds=self.last_save)

    def _evaluate(self, version: int) -> None:
        """The last one decides whether the run is done, so all must know if it was left."""
        with self.clock("evaluation", version):
            scores = evaluation.Scores(self.world)
            left = self._await(scores, f"the evaluation of weights {version}")
        if self.lead and not left:
            score = scores.sum
            self._event("eval", step=version, accuracy=score.mean, prompts=score.prompts, seconds=score.seconds)
            self.board.scalars(version, {"eval/reward": score.mean})
        if version == self.steps:
            self._stops(left)

    def _await(self, box: Mailbox, what: str) -> bool:
        """Wait until the first rank's `box` is complete; there, True if it is time to leave instead."""
        leaving = Leaving(box, self._due)
        self.sender.serve(leaving, what)
        return leaving.left

    def _due(self) -> bool:
        """True where the rest of the step, and saving it, cannot be expected to fit into what is left."""
        rest = max(0.0, self.longest_step - (time.monotonic() - self.mark))
        return self.stop.due(rest + SAVE_MARGIN * self.last_save)

    def _may_leave(self) -> None:
        """At every micro-batch that changes nothing yet. Raises: Stopped, on all training ranks."""
        self.stop.poll()
        if self.vote(self.lead and self._due()):
            raise Stopped("the step could not be expected to end in time")

    def _limit(self, step: int) -> None:
        """Micro-batches as they were when the step was made before, or would have been: a repeated step gives the same bits."""
        learned = (tokens for since, tokens in self.limits if since <= step)
        self.trainer.passes.limit = min([self.config.train.micro_batch_tokens, *learned])

    def _lowered(self, before: int) -> None:
        """Memory has lowered the limit. A rank that cannot go on may be any, and is the only one that knows."""
        tokens = self.trainer.passes.limit
        self.limits.append((self.version, tokens))
        print(f"out of memory: micro-batches of {tokens} tokens from now on, not {before}", file=sys.stderr, flush=True)
        if self.lead or self.trainer.passes.tied:
            configured = self.config.train.micro_batch_tokens
            self._event("micro_batch_tokens", step=self.version, tokens=tokens, before=before, configured=configured)

    def _earlier_limits(self) -> list[tuple[int, int]]:
        """What earlier attempts with the same `train.micro_batch_tokens` learned."""
        lessons = [e for e in self.events.read() if e.get("event") == "micro_batch_tokens"] if self.lead else []
        return [(e["step"], e["tokens"]) for e in lessons if e["configured"] == self.config.train.micro_batch_tokens]

    def _stops(self, wanted: bool) -> bool:
        """True if a training rank wants to end here; the engines are told."""
        self.stopping = bool(self.world.agree(wanted))
        if self.stopping and self.lead:
            self.stop.tell()
        return self.stopping

    def _earlier_save(self) -> float:
        """Seconds that the last save of an earlier attempt took; 0 if there was none."""
        saves = [e["seconds"] for e in self.events.read() if e.get("event") == "checkpoint"] if self.lead else []
        return float(saves[-1]) if saves else 0.0

    def _restarts(self) -> int:
        """How many engines were started again since the last call; each is an event."""
        deaths = list(iter(lambda: self.world.take(DEATH), None))
        for death in deaths:
            self._event("engine_restart", **asdict(death))
        return len(deaths)

    def _phases(self) -> dict[str, float]:
        """Seconds of the step by phase; what the trainer waited beyond generation and reward is `wait`."""
        mine, engine = self.clock.take(), self.generation
        seconds = {phase: mine.get(phase, 0.0) for phase in metrics.PHASES}
        seconds |= {"rollout": engine["rollout"], "reward": engine["reward"]}
        seconds["wait"] = max(0.0, seconds["wait"] - engine["rollout"] - engine["reward"] - engine["swap"])
        seconds["swap"] += engine["swap"]
        return seconds

    def _event(self, event: str, **fields: object) -> None:
        """Tell programs, and the readers of this rank's log."""
        line = {"event": event, "attempt": self.attempt, "time": time.time(), **fields}
        self.events.append(line)
        if text := logline.of_event(line, self.steps):
            logline.say(text)
