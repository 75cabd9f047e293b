"""On a GPU with too little memory for a micro-batch: the step is that of a run that began with smaller ones, bit for bit."""

import gc
import hashlib

import pytest
import torch
from train_parts import config, hf_model, samples, trainer

from miles_hpc import device
from miles_hpc.config import Config
from miles_hpc.train.advantage import group_advantages

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytestmark = pytest.mark.gpu
device.without_workspace()

SIZES = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 6, "num_attention_heads": 16, "head_dim": 64}
SIZES |= {"num_key_value_heads": 8, "max_position_embeddings": 1024, "initializer_range": 0.03, "vocab_size": 32000}
TOKENS = 16384
STEPS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    hf_model("qwen3", **SIZES).bfloat16().save_pretrained(folder)
    return folder


def steps(model, store, tokens, gib=0.0):
    """Digest of all weights after some steps, GiB beyond what there was before, and the trainer's last limit.

    Args:
        gib: all that may be taken beyond what there was before; 0: all of the GPU.
    """
    run = config(micro_batch_tokens=tokens, dtype="bfloat16").model_dump()
    run["run"]["numerics"] = "exact"  # gradients repeat
    run["model"]["context_length"] = 1024
    s, digest = samples(prompts=32, group=4, shortest=200, longest=300), hashlib.sha256()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, total = torch.cuda.memory_reserved(), torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (before + gib * 2**30) / total) if gib else 1.0)
    with trainer(Config.model_validate(run), model, store) as made:
        made.proved = True  # no sampler gave these log-probs
        for step in range(STEPS):
            made.step(s, group_advantages(s.rewards, 4), step)
        for _, tensor in made.weights():
            digest.update(tensor.contiguous().view(torch.int16).cpu().numpy().tobytes())
        limit = made.passes.limit
    return digest.hexdigest(), (torch.cuda.max_memory_allocated() - before) / 2**30, limit


def test_a_step_for_which_memory_is_too_small(model, tmp_path):
    large, most, _ = steps(model, tmp_path / "large", TOKENS)
    small, least, _ = steps(model, tmp_path / "small", TOKENS // 2)
    assert most - least > 0.5 and large != small
    there = (most + least) / 2
    try:
        found, peak, limit = steps(model, tmp_path / "short", TOKENS, there)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    print(f"{most:.2f} GiB needed, {least:.2f} with half, {there:.2f} there; peak {peak:.2f}, then {limit} tokens")
    assert peak <= there and limit == TOKENS // 2
    assert found == small
