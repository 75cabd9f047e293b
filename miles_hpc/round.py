"""One try to bring a version of the weights into some engines, seen from the first training rank.

Messages to a rollout rank are `Order`s; both they and the answers carry the number of the round, and what belongs to another
round is not heard. Nobody enters a collective before every engine of the round has answered over MPI. See
docs/decisions/018-engine-faults.md.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miles_hpc.errors import DeadlineExceeded
from miles_hpc.group import Group
from miles_hpc.pace import Pace
from miles_hpc.world import World

if TYPE_CHECKING:
    import torch

WEIGHTS, ANSWER = 11, 12


@dataclass(frozen=True)
class Call:
    """Is your engine there, and in which group? Answered with `Present`, after a restart of the engine if need be."""


@dataclass(frozen=True)
class Meeting:
    """Where to join the next generation of the weight group."""

    generation: int
    address: str
    port: int
    offset: int
    size: int


@dataclass(frozen=True)
class Load:
    """Take these broadcasts, in this order, into your engine."""

    buckets: list[str]
    """`Bucket.text` of each."""


@dataclass(frozen=True)
class Complete:
    """All of a version has been sent: what every engine must hold now."""

    version: int
    digests: list[dict[str, str]]
    """For each worker of an engine, by engine tensor."""


@dataclass(frozen=True)
class Order:
    """To a rollout rank."""

    round: int
    message: Call | Meeting | Load | Complete
    seconds: float
    """After so long the trainer will have given up."""


@dataclass(frozen=True)
class Present:
    """An engine that can take weights."""

    generation: int | None
    """Of the group that its workers are in."""
    workers: int
    starts: int = 0
    """How often the engine was started again in this attempt."""


@dataclass(frozen=True)
class Joined:
    """The engine's workers are in the group."""


@dataclass(frozen=True)
class Confirmed:
    """What the engine holds, compared with `Complete`."""

    different: list[str]
    compared: int


@dataclass(frozen=True)
class Trouble:
    """The engine died, does not answer or refused; its rank takes no further part in this round."""

    why: str
    refused: bool
    """The engine lives."""


@dataclass(frozen=True)
class Answer:
    """From a rollout rank."""

    rank: int
    round: int
    word: Present | Joined | Confirmed | Trouble


class Broken(Exception):
    """A round that cannot be finished."""


@dataclass
class Paces:
    """Measured durations, kept over all rounds."""

    join: Pace
    load: Pace
    """From the announcement to the last broadcast."""
    confirm: Pace


