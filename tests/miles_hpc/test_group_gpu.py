"""On a GPU: a broadcast that hangs holds up nobody but the thread that waits for it."""

import threading

import pytest
import torch
import torch.distributed as dist

from miles_hpc.group import Group

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytestmark = pytest.mark.gpu
CYCLES = 10**10
"""About 5 s."""


class Hanging:
    def wait(self, limit):
        torch.cuda.current_stream().synchronize()


def test_what_follows_a_broadcast_that_hangs_goes_on(monkeypatch):
    group, begun = Group(1, (1,), 1, "127.0.0.1", 60.0), threading.Event()

    def broadcast(flat, **options):
        torch.cuda._sleep(CYCLES)  # on the stream of this thread, as NCCL's wait has it
        begun.set()
        return Hanging()

    monkeypatch.setattr(dist, "broadcast", broadcast)
    sent = group.broadcast(torch.ones(8, device="cuda"))
    assert begun.wait(60)
    assert int(torch.ones(8, device="cuda").sum()) == 8
    assert not sent.done()
    sent.result(timeout=60)
