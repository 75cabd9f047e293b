"""Weights from trainers to engines on the same GPUs, without a copy through the host (`run.placement = "colocate"`).

Every training rank lends whole tensors, a bucket at a time, to the engine beside it: over MPI goes a pickle that names memory
of this process (CUDA IPC; on a CPU named shared memory), which the engine's worker on the same GPU opens and copies from. What
was shared is kept until the engine says that it has it. Names, shapes and digests are checked as in `sync.py`.
"""

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_hpc import device
from miles_hpc.buckets import BUCKET_MIB, Bucket, Cargo, Weights
from miles_hpc.errors import SyncError, WorldError
from miles_hpc.fused import Fused, different
from miles_hpc.heartbeat import Heartbeat
from miles_hpc.layout import Layout
from miles_hpc.round import Complete
from miles_hpc.sync import Mailbox, Report
from miles_hpc.world import World

if TYPE_CHECKING:
    import torch

    from miles_hpc.rollout.engine import EngineHost

READY, SHARED, TAKEN, CONFIRMED = 15, 16, 17, 18
BUCKETS = 2
"""Shared at a time."""
MARGIN = 1.25
SHARED_MIB = BUCKET_MIB | {"cuda": 2048}
"""Each is a call of the engine, and its keys and values are not there yet."""


class Giver(ABC):
    """The training side, on every training rank, of any way on which an engine says that it has taken what it was given.

    Args:
        model_folder: the checkpoint that the engines loaded.
        layout: of the engines' tensors.
    """

    def __init__(
        self, world: World, trainer: Weights, model_folder: Path, heartbeat: Heartbeat, seconds: float, layout: Layout
    ) -> None:
        self.world, self.heartbeat, self.seconds, self.layout = world, heartbeat, seconds, layout
        self.cargo = Cargo(trainer, model_folder, SHARED_MIB)
        self.fused = Fused(self.cargo.buckets, layout)
        if world.leads:
            for engine in world.rollout:
                world.receive(READY, seconds, f"the engine of rollout rank {engine} to start", source=engine)

    def send(self, version: int) -> Report:
        """Hand the trainer's weights over as `version`; collective over the training ranks.

        Raises:
            SyncError: an engine whose tensors differ from what was shared.
        """
        self.heartbeat.enter("sync")
        started, sums = time.monotonic(), []
        for bucket, flat in self.cargo:
            self._give(bucket, flat)
            if self.world.leads:
                sums.append(self.fused.sums(bucket, flat))
        self._say(None)
        digests = self.fused.digests(sums) if self.world.leads else []  # while the engine copies the last bucket
        self._take_back()
        compared = self._confirmed(Complete(version, digests)) if self.world.leads else 0
        report = Report(time.monotonic() - started, self.cargo.size, compared)
        del flat
        device.collect_shared()
        return report

    def serve(self, box: Mailbox, what: str) -> None:
        """Wait on the first rank until `box` is complete."""
        while self.world.leads and not box.complete:
            self.world.until(box.take, self.seconds, what)

    def _confirmed(self, complete: Complete) -> int:
        """Number of engine tensors found equal."""
        for engine in self.world.rollout:
            self.world.send(complete, engine, SHARED, self.seconds, f"rollout rank {engine} to hear of digests")
        compared = 0
        for engine in self.world.rollout:
            what = f"rollout rank {engine} to confirm weights {complete.version}"
            wrong, count = self.world.receive(CONFIRMED, self.seconds, what, source=engine)
            compared += count
            if wrong:
                raise SyncError(
                    f"after weights {complete.version} {len(wrong)} engine tensors differ from what was shared: "
                    + ", ".join(wrong[:3]),
                    where=f"rollout rank {engine}",
                )
        return compared

    @abstractmethod
    def _give(self, bucket: Bucket, flat: "torch.Tensor") -> None:
        """A bucket and its bytes."""

    @abstractmethod
    def _take_back(self) -> None:
        """Wait until everything that was given has been taken."""

    @abstractmethod
    def _say(self, message: bytes | bool | None) -> None:
        """Tell the engines of this rank of what is given; None: that was all."""


