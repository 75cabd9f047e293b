"""Group rewards, filters, replacement of refused groups, and what a resumed step still has to do."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_parts import by_index, generator

from miles_hpc import filters, metrics
from miles_hpc.data import Prompts
from miles_hpc.errors import EdgeError
from miles_hpc.records import Row
from miles_hpc.rollout.judge import Judge
from miles_hpc.rollout.role import open_places
from miles_hpc.sample import Sample
from miles_hpc.samples.schema import Samples


def group(*rewards: float, tokens: int = 5, status: Sample.Status = Sample.Status.COMPLETED) -> list[Sample]:
    return [Sample(reward=reward, response_length=tokens, status=status) for reward in rewards]


def test_filters_in_the_box() -> None:
    assert filters.zero_variance(group(1, 1)) == "zero_variance_1" and filters.zero_variance(group(1, 0)) == ""
    assert filters.answer_length(group(1, tokens=3), shortest=4) == "too_short"
    assert filters.answer_length(group(1, tokens=9), longest=8) == "too_long"
    assert filters.answer_length(group(1, status=Sample.Status.TRUNCATED), truncated=0.5) == "truncated"
    assert filters.answer_length(group(1), shortest=1, longest=9) == ""
    assert [filters.mean_reward(group(r), 0.1, 0.9) for r in (0, 1, 0.5)] == ["too_hard", "too_easy", ""]


def odd(samples: list[Sample]) -> str:
    """Refuses prompts with an odd id."""
    return "odd" if samples[0].group_index % 2 else ""


def judged(judge: Judge, **rollout: Any) -> Any:
    source = generator(by_index, **rollout)
    source.judge = judge
    return source


def test_refused_groups_are_replaced_until_one_is_kept_or_none_is_left() -> None:
    source = judged(Judge(filters=[odd]))
    samples = Samples.concat(list(source.groups(0, [1, 2, 3], 0, {1: [7, 4, 6], 2: [8], 3: [5, 9]}))).sorted()
    assert sorted(set(samples.accepted.prompt_ids.tolist())) == [2, 4]
    assert sorted(set(samples.refused.prompt_ids.tolist())) == [1, 3, 5, 7, 9]
    assert set(samples.refused.refusals) == {"odd"} and len(samples.refused) == 5 * 3
    assert source.timing.generated_tokens == 7 * 5


def test_group_rewards_replace_rewards_before_filters_look() -> None:
    def halved(samples: list[Sample]) -> list[float]:
        return [sample.value / 2 for sample in samples]

    seen: list[list[float]] = []
    source = judged(Judge(halved, [lambda samples: seen.append([s.value for s in samples]) or ""]))
    samples = Samples.concat(list(source.groups(0, [4], 0)))
    assert samples.rewards.tolist() == [0, 0.5, 1] and seen == [[0, 0.5, 1]]
    assert source.evaluate().reward_sum == 0 and len(seen) == 1  # evaluations are not filtered


def spoil(value: Any) -> None:
    """Empty a list or a mapping, and every one in it."""
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, list | dict):
            spoil(part)
    value.clear()


def talking(spoils: bool) -> Any:
    async def talk(sample: Sample, engine: Any) -> Sample:
        output = await engine.generate(sample.tokens)
        sample.tokens, sample.response_length = [*sample.tokens, *output.tokens], len(output.tokens)
        sample.rollout_log_probs, sample.loss_mask = list(output.log_probs), [1] * len(output.tokens)
        spoil([output.tokens, output.log_probs, sample.metadata, sample.label] if spoils else [])
        return sample

    return talk


@pytest.mark.parametrize("who", ["filter", "group reward", "reward", "generate"])
def test_what_a_function_does_to_its_arguments_is_not_stored(who: str) -> None:
    def spoilt(samples: list[Sample]) -> Any:
        rewards = [sample.value for sample in samples]
        for sample in samples:
            spoil([value for value in vars(sample).values() if isinstance(value, list | dict)])
        return "" if who == "filter" else rewards

    def score(prompt: str, answer: str, label: Any, metadata: dict[str, Any]) -> float:
        spoil([label, metadata] if who == "reward" else [])
        return float(answer)

    plain, source = generator(by_index), generator(score)
    for each in (plain, source):
        each.prompts.rows[1] = Row("p1", {"n": [1, [2]]}, {"tests": [["a"], {"b": []}]})
    source.judge = {"filter": Judge(filters=[spoilt]), "group reward": Judge(spoilt)}.get(who, Judge())
    plain.talk, source.talk = talking(False), talking(who == "generate")
    expected, found = (Samples.concat(list(each.groups(0, [1, 3], 0))).sorted() for each in (plain, source))
    for name, value in vars(expected).items():
        np.testing.assert_array_equal(getattr(found, name), value, name)
    assert source.prompts.rows[1] == plain.prompts.rows[1] and source.prompts.rows[1].metadata["tests"] == [["a"], {"b": []}]


def removes(samples: list[Sample]) -> str:
    samples[1].remove_sample = True
    return ""


@pytest.mark.parametrize("judge", [Judge(filters=[removes]), Judge(lambda samples: [float(removes(samples) == "")] * 3)])
def test_who_cannot_remove_a_sample_is_told(judge: Judge) -> None:
    with pytest.raises(EdgeError, match="sets remove_sample, which only") as caught:
        list(judged(judge).groups(0, [4], 0))
    assert caught.value.where == "prompt 4, sample 1"


def raises(samples: list[Sample]) -> str:
    raise ValueError("no")


@pytest.mark.parametrize(
    "judge",
    [
        Judge(filters=[raises]),
        Judge(filters=[lambda samples: True]),
        Judge(lambda samples: [1.0]),
        Judge(lambda samples: [float("nan")] * 3),
        Judge(lambda samples: [1e39] * 3),  # not finite as float32, which is what is stored
        Judge(lambda samples: [10**400] * 3),
        Judge(lambda samples: ["1.0"] * 3),
        Judge(lambda samples: 1.0),
    ],
)
def test_bad_functions_of_groups_end_the_run_or_drop_the_group(judge: Judge) -> None:
    with pytest.raises(EdgeError, match="prompt 4"):
        list(judged(judge).groups(0, [4], 0))
    source = judged(judge, reward_error="drop")
    assert list(source.groups(0, [4], 0, {4: [6]})) == [] and list(source.reward_errors) == [4]


def test_what_is_left_of_a_step() -> None:
    places = [[0, 10, 11], [1, 12, 13], [2, 14, 15], [3, 16, 17], [4, 18, 19]]
    finished, refused = {0, 1, 2, 12, 14, 15, 4, 18}, {1, 2, 14, 15, 4, 18}
    assert open_places(places, finished, refused) == [[3, 16, 17], [19]]


@given(st.integers(1, 9), st.integers(1, 6), st.integers(0, 4), st.integers(0, 30))
def test_spare_prompts_are_their_own(rows: int, count: int, tries: int, step: int) -> None:
    """Never those of any step, never twice, and always prompts of the data."""
    prompts = Prompts([Row("p")] * rows, None, chat=False, seed=1, source="rows")
    drawn = [prompts.spare_ids(s, count, tries) for s in (step, step + 1)]
    assert drawn[0].shape == (count, tries) and drawn[0].dtype == np.int64
    ids = np.concatenate(drawn).reshape(-1)
    assert len(np.unique(ids)) == len(ids)
    assert (ids >= rows << 31).all()
    assert (prompts.spare_ids(step, count, tries) == drawn[0]).all()


def test_an_interruption_anywhere_changes_nothing() -> None:
    """Whatever was on disk, the step ends with the same groups, none generated twice."""
    places = [[1, 7, 4, 6], [2, 8], [3, 5, 9]]
    whole = _run(places, set(), set())
    for cut in range(len(whole) + 1):
        done = dict(list(whole.items())[:cut])
        rest = _run(places, set(done), {i for i, refusal in done.items() if refusal})
        assert not done.keys() & rest.keys() and done | rest == whole


def _run(places: list[list[int]], finished: set[int], refused: set[int]) -> dict[int, str]:
    """Prompt id and refusal of every group, in the order of the shards."""
    left = open_places(places, finished, refused)
    source = judged(Judge(filters=[odd]), flush_groups=1)
    chunks = source.groups(0, [p[0] for p in left], 0, {p[0]: p[1:] for p in left})
    return {int(chunk.prompt_ids[0]): chunk.refusals[0] for chunk in chunks}


def test_refusals_are_counted() -> None:
    source = judged(Judge(filters=[odd]))
    samples = Samples.concat(list(source.groups(0, [1, 2, 3], 0, {1: [4]}))).sorted()
    figures = metrics.of_refused(samples.accepted, samples.refused, 3, 3)
    assert figures == {
        "groups/tried": 4, "groups/refused": 2, "groups/empty_places": 1, "reward/all_mean": 1.0, "filter/odd": 2
    }  # fmt: skip
    accepted = samples.accepted
    lines = metrics.fates(accepted, [], accepted.rewards != 0, 3, 0, 1, samples.refused)
    assert [(line["prompt_id"], line["fate"], line.get("reason")) for line in lines] == [
        (2, "trained", None), (4, "trained", None), (1, "refused", "odd"), (3, "refused", "odd")
    ]  # fmt: skip
