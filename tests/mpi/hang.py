"""hang.py ROLE SIZE FOLDER MODE: two training ranks meet in collectives, two rollout ranks wait for their word; one hangs.

Modes: `stopped` (rank 0, which watches, by SIGSTOP), `asleep` (rank 1, in a user's function, while rank 0 is in a gloo
collective), `blocked` (rank 1, in C with the interpreter), `slow` (nobody: rank 1 takes long in the first step and again later,
and is stopped for two seconds in the last).
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from miles_hpc import verdicts, watchdog
from miles_hpc.heartbeat import Heartbeat
from miles_hpc.paths import RunPaths
from miles_hpc.watch import Limits, Watch
from miles_hpc.watchdog import Watchdog
from miles_hpc.world import World, connect

STEPS, WORD = 4, 7
SHORT, LONG = 5.0, 60.0
LIMITS = {
    "stopped": Limits(SHORT, LONG, long=LONG),
    "blocked": Limits(SHORT, LONG, long=LONG),
    "asleep": Limits(LONG, SHORT, long=SHORT),
    "slow": Limits(2 * SHORT, SHORT, long=LONG),
}
"""Short is only what must be found soon: a busy machine may let any process wait for long, at its start above all."""


def sleep_for_ever() -> None:
    time.sleep(1000)


def misbehave(mode: str, rank: int, step: int, folder: Path) -> None:
    """What `mode` asks of this rank in this step."""
    last = step == STEPS - 1
    if mode == "slow" and rank == 1 and step in (0, 2):
        time.sleep(5)  # more than a phase that was seen before may take; less than it took then, times the factor
    if not last or rank != {"stopped": 0}.get(mode, 1):
        return
    (folder / "since").write_text(str(time.time()))
    if mode == "asleep":
        sleep_for_ever()
    if mode == "blocked":
        ctypes.PyDLL(None).sleep(1000)
    if mode == "slow":
        subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def leave_together(folder: Path, ranks: int) -> None:
    """So many ranks can write their stacks. None leaves before all have, since the first that does ends the world."""
    leave = os._exit

    def leave_last(code: int) -> None:
        (folder / f"leaves-{os.getpid()}").touch()
        while len(list(folder.glob("leaves-*"))) < ranks:
            time.sleep(0.05)
        leave(code)

    watchdog.LEAVE_SECONDS, os._exit = 0.0, leave_last


def train(world: World, heartbeat: Heartbeat, folder: Path, mode: str) -> None:
    for step in range(STEPS):
        heartbeat.enter("wait", step)
        time.sleep(0.1)
        heartbeat.enter("train", step)
        misbehave(mode, world.rank, step, folder)
        dist.all_reduce(torch.ones(1))
        if world.leads:
            for engine in world.rollout:
                world.send(step, engine, WORD, 100, "a word to go")


def rollout(world: World, heartbeat: Heartbeat) -> None:
    for step in range(STEPS):
        heartbeat.enter("sync", step)
        world.receive(WORD, 100, "a word", source=0)
        heartbeat.enter("rollout", step)
        time.sleep(0.1)


def main() -> None:
    role, size, name, mode = sys.argv[1:]
    folder, rank = Path(name), int(os.environ["PMI_RANK"])
    heartbeat = Heartbeat(RunPaths(folder).heartbeat(rank), role, rank, 1)
    watch = Watch({0: "train", 1: "train", 2: "rollout", 3: "rollout"}, replace(LIMITS[mode], long=LONG))
    leave_together(folder, 4 if mode == "asleep" else 3)
    dog = Watchdog(heartbeat, RunPaths(folder), 1, watch, watching=rank in (0, 2))
    dog.start()
    world = connect(role, int(size), heartbeat.beat)
    if role == "train":
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/group"), rank=rank, world_size=2)
    world.barrier()
    watch.limits = LIMITS[mode]
    if role == "train":
        train(world, heartbeat, folder, mode)
    else:
        rollout(world, heartbeat)
    world.barrier()
    dog.stop()
    if rank == 0:
        verdicts.write(RunPaths(folder), 1, kind="done")


if __name__ == "__main__":
    main()
