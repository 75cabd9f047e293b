"""Weight sync over MPI and gloo: what arrives is what was sent, and what would go wrong silently is named."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_hpc import buckets
from miles_hpc.errors import SyncError, WorldError
from miles_hpc.examples import arithmetic
from miles_hpc.handover import Borrower
from miles_hpc.layout import engine_tensor
from miles_hpc.world import World

pytestmark = pytest.mark.mpi


@pytest.fixture
def model(tmp_path):
    arithmetic.model(tmp_path, seed=0)
    return tmp_path


def test_every_version_reaches_every_engine(mpi, model):
    done = mpi("sync", "fine", train=2, rollout=2)
    assert done.returncode == 0, done.stdout + done.stderr
    sent = [[int(word) for word in line.split()] for line in (model / "sent").read_text().splitlines()]
    size = sum(tensor.nbytes for tensor in load_file(model / "model.safetensors").values())
    assert [line[:2] for line in sent] == [[0, size], [1, size], [2, size]]
    assert {line[2] for line in sent} == {2 * len(engine_tensors(model))}
    assert [(model / f"took-{rank}").read_text() for rank in (2, 3)] == ["0 1 2 "] * 2


def test_weights_shared_by_every_training_rank_reach_the_engine_beside_it(mpi, model):
    done = mpi("sync", "fine", "2", train=4, rollout=2)
    assert done.returncode == 0, done.stdout + done.stderr
    sent = [[int(word) for word in line.split()] for line in (model / "sent").read_text().splitlines()]
    size = sum(tensor.nbytes for tensor in load_file(model / "model.safetensors").values())
    assert sent == [[version, size, 2 * 2 * len(engine_tensors(model))] for version in range(3)]
    assert [(model / f"took-{rank}").read_text() for rank in (4, 5)] == ["0 1 2 "] * 2


def test_weights_over_a_transport_of_the_users_own(mpi, model):
    done = mpi("sync", "fine", "files", train=2, rollout=2)
    assert done.returncode == 0, done.stdout + done.stderr
    sent = [[int(word) for word in line.split()] for line in (model / "sent").read_text().splitlines()]
    size = sum(tensor.nbytes for tensor in load_file(model / "model.safetensors").values())
    assert sent == [[version, size, 2 * len(engine_tensors(model))] for version in range(3)]
    assert not list((model / "weights").iterdir())


def test_bytes_that_a_transport_loses_are_named(mpi, model):
    done = mpi("sync", "short", "files", train=1, rollout=1)
    assert done.returncode != 0
    assert "rollout.weight_transport get('001-000000000') must return" in (model / "refused-rollout").read_text()


def engine_tensors(model) -> set[str]:
    return {engine_tensor(name)[0] for name in load_file(model / "model.safetensors")}


@pytest.mark.parametrize("way", ["", "1", "files"], ids=["broadcast", "shared", "files"])
@pytest.mark.parametrize(
    ("mode", "named"),
    [
        ("flipped", "model.layers.0.self_attn.qkv_proj.weight"),
        ("missing", "lack 9 tensors"),
        ("reshaped", "lm_head.weight has shape"),
    ],
)
def test_what_the_engine_would_not_notice_is_named(mpi, model, mode, named, way):
    done = mpi("sync", mode, *filter(None, [way]), train=1, rollout=1)
    assert done.returncode != 0
    assert named in (model / "refused-train").read_text()


def test_buckets_keep_the_order_the_limit_and_one_dtype():
    named = [(str(i), torch.zeros(size)) for i, size in enumerate([100_000, 200_000, 300_000, 10, 10])]
    named += [("5", torch.zeros(3, 7).bfloat16()), ("6", torch.zeros(0, 2).bfloat16())]
    found = buckets.buckets(named, {"cpu": 1})
    assert [bucket.names for bucket in found] == [("0",), ("1",), ("2",), ("3", "4"), ("5", "6")]
    assert [bucket.size for bucket in found] == [400_000, 800_000, 1_200_000, 80, 42]
    assert [buckets.Bucket.read(bucket.text) for bucket in found] == found


def test_what_lies_in_a_bucket_is_what_was_put_in():
    tensors = [torch.randn(2, 3), torch.randn(4, 5).t(), torch.zeros(0, 5), torch.randn(1, requires_grad=True)]
    (bucket,) = buckets.buckets([(str(i), tensor) for i, tensor in enumerate(tensors)])
    for view, tensor in zip(bucket.views(bucket.flat(tensors)), tensors, strict=True):
        assert torch.equal(view, tensor) and view.shape == tensor.shape


def test_a_trainer_that_changes_its_order_is_found_out(model):
    named = list(load_file(model / "model.safetensors").items())
    cargo = buckets.Cargo(SimpleNamespace(weights=lambda: iter(named)), model)
    assert sum(len(flat) for _, flat in cargo) == cargo.size
    named[0], named[1] = named[1], named[0]
    with pytest.raises(SyncError, match="another order"):
        list(cargo)


def test_checkpoint_shapes_come_from_all_files(tmp_path):
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(5)}, tmp_path / "model-00002-of-00002.safetensors")
    assert buckets.checkpoint_shapes(tmp_path) == {"a": (2, 3), "b": (5,)}


def test_an_engine_away_from_its_training_ranks_is_refused():
    role: Any = SimpleNamespace(rank=1, size=2)
    world = World(None, role, "rollout", 3, (0, 1), (2, 3), ("a", "b", "a", "a"), lambda: None)
    nothing: Any = None
    with pytest.raises(WorldError, match="the engine is on a, its training ranks on b"):
        Borrower(world, nothing, 1, nothing, 1.0)
