"""world.py ROLE SIZE FOLDER MODE: one rank that tries what `World` offers and prints what it saw."""

import sys
import time

from miles_hpc.errors import DeadlineExceeded, MilesError
from miles_hpc.world import World, connect


def talk(world: World, polls: list[int]) -> None:
    first, last = world.train[0], world.rollout[-1]
    if world.rank == last:
        world.send({"from": last}, first, 5, 30, "a message to arrive")
    if world.rank == first:
        assert world.receive(5, 30, "a message") == {"from": last}
    assert world.agree(world.role_rank + 1) == world.role_size
    assert world.share("of " + world.role if world.leads else None, 30, "a word") == "of " + world.role
    try:
        world.receive(9, 0.05, "what nobody sends")
    except DeadlineExceeded as error:
        assert "what nobody sends" in str(error) and world.role in error.where
    else:
        raise AssertionError("a wait without an end")
    assert polls
    world.barrier()
    who = f"{world.role} {world.role_rank}/{world.role_size} {world.train} {world.rollout}"
    sys.stdout.write(f"rank {world.rank} {who} {world.address}\n")  # one write: the ranks share this file


def mute(last: int, mode: str) -> None:
    """The last rank never comes to the probe's barrier, or to its broadcast: what a fabric does that loses messages."""
    from mpi4py import MPI

    from miles_hpc import world

    world.PROBE_SECONDS = 2.0
    if MPI.COMM_WORLD.rank == last:
        if mode == "mute-large":
            MPI.COMM_WORLD.Ibarrier().Wait()
        time.sleep(6)
        MPI.COMM_WORLD.Abort(1)


def main() -> None:
    role, size, _, mode = sys.argv[1:]
    polls: list[int] = []
    if mode.startswith("mute"):
        mute(int(size) - 1, mode)
    try:
        world = connect("train" if mode == "one-role" else role, int(size), lambda: polls.append(1))
    except MilesError as error:
        sys.stdout.write(f"refused: {error}\n")
        sys.stdout.flush()
        time.sleep(20 if mode.startswith("mute") else 0)  # the end of the mute rank ends all
        return
    talk(world, polls)


if __name__ == "__main__":
    main()
