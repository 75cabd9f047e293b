"""`compare-numerics` names the first operation that trainer and engine compute differently."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_hpc import comparison
from miles_hpc.config import Config
from miles_hpc.examples import arithmetic

pytestmark = pytest.mark.engine


def config(numerics: str) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "t", "steps": 1, "numerics": numerics},
            "model": {"path": "unused", "context_length": 96},
            "data": {"prompts": "miles_hpc.examples.arithmetic:prompts"},
            "rollout": {"prompts_per_step": 8, "samples_per_prompt": 2, "max_new_tokens": 24, "reward": "a:b"},
            "train": {"lr": 1e-4},
        }
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    arithmetic.model(folder, seed=1)
    return folder


def served(numerics: str, model: Path) -> comparison.Served:
    settings = config(numerics)
    return comparison.serve(settings, model, comparison.requests(settings, model))


@pytest.fixture(scope="module")
def exact(model) -> comparison.Served:
    return served("exact", model)


def first(found: list[comparison.Difference]) -> str | None:
    return next((d.name for d in found if d.differing), None)


def test_nothing_differs_in_exact_numerics(exact, model):
    found = comparison.against(config("exact"), model, exact)
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    assert [d.op for d in found[: len(comparison.OPS)]] == list(comparison.OPS)
    assert len(found) == layers * len(comparison.OPS) + 2 and found[-1].name == "log_probs"
    assert first(found) is None and found[0].tokens > 200 and found[-1].tokens > 100


def next_float(folder: Path, name: str) -> None:
    """Every element of one tensor of the checkpoint becomes the next larger float."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = torch.nextafter(tensors[name], torch.tensor(torch.inf))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def other_epsilon(folder: Path) -> None:
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"rms_norm_eps": 2e-6}))


LAYER = "model.layers.1."
BREAKS: dict[str, Callable[[Path], None]] = {
    "layer 0 input_layernorm": other_epsilon,
    "layer 1 input_layernorm": lambda f: next_float(f, LAYER + "input_layernorm.weight"),
    "layer 1 qkv_proj": lambda f: next_float(f, LAYER + "self_attn.v_proj.weight"),
    "layer 1 q_norm_rope": lambda f: next_float(f, LAYER + "self_attn.q_norm.weight"),
    "layer 1 k_norm_rope": lambda f: next_float(f, LAYER + "self_attn.k_norm.weight"),
    "layer 1 o_proj": lambda f: next_float(f, LAYER + "self_attn.o_proj.weight"),
    "layer 1 post_attention_layernorm": lambda f: next_float(f, LAYER + "post_attention_layernorm.weight"),
    "layer 1 router": lambda f: next_float(f, LAYER + "mlp.gate.weight"),
    "layer 1 mlp": lambda f: next_float(f, LAYER + "mlp.experts.0.down_proj.weight"),
    "norm": lambda f: next_float(f, "model.norm.weight"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_operation_is_named(exact, model, tmp_path, name):
    """The sides are given other numbers in one place; it is the trainer's, since an engine takes long to start."""
    broken = shutil.copytree(model, tmp_path / "broken")
    BREAKS[name](broken)
    found = comparison.against(config("exact"), broken, exact)
    assert first(found) == name
    different = next(d for d in found if d.differing)
    assert different.largest > 0 and different.ulps > 0


def test_a_broken_attention_is_named(exact, model, monkeypatch):
    from miles_hpc.train import exact as module

    whole = module.varlen
    monkeypatch.setattr(module, "varlen", lambda q, k, v, t, g, scale: whole(q, k, v, t, g, scale * (1 + 1e-6)))
    assert first(comparison.against(config("exact"), model, exact)) == "layer 0 attention"


def test_native_numerics_differ_by_little(model):
    """SGLang's own classes are watched too."""
    found = comparison.against(config("native"), model, served("native", model))
    assert [d.op for d in found[: len(comparison.OPS)]] == list(comparison.OPS)
    assert first(found) is not None and max(d.largest for d in found) < 1e-3
    assert found[-1].name == "log_probs" and 0 < found[-1].largest < 1e-4
