"""lost.py MODE --role ROLE --run FOLDER --attempt N --world-size SIZE: two training ranks meet in gloo; the second is `killed`,
or comes `late`, in the second step.

What ends a rank is handled as `miles_hpc.main` does it.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from miles_hpc import main as rank_main
from miles_hpc.heartbeat import Heartbeat
from miles_hpc.paths import RunPaths
from miles_hpc.world import World, connect

PATIENCE = timedelta(seconds=1)


def train(world: World, folder: Path, mode: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/group"), rank=world.rank, world_size=2)
    dist.all_reduce(torch.ones(1))
    if world.rank == 1 and mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if world.rank == 1 and mode == "late":
        time.sleep(600)
    if mode == "late":
        dist.distributed_c10d._set_pg_timeout(PATIENCE)
    dist.all_reduce(torch.ones(1))


def main() -> None:
    mode, *arguments = sys.argv[1:]
    told = rank_main._parse(arguments)
    paths, rank = RunPaths(told.run), int(os.environ["PMI_RANK"])
    heartbeat = Heartbeat(paths.heartbeat(rank), told.role, rank, told.attempt)
    world = connect(told.role, told.world_size, heartbeat.beat)
    heartbeat.enter("train", 3)
    try:
        if told.role == "train":
            train(world, paths.folder, mode)
        world.receive(7, 600, "a word that never comes")
    except BaseException as error:
        rank_main._fail(error, paths, told.attempt, heartbeat)
        rank_main._end([world])


if __name__ == "__main__":
    main()
