"""Weights from the trainers to the engines: bucketed broadcast, checked on both ends.

The first training rank broadcasts Hugging Face tensors in buckets over one `torch.distributed` group (gloo or NCCL) that it
shares with the engines' workers; names, shapes and versions travel over MPI. SGLang answers "success" to unknown names, missing
names and wrong sizes (seen with 0.5.16), so the sender compares names and shapes with the checkpoint that the engines loaded,
and after every sync the digests of all engine tensors are compared with the sender's.
"""

import re
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from miles_hpc.errors import SyncError
from miles_hpc.heartbeat import Heartbeat
from miles_hpc.world import World

if TYPE_CHECKING:
    import torch

    from miles_hpc.rollout.engine import EngineHost

RENDEZVOUS, READY, WEIGHTS, ACKNOWLEDGE = 11, 12, 13, 14
GROUP = "miles_hpc_weights"
# A bucket is one engine call. CPU: 538 MB took 1.2 s in 64 MiB buckets, 3.0 s in one. CUDA: a call costs 2 ms, so fewer.
VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
VOCABULARY_MULTIPLE = 64  # SGLang fills its vocabulary tables up with zero rows
BUCKET_MIB = {"cpu": 64, "cuda": 512}


class Weights(Protocol):
    """What a trainer offers: whole weights under checkpoint names, in a fixed order; collective over the training ranks."""

    def weights(self) -> Iterator[tuple[str, "torch.Tensor"]]: ...


