"""Model folders that cannot be trained: what is wrong is named."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_parts import config, hf_model, trainer

from miles_hpc.errors import ModelError
from miles_hpc.train import architecture


def _edit(folder, change):
    file = folder / "config.json"
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def _copy(models, family, folder):
    return shutil.copytree(models[family], folder / family)


REFUSED = {
    "architecture": (
        lambda c: c.update(architectures=["GPT2LMHeadModel"]),
        "Qwen3ForCausalLM, Qwen3MoeForCausalLM, LlamaForCausalLM",
    ),
    "model_type": (lambda c: c.update(model_type="nonesuch"), "supported: Qwen3ForCausalLM"),
    "bias": (lambda c: c.update(attention_bias=True), "attention_bias"),
    "rotary positions": (lambda c: c["rope_parameters"].update(rope_type="dynamic", factor=2.0), "rope_type default, linear"),
    "a size in words": (lambda c: c.update(hidden_size="x"), "config.json cannot be read: .*'hidden_size'"),
    "a list as model_type": (lambda c: c.update(model_type=[1]), "config.json cannot be read"),
    "activation": (lambda c: c.update(hidden_act="gelu"), "hidden_act = 'gelu'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name, models, tmp_path):
    change, message = REFUSED[name]
    folder = _copy(models, "qwen3", tmp_path)
    _edit(folder, change)
    with pytest.raises(ModelError, match=message):
        architecture.read(folder)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        architecture.read(tmp_path)


@pytest.mark.parametrize(
    ("tp", "ep", "message"), [(3, 1, "num_attention_heads = 4"), (4, 1, "num_key_value_heads = 2"), (1, 3, "num_experts = 4")]
)
def test_ranks_that_do_not_fit_the_model_are_refused(tp, ep, message):
    with pytest.raises(ModelError, match=message):
        architecture.check_parallel(hf_model("moe").config, tp, ep)


def test_expert_parallelism_without_experts_is_refused():
    with pytest.raises(ModelError, match="no experts"):
        architecture.check_parallel(hf_model("qwen3").config, 1, 2)


def _rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


DAMAGED = {
    "missing": (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "missing tensors: model.layers.1.mlp.up_proj.weight"),
    "unexpected": (lambda t: t.update(extra=torch.zeros(2)), "unexpected tensors: extra"),
    "shape": (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"model.norm.weight \(3,\)"),
    "rows": (lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": torch.zeros(31, 64)}), r"k_proj.weight \(31, 64\)"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_tensors_that_do_not_fit_are_named(name, models, tmp_path):
    change, message = DAMAGED[name]
    folder = _copy(models, "qwen3", tmp_path)
    _rewrite(folder, change)
    with pytest.raises(ModelError, match=message), trainer(config(), folder, tmp_path / "store"):
        pass


def test_a_damaged_file_is_named(models, tmp_path):
    folder = _copy(models, "qwen3", tmp_path)
    (folder / "model.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(ModelError, match="damaged checkpoint file"), trainer(config(), folder, tmp_path / "store"):
        pass
