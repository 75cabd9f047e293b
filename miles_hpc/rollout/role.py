"""A rollout rank's part in the loop: what `loop.rollout` calls, in that order."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import dropwhile
from pathlib import Path

from miles_hpc import evaluation, logline, metrics
from miles_hpc.config import Config
from miles_hpc.data import Prompts
from miles_hpc.errors import DeadlineExceeded, EngineDied, SampleError, Stopped
from miles_hpc.handover import Taker
from miles_hpc.paths import RunPaths
from miles_hpc.receiver import Receiver
from miles_hpc.rollout import drafts
from miles_hpc.rollout.generate import Generator
from miles_hpc.rollout.request import Output, Request
from miles_hpc.samples import store
from miles_hpc.samples.exchange import FIRST_STEP, Finished, Outbox, Shard
from miles_hpc.world import World


@dataclass
class RolloutRole:
    """A rollout rank: generates its part of every step, and takes new weights."""

    config: Config
    paths: RunPaths
    world: World
    prompts: Prompts
    generator: Generator
    receiver: Receiver | Taker
    outbox: Outbox
    clock: metrics.Clock
    seconds: float
    """Deadline of a wait for the other role."""
    backlog: Mapping[int, list[Shard]] = field(default_factory=dict)
    """Complete shards that an earlier attempt left, by step."""

    def __post_init__(self) -> None:
        self.steps, self.staleness = self.config.run.steps, self.config.rollout.staleness
        self.board: metrics.Board | None = None
        self.version = -1
        """The newest that the loop has asked for; an engine that had to start again in a generation may hold a newer one."""
        if isinstance(self.receiver, Receiver):  # the others' weights cannot be sent in the middle of a step
            self.generator.engine.recover = self._recover

    def start(self) -> int:
        """Hear the first step from the trainer; learn what an earlier attempt has left from it on."""
        lead = self.world.train[0]
        step = self.world.receive(FIRST_STEP, self.seconds, "the trainer to say the first step", source=lead)
        self.version = step - 1
        found = leftovers(self.paths, step, self.steps) if self.world.leads else None
        self.backlog = self.world.share(found, self.seconds, "the shards of an earlier attempt")
        if self.world.leads:
            self.board = metrics.Board(self.paths.tensorboard("rollout"), step)
        logline.say(f"begin at step {step}" + (f"; on disk is some of steps {[*self.backlog]}" if self.backlog else ""))
        return step

    def receive(self, version: int) -> None:
        """Have every version up to `version` in the engine, one after the other, and evaluate each that is due.

        With rollout.staleness = 1 the last step is followed by two: the trainer waits for the scores of each.
        """
        while self.version < version:
            self.version += 1
            if self.version > self.receiver.version:
                self.receiver.receive(self.version)
            if evaluation.due(self.config, self.version):
                self._evaluate(self.version)

    def generate(self, step: int) -> None:
        """This engine's share of the step's groups, written and announced; what is on disk is not generated again.

        Raises:
            Stopped: on the way; the groups that were finished are on disk, with what was begun of others, if wanted.
        """
        old = self.backlog.get(step, [])
        missing = self._missing(step, old)
        if self.world.leads:
            for shard in old:
                self.outbox.announce(shard)
        mine = missing[self.world.role_rank :: self.world.role_size]
        written = 0
        with self.clock("rollout", step):
            prompt_ids, spare = [place[0] for place in mine], {place[0]: place[1:] for place in mine}
            begun = drafts.on_disk(self.paths, step) if self._continues else {}
            try:
                for samples in self.generator.groups(step, prompt_ids, self.receiver.version, spare, begun):
                    self.outbox.put(step, samples)
                    written += len(samples)
            except Stopped:
                self._keep(step)
                raise
        swap = self.receiver.leave()
        timing, dropped = self.generator.timing, sorted(self.generator.reward_errors)
        seconds = {"rollout": timing.generate_seconds, "reward": timing.reward_seconds, "swap": swap}
        first = self.generator.reward_errors[dropped[0]] if dropped else ""
        self.outbox.announce(Finished(step, seconds, timing.generated_tokens, dropped, first))
        self._report(step, written)

    @property
    def _continues(self) -> bool:
        return self.config.rollout.unfinished == "continue"

    def _keep(self, step: int) -> None:
        """What is there of the step, for the next attempt."""
        for samples in self.generator.unwritten:
            self.outbox.keep(step, samples)
        if self._continues and (begun := self.generator.interrupted()):
            self.outbox.keep(step, drafts.pack(begun), drafts=True)

    def _missing(self, step: int, old: list[Shard]) -> list[list[int]]:
        """Prompt ids to try for each place of the step that has no group yet."""
        rollout = self.config.rollout
        ids = self.prompts.ids_of_step(step, rollout.prompts_per_step)
        tries = rollout.max_tries - 1 if rollout.filters else 0
        spare = self.prompts.spare_ids(step, rollout.prompts_per_step, tries)
        finished = {i for shard in old for i in shard.prompt_ids}
        refused = {i for shard in old for i in shard.refused}
        return open_places([[int(i), *map(int, others)] for i, others in zip(ids, spare, strict=True)], finished, refused)

    def _evaluate(self, version: int) -> None:
        with self.clock("evaluation", version):
            started = time.monotonic()
            share = self.generator.evaluate(self.world.role_rank, self.world.role_size)
        score = evaluation.Score(version, share.reward_sum, share.prompts, time.monotonic() - started)
        logline.say(f"evaluation of weights {version}: prompts {score.prompts}, {score.seconds:.1f} s")
        evaluation.send(self.world, score, self.seconds)

    def _recover(self, error: EngineDied | DeadlineExceeded, requests: Mapping[int, Request]) -> dict[int, Output]:
        """Another engine, in the middle of a generation, with the newest weights; what other engines answered meanwhile."""
        # After an evaluation the run may be at its end, where nobody would take the question.
        evaluating = self.clock.heartbeat.phase == "evaluation"
        assert isinstance(self.receiver, Receiver)
        answers = self.receiver.recover(error, {} if evaluating else requests)
        self.generator.version = self.receiver.version
        return answers

    def _report(self, step: int, written: int) -> None:
        """What this engine saw: in the rank's log, and by the first rollout rank in TensorBoard."""
        for prompt_id, error in self.generator.reward_errors.items():
            print(f"group of prompt {prompt_id} dropped: {error}", flush=True)
        timing = self.generator.timing
        speed = timing.generated_tokens / max(timing.generate_seconds, 1e-9)
        logline.say(f"step {step}: samples {written}, {timing.generate_seconds:.1f} s, {speed:.0f} tokens/s")
        if not self.board:
            return
        figures = {
            "engine/tokens_per_s": speed,
            "engine/generate_seconds": timing.generate_seconds,
            "engine/reward_seconds": timing.reward_seconds,
            "engine/reward_work_seconds": timing.reward_work_seconds,
            "engine/weight_version": float(self.receiver.version),
            **self.receiver.figures,
        }
        self.board.scalars(step, figures)


