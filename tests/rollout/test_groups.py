"""Rollout functions: one coroutine answers a whole share, in its own order, and may say what an answer is worth."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from rollout_parts import by_index, generator

from miles_hpc.errors import EdgeError
from miles_hpc.filters import zero_variance
from miles_hpc.rollout.judge import Judge
from miles_hpc.sample import Sample
from miles_hpc.samples.schema import STOPPED, TRUNCATED, Samples


async def answer(sample: Sample, engine: Any) -> None:
    output = await engine.generate(sample, sample.tokens)
    sample.tokens = [*sample.tokens, *output.tokens]
    sample.response_length, sample.rollout_log_probs = len(output.tokens), output.log_probs
    sample.status = Sample.Status.COMPLETED if output.stopped else Sample.Status.TRUNCATED


async def backwards(groups: list[list[Sample]], engine: Any) -> AsyncIterator[list[Sample]]:
    """The last group first."""
    for group in reversed(groups):
        for sample in group:
            await answer(sample, engine)
        yield group


async def tournament(groups: list[list[Sample]], engine: Any) -> AsyncIterator[list[Sample]]:
    """The longest answer of a group wins."""
    async for group in backwards(groups, engine):
        longest = max(sample.response_length for sample in group)
        for sample in group:
            sample.reward = {"reward": float(sample.response_length == longest), "length": sample.response_length}
        yield group


def whole(function: Any, **rollout: Any) -> Any:
    source = generator(by_index, **rollout)
    source.whole = function
    return source


def test_a_rollout_function_gives_what_the_engine_alone_gives() -> None:
    plain = Samples.concat(list(generator(by_index).groups(0, [1, 3], 5))).sorted()
    source = whole(backwards)
    found = Samples.concat(list(source.groups(0, [1, 3], 5))).sorted()
    for name in ("tokens", "loss_mask", "rollout_log_probs", "rewards", "status", "weight_versions"):
        np.testing.assert_array_equal(getattr(found, name), getattr(plain, name))
    assert source.evaluate().prompts == 3


def test_the_reward_that_a_function_sets_counts() -> None:
    found = Samples.concat(list(whole(tournament).groups(0, [1, 3], 5))).sorted()
    assert found.rewards.tolist() == [1, 0, 1, 1, 0, 1]  # even samples end with a stop token
    assert found.reward_parts["length"].tolist() == [2, 1, 2, 2, 1, 2]


def test_replacements_of_refused_groups_are_asked_for_again() -> None:
    calls: list[list[int | None]] = []

    async def noted(groups: list[list[Sample]], engine: Any) -> AsyncIterator[list[Sample]]:
        calls.append([group[0].group_index for group in groups])
        async for group in backwards(groups, engine):
            for sample in group:
                sample.reward = 1.0 if sample.group_index == 1 else float(sample.index or 0)
            yield group

    source = whole(noted)
    source.judge = Judge(filters=[zero_variance])
    found = Samples.concat(list(source.groups(0, [1, 3], 5, spare={1: [2]}))).sorted()
    assert calls == [[1, 3], [2]]
    assert sorted(set(found.accepted.prompt_ids)) == [2, 3] and set(found.refused.prompt_ids) == {1}


async def leaves_out(groups: list[list[Sample]], engine: Any) -> AsyncIterator[list[Sample]]:
    async for group in backwards(groups[1:], engine):
        yield group


async def twice(groups: list[list[Sample]], engine: Any) -> AsyncIterator[list[Sample]]:
    async for group in backwards(groups, engine):
        yield group
        yield group


async def strangers(groups: list[list[Sample]], engine: Any) -> AsyncIterator[list[Sample]]:
    yield [Sample(group_index=99, index=0)]


async def a_stranger_at_the_end(groups: list[list[Sample]], engine: Any) -> AsyncIterator[list[Sample]]:
    async for group in backwards(groups, engine):
        yield group
    yield [Sample(group_index=99, index=0)]


async def raises(groups: list[list[Sample]], engine: Any) -> AsyncIterator[list[Sample]]:
    async for group in backwards(groups[:1], engine):
        yield group
    raise ValueError("out of ideas")


async def unanswered(groups: list[list[Sample]], engine: Any) -> AsyncIterator[list[Sample]]:
    for group in groups:
        yield group


async def worthless(groups: list[list[Sample]], engine: Any) -> AsyncIterator[list[Sample]]:
    async for group in backwards(groups, engine):
        group[0].reward = "good"
        yield group


def test_samples_of_a_rollout_function_are_removed_dropped_and_ended_as_those_of_a_generate_function() -> None:
    async def mixed(groups: list[list[Sample]], engine: Any) -> AsyncIterator[list[Sample]]:
        async for group in backwards(groups, engine):
            for sample in group:
                sample.status = Sample.Status.FAILED if sample.group_index == 1 else Sample.Status.PENDING
            group[2].remove_sample = True
            yield group

    source = whole(mixed, reward_error="drop")
    found = Samples.concat(list(source.groups(0, [1, 3], 5))).sorted()
    assert list(source.reward_errors) == [1] and "rollout.function has no answer for prompt 1" in source.reward_errors[1]
    assert found.answer_lengths.tolist() == [2, 1, 0] and found.status.tolist() == [STOPPED, TRUNCATED, STOPPED]


@pytest.mark.parametrize(
    ("function", "what"),
    [(leaves_out, "ended without 3 of its answers, the first: prompt 1, sample 0"), (twice, "each once"),
     (a_stranger_at_the_end, "each once"),
     (strangers, "each once"), (raises, "ValueError: out of ideas"), (unanswered, "0 answer tokens"),
     (worthless, r"sample\.reward of prompt \d, sample 0 must return a finite number")],
)  # fmt: skip
def test_bad_rollout_functions_are_named(function: Any, what: str) -> None:
    with pytest.raises(EdgeError, match=what) as caught:
        list(whole(function).groups(0, [1, 3], 0))
    assert "test_groups.py:" in caught.value.where


@pytest.mark.parametrize("also_open", [True, False])
def test_a_function_that_raises_after_its_last_answer_is_named(also_open: bool) -> None:
    async def raises_at_the_end(groups: list[list[Sample]], engine: Any) -> AsyncIterator[list[Sample]]:
        if len(groups) == 1:  # the replacement is still under way when the first call fails
            await asyncio.sleep(60)
        async for group in backwards(groups, engine):
            yield group
        await asyncio.sleep(0.1)
        raise ValueError("out of ideas")

    source = whole(raises_at_the_end)
    if also_open:
        source.judge = Judge(filters=[lambda samples: "no" * (samples[0].group_index == 1)])
    with pytest.raises(EdgeError, match="ValueError: out of ideas"):
        list(source.groups(0, [1, 3], 5, spare={1: [2]}))
