"""How all ranks leave a run that Slurm asks to end: any of them hears a signal, the first training rank decides, all follow.

A step is left where its end cannot be expected within the grace; else it is finished, and no other begins. Training ranks leave
together, at a point that all reach; a rollout rank leaves any wait, since nothing of it is lost: finished groups go to disk.
"""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from miles_hpc import signals
from miles_hpc.errors import Stopped
from miles_hpc.sync import Mailbox
from miles_hpc.world import World

HEARD, LEAVE = 41, 42
TERM_SECONDS = 30.0
"""Slurm's KillWait unless a site changes it."""
MARGIN_SECONDS = 2.0
"""Of the grace, for agreeing to leave, and for leaving itself."""


@dataclass
class Stop:
    """This rank's part.

    Args:
        world: of this rank.
        warning_seconds: between USR2 and the end.
    """

    world: World
    warning_seconds: float
    asked: int = 0
    """The first signal that this rank has noted or, on the first training rank, heard of."""
    deadline: float = field(default=float("inf"), init=False)
    """Of `time.monotonic()`: when Slurm kills."""
    _left: bool = field(default=False, init=False)
    _requests: list[Any] = field(default_factory=list, init=False)

    def poll(self) -> None:
        """Called in every wait of every rank.

        Raises:
            Stopped: on a rollout rank, when it is told to leave.
        """
        lead = self.world.train[0]
        if not self.asked and (number := signals.noted()):
            self._hear(number)
            if self.world.rank != lead:
                self._requests.append(self.world.comm.isend(number, dest=lead, tag=HEARD))
        if self.world.rank == lead and (number := self.world.take(HEARD)) and not self.asked:
            signals.note(number)  # for the verdict
            self._hear(number)
        if self.world.role == "rollout" and not self._left and self.world.take(LEAVE):
            self._left = True
            raise Stopped("asked to end by a signal")

    def due(self, needed: float) -> bool:
        """True where something that takes `needed` seconds cannot be expected to end in time.

        After TERM nothing long is begun or waited for: Slurm sends it to the engines too. What is decided here is known to all
        ranks a moment later, and must still fit then.
        """
        return bool(self.asked) and (self.asked == signal.SIGTERM or not self.fits(needed + MARGIN_SECONDS))

    def fits(self, needed: float) -> bool:
        """True if there is no signal, or so much time left."""
        return time.monotonic() + needed + MARGIN_SECONDS < self.deadline

    def tell(self) -> None:
        """From the first training rank: all rollout ranks leave. More than once is once."""
        if not self._left:
            self._left = True
            self._requests += [self.world.comm.isend(True, dest=rank, tag=LEAVE) for rank in self.world.rollout]

    def _hear(self, number: int) -> None:
        self.asked = number
        self.deadline = time.monotonic() + (TERM_SECONDS if number == signal.SIGTERM else self.warning_seconds)


@dataclass
class Vote:
    """An agreement among the ranks of a role, asked for at one call and known at the next, so that nobody waits for it."""

    world: World
    _pending: Callable[[], int] | None = field(default=None, init=False)

    def __call__(self, mine: bool) -> bool:
        """True if any rank of the role said so at the last call; collective."""
        found = bool(self._pending and self._pending())
        self._pending = self.world.vote(int(mine))
        return found


@dataclass
class Leaving:
    """A mailbox that counts as complete when it is time to leave."""

    box: Mailbox
    due: Callable[[], bool]
    left: bool = field(default=False, init=False)

    @property
    def complete(self) -> bool:
        """Nothing more is waited for, or it is time to leave."""
        return self.left or self.box.complete

    def take(self) -> bool:
        """Take one message, or notice that it is time to leave; False if neither."""
        self.left = self.left or self.due()
        return self.left or self.box.take()
