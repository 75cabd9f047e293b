"""`rollout.weight_transport`: weights on a way of the user's own, such as files where nodes share no other network.

The user's object carries bytes under keys; what they are, and that they are right, is taken care of here: the first training
rank puts bucket after bucket and announces each over MPI, every rollout rank gets it and hands it to its engine in shared
memory, and digests are compared as in `sync.py`.
"""

import itertools
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_hpc import edges
from miles_hpc.attach import attach_object
from miles_hpc.buckets import Bucket, Weights
from miles_hpc.config import Config
from miles_hpc.handover import SHARED, TAKEN, Giver, Taker, handle
from miles_hpc.heartbeat import Heartbeat
from miles_hpc.layout import Layout
from miles_hpc.paths import RunPaths
from miles_hpc.world import World

if TYPE_CHECKING:
    import torch

    from miles_hpc.rollout.engine import EngineHost

KEY = "rollout.weight_transport"
METHODS = {"put": ("key", "data"), "get": ("key",), "drop": ("key",)}


class Carrier:
    """The user's transport, its answers checked.

    Args:
        made: what the edge returned, see `protocols.Transport`.
    """

    def __init__(self, made: Any) -> None:
        self.made = made

    @classmethod
    def of(cls, config: Config, paths: RunPaths) -> "Carrier":
        """The named one. Raises: EdgeError: the function cannot be loaded, raised, or returned no transport."""
        return cls(attach_object(config, KEY, config.rollout.weight_transport, paths.folder, METHODS))

    def put(self, key: str, data: np.ndarray) -> None:
        """Have the bytes carried. Raises: EdgeError if that raised."""
        edges.call(self.made.put, key, data, key=f"{KEY} put({key!r})")

    def get(self, key: str, size: int) -> np.ndarray:
        """The bytes that were put, [size] uint8. Raises: EdgeError: it raised, or gave another number of bytes."""
        name = f"{KEY} get({key!r})"
        found = edges.call(self.made.get, key, key=name)
        try:
            data = np.frombuffer(found, np.uint8)
        except (TypeError, ValueError):
            raise edges.wrong(name, self.made.get, f"{size} bytes", found) from None
        if len(data) != size:
            raise edges.wrong(name, self.made.get, f"{size} bytes, not {len(data)}", found)
        return data

    def drop(self, key: str) -> None:
        """Forget the bytes. Raises: EdgeError if that raised."""
        edges.call(self.made.drop, key, key=f"{KEY} drop({key!r})")


def check(config: Config, paths: RunPaths) -> None:
    """Send a few bytes to and fro before an engine starts.

    Raises:
        EdgeError: the transport cannot be used.
    """
    if not config.rollout.weight_transport:
        return
    carrier, data = Carrier.of(config, paths), np.arange(256, dtype=np.uint8)
    key = f"check-{uuid.uuid4().hex}"  # of no earlier attempt, which may have ended before it dropped its own
    carrier.put(key, data)
    found = carrier.get(key, len(data))
    if not np.array_equal(found, data):
        raise edges.wrong(f"{KEY} get({key!r})", carrier.made.get, "the bytes that were put", bytes(found))
    carrier.drop(key)


@dataclass(frozen=True)
class Parcel:
    """Announcement of a bucket."""

    key: str
    bucket: Bucket


class Shipper(Giver):
    """The training side: the first rank sends, the others only gather with it.

    Args:
        name: of the attempt; no key is used twice.
    """

    def __init__(
        self,
        world: World,
        trainer: Weights,
        model_folder: Path,
        heartbeat: Heartbeat,
        seconds: float,
        layout: Layout,
        carrier: Carrier,
        name: str,
    ) -> None:
        super().__init__(world, trainer, model_folder, heartbeat, seconds, layout)
        self.carrier = carrier
        self.keys = (f"{name}-{number:09d}" for number in itertools.count())
        self.under_way = ""

    def _give(self, bucket: Bucket, flat: "torch.Tensor") -> None:
        """The next bucket is put while the engines take the one before."""
        if not self.world.leads:
            return
        key = next(self.keys)
        self.carrier.put(key, flat.cpu().numpy())
        self._take_back()
        self.under_way = key
        self._say(Parcel(key, bucket))

    def _take_back(self) -> None:
        if not self.under_way:
            return
        for engine in self.world.rollout:
            self.world.receive(TAKEN, self.seconds, f"rollout rank {engine} to take weights", source=engine)
        self.carrier.drop(self.under_way)
        self.under_way = ""

    def _say(self, message: Any) -> None:
        for engine in self.world.rollout if self.world.leads else ():
            self.world.send(message, engine, SHARED, self.seconds, f"rollout rank {engine} to hear of weights")


class Unpacker(Taker):
    """The rollout side: every worker of the engine opens the same shared memory."""

    def __init__(
        self, world: World, engine: "EngineHost", workers: int, heartbeat: Heartbeat, seconds: float, carrier: Carrier
    ) -> None:
        import torch

        torch.multiprocessing.set_sharing_strategy("file_system")  # memory that any process can open by its name
        self.carrier = carrier
        super().__init__(world, engine, workers, heartbeat, seconds)

    def _take(self) -> None:
        while parcel := self.world.receive(SHARED, self.seconds, "weights from the trainer", source=self.lead):
            flat = self._unpack(parcel)
            handles = [handle(parcel.bucket, flat)] * self.workers
            self.engine.call("update_weights_from_tensor", timeout=self.seconds, serialized_named_tensors=handles)
            self.world.send(None, self.lead, TAKEN, self.seconds, "the trainer to hear that its weights were taken")

    def _unpack(self, parcel: Parcel) -> "torch.Tensor":
        """[bytes] uint8 in memory that every worker can open."""
        import torch

        return torch.from_numpy(self.carrier.get(parcel.key, parcel.bucket.size).copy()).share_memory_()
