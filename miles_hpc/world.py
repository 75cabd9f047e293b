"""One MPI world over all ranks, and who is who in it.

Training ranks come first. The role is told by the launcher, never guessed from Slurm's variables, which name the last component
in all of them. Every wait polls, so that a rank can beat its heart and note a signal; every wait has a deadline.
"""

import atexit
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from miles_hpc.errors import DeadlineExceeded, WorldError

PROBE_BYTES = 8 << 20  # large enough to leave MPI's eager path, where a half-working fabric shows
PROBE_SECONDS = 120.0
ROLE_SECONDS = 7200.0  # of waits among the ranks of a role; the watchdog finds the one that hangs long before
POLL_SECONDS, SHORT_SECONDS = 0.002, 0.00002  # short waits are looked at more often: a weight sync is a row of them
PROGRESS_SECONDS = 0.005


@dataclass
class World:
    """This rank's view of the MPI world."""

    comm: Any
    role_comm: Any
    role: str
    rank: int
    train: tuple[int, ...]
    """World ranks that train."""
    rollout: tuple[int, ...]
    """World ranks that hold an engine."""
    hosts: tuple[str, ...]
    """Host name of every world rank."""
    poll: Callable[[], None]
    _posted: list[Any] = field(default_factory=list)

    @property
    def role_rank(self) -> int:
        """Rank among those of the same role."""
        return self.role_comm.rank

    @property
    def role_size(self) -> int:
        """Ranks of the same role."""
        return self.role_comm.size

    @property
    def leads(self) -> bool:
        """True on the first rank of a role."""
        return self.role_comm.rank == 0

    @property
    def address(self) -> str:
        """Where this rank's host can be reached by all others: loopback if there is only one host.

        Raises:
            WorldError: the host's name stands for no such address.
        """
        if len(set(self.hosts)) == 1:
            return "127.0.0.1"
        name = socket.gethostname()
        try:
            found = socket.gethostbyname(name)
            if not found.startswith("127."):
                return found
        except OSError as error:
            found = f"no address ({error})"
        raise WorldError(
            f"the host name {name} stands for {found}, where no other node can reach it",
            where=f"{self.role} rank {self.rank}",
            next_step="give the node its own address under that name, in DNS or in /etc/hosts",
        )

    def wait(self, request: Any, seconds: float, what: str) -> None:
        """Wait for a non-blocking MPI operation.

        Raises:
            DeadlineExceeded: not finished after `seconds`.
        """
        end = time.monotonic() + seconds
        while not request.Test():
            self._pause(end, seconds, what)

    def send(self, value: object, to: int, tag: int, seconds: float, what: str) -> None:
        """Send a Python object to a world rank."""
        self.wait(self.comm.isend(value, dest=to, tag=tag), seconds, what)

    def post(self, value: object, to: int, tag: int) -> None:
        """Send a Python object that a world rank will take when it gets round to it; returns at once."""
        self._posted = [request for request in self._posted if not request.Test()]
        self._posted.append(self.comm.isend(value, dest=to, tag=tag))

    def receive(self, tag: int, seconds: float, what: str, source: int | None = None) -> Any:
        """Receive a Python object from a world rank, or from any."""
        return self.until(lambda: self._probe(tag, source), seconds, what).recv()

    def take(self, tag: int, source: int | None = None) -> Any:
        """An object that has arrived from a world rank, or from any; None if there is none."""
        message = self._probe(tag, source)
        return message.recv() if message else None

    def until(self, ready: Callable[[], Any], seconds: float, what: str) -> Any:
        """Call `ready` until it returns something true, which is returned.

        Raises:
            DeadlineExceeded: nothing true after `seconds`.
        """
        end = time.monotonic() + seconds
        while not (found := ready()):
            self._pause(end, seconds, what)
        return found

    def agree(self, number: int) -> int:
        """The largest `number` over the ranks of this role."""
        return self.vote(number)()

    def vote(self, number: int) -> Callable[[], int]:
        """Ask for the largest `number` over the ranks of this role; the function returned waits for it."""
        import numpy as np
        from mpi4py import MPI

        largest = np.array([number], np.int64)  # mpi4py keeps no buffer of an Iallreduce alive, `answer` keeps this one
        request = self.role_comm.Iallreduce(MPI.IN_PLACE, largest, MPI.MAX)

        def answer() -> int:
            self.wait(request, ROLE_SECONDS, f"{self.role} ranks to agree")
            return int(largest[0])

        return answer

    def share(self, value: Any, seconds: float, what: str) -> Any:
        """The first rank's `value`, on every rank of this role."""
        if self.leads:
            for other in range(1, self.role_size):
                self.wait(self.role_comm.isend(value, dest=other, tag=0), seconds, what)
            return value
        end = time.monotonic() + seconds
        while (message := self.role_comm.improbe(source=0, tag=0)) is None:
            self._pause(end, seconds, what)
        return message.recv()

    def barrier(self, seconds: float = PROBE_SECONDS, what: str = "all ranks") -> None:
        """Wait until every rank of the world is here."""
        self.wait(self.comm.Ibarrier(), seconds, what)

    def end(self, seconds: float) -> None:
        """Wait until every rank of the world has ended its work, and read what nobody waited for.

        MPICH over OFI ends the world with an error if a rank is finalized that has messages left.
        """
        self.barrier(seconds, "all ranks to finish")
        while message := self.comm.improbe():
            message.recv()
        self.barrier(seconds, "all ranks to finish")

    def role_barrier(self) -> None:
        """Wait until every rank of this role is here."""
        self.wait(self.role_comm.Ibarrier(), ROLE_SECONDS, f"all {self.role} ranks")

    def abort(self, code: int) -> None:
        """End every rank of the world at once."""
        self.comm.Abort(code)

    def _probe(self, tag: int, source: int | None) -> Any:
        from mpi4py import MPI

        return self.comm.improbe(source=MPI.ANY_SOURCE if source is None else source, tag=tag)

    def _pause(self, end: float, seconds: float, what: str) -> None:
        left = end - time.monotonic()
        if left < 0:
            raise DeadlineExceeded(f"waited {seconds:.0f} s for {what}", where=f"{self.role} rank {self.rank}")
        self.poll()
        time.sleep(min(POLL_SECONDS, (seconds - left) / 8 + SHORT_SECONDS))


