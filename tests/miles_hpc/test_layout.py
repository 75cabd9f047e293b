"""Where a checkpoint's tensors lie in an engine: what is copied there has the digests that the sender expects."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from miles_hpc.digest import digest
from miles_hpc.fused import Fused, different
from miles_hpc.layout import Layout
from miles_hpc.rollout.loading import Loader, views

HIDDEN, VOCABULARY, HEAD, WIDTH, EXPERTS = 8, 150, 4, 12, 3
SHAPES = {
    "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    **{f"model.layers.0.self_attn.{n}_proj.weight": (rows, HIDDEN) for n, rows in (("q", 32), ("k", 16), ("v", 16))},
    **{f"model.layers.0.self_attn.{n}_proj.bias": (rows,) for n, rows in (("q", 32), ("k", 16), ("v", 16))},
    "model.layers.0.self_attn.o_proj.weight": (HIDDEN, 32),
    "model.layers.0.self_attn.q_norm.weight": (HEAD,),
    **{f"model.layers.0.mlp.{n}_proj.weight": (WIDTH, HIDDEN) for n in ("gate", "up")},
    "model.layers.0.mlp.down_proj.weight": (HIDDEN, WIDTH),
    "model.layers.1.mlp.gate.weight": (EXPERTS, HIDDEN),
    **{f"model.layers.1.mlp.experts.{e}.{n}_proj.weight": (WIDTH, HIDDEN) for e in range(EXPERTS) for n in ("gate", "up")},
    **{f"model.layers.1.mlp.experts.{e}.down_proj.weight": (HIDDEN, WIDTH) for e in range(EXPERTS)},
}


def checkpoint() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=g) for name, shape in SHAPES.items()}


def engine(workers: int, copies: int = 1) -> dict[str, torch.Tensor]:
    """A worker's empty tensors; `copies`: workers that hold the same key-value heads."""
    kv, width, rows = 16 * copies // workers, WIDTH // workers, 192 // workers
    shapes = {
        "model.embed_tokens.weight": (rows, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "model.layers.0.self_attn.qkv_proj.weight": (32 // workers + 2 * kv, HIDDEN),
        "model.layers.0.self_attn.qkv_proj.bias": (32 // workers + 2 * kv,),
        "model.layers.0.self_attn.o_proj.weight": (HIDDEN, 32 // workers),
        "model.layers.0.self_attn.q_norm.weight": (HEAD,),
        "model.layers.0.mlp.gate_up_proj.weight": (2 * width, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, width),
        "model.layers.1.mlp.gate.weight": (EXPERTS, HIDDEN),
        "model.layers.1.mlp.experts.w13_weight": (EXPERTS, 2 * width, HIDDEN),
        "model.layers.1.mlp.experts.w2_weight": (EXPERTS, HIDDEN, width),
    }
    return {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}


def loader(tensors: dict[str, torch.Tensor], layout: Layout, worker: int = 0) -> Loader:
    model: Any = SimpleNamespace(named_parameters=tensors.items)
    return Loader(model, layout, worker)


@pytest.mark.parametrize(("workers", "groups"), [(1, 4), (2, 4), (4, 4), (4, 2), (2, 1)])
def test_what_workers_hold_has_the_digests_that_are_expected(workers, groups):
    layout, named = Layout(workers=workers, groups=groups), checkpoint()
    held = [engine(workers, max(1, workers // groups)) for _ in range(workers)]
    expected = Fused(layout)
    for name, tensor in reversed(named.items()):
        expected.add(name, tensor)
    for worker, tensors in enumerate(held):
        loader(tensors, layout, worker)(named.items())
        assert not any(tensor.isnan().any() for tensor in tensors.values())
    found = [{name: digest(tensor) for name, tensor in tensors.items()} for tensors in held]
    assert expected.digests() == expected.digests() == found
    if workers > 1:
        found[1]["model.norm.weight"] = ""
        assert different(expected.digests(), found) == ["model.norm.weight of worker 1"]
        assert len(different(expected.digests(), found[:1])) == workers * len(held[0])


def test_one_worker_holds_what_the_checkpoint_says():
    named, held = checkpoint(), engine(1)
    loader(held, Layout())(named.items())
    queries = torch.cat([named[f"model.layers.0.self_attn.{n}_proj.weight"] for n in "qkv"])
    assert torch.equal(held["model.layers.0.self_attn.qkv_proj.weight"], queries)
    assert torch.equal(held["model.embed_tokens.weight"][:VOCABULARY], named["model.embed_tokens.weight"])
    assert not held["model.embed_tokens.weight"][VOCABULARY:].any()
    up = named["model.layers.1.mlp.experts.2.up_proj.weight"]
    assert torch.equal(held["model.layers.1.mlp.experts.w13_weight"][2, WIDTH:], up)


def test_exact_engines_hold_the_checkpoints_tensors():
    named, layout = checkpoint(), Layout(exact=True)
    held = {name: torch.empty_like(tensor) for name, tensor in named.items()}
    loader(held, layout)(named.items())
    expected = Fused(layout)
    for name, tensor in named.items():
        expected.add(name, tensor)
    assert expected.digests() == [{name: digest(tensor) for name, tensor in held.items()}]


def test_a_tensor_that_the_engine_lacks_or_holds_in_another_shape():
    with pytest.raises(KeyError, match=r"model\.layers\.9"):
        loader(engine(1), Layout())([("model.layers.9.input_layernorm.weight", torch.zeros(HIDDEN))])
    with pytest.raises(RuntimeError):
        loader(engine(1), Layout())([("model.norm.weight", torch.zeros(HIDDEN + 1))])


def test_views_of_a_bucket():
    tensors = [torch.randn(2, 3), torch.arange(4, dtype=torch.int16), torch.zeros(0, 5)]
    flat = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in tensors])
    for tensor, view in zip(tensors, views(flat, [t.shape for t in tensors], [t.dtype for t in tensors]), strict=True):
        assert torch.equal(tensor, view) and view.dtype == tensor.dtype
