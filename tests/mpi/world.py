"""world.py ROLE SIZE FOLDER MODE: one rank that tries what `World` offers and prints what it saw."""

import sys

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


def main() -> None:
    role, size, _, mode = sys.argv[1:]
    polls: list[int] = []
    try:
        world = connect("train" if mode == "one-role" else role, int(size), lambda: polls.append(1))
    except MilesError as error:
        sys.stdout.write(f"refused: {error}\n")
        return
    talk(world, polls)


if __name__ == "__main__":
    main()