def open_places(places: list[list[int]], finished: set[int], refused: set[int]) -> list[list[int]]:
    """What is left to do after an interruption: a place is filled by its first prompt that is finished and not refused.

    Args:
        places: for each place of the step, the prompt ids that are tried in turn.
        finished: prompt ids whose group is on disk, refused ones included.
        refused: those that a filter refused.

    Returns:
        For each place still open, the ids still to try; a place whose ids are all refused stays empty.
    """
    left = [list(dropwhile(lambda i: i in refused, place)) for place in places]
    return [place for place in left if place and place[0] not in finished]


def leftovers(paths: RunPaths, first: int, steps: int) -> dict[int, list[Shard]]:
    """Complete shards of the steps from `first` on, found by listing the folders.

    Damaged ones are set aside and named, half-written ones removed: no rank writes before all have heard the answer.
    """
    found: dict[int, list[Shard]] = {}
    for step in range(first, steps):
        if not paths.step_samples(step).is_dir():
            continue
        store.remove_unfinished(paths, step)
        shards = [shard for file in store.on_disk(paths, step) if (shard := _readable(step, file))]
        if shards:
            found[step] = shards
    return found


def _readable(step: int, file: Path) -> Shard | None:
    try:
        return Shard.of(step, file, store.read(file, deadline=0))
    except SampleError as error:
        print(f"set aside as {store.set_aside(file).name}: {error}", flush=True)
        return None