class Lender(Giver):
    """Gives memory of its own.

    Args:
        layout: of the engines' tensors; an engine has a training rank beside each of its workers.
    """

    def __init__(
        self,
        world: World,
        trainer: Weights,
        model_folder: Path,
        heartbeat: Heartbeat,
        seconds: float,
        layout: Layout,
    ) -> None:
        import torch

        torch.multiprocessing.set_sharing_strategy("file_system")  # on a CPU: memory that any process can open by its name
        super().__init__(world, trainer, model_folder, heartbeat, seconds, layout)
        self.engine = world.rollout[world.role_rank // layout.workers]
        self.shared: deque[torch.Tensor] = deque()
        self.invited = False
        """The engine has been told that it has room."""
        self.asleep, self.need = 0, math.inf
        """Bytes of the GPU that others than this rank hold while the engine sleeps, and what it takes when it wakes."""

    def prepare(self) -> bool:
        """Before `send`: whether the engine has room beside all that this rank holds. It then wakes at once.

        Memory that was just given back is slow to get (40 ms), and memory that is given back late costs nothing.
        """
        self.asleep = device.others()
        if room := device.free() > MARGIN * self.need:
            self._invite()
        return room

    def send(self, version: int) -> Report:
        """See `Giver`."""
        if not self.invited:
            self._invite()
        self.invited = False
        report = super().send(version)
        self.need = device.others() - self.asleep
        return report

    def _invite(self) -> None:
        self._say(True)
        self.invited = True

    def _give(self, bucket: Bucket, flat: "torch.Tensor") -> None:
        """The next one is gathered before the engine has copied this one."""
        self.shared.append(flat)
        self._say(handle(bucket, flat))
        self._keep(BUCKETS - 1)

    def _take_back(self) -> None:
        self._keep(0)

    def _keep(self, most: int) -> None:
        """Wait until at most so many buckets are shared."""
        while len(self.shared) > most:
            what = f"rollout rank {self.engine} to take weights"
            self.world.receive(TAKEN, self.seconds, what, source=self.engine)
            self.shared.popleft()

    def _say(self, message: bytes | bool | None) -> None:
        self.world.send(message, self.engine, SHARED, self.seconds, f"rollout rank {self.engine} to hear of weights")


class Taker(ABC):
    """The rollout side: has the engine take what is given, and compares digests.

    Args:
        workers: of the engine.
    """

    def __init__(self, world: World, engine: "EngineHost", workers: int, heartbeat: Heartbeat, seconds: float) -> None:
        self.world, self.engine, self.heartbeat, self.seconds = world, engine, heartbeat, seconds
        self.version, self.workers, self.lead = -1, workers, world.train[0]
        self.figures: dict[str, float] = {}
        world.send(workers, self.lead, READY, seconds, "the trainer to hear that the engine is up")

    def receive(self, version: int) -> None:
        """Take weights until `version` is in the engine."""
        self.heartbeat.enter("sync")
        while self.version < version:
            self._take()
            ranks = self.engine.call("checksum", timeout=self.seconds)
            complete = self.world.receive(SHARED, self.seconds, "digests from the trainer", source=self.lead)
            self._compare(complete, ranks)
            self.version = complete.version

    def leave(self) -> float:
        """After a generation: seconds it took the engine to leave its GPUs to others; here it has them to itself."""
        return 0.0

    @abstractmethod
    def _take(self) -> None:
        """All buckets of a version."""

    def _compare(self, complete: Complete, ranks: list[dict[str, str]]) -> None:
        found = different(complete.digests, ranks), sum(map(len, complete.digests))
        self.world.send(found, self.lead, CONFIRMED, self.seconds, "the trainer to take a confirmation")


class Borrower(Taker):
    """Wakes the engine, and has it copy from the memory of the training ranks beside it, one for each of its workers.

    Raises:
        WorldError: they are on another node.
    """

    def __init__(self, world: World, engine: "EngineHost", workers: int, heartbeat: Heartbeat, seconds: float) -> None:
        first = world.role_rank * workers
        self.lenders = world.train[first : first + workers]
        if {world.hosts[rank] for rank in self.lenders} != {world.hosts[world.rank]}:
            raise WorldError(
                f"the engine is on {world.hosts[world.rank]}, its training ranks on "
                f"{', '.join(world.hosts[rank] for rank in self.lenders)}",
                where=f"rollout rank {world.rank}",
                next_step='let srun keep the order of SLURM_HOSTFILE, or set run.placement = "split"',
            )
        super().__init__(world, engine, workers, heartbeat, seconds)

    def leave(self) -> float:
        """After a generation: seconds it took the engine to leave its GPUs to the training ranks."""
        self.heartbeat.enter("swap")
        return self._timed("engine/sleep_seconds", "sleep")

    def _take(self) -> None:
        """Memory for the weights when they have room, for keys and values when buckets are no longer in the way."""
        self._lent()
        self._timed("engine/wake_weights_seconds", "wake", regions=["weights"])
        while all(handles := self._lent()):
            self.engine.call("update_weights_from_tensor", timeout=self.seconds, serialized_named_tensors=handles)
            for rank in self.lenders:
                self.world.send(None, rank, TAKEN, self.seconds, "a training rank to hear that its weights were taken")
        self._timed("engine/wake_cache_seconds", "wake", regions=["kv_cache", "cuda_graph"])

    def _lent(self) -> list[Any]:
        """What each training rank beside the engine's workers says: first that there is room, then handles, at last None."""
        what = "weights from the trainer"
        return [self.world.receive(SHARED, self.seconds, what, source=rank) for rank in self.lenders]

    def _timed(self, figure: str, call: str, **fields: list[str]) -> float:
        started = time.monotonic()
        self.engine.call(call, timeout=self.seconds, **fields)
        self.figures[figure] = time.monotonic() - started
        return self.figures[figure]


def handle(bucket: Bucket, flat: "torch.Tensor") -> bytes:
    """What SGLang's `update_weights_from_tensor` opens: where `flat` is and what is where in it; valid while `flat` lives."""
    return bytes(ForkingPickler.dumps({"flattened_tensor": flat, "metadata": bucket.text}))
