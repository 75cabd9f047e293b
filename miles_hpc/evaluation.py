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
        """Mean reward; 0 without prompts."""
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


class Scores:
    """On the first training rank: what the engines say about a version of the weights."""

    def __init__(self, world: World) -> None:
        self.world, self._found = world, list[Score]()

    @property
    def complete(self) -> bool:
        """Every engine has sent its share."""
        return len(self._found) == len(self.world.rollout)

    def take(self) -> bool:
        """Take a share that has arrived; False if there is none."""
        score = self.world.take(EVALUATION)
        self._found += [score] if score else []
        return score is not None

    @property
    def sum(self) -> Score:
        """Of all engines; the slowest one's seconds."""
        found = self._found
        return Score(
            found[0].version, sum(s.total for s in found), sum(s.prompts for s in found), max(s.seconds for s in found)
        )
