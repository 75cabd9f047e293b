"""What exact numerics refuse, by name."""

import pytest

from miles_hpc.config import Config
from miles_hpc.rollout import sglang

BASE = {
    "run": {"name": "t", "steps": 1, "numerics": "exact"},
    "model": {"path": "unused"},
    "data": {"prompts": "a:b"},
    "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 8, "reward": "a:b"},
    "train": {"lr": 1e-4},
    "slurm": {"train": {"ranks_per_node": 2}},
}


@pytest.mark.parametrize(
    ("section", "key"),
    [("train", "tensor_parallel"), ("train", "expert_parallel"), ("rollout", "tensor_parallel"), ("rollout", "staleness")],
)
def test_settings_that_are_not_covered(section, key):
    value = 1 if key == "staleness" else 2
    with pytest.raises(
        ValueError, match=rf'needs {section}\.{key} = {value - 1}, not {value}; or set run\.numerics = "native"'
    ):
        Config.model_validate(BASE | {section: BASE[section] | {key: value}})
    Config.model_validate(BASE)


def test_no_model_class_of_sglang_is_left_to_fall_back_to():
    off = sglang._other_models(())
    assert {"qwen3", "qwen3_moe", "llama", "transformers"} <= set(off) and "exact_causal" not in off
    assert not set(sglang.MODELS) & set(sglang._other_models(sglang.MODELS))
