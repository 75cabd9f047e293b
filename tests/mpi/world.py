"""world.py ROLE SIZE FOLDER MODE: one rank that tries what `World` offers and prints what it saw."""

import sys
import time
from pathlib import Path

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


def mute(last: int, mode: str, said: Path) -> None:
    """The last rank never comes to the probe's barrier, or to its broadcast: what a fabric does that loses messages.

    With `mute-large` the others begin once it has come to the barrier. It ends all once the first has said what it found.
    """
    from mpi4py import MPI

    from miles_hpc import world

    world.PROBE_SECONDS, comm = 2.0, MPI.COMM_WORLD
    if comm.rank == last:
        if mode == "mute-large":
            barrier = comm.Ibarrier()
            comm.send("here", dest=0)
            barrier.Wait()
        while not said.exists():
            time.sleep(0.05)
        comm.Abort(1)
    elif mode == "mute-large":
        comm.recv(source=last)


def main() -> None:
    role, size, folder, mode = sys.argv[1:]
    polls: list[int] = []
    said = Path(folder, "said")
    if mode.startswith("mute"):
        mute(int(size) - 1, mode, said)
    try:
        world = connect("train" if mode == "one-role" else role, int(size), lambda: polls.append(1))
    except MilesError as error:
        if mode.startswith("mute"):
            said.with_suffix(".tmp").write_text(str(error))  # what is printed just before an abort may be lost
            said.with_suffix(".tmp").rename(said)
            time.sleep(100)  # the end of the mute rank ends all
        sys.stdout.write(f"refused: {error}\n")
        return
    talk(world, polls)


if __name__ == "__main__":
    main()