def connect(role: str, expected: int, poll: Callable[[], None]) -> World:
    """Start MPI, check that the world is the one the launcher asked for, and that large messages cross it.

    Raises:
        WorldError: another number of ranks than `expected` (srun's `--mpi` of the wrong kind gives a world of one), or a role
            without ranks.
        DeadlineExceeded: the probe did not come through.
    """
    from mpi4py import MPI  # here, not above: children that SGLang spawns import this module again and must not start MPI

    comm = MPI.COMM_WORLD
    if comm.size != expected:
        raise WorldError(
            f"the MPI world has {comm.size} ranks, the launcher started {expected}",
            where=f"{role} rank {os.environ.get('SLURM_PROCID', comm.rank)} on {socket.gethostname()}",
            next_step="set slurm.mpi (or mpi in the site profile) to a kind of `srun --mpi=list` that your MPI speaks",
        )
    world = World(comm, comm, role, comm.rank, (), (), (), poll)
    _probe(world)
    _keep_moving(comm)  # after the probe: this is collective, and has no deadline
    members = comm.allgather((role, socket.gethostname()))
    world.train = tuple(i for i, (name, _) in enumerate(members) if name == "train")
    world.rollout = tuple(i for i, (name, _) in enumerate(members) if name == "rollout")
    world.hosts = tuple(host for _, host in members)
    if not world.train or not world.rollout:
        raise WorldError(f"{len(world.train)} train and {len(world.rollout)} rollout ranks: both roles are needed")
    world.role_comm = comm.Split(color=int(role == "rollout"), key=comm.rank)
    return world


def _keep_moving(comm: Any) -> None:
    """Look for messages from a thread of its own until the interpreter ends.

    MPI sends only while somebody is inside MPI. A rank that says "join me" and then blocks in a NCCL or gloo call would leave
    its word in a buffer for ever (seen with MPICH over libfabric and ucx between nodes).
    """
    own, over = comm.Dup(), threading.Event()

    def look() -> None:
        while not over.wait(PROGRESS_SECONDS):
            own.Iprobe()

    thread = threading.Thread(target=look, name="mpi-progress", daemon=True)
    thread.start()

    def stop() -> None:
        over.set()
        thread.join()

    atexit.register(stop)


def _probe(world: World) -> None:
    """A barrier and a broadcast from the last rank, which is on another component than the first."""
    import numpy as np

    world.barrier(PROBE_SECONDS, "the first barrier over all ranks")
    last = world.comm.size - 1
    buffer = np.full(PROBE_BYTES // 8, world.rank, np.int64)
    world.wait(world.comm.Ibcast(buffer, root=last), PROBE_SECONDS, "an 8 MiB broadcast over all ranks")
    if buffer[0] != last or buffer[-1] != last:
        raise WorldError("an 8 MiB broadcast over all ranks arrived damaged", where=f"rank {world.rank}")
