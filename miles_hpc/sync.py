"""Weights from the trainers to the engines: bucketed broadcast, checked on both ends.

The first training rank broadcasts Hugging Face tensors in buckets over one `torch.distributed` group (gloo or NCCL) that it
shares with the engines' workers; names, shapes and versions travel over MPI. SGLang answers "success" to unknown names, missing
names and wrong sizes (seen with 0.5.16), so names and shapes are compared with the checkpoint that the engines loaded
(`buckets.py`), and after every sync the digests of all engine tensors are compared with the sender's. An engine that fails on
the way is served again in the next round (`round.py`), in a new group.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from miles_hpc.buckets import Cargo, Weights
from miles_hpc.errors import SyncError
from miles_hpc.fused import Fused
from miles_hpc.group import Group
from miles_hpc.heartbeat import Heartbeat
from miles_hpc.layout import Layout
from miles_hpc.pace import Pace
from miles_hpc.round import Complete, Confirmed, Paces, Round
from miles_hpc.world import World

LOST = 13
JOIN_SECONDS = 120.0
"""At most for a group to form; an engine whose peer dies meanwhile stays in the rendezvous for so long."""
FRUITLESS_ROUNDS = 3
"""So many rounds in a row that fail although the engine lives: one more is of no use, and failed NCCL groups keep memory."""


class Mailbox(Protocol):
    """What the first training rank waits for while engines may need weights."""

    @property
    def complete(self) -> bool:
        """Nothing is missing any more."""

    def take(self) -> bool:
        """Take one message that has arrived; False if there is none."""


@dataclass(frozen=True)
class Lost:
    """A rollout rank whose engine had to start again in the middle of its work needs the newest weights."""

    rank: int
    round: int
    """The last one it has confirmed; a later one has served it already."""


@dataclass
class Report:
    """What a sync took."""

    seconds: float = 0.0
    size: int = 0
    """Bytes, one copy of the weights."""
    digests: int = 0
    """Engine tensors compared, over all engines."""
    given_up: int = 0
    """Rounds that had to be repeated for at least one engine."""


class Sender:
    """The training side of a sync, on every training rank; only the first talks to the engines.

    Args:
        model_folder: the checkpoint that the engines loaded.
        seconds: deadline of a wait for the other role.
        first: seconds that a step of a sync may take before any was measured.
        layout: of the engines' tensors; by default that of one worker in native numerics.

    Raises:
        SyncError: names or shapes that are not the checkpoint's.
    """

    def __init__(
        self,
        world: World,
        trainer: Weights,
        model_folder: Path,
        heartbeat: Heartbeat,
        seconds: float,
        first: float,
        layout: Layout | None = None,
    ) -> None:
        self.world, self.heartbeat, self.seconds = world, heartbeat, seconds
        self.cargo = Cargo(trainer, model_folder)
        self.fused = Fused(self.cargo.buckets, layout or Layout())
        self.paces = Paces(Pace(min(first, JOIN_SECONDS)), Pace(first), Pace(first))
        self.version = -1
        self.round: Round | None = None
        self.group: Group | None = None
        self._number = self._fruitless = 0
        self._served: dict[int, int] = {}
        """By rollout rank: the last round that it confirmed."""

    def send(self, version: int) -> Report:
        """Send the trainer's weights as `version` to all engines; collective over the training ranks.

        Raises:
            SyncError: an engine whose tensors differ from what was sent, or rounds that keep failing for another reason than
                an engine that died.
        """
        self.heartbeat.enter("sync")
        self.version = version
        return self._deliver(list(self.world.rollout))

    def serve(self, box: Mailbox, what: str) -> None:
        """Wait until the first rank's `box` is complete; engines that ask meanwhile get the last version that was sent.

        Collective over the training ranks, whose weights must still be those of the last `send`.
        """
        while lost := self._led(self._lost_before, box, what):
            self._deliver(lost)

    def close(self) -> None:
        """Leave the group."""
        if self.group:
            self.group.leave()
        self.group = None

    def _deliver(self, engines: list[int]) -> Report:
        """Rounds until every engine has the version. An engine that keeps failing ends its rank, and with it the world."""
        started, report = time.monotonic(), Report()
        while engines:
            if self._led(self._open, engines):
                self._stream(report)
            engines = self._led(lambda: self.round.left if self.round else [])
            report.given_up += bool(engines)
        report.seconds = time.monotonic() - started
        return report

    def _led(self, do: Callable[..., Any], *given: Any) -> Any:
        """What the first rank finds, on every training rank."""
        return self.world.share(do(*given) if self.world.leads else None, self.seconds, "the first training rank")

    def _lost_before(self, box: Mailbox, what: str) -> list[int]:
        """An engine that needs weights before the box is complete."""
        while not box.complete:
            found = self.world.until(lambda: box.take() or self._lost(), self.seconds, what)
            if isinstance(found, Lost):
                return [found.rank]
        return []

    def _lost(self) -> Lost | None:
        lost = self.world.take(LOST)
        return lost if lost and lost.round >= self._served.get(lost.rank, 0) else None

    def _open(self, engines: list[int]) -> bool:
        self._number += 1
        before, self.round = self.round, Round(self.world, self._number, engines, self.seconds, self.paces)
        self.group = self.round.open(self.group)
        self._judge(before, self.round)
        return self.group is not None

    def _judge(self, before: Round | None, now: Round) -> None:
        """Raises: SyncError: another round is of no use."""
        fruitless = before is not None and before.broken and (before.refused or before.starts == now.starts)
        self._fruitless = self._fruitless + 1 if fruitless else 0
        if self._fruitless == FRUITLESS_ROUNDS and before:
            raise SyncError(
                f"{FRUITLESS_ROUNDS} rounds in a row did not bring the weights to engines that live; the last: {before.broken}",
                where=f"rollout ranks {', '.join(map(str, before.engines))}",
                next_step="with NCCL: NCCL_DEBUG=INFO under [environment] of the site's profile says more",
            )

    def _stream(self, report: Report) -> None:
        """Buckets one after the other; the next is gathered while the last is on its way."""
        if not self.round:
            return self.cargo.gather()
        sums = []
        self.round.announce([bucket.text for bucket in self.cargo.buckets])
        for bucket, flat in self.cargo:  # to its end even if the round breaks: gathering is collective
            self.round.put(flat)
            sums.append(self.fused.sums(bucket, flat))
        confirmed = self.round.finish(Complete(self.version, self.fused.digests(sums)))
        self.group = self.round.group
        report.size = self.cargo.size
        report.digests += self._compared(confirmed)

    def _compared(self, confirmed: dict[int, Confirmed]) -> int:
        """Number of engine tensors found equal."""
        for engine, found in confirmed.items():
            if found.different:
                raise SyncError(
                    f"after weights {self.version} {len(found.different)} engine tensors differ from what was sent: "
                    + ", ".join(found.different[:3]),
                    where=f"rollout rank {engine}",
                )
            self._served[engine] = self._number
        return sum(found.compared for found in confirmed.values())
