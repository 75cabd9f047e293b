"""Held-out evaluation: greedy answers by all engines at agreed versions of the weights, one mean score."""

from dataclasses import dataclass

from miles_hpc.config import Config
from miles_hpc.world import World

EVALUATION = 31


@dataclass(frozen=True)
class Score:
    """One engine's share, or the sum over all."""

    version: int
    total: float
    """Sum of rewards."""
    prompts: int
    seconds: float

    @property
    def mean(self) -> float:
        return self.total / max(1, self.prompts)


def due(config: Config, version: int) -> bool:
    """True for version 0, the last one, and every `eval.every_steps` between."""
    if not config.data.eval:
        return False
    every = config.eval.every_steps
    return version in (0, config.run.steps) or bool(every and version % every == 0)


def send(world: World, score: Score, seconds: float) -> None:
    """From a rollout rank to the first training rank."""
    world.send(score, world.train[0], EVALUATION, seconds, "the trainer to take an evaluation")


def collect(world: World, version: int, seconds: float) -> Score:
    """On the first training rank: the scores of all engines for `version`, added up."""
    what = f"the evaluation of weights {version}"
    scores = [world.receive(EVALUATION, seconds, what, source=rank) for rank in world.rollout]
    return Score(
        version, sum(s.total for s in scores), sum(s.prompts for s in scores), max((s.seconds for s in scores), default=0.0)
    )