class Round:
    """Args:
    number: one more than that of the round before.
    engines: world ranks to be served.
    patience: seconds that a rank may need to be there: an engine in a long generation, or one that starts again.
    """

    def __init__(self, world: World, number: int, engines: list[int], patience: float, paces: Paces) -> None:
        self.world, self.number, self.engines, self.patience, self.paces = world, number, engines, patience, paces
        self.left = list(engines)
        """Engines that have not confirmed the version."""
        self.broken = ""
        """Why the round was given up."""
        self.starts: dict[int, int] = {}
        """By rollout rank: how often its engine was started again, as said at the roll call."""
        self.group: Group | None = None
        self._words: dict[type, dict[int, Any]] = defaultdict(dict)
        self._pending: Future[None] | None = None
        self._announced = 0.0

    @property
    def refused(self) -> bool:
        """An engine that lives could not follow."""
        return any(trouble.refused for trouble in self._words[Trouble].values())

    def open(self, last: Group | None) -> Group | None:
        """Call the roll and have everybody in one group, `last` if it is theirs; None if that failed."""
        present = self._roll()
        self.starts = {rank: word.starts for rank, word in present.items()}
        if last and last.members == tuple(self.engines) and {p.generation for p in present.values()} == {last.generation}:
            self.group = last
            return last
        if last:
            last.leave()
        with self._giving_up():
            workers = next(iter(present.values())).workers
            limit = self.paces.join.limit
            patience = limit + self.paces.load.most  # this round gives up before
            self.group = Group(self.number, tuple(self.engines), workers, self.world.address, patience)
            self._meet(self.group, limit)
        return self.group

    def announce(self, buckets: list[str]) -> None:
        """Have all engines wait for these broadcasts; they are in the group, so nobody waits for one that cannot come."""
        self._announced = time.monotonic()
        if self.group is not None:
            with self._giving_up():
                self._tell(Load(buckets), self.paces.load.limit)

    def put(self, flat: "torch.Tensor") -> None:
        """Broadcast a bucket; it is on its way when this returns. Nothing is sent in a broken round."""
        if self.group is None:
            return
        with self._giving_up():
            self._settle()
            self._pending = self.group.broadcast(flat)

    def finish(self, complete: Complete) -> dict[int, Confirmed]:
        """End the round; what each engine that has the version now holds. `left` are the others."""
        if self.group is None:
            return {}
        with self._giving_up():
            self._settle()
            self.paces.load.took(time.monotonic() - self._announced)
            started, limit = time.monotonic(), self.paces.confirm.limit
            self._tell(complete, limit)
            self._wait(lambda: not self._silent(Confirmed), limit, "the engines to confirm weights", heeding=False)
            self.paces.confirm.took(time.monotonic() - started)
        confirmed = self._heard(Confirmed)
        self.left = [engine for engine in self.engines if engine not in confirmed]
        return confirmed

    def _meet(self, group: Group, limit: float) -> None:
        started, port = time.monotonic(), group.store.port
        for index, engine in enumerate(self.engines):
            self._send(
                Meeting(group.generation, self.world.address, port, 1 + index * group.workers, group.size), engine, limit
            )
        joining = group.join()
        self._wait(lambda: joining.done() and not self._silent(Joined), limit, "the weight group to form")
        _result(joining)
        self.paces.join.took(time.monotonic() - started)

    def _settle(self) -> None:
        """Wait for the broadcast on its way."""
        if future := self._pending:
            self._pending = None
            self._wait(future.done, self.paces.load.limit, "a bucket of weights to arrive")
            _result(future)

    def _roll(self) -> dict[int, Present]:
        self._tell(Call(), self.patience)
        for engine in self.engines:
            what = f"rollout rank {engine} to answer the roll call of the weights"
            self.world.until(lambda engine=engine: engine in self._heard(Present), self.patience, what)  # type: ignore[misc]
        return self._heard(Present)

    def _tell(self, message: Call | Load | Complete, limit: float) -> None:
        for engine in self.engines:
            self._send(message, engine, limit)

    def _send(self, message: Any, engine: int, limit: float) -> None:
        what = f"rollout rank {engine} to take weights"
        self.world.send(Order(self.number, message, limit), engine, WEIGHTS, self.patience, what)

    def _wait(self, done: Callable[[], bool], seconds: float, what: str, heeding: bool = True) -> None:
        """Raises: Broken after `seconds`, or, if `heeding`, once a rank reports trouble."""

        def over() -> bool:
            return (heeding and bool(self._heard(Trouble))) or done()

        try:
            self.world.until(over, seconds, what)
        except DeadlineExceeded:
            raise Broken(f"{what}: not within {seconds:.0f} s") from None
        for rank, trouble in self._heard(Trouble).items() if heeding else ():
            raise Broken(f"rollout rank {rank}: {trouble.why}")

    def _silent(self, word: type) -> set[int]:
        """Engines that have neither said `word` nor reported trouble."""
        return set(self.engines) - self._heard(word).keys() - self._heard(Trouble).keys()

    def _heard(self, word: type) -> dict[int, Any]:
        """By rank: the answers of this kind that have come."""
        while answer := self.world.take(ANSWER):
            if answer.round == self.number:
                self._words[type(answer.word)][answer.rank] = answer.word
        return self._words[word]

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except Broken as error:
            self.broken = str(error)
            print(f"weights: round {self.number} given up: {self.broken}", flush=True)
            if self.group:
                self.group.leave()
            self.group = None


def _result(future: Future[None]) -> None:
    """Raises: Broken if a collective failed."""
    if error := future.exception():
        raise Broken(f"{type(error).__name__}: {error}")
