"""sync.py ROLE SIZE FOLDER MODE [WORKERS]: weights from training ranks to engines that receive the real broadcasts.

The engine's process is replaced at its border (`EngineHost.call`); it joins the weight group and holds tensors as SGLang does.
With WORKERS the weights are shared (`handover.py`) to engines of so many workers.
"""

import pickle
import sys
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from engine import digests
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

from miles_hpc.buckets import Bucket
from miles_hpc.errors import MilesError
from miles_hpc.handover import Borrower, Lender
from miles_hpc.heartbeat import Heartbeat
from miles_hpc.layout import Layout
from miles_hpc.receiver import Receiver
from miles_hpc.sync import Sender
from miles_hpc.transport import Carrier, Shipper, Unpacker
from miles_hpc.world import connect


class Trainer:
    def __init__(self, folder: Path, mode: str) -> None:
        self.tensors, self.mode, self.version = load_file(folder / "model.safetensors"), mode, 0

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors.items():
            if self.mode == "missing" and name.endswith("norm.weight"):
                continue
            if self.mode == "reshaped" and name == "lm_head.weight":
                tensor = tensor.T
            yield name, tensor + self.version


class Engine:
    """Takes broadcasts into plain tensors; with mode `flipped` one element of one of them is lost."""

    ended = False

    def __init__(self, mode: str, layout: Layout) -> None:
        self.mode, self.layout, self.held, self.group = mode, layout, {}, None
        self.calls: list[str] = []

    def call(self, name: str, timeout: float, **fields: Any) -> Any:
        self.calls.append(name)
        return getattr(self, name)(**fields)

    def init_weights_update_group(self, master_address, master_port, rank_offset, world_size, group_name, backend) -> None:
        store = PrefixStore(group_name, dist.TCPStore(master_address, master_port, is_master=False))
        limit = timedelta(seconds=60)
        self.group, _ = _new_process_group_helper(
            world_size, rank_offset, [], Backend(backend), store, group_name=group_name, backend_options=None, timeout=limit
        )
        _world.pg_group_ranks[self.group] = {i: i for i in range(world_size)}

    def update_weights_from_distributed(self, buckets: list[str], group_name: str) -> None:
        for bucket in map(Bucket.read, buckets):
            flat = torch.empty(bucket.size, dtype=torch.uint8)
            dist.broadcast(flat, src=0, group=self.group)
            self.held |= zip(bucket.names, bucket.views(flat), strict=True)

    def update_weights_from_tensor(self, serialized_named_tensors: list[bytes]) -> None:
        """Copies from each training rank's own memory."""
        for worker, text in enumerate(serialized_named_tensors):
            shared = pickle.loads(text)
            bucket = Bucket.read(shared["metadata"])
            for name, tensor in zip(bucket.names, bucket.views(shared["flattened_tensor"]), strict=True):
                assert worker == 0 or torch.equal(self.held[name], tensor)
                self.held[name] = tensor.clone()

    def wake(self, regions: list[str]) -> None:
        assert self.calls.count("wake") % 2 == (regions == ["weights"])

    def checksum(self) -> list[dict[str, str]]:
        if self.mode == "flipped":
            self.held["model.layers.0.self_attn.k_proj.weight"].view(-1)[3] = 0
        return digests(self.held, self.layout)


class Files:
    """A transport over a folder; with mode `short` the last byte is lost on the way."""

    def __init__(self, folder: Path, mode: str) -> None:
        self.folder, self.short = folder, mode == "short"
        folder.mkdir(exist_ok=True)

    def put(self, key: str, data: Any) -> None:
        (self.folder / f".{key}").write_bytes(data[: len(data) - self.short])
        (self.folder / f".{key}").rename(self.folder / key)

    def get(self, key: str) -> bytes:
        return (self.folder / key).read_bytes()

    def drop(self, key: str) -> None:
        (self.folder / key).unlink()


def main() -> None:
    role, size, folder, mode, *more = sys.argv[1:]
    files = more == ["files"]
    workers = int(more[0]) if more and not files else 0
    layout = Layout(workers=workers or 1, groups=workers)
    world = connect(role, int(size), lambda: None)
    heartbeat = Heartbeat(Path(folder) / f"beat-{world.rank}.json", role, world.rank, 1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/{role}-group"), rank=world.role_rank, world_size=world.role_size
    )
    try:
        if role == "train":
            trainer = Trainer(Path(folder), mode)
            sender: Any = partial(Sender, first=60)
            if workers:
                sender = partial(Lender, layout=layout)
            if files:
                sender = partial(Shipper, layout=Layout(), carrier=Carrier(Files(Path(folder, "weights"), mode)), name="001")
            sender = sender(world, trainer, Path(folder), heartbeat, 60)
            for trainer.version in range(3):
                if workers:
                    assert sender.prepare() == (trainer.version > 0)  # what an engine takes is not known before
                report = sender.send(trainer.version)
                if world.leads:
                    with Path(folder, "sent").open("a") as file:
                        file.write(f"{trainer.version} {report.size} {report.digests}\n")
        else:
            engine: Any = Engine(mode, layout)
            if files:
                receiver: Any = Unpacker(world, engine, 1, heartbeat, 60, Carrier(Files(Path(folder, "weights"), mode)))
            elif workers:
                receiver = Borrower(world, engine, workers, heartbeat, 60)
            else:
                receiver = Receiver(world, engine, SimpleNamespace(deaths=[]), 1, "gloo", heartbeat, 60)
            for version in range(3):
                receiver.receive(version)
                with Path(folder, f"took-{world.rank}").open("a") as file:
                    file.write(f"{receiver.version} ")
    except MilesError as error:
        Path(folder, f"refused-{role}").write_text(str(error))  # what is printed just before an abort may be lost
        world.abort(1)
    world.barrier()


if __name__ == "__main__":
    main()
