"""The stand-in for `torch.cuda` on a machine without it."""

import subprocess
import sys

import pytest
import torch

from miles_hpc import device

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA needs no stand-in")


@pytest.fixture(autouse=True)
def installed():
    assert device.install() and device.install()  # twice changes nothing more


def test_cuda_stays_unavailable():
    assert not torch.cuda.is_available()
    assert (device.backend(), device.device()) == ("gloo", device.CPU)


def test_cuda_literals_mean_the_cpu():
    for where in ("cuda", "cuda:0", torch.device("cuda"), torch.cuda.current_device()):
        assert torch.zeros(2, device=where).device == device.CPU
        assert torch.ones(2).to(where).device == device.CPU
    assert torch.empty(2, pin_memory=True).cuda().pin_memory().device == device.CPU


def test_other_arguments_pass_through():
    assert torch.ones(2).to(torch.float64).dtype == torch.float64
    assert torch.ones(2).type(torch.int32).dtype == torch.int32
    assert torch.ones(2).type() == "torch.cuda.FloatTensor"  # what megatron's optimizers compare with


def test_random_states_are_the_cpus():
    torch.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    torch.cuda.manual_seed(3)
    assert torch.equal(torch.rand(3), first)


def test_nothing_is_compiled():
    def function(): ...

    assert torch.compile(function) is torch.compile(function, dynamic=True) is function
    assert torch.compile(dynamic=True)(function) is function


def test_streams_and_events_do_nothing():
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event()
        start.record()
        end.record()
    assert start.elapsed_time(end) >= 0


def test_devices_as_contexts_go_on_to_work():
    """Where nobody had used one before: transformers loads models in one, and would leave buffers with what was in memory."""
    code = """
import torch
from miles_hpc import device
device.install()
with torch.device("meta"):
    made = {name: getattr(torch, name)(*of).is_meta for name, of in %r.items()}
assert all(made.values()), made
"""
    size = ([2],)
    arguments = dict.fromkeys(("zeros", "ones", "empty", "rand", "randn", "tensor", "as_tensor"), size)
    arguments |= {"full": ([2], 1.0), "arange": (2,), "empty_strided": ([2], [1])}
    assert set(arguments) == set(device.FACTORIES)
    subprocess.run([sys.executable, "-c", code % arguments], check=True)
