"""Requests under way on an engine, which outlive it."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from miles_hpc.errors import DeadlineExceeded, EngineDied, EngineError
from miles_hpc.rollout.request import Output, Request

if TYPE_CHECKING:
    from miles_hpc.rollout.engine import EngineHost

PING_SECONDS = 1.0
INTERRUPT_SECONDS = 5.0

Recover = Callable[[EngineDied | DeadlineExceeded, Mapping[int, Request]], dict[int, Output]]


class Flight:
    """Leaving the context aborts the requests without an answer.

    When the engine dies, or its scheduler stops to answer, `EngineHost.recover` brings up another one, which gets the requests
    without an answer again; keyed sampling makes their answers the same.
    """

    def __init__(self, engine: "EngineHost", recovering: bool = True) -> None:
        self.engine, self.recovering = engine, recovering
        self._given: dict[int, Output] = {}
        """Answers of other engines."""
        self.open: dict[int, Request] = {}
        """Requests without an answer."""
        self.refused: dict[int, str] = {}
        """Why the engine refused a request that was then sent a second time."""
        self._ping: int | None = None
        """Key of the ping without an answer."""
        self._since = self._pinged = self._sign = 0.0
        """When the wait for an answer began, when the last ping went out, and the last sign of life since."""

    def __enter__(self) -> "Flight":
        return self

    def __exit__(self, *error: object) -> None:
        self.engine._abandon(self.open)

    def add(self, requests: Sequence[Request]) -> list[int]:
        """Send requests; returns their keys."""
        if not self.open:  # nobody has listened since the last answer: what came meanwhile is no silence
            self._since = self._sign = time.monotonic()
        added = {next(self.engine._ids): request for request in requests}
        self.open |= added
        self._send(added)
        return list(added)

    def next(self) -> tuple[int, Output | EngineError]:
        """The next answer and its request's key; an error if the engine refused the request twice.

        Raises:
            EngineDied, DeadlineExceeded: the engine, where it is not to be started again.
        """
        self._since = time.monotonic()
        while not (answer := self.look(PING_SECONDS)):
            pass
        return answer

    def look(self, seconds: float) -> tuple[int, Output | EngineError] | None:
        """As `next` while requests are open, but None if nothing comes within `seconds`, or no answer.

        Raises:
            EngineDied, DeadlineExceeded: as `next`.
        """
        try:
            if not (answer := self._answer(seconds)):
                return None
        except (EngineDied, DeadlineExceeded) as error:
            self._recover(error)
            answer = None
        self._since = time.monotonic()
        return answer

    def interrupt(self, seconds: float = INTERRUPT_SECONDS) -> dict[int, Output]:
        """Generate no further; what there is of the open requests, by key. What the engine cannot say in time is missing."""
        found, end = dict(self._given), time.monotonic() + seconds
        silent = self.open.keys() - found
        self.engine._abandon(silent)
        with contextlib.suppress(EngineDied, DeadlineExceeded):
            while silent and self.engine._ready:
                kind, key, value = self.engine._receive("stop generating", end - time.monotonic())
                if kind == "output" and key in silent:
                    found[key] = value
                silent -= {key}
        return found

    def _answer(self, seconds: float) -> tuple[int, Output | EngineError] | None:
        """An answer, or None for anything else that came or did not come."""
        for key in self._given.keys() & self.open.keys():
            self.open.pop(key)
            return key, self._given.pop(key)
        doing = f"generate ({len(self.open)} answers outstanding)"
        self._ask_for_a_sign()
        if not self.engine._arrived(doing, seconds):
            self._check(doing)
            return None
        kind, key, value = self.engine._receive(doing, PING_SECONDS)
        self._alive(key)
        if key not in self.open:
            return None
        if kind == "error":
            return self._refuse(key, value)
        self.engine.warm = True
        self.open.pop(key)
        return key, value

    def _ask_for_a_sign(self) -> None:
        """Ping the scheduler now and then."""
        now = time.monotonic()
        if self._ping is None and now > self._pinged + PING_SECONDS:
            self._ping, self._pinged, self._sign = self.engine._call("alive", {}), now, now

    def _check(self, doing: str) -> None:
        """Raises: DeadlineExceeded if the scheduler is silent, or without an answer since too long."""
        now = time.monotonic()
        limit = self.engine.pace.limit if self.engine.warm else self.engine.timeout
        if self._ping is not None and now - self._sign > limit:
            self.engine.pace.took(now - self._sign)  # should it only be slow, it gets more time henceforth
            raise self._late(f"the engine's scheduler has been silent for {limit:.0f} s: {doing}")
        if now - self._since > self.engine.timeout:
            raise self._late(f"no answer within {self.engine.timeout:.0f} s: {doing}")

    def _late(self, what: str) -> DeadlineExceeded:
        return DeadlineExceeded(what + self.engine._tail(), where=self.engine._where())

    def _alive(self, key: int) -> None:
        """Any message is a sign of life."""
        now = time.monotonic()
        if self._ping is not None:
            self.engine.pace.took(now - self._sign)
        self._sign, self._ping = now, None if key == self._ping else self._ping

    def _refuse(self, key: int, reason: str) -> tuple[int, EngineError] | None:
        """Send the request once more; the second refusal is its answer."""
        if key in self.refused:
            request = self.open.pop(key)
            sample = f"prompt {request.prompt_id}, sample {request.sample_index}"
            return key, EngineError(f"the engine refused to generate: {reason}", where=f"{sample}, {self.engine._where()}")
        self.refused[key] = reason
        self._send({key: self.open[key]})
        return None

    def _send(self, requests: dict[int, Request]) -> None:
        try:
            self.engine._send("generate", ("generate", list(requests.items())))
        except EngineDied as error:
            self._recover(error)

    def _recover(self, error: EngineDied | DeadlineExceeded) -> None:
        """Another engine for all requests without an answer."""
        recover = self.engine.recover if self.recovering else give_up
        self._given |= recover(error, self.open)
        self._ping = None
        self._send({key: request for key, request in self.open.items() if key not in self._given})


def give_up(error: EngineDied | DeadlineExceeded, requests: Mapping[int, Request]) -> dict[int, Output]:
    """The recovery of a client that has none. Raises: what it is given."""
    raise error
