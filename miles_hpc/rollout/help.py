"""Engines with nothing to do answer requests of one that is being started again.

The rank whose engine ended asks all others and goes on with its repair; whoever waits for weights of the next version, with the
same version in its engine, answers what it was asked until it is told to stop. Nothing depends on an answer: what has none when
the engine is back, that engine generates itself. Keyed sampling makes all of them equal.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from miles_hpc.errors import EngineError
from miles_hpc.rollout.engine import EngineHost
from miles_hpc.rollout.request import Output, Request
from miles_hpc.world import World

ASK, HELP = 19, 20


@dataclass(frozen=True)
class Ask:
    """Requests of a rank, by key; none: no help is needed any more."""

    rank: int
    number: int
    """Of this rank's asking."""
    version: int
    """Of the weights that must answer."""
    requests: dict[int, Request]


class Help:
    """Both sides: what this rank asks for, and what it is asked for."""

    def __init__(self, world: World, engine: EngineHost) -> None:
        self.world, self.engine = world, engine
        self.others = [rank for rank in world.rollout if rank != world.rank]
        self._number = 0
        self._asked: dict[int, Ask] = {}
        """By rank: the newest of its asks that is not done."""

    def ask(self, version: int, requests: Mapping[int, Request]) -> None:
        """Give every other rank its share of the requests."""
        self._number += 1
        keys = list(requests)
        for index, other in enumerate(self.others):
            share = {key: requests[key] for key in keys[index :: len(self.others)]}
            self.world.post(Ask(self.world.rank, self._number, version, share), other, ASK)

    def answers(self) -> dict[int, Output]:
        """What has come in, by key; the others are told to stop."""
        for other in self.others:
            self.world.post(Ask(self.world.rank, self._number, -1, {}), other, ASK)
        found: dict[int, Output] = {}
        while help := self.world.take(HELP):
            number, key, output = help
            if number == self._number:
                found[key] = output
        return found

    def give(self, version: int) -> None:
        """Answer what others ask of an engine that holds `version`.

        Raises:
            EngineDied, DeadlineExceeded: this engine.
        """
        self._hear()
        while self.world.take(HELP):  # too late
            pass
        for rank, ask in list(self._asked.items()):
            del self._asked[rank]
            if ask.version == version and ask.requests:
                self._answer(ask)

    def _answer(self, ask: Ask) -> None:
        with self.engine.flight(recovering=False) as flight:
            keys = dict(zip(flight.add(list(ask.requests.values())), ask.requests, strict=True))
            while flight.open and not self._recalled(ask):
                key, output = flight.next()
                if not isinstance(output, EngineError):
                    self.world.post((ask.number, keys[key], output), ask.rank, HELP)

    def _recalled(self, ask: Ask) -> bool:
        self._hear()
        return ask.rank in self._asked

    def _hear(self) -> None:
        while ask := self.world.take(ASK):
            self._asked[ask.rank] = ask
