"""Hugging Face checkpoints in and out: names, values, and what the model computes with them."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from train_parts import FAMILIES, config, hf_model, samples, trainer, write_model

from miles_hpc.train.convert import COLUMNS, GATE_UP, QKV, ROWS, VOCAB, Dims, rules
from miles_hpc.train.packing import pack

VARIANTS = {
    "moe_unnormalised": ("moe", {"norm_topk_prob": False}),
    "moe_partly_dense": ("moe", {"mlp_only_layers": [0]}),
    "qwen3_tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_yarn": (
        "qwen3",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}},
    ),
    "llama_untied_scaled": (
        "llama",
        {
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8,
            },
        },
    ),
}


@pytest.fixture(scope="module", params=[*FAMILIES, *VARIANTS])
def pair(request, tmp_path_factory):
    """(transformers model, trainer, folder) of the same checkpoint."""
    family, changes = VARIANTS.get(request.param, (request.param, {}))
    root = tmp_path_factory.mktemp(request.param)
    folder = write_model(family, root / "model", **changes)
    with trainer(config(), folder, root / "store") as made:
        yield hf_model(family, **changes), made, folder


@torch.no_grad()
def test_logits_are_those_of_transformers(pair):
    model, made, _ = pair
    s, chosen = samples(), np.array([3, 1, 5, 17])
    p = pack(s, chosen, 1, torch.device("cpu"))
    logits = made.policy.logits(p)
    for i, start, end in zip(chosen, p.bounds[:-1], p.bounds[1:], strict=True):
        tokens = torch.from_numpy(s.tokens[s.offsets[i] : s.offsets[i + 1]]).long()
        torch.testing.assert_close(logits[start:end], model(tokens[None]).logits[0], atol=1e-5, rtol=0)


def test_round_trip_is_bitwise(pair):
    _, made, folder = pair
    expected = load_file(folder / "model.safetensors")
    found = dict(made.weights())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == found[name].dtype and torch.equal(tensor, found[name]), name


def test_an_export_is_loadable_by_transformers(pair, tmp_path):
    from transformers import AutoModelForCausalLM

    model, made, folder = pair
    (folder / "tokenizer_config.json").write_text("{}")
    made.export(tmp_path / "export")
    made.export(tmp_path / "export")  # an export there already is replaced
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    names = {p.name for p in (tmp_path / "export").iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json"}
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


@pytest.mark.parametrize("size", [1, 2])
def test_layouts_split_and_join_bitwise(size):
    dims = Dims(heads=4, groups=2, head_dim=3, vocab=7)
    tensors = {
        "qkv": (QKV, [torch.randn(12, 5), torch.randn(6, 5), torch.randn(6, 5)]),
        "gate_up": (GATE_UP, [torch.randn(8, 5), torch.randn(8, 5)]),
        "rows": (ROWS, [torch.randn(8, 5)]),
        "columns": (COLUMNS, [torch.randn(5, 8)]),
        "vocabulary": (VOCAB, [torch.randn(7, 5)]),
    }
    for name, (layout, whole) in tensors.items():
        joined = layout.whole([layout.shard(whole, dims, rank, size) for rank in range(size)], dims)
        assert all(torch.equal(a, b) for a, b in zip(whole, joined, strict=True)), name


def test_order_is_fixed_and_names_are_unique():
    names = [source for rule in rules(hf_model("moe").config) for source in rule.sources]
    assert names[0] == "model.embed_tokens.weight" and names[-1] == "lm_head.weight"
    assert len(set(names)) == len(names)
