"""When held-out prompts are scored."""

import pytest

from miles_hpc import config, evaluation


def plan(every: int, held_out: str = "held.jsonl") -> config.Config:
    sections = {
        "run": {"name": "t", "steps": 10},
        "model": {"path": "m"},
        "data": {"prompts": "p.jsonl", "eval": held_out},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, "max_new_tokens": 8, "reward": "a:b"},
        "train": {"lr": 1e-4},
        "eval": {"every_steps": every},
    }
    return config.Config.model_validate(sections)


@pytest.mark.parametrize(("every", "versions"), [(0, [0, 10]), (4, [0, 4, 8, 10]), (5, [0, 5, 10])])
def test_first_last_and_every_n(every, versions):
    assert [v for v in range(11) if evaluation.due(plan(every), v)] == versions


def test_never_without_held_out_prompts():
    assert not any(evaluation.due(plan(2, ""), v) for v in range(11))


def test_shares_add_up_to_one_mean():
    assert evaluation.Score(3, 6.0, 8, 0.1).mean == 0.75
    assert evaluation.Score(3, 0.0, 0, 0.0).mean == 0.0
