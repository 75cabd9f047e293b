"""stop.py ROLE SIZE FOLDER MODE: two training and two rollout ranks in the middle of a step, one of which gets a signal.

Modes, each with rank, signal, and where everybody is: `generation` (3, USR2 twice; the first training rank waits for samples,
the others for it, the rollout ranks for their engines), `update` (1, TERM; training ranks at their micro-batches, rollout ranks
wait for weights), `fits` (2, USR2; as in `generation`, but the step is nearly done).
"""

import os
import signal
import sys
import time
from pathlib import Path

from miles_hpc import signals
from miles_hpc.errors import Stopped
from miles_hpc.paths import RunPaths
from miles_hpc.samples.exchange import Finished, Inbox, Outbox
from miles_hpc.stop import Leaving, Stop, Vote
from miles_hpc.world import World, connect

SIGNALS = {"generation": (3, signal.SIGUSR2), "update": (1, signal.SIGTERM), "fits": (2, signal.SIGUSR2)}
WARNING_SECONDS, WEIGHTS = 120.0, 12


def train(world: World, stop: Stop, mode: str) -> str:
    if mode == "update":
        vote = Vote(world)
        for batch in range(1000):
            stop.poll()
            if vote(world.leads and stop.due(60.0)):
                return f"at batch {min(batch, 1)}"
            time.sleep(0.02)
    inbox = Leaving(Inbox(world, 60), lambda: stop.due(600.0 if mode == "generation" else 1.0))
    if world.leads:
        world.until(lambda: inbox.complete or (inbox.take() and inbox.complete), 60, "samples")
    return "in the wait" if world.agree(inbox.left) else "not at all"


def rollout(world: World, mode: str, paths: RunPaths) -> str:
    try:
        if mode == "update":
            world.receive(WEIGHTS, 60, "weights")
        for _ in range(3):
            pause(world, 30.0 if mode == "generation" else 0.5)
    except Stopped:
        return "in the wait"
    Outbox(world, paths, 1, 60).announce(Finished(0))
    try:
        world.receive(WEIGHTS, 60, "weights")
    except Stopped:
        return "after its work"
    return "never"


def pause(world: World, seconds: float) -> None:
    """The engine is at work."""
    end = time.monotonic() + seconds
    world.until(lambda: time.monotonic() > end, 60, "a moment")


def main() -> None:
    role, size, folder, mode = sys.argv[1:]
    signals.install()
    world = connect(role, int(size), signals.check)
    stop = Stop(world, WARNING_SECONDS)
    world.poll = stop.poll
    world.barrier()
    if (rank := SIGNALS[mode])[0] == world.rank:
        os.kill(os.getpid(), rank[1])
        os.kill(os.getpid(), rank[1])
    left = train(world, stop, mode) if role == "train" else rollout(world, mode, RunPaths(Path(folder)))
    if world.rank == 0:
        stop.tell()
    world.barrier()
    sys.stdout.write(f"rank {world.rank} left {left}\n")  # one write: the ranks share this file


if __name__ == "__main__":
    main()
