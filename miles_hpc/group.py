"""The process group of the first training rank and the engines' workers.

A collective whose other end has died may block for minutes, in gloo as in NCCL, and a thread inside it cannot be called back.
So everything that may block runs in a daemon thread of its own; the rank waits for it, beats its heart, and may give it up.
"""

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

NAME = "miles_hpc_weights"
POLL_SECONDS = 0.0001


class Group:
    """One generation of the group, seen from its rank 0.

    Args:
        generation: number; part of the group's name, so that two generations never meet.
        members: world ranks of the engines, in the order of their ranks in the group.
        workers: ranks of the group per engine.
        address: of this host, for the others.
        seconds: time-out of rendezvous and collectives, should nobody give them up before; NCCL then ends the process.
    """

    def __init__(self, generation: int, members: tuple[int, ...], workers: int, address: str, seconds: float) -> None:
        self.generation, self.members, self.workers = generation, members, workers
        self.size, self.seconds = 1 + workers * len(members), seconds
        self.store = open_store(address)
        self._group: Any = None
        self._stream: Any = None

    def join(self) -> Future[None]:
        """Meet the other ranks."""
        return aside(self._join)

    def broadcast(self, flat: "torch.Tensor") -> Future[None]:
        """Send [bytes] to all other ranks.

        Its end is waited for on a stream of its own: on the caller's, everything after a broadcast that never ends would hang.
        """
        import torch

        if not flat.is_cuda:
            return aside(lambda: self._broadcast(flat))
        self._stream = self._stream or torch.cuda.Stream(flat.device)
        self._stream.wait_stream(torch.cuda.current_stream())
        return aside(lambda: self._broadcast_on(self._stream, flat))

    def leave(self) -> None:
        """Take the group down, in whatever state it is; returns at once."""
        aside(self._leave)

    def _join(self) -> None:
        """As rank 0 beside the default group, as SGLang's `init_custom_process_group` does on the other side."""
        from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

        from miles_hpc.device import backend

        limit, name = timedelta(seconds=self.seconds), group_name(self.generation)
        self.store.set_timeout(limit)
        prefixed = PrefixStore(name, self.store)
        group, _ = _new_process_group_helper(
            self.size, 0, [], Backend(backend()), prefixed, group_name=name, backend_options=None, timeout=limit
        )
        _world.pg_group_ranks[group] = {rank: rank for rank in range(self.size)}
        self._group = group

    def _broadcast_on(self, stream: Any, flat: "torch.Tensor") -> None:
        import torch

        with torch.cuda.stream(stream):
            self._broadcast(flat)

    def _broadcast(self, flat: "torch.Tensor") -> None:
        import torch.distributed as dist

        work, end = dist.broadcast(flat, src=0, group=self._group, async_op=True), time.monotonic() + self.seconds
        while not work.is_completed() and time.monotonic() < end:  # NCCL's own wait looks once in a millisecond
            time.sleep(POLL_SECONDS)
        work.wait(timedelta(seconds=POLL_SECONDS))

    def _leave(self) -> None:
        import torch.distributed as dist

        group, self._group, self.store = self._group, None, None
        if group is not None:
            if dist.get_backend(group) == "nccl":
                dist.distributed_c10d._abort_process_group(group)  # an end that waits for the others would not come
            else:
                dist.destroy_process_group(group)


def group_name(generation: int) -> Any:  # torch's GroupName is a NewType of str in torch 2.13, str before
    """Name of a generation of the group, the same on both sides."""
    return f"{NAME}_{generation}"


def aside(work: Callable[[], None]) -> Future[None]:
    """Do `work` in a daemon thread, which the interpreter does not wait for at its end."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="weight-group", daemon=True).start()
    return future


def open_store(address: str) -> Any:
    """A rendezvous store on a port that the kernel picks, bound to `address` alone; other ranks learn the port over MPI."""
    from torch.distributed import TCPStore

    listener = socket.create_server((address, 0), backlog=128)
    port = listener.getsockname()[1]
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