@dataclass(frozen=True)
class Bucket:
    """Announcement of one broadcast."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


@dataclass(frozen=True)
class Complete:
    """End of a sync: what every engine must hold now."""

    version: int
    stop: bool
    """The run ends after this version."""
    digests: dict[str, str]
    """By engine tensor."""


@dataclass
class Report:
    """What a sync took."""

    seconds: float = 0.0
    size: int = 0
    """Bytes, one copy of the weights."""
    digests: int = 0
    """Engine tensors compared, over all engines."""


@dataclass
class Fused:
    """Digests of engine tensors, which are concatenations of checkpoint tensors."""

    exact: bool = False
    """The engine's tensors are the checkpoint's, as in exact numerics."""
    parts: dict[str, list[tuple[tuple[int, int], "torch.Tensor"]]] = field(default_factory=dict)

    def add(self, name: str, tensor: "torch.Tensor") -> None:
        if self.exact:
            self.parts[name] = [((0, 0), tensor)]
            return
        engine_name, place = engine_tensor(name)
        self.parts.setdefault(engine_name, []).append((place, _filled(tensor) if name in VOCABULARY else tensor))

    def digests(self) -> dict[str, str]:
        """By engine tensor name."""
        import torch

        from miles_hpc.digest import digest

        joined = {}
        for name, parts in self.parts.items():
            ordered = [tensor.reshape(-1) for _, tensor in sorted(parts, key=lambda part: part[0])]
            joined[name] = digest(torch.cat(ordered) if len(ordered) > 1 else ordered[0])
        return joined


def _filled(table: "torch.Tensor") -> "torch.Tensor":
    """[vocabulary, hidden] as the engine holds it: filled up with zero rows."""
    import torch

    return torch.nn.functional.pad(table, (0, 0, 0, -len(table) % VOCABULARY_MULTIPLE))


def engine_tensor(name: str) -> tuple[str, tuple[int, int]]:
    """The engine's tensor that a checkpoint tensor becomes part of, and its place there (expert, part).

    SGLang 0.5.16 joins q, k, v; gate, up; and the experts of a layer, each along the first dimension.
    """
    if match := re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name):
        prefix, expert, part = match.groups()
        fused = "w2_weight" if part == "down" else "w13_weight"
        return f"{prefix}.{fused}", (int(expert), int(part == "up"))
    if match := re.fullmatch(r"(.*\.self_attn)\.([qkv])_proj\.(weight|bias)", name):
        return f"{match[1]}.qkv_proj.{match[3]}", (0, "qkv".index(match[2]))
    if match := re.fullmatch(r"(.*\.mlp)\.(gate|up)_proj\.weight", name):
        return f"{match[1]}.gate_up_proj.weight", (0, int(match[2] == "up"))
    return name, (0, 0)


class Sender:
    """The training side of a sync, on every training rank; only the first talks to the engines."""

    def __init__(
        self, world: World, trainer: Weights, model_folder: Path, heartbeat: Heartbeat, seconds: float, exact: bool = False
    ) -> None:
        self.world, self.trainer, self.heartbeat, self.seconds, self.exact = world, trainer, heartbeat, seconds, exact
        self.expected = checkpoint_shapes(model_folder)
        self.group = self._join() if world.leads else None

    def send(self, version: int, *, stop: bool = False) -> Report:
        """Send the trainer's weights as `version`; collective over the training ranks.

        Raises:
            SyncError: a name or shape the engines do not know, or an engine whose tensors differ from what was sent.
        """
        self.heartbeat.enter("sync")
        started = time.monotonic()
        if not self.world.leads:
            for _ in self.trainer.weights():
                pass
            return Report(time.monotonic() - started)
        report = self._broadcast(version, stop)
        report.digests = self._acknowledged(version)
        report.seconds = time.monotonic() - started
        return report

    def _broadcast(self, version: int, stop: bool) -> Report:
        """Buckets one after the other; the next is gathered while the last is on its way."""
        import torch.distributed as dist

        fused, report, pending = Fused(self.exact), Report(), None
        seen: set[str] = set()
        for bucket in buckets(self._checked(seen, fused)):
            flat = flatten(tensor for _, tensor in bucket)
            self._wait(pending)
            self._tell(announce(bucket))
            pending = (dist.broadcast(flat, src=0, group=self.group, async_op=True), flat)
            report.size += flat.numel()
        self._wait(pending)
        if missing := sorted(self.expected.keys() - seen):
            raise SyncError(f"version {version} lacks {len(missing)} tensors of the checkpoint", where=", ".join(missing[:3]))
        self._tell(Complete(version, stop, fused.digests()))
        return report

    def _checked(self, seen: set[str], fused: Fused) -> Iterator[tuple[str, "torch.Tensor"]]:
        for name, tensor in self.trainer.weights():
            if self.expected.get(name) != tuple(tensor.shape):
                raise SyncError(f"{name} has shape {tuple(tensor.shape)}, the engines loaded {self.expected.get(name)}")
            seen.add(name)
            fused.add(name, tensor)
            yield name, tensor

    def _wait(self, pending: tuple[Any, Any] | None) -> None:
        if pending:
            pending[0].wait(timedelta(seconds=self.seconds))

    def _tell(self, message: Bucket | Complete) -> None:
        for engine in self.world.rollout:
            self.world.send(message, engine, WEIGHTS, self.seconds, f"rollout rank {engine} to take weights")

    def _acknowledged(self, version: int) -> int:
        """Number of engine tensors found equal."""
        compared = 0
        for engine in self.world.rollout:
            what = f"rollout rank {engine} to confirm weights {version}"
            answer = self.world.receive(ACKNOWLEDGE, self.seconds, what, source=engine)
            if answer["different"]:
                named = ", ".join(answer["different"][:3])
                raise SyncError(
                    f"after weights {version} {len(answer['different'])} engine tensors differ from what was sent: {named}",
                    where=f"rollout rank {engine}",
                )
            compared += answer["compared"]
        return compared

    def _join(self) -> Any:
        """The group of this rank and all engine workers; entered only after every engine is up."""
        for engine in self.world.rollout:
            workers = self.world.receive(READY, self.seconds, f"the engine of rollout rank {engine} to start", source=engine)
        size = 1 + workers * len(self.world.rollout)
        store = open_store(self.world.address)
        for index, engine in enumerate(self.world.rollout):
            meeting = {"address": self.world.address, "port": store.port, "offset": 1 + index * workers, "size": size}
            self.world.send(meeting, engine, RENDEZVOUS, self.seconds, f"rollout rank {engine} to join the weight group")
        return weight_group(store, size, self.seconds)


class Receiver:
    """The rollout side of a sync: passes announcements to the engine and compares digests."""

    def __init__(
        self, world: World, engine: "EngineHost", workers: int, backend: str, heartbeat: Heartbeat, seconds: float
    ) -> None:
        self.world, self.engine, self.heartbeat, self.seconds = world, engine, heartbeat, seconds
        self.version = -1
        self.figures: dict[str, float] = {}
        self._join(workers, backend)

    def receive(self, version: int) -> bool:
        """Take weights until `version` is in the engine; False if the run ends with what was received."""
        self.heartbeat.enter("sync")
        going_on = True
        while self.version < version and going_on:
            message = self._next()
            while isinstance(message, Bucket):
                self._load(message)
                message = self._next()
            self._compare(message)
            self.version, going_on = message.version, not message.stop
        return going_on

    def leave(self) -> float:
        """After a generation: seconds it took the engine to leave its GPUs to others; here it has them to itself."""
        return 0.0

    def _next(self) -> Bucket | Complete:
        return self.world.receive(WEIGHTS, self.seconds, "weights from the trainer", source=self.world.train[0])

    def _load(self, bucket: Bucket) -> None:
        self.engine.call(
            "update_weights_from_distributed",
            timeout=self.seconds,
            names=bucket.names,
            dtypes=bucket.dtypes,
            shapes=bucket.shapes,
            group_name=GROUP,
            load_format="flattened_bucket",
            flush_cache=False,
        )

    def _compare(self, complete: Complete) -> None:
        # Keys and values of prompts were computed with the old weights.
        self.engine.call("flush_cache", timeout=self.seconds, timeout_s=self.seconds)
        ranks = self.engine.call("checksum", timeout=self.seconds)
        # An engine over several GPUs holds slices, whose digests are not the whole tensor's.
        expected = complete.digests if len(ranks) == 1 else {}
        different = sorted(name for name, value in expected.items() if ranks[0].get(name) != value)
        answer = {"different": different, "compared": len(expected)}
        self.world.send(answer, self.world.train[0], ACKNOWLEDGE, self.seconds, "the trainer to take an acknowledgement")

    def _join(self, workers: int, backend: str) -> None:
        lead = self.world.train[0]
        self.world.send(workers, lead, READY, self.seconds, "the trainer to hear that the engine is up")
        meeting = self.world.receive(RENDEZVOUS, self.seconds, "the trainer to open the weight group", source=lead)
        self.engine.call(
            "init_weights_update_group",
            timeout=self.seconds,
            master_address=meeting["address"],
            master_port=meeting["port"],
            rank_offset=meeting["offset"],
            world_size=meeting["size"],
            group_name=GROUP,
            backend=backend,
        )


def buckets(named: Iterable[tuple[str, "torch.Tensor"]]) -> Iterator[list[tuple[str, "torch.Tensor"]]]:
    """Tensors in order, in lists of about BUCKET_MIB; a larger tensor is a bucket of its own."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in named:
        limit = BUCKET_MIB[tensor.device.type] << 20
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def flatten(tensors: Iterable["torch.Tensor"]) -> "torch.Tensor":
    """[bytes] uint8: the tensors' bytes one after the other, SGLang's `flattened_bucket` layout."""
    import torch

    return torch.cat([t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors])


def announce(bucket: list[tuple[str, "torch.Tensor"]]) -> Bucket:
    """Names, dtypes and shapes of a bucket."""
    return Bucket(
        [name for name, _ in bucket],
        [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        [list(tensor.shape) for _, tensor in bucket],
    )


def open_store(address: str) -> Any:
    """A rendezvous store on a port that the kernel picks, bound to `address` alone; other ranks learn the port over MPI."""
    from torch.distributed import TCPStore

    listener = socket.create_server((address, 0), backlog=128)
    port = listener.getsockname()[1]
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def weight_group(store: Any, size: int, seconds: float) -> Any:
    """Join as rank 0 a process group beside the default one, as SGLang's `init_custom_process_group` does on the other side."""
    from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

    from miles_hpc.device import backend

    limit = timedelta(seconds=seconds)
    store.set_timeout(limit)
    prefixed = PrefixStore(GROUP, store)
    name: Any = GROUP  # a NewType of str in torch 2.13, str before
    group, _ = _new_process_group_helper(
        size, 0, [], Backend(backend()), prefixed, group_name=name, backend_options=None, timeout=limit
    )
    _world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in a Hugging Face checkpoint, from the file headers."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            names = list(tensors.keys())
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
    return shapes
