"""When held-out prompts are scored."""

from types import SimpleNamespace
from typing import Any

import pytest

from miles_hpc import config, evaluation, loop
from miles_hpc.rollout.role import RolloutRole


def plan(every: int, held_out: str = "held.jsonl", staleness: int = 0) -> config.Config:
    sections = {
        "run": {"name": "t", "steps": 10},
        "model": {"path": "m"},
        "data": {"prompts": "p.jsonl", "eval": held_out},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, "max_new_tokens": 8, "reward": "a:b"}
        | {"staleness": staleness},
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


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(("first", "every"), [(0, 1), (0, 3), (4, 1), (4, 3)])
def test_an_engine_scores_every_due_version_once(staleness: int, again: bool, first: int, every: int) -> None:
    """Else the trainer waits for ever: also of the last but one, and of one that it got in a generation, started again."""
    receiver: Any = SimpleNamespace(version=-1)
    receiver.receive = lambda version: setattr(receiver, "version", max(version, receiver.version))
    nothing: Any = SimpleNamespace()
    role, scored = RolloutRole(plan(every, staleness=staleness), *[nothing] * 4, receiver, *[nothing] * 2, 1.0), list[int]()
    role.start = lambda: setattr(role, "version", first - 1) or first  # type: ignore[method-assign]
    role.generate = lambda step: again and receiver.receive(step)  # type: ignore[method-assign,assignment]
    role._evaluate = lambda version: scored.append(version) or receiver.version == version or pytest.fail()  # type: ignore
    loop.rollout(role)
    assert scored == [version for version in range(first, 11) if version in (0, 10) or version % every == 0]
