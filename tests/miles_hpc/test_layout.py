"""Where a checkpoint's tensors lie in an engine: what is copied there has the digests that the sender expects."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from miles_hpc.buckets import Bucket, buckets
from miles_hpc.digest import digest
from miles_hpc.fused import Fused, different
from miles_hpc.layout import Layout
from miles_hpc.rollout.loading import Loader

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


def packed(named: dict[str, torch.Tensor], of: int = 5) -> list[tuple[Bucket, torch.Tensor]]:
    """In buckets of so many tensors, with their bytes."""
    pairs = list(named.items())
    groups = [pairs[i : i + of] for i in range(0, len(pairs), of)]
    return [(bucket, bucket.flat(tensor for _, tensor in group)) for group in groups for bucket in buckets(group)]


def expected(flats: list[tuple[Bucket, torch.Tensor]], layout: Layout) -> list[dict[str, str]]:
    fused = Fused([bucket for bucket, _ in flats], layout)
    sums = [fused.sums(bucket, flat) for bucket, flat in flats]
    assert fused.digests(sums) == fused.digests(sums)
    return fused.digests(sums)


def load(tensors: dict[str, torch.Tensor], layout: Layout, flats: list[tuple[Bucket, torch.Tensor]], worker: int = 0) -> None:
    """Twice, as every sync after the first finds the places known."""
    model: Any = SimpleNamespace(named_parameters=tensors.items)
    loader = Loader(model, layout, worker)
    for bucket, flat in [(bucket, torch.zeros_like(flat)) for bucket, flat in flats] + flats:
        loader(bucket, flat)


@pytest.mark.parametrize(("workers", "groups"), [(1, 4), (2, 4), (4, 4), (4, 2), (2, 1)])
def test_what_workers_hold_has_the_digests_that_are_expected(workers, groups):
    layout, named = Layout(workers=workers, groups=groups), checkpoint()
    held = [engine(workers, max(1, workers // groups)) for _ in range(workers)]
    flats = packed(dict(reversed(named.items())))
    for worker, tensors in enumerate(held):
        load(tensors, layout, flats, worker)
        assert not any(tensor.isnan().any() for tensor in tensors.values())
    found = [{name: digest(tensor) for name, tensor in tensors.items()} for tensors in held]
    assert expected(flats, layout) == found
    if workers > 1:
        found[1]["model.norm.weight"] = ""
        assert different(expected(flats, layout), found) == ["model.norm.weight of worker 1"]
        assert len(different(expected(flats, layout), found[:1])) == workers * len(held[0])


def test_one_worker_holds_what_the_checkpoint_says():
    named, held = checkpoint(), engine(1)
    load(held, Layout(), packed(named))
    queries = torch.cat([named[f"model.layers.0.self_attn.{n}_proj.weight"] for n in "qkv"])
    assert torch.equal(held["model.layers.0.self_attn.qkv_proj.weight"], queries)
    assert torch.equal(held["model.embed_tokens.weight"][:VOCABULARY], named["model.embed_tokens.weight"])
    assert not held["model.embed_tokens.weight"][VOCABULARY:].any()
    up = named["model.layers.1.mlp.experts.2.up_proj.weight"]
    assert torch.equal(held["model.layers.1.mlp.experts.w13_weight"][2, WIDTH:], up)


def test_exact_engines_hold_the_checkpoints_tensors():
    named, layout = checkpoint(), Layout(exact=True)
    held = {name: torch.empty_like(tensor) for name, tensor in named.items()}
    load(held, layout, packed(named))
    assert expected(packed(named), layout) == [{name: digest(tensor) for name, tensor in held.items()}]


def test_a_tensor_that_the_engine_lacks_or_holds_in_another_shape():
    with pytest.raises(KeyError, match=r"model\.layers\.9"):
        load(engine(1), Layout(), packed({"model.layers.9.input_layernorm.weight": torch.zeros(HIDDEN)}))
    with pytest.raises(RuntimeError):
        load(engine(1), Layout(), packed({"model.norm.weight": torch.zeros(HIDDEN + 1)}))


def test_bytes_that_are_no_whole_words_are_the_last_ones():
    odd = torch.randn(3).bfloat16()
    assert expected(packed({"model.norm.weight": odd, "b": odd}), Layout()) == [
        {"model.norm.weight": digest(odd), "b": digest(odd)}
    ]
    with pytest.raises(ValueError, match=r"parts of model\.layers\.0\.self_attn\.qkv_proj\.bias are no whole words"):
        expected(packed({f"model.layers.0.self_attn.{name}_proj.bias": odd for name in "qkv"}), Layout())
