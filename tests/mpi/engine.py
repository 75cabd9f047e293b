"""engine.py FD PARENT: an engine's host process without SGLang, which speaks the host's messages and joins real gloo groups.

It holds plain tensors. A request is answered by the sum of one tensor's elements and the rank. A file `fault-RANK`
beside its model, "NAME N SIGNAL", makes it send itself that signal at the Nth call of that name, once; "NAME refused"
makes it refuse every call of that name. With SEED in its environment it does everything late by chance.
"""

import os
import random
import signal
import sys
import time
from collections import Counter
from datetime import timedelta
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

from miles_hpc.buckets import Bucket, buckets
from miles_hpc.fused import Fused
from miles_hpc.layout import Layout
from miles_hpc.rollout.request import Output

SHOWN = "model.norm.weight"
DELAY_SECONDS = 0.1


def digests(held: dict[str, torch.Tensor], layout: Layout) -> list[dict[str, str]]:
    """As an engine of that layout would have them that holds these checkpoint tensors."""
    found = list(held.items())
    packed = buckets(found)
    fused, tensors = Fused(packed, layout), iter(tensor for _, tensor in found)
    return fused.digests([fused.sums(bucket, bucket.flat(islice(tensors, len(bucket.names)))) for bucket in packed])


class Engine:
    """Takes broadcasts into plain tensors."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.groups, self.counts = folder, {}, Counter[str]()
        self.held = load_file(folder / "model.safetensors")
        self.chance = random.Random(f"{os.environ['SEED']} {os.environ['RANK']}") if "SEED" in os.environ else None
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def init_weights_update_group(self, master_address, master_port, rank_offset, world_size, group_name, backend) -> None:
        store = PrefixStore(group_name, dist.TCPStore(master_address, master_port, is_master=False))
        group, _ = _new_process_group_helper(
            world_size, rank_offset, [], Backend(backend), store, group_name=group_name, timeout=timedelta(minutes=30)
        )
        _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
        self.groups[group_name] = group

    def destroy_weights_update_group(self, group_name: str) -> None:
        dist.destroy_process_group(self.groups.pop(group_name))

    def update_weights_from_distributed(self, buckets: list[str], group_name: str) -> None:
        for bucket in map(Bucket.read, buckets):
            flat = torch.empty(bucket.size, dtype=torch.uint8)
            dist.broadcast(flat, src=0, group=self.groups[group_name])
            self.held |= zip(bucket.names, bucket.views(flat), strict=True)

    def alive(self) -> None: ...

    def checksum(self) -> list[dict[str, str]]:
        return digests(self.held, Layout())

    def generate(self, connection: Connection, requests: list) -> None:
        for key, _ in requests:
            self.meet("answer")
            tokens = [round(self.held[SHOWN].sum().item()), int(os.environ["RANK"])]
            connection.send(("output", key, Output(tokens, [0.0, 0.0], True)))

    def meet(self, name: str) -> None:
        """The delay, and the fault if it is now."""
        if self.chance:
            time.sleep(self.chance.random() * DELAY_SECONDS)
        self.counts[name] += 1
        file = self.folder / f"fault-{os.environ['RANK']}"
        if file.exists() and file.read_text() == f"{name} refused":
            raise RuntimeError(f"{name} cannot be done here")
        if file.exists() and file.read_text().split()[:2] == [name, str(self.counts[name])]:
            number = getattr(signal, file.read_text().split()[2])
            file.unlink()
            os.kill(os.getpid(), number)
            time.sleep(0.1)


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    engine = Engine(Path(connection.recv().model_folder))
    connection.send(("ready", {}))
    while (message := connection.recv())[0] != "exit":
        if message[0] == "generate":
            engine.generate(connection, message[1])
        elif message[0] == "call":
            _, key, name, fields = message
            connection.send(answer(engine, key, name, fields))
            engine.meet(f"{name}-answered")


def answer(engine: Engine, key: int, name: str, fields: dict[str, Any]) -> tuple[str, int, Any]:
    try:
        engine.meet(name)
        return ("answer", key, getattr(engine, name)(**fields))
    except Exception as error:
        return ("error", key, str(error))


if __name__ == "__main__":
    main()
