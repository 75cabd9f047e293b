"""An engine that dies or does not answer is started again in its place, but not for ever."""

import time
from dataclasses import dataclass

from miles_hpc.errors import DeadlineExceeded, EngineDied
from miles_hpc.heartbeat import Heartbeat
from miles_hpc.rollout.engine import EngineHost
from miles_hpc.world import World

DEATH = 14
TOO_OFTEN = 3
WITHIN_VERSIONS = 5


@dataclass(frozen=True)
class Death:
    """An engine's, told to the first training rank."""

    rank: int
    version: int
    """The newest that the engine had held."""
    phase: str
    """Of its rank."""
    error: str
    seconds: float
    """From when it was noticed to an engine that can take weights."""


class Restarts:
    """Starts this rank's engine again.

    Args:
        seconds: deadline for telling the first training rank.
        next_step: what to type when it has ended too often.
    """

    def __init__(self, engine: EngineHost, world: World, heartbeat: Heartbeat, seconds: float, next_step: str) -> None:
        self.engine, self.world, self.heartbeat, self.seconds, self.next_step = engine, world, heartbeat, seconds, next_step
        self.version = 0
        """The newest that the engine has held."""
        self.deaths: list[int] = []
        """That version at every death."""

    def ready(self) -> None:
        """Wait for an engine that was started; if it dies at it, start it again.

        Raises:
            EngineError: it refused to start. EngineDied: too many deaths.
        """
        try:
            self.engine.wait_ready()
        except (EngineDied, DeadlineExceeded) as error:
            self.again(error)

    def again(self, error: EngineDied | DeadlineExceeded) -> None:
        """End what `error` has left of the engine, start a new one, and wait until it can take weights.

        Raises:
            EngineError: it refused to start. EngineDied: TOO_OFTEN deaths within WITHIN_VERSIONS versions.
        """
        began, phase = time.monotonic(), self.heartbeat.phase
        self.heartbeat.enter("engine start")
        self._count(error)
        print(f"the engine is started again: {error}", flush=True)
        self.engine.start()
        self.ready()
        death = Death(self.world.rank, self.version, phase, error.what, time.monotonic() - began)
        self.world.send(death, self.world.train[0], DEATH, self.seconds, "the trainer to hear of an engine's death")
        self.heartbeat.enter(phase)

    def _count(self, error: EngineDied | DeadlineExceeded) -> None:
        self.deaths.append(self.version)
        if sum(version > self.version - WITHIN_VERSIONS for version in self.deaths) >= TOO_OFTEN:
            raise EngineDied(
                f"the engine ended {TOO_OFTEN} times within {WITHIN_VERSIONS} versions of the weights, last: {error.what}",
                where=error.where,
                next_step=self.next_step,
            ) from error
