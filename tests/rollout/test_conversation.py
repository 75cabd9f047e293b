"""Generate edges: several turns, tools, errors, and a file in the style of slime."""

import asyncio
import contextlib
import sys
import time
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollout_parts import Flight, by_index, config, generator

from miles_hpc import attach
from miles_hpc.errors import DeadlineExceeded, EdgeError
from miles_hpc.rollout.judge import Judge
from miles_hpc.sample import Sample
from miles_hpc.samples.schema import STOPPED, TRUNCATED, Samples

TOOL = [ord("T"), ord("T")]


class Abroad(Enum):
    """The statuses of an installed slime."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    FAILED = "failed"


async def two_turns(sample: Sample, engine: Any) -> Sample:
    """The model, two tokens of a tool, the model again."""
    prompt = len(sample.tokens)
    first = await engine.generate(sample.tokens)
    await asyncio.sleep(0.001)
    second = await engine.generate([*sample.tokens, *first.tokens, *TOOL])
    sample.tokens = [*sample.tokens, *first.tokens, *TOOL, *second.tokens]
    sample.response_length = len(sample.tokens) - prompt
    sample.loss_mask = [1] * len(first.tokens) + [0] * 2 + [1] * len(second.tokens)
    sample.rollout_log_probs = [*first.log_probs, 7.0, 7.0, *second.log_probs]
    sample.status = Sample.Status.COMPLETED
    return sample


def talking(talk: Any, **rollout: Any) -> Any:
    source = generator(lambda prompt, answer, label, metadata: float(metadata["tokens"]), **rollout)
    source.talk = talk
    return source


def test_turns_and_tools() -> None:
    source = talking(two_turns)
    samples = Samples.concat(list(source.groups(0, [7, 1, 3], version=5))).sorted()
    assert len(samples) == 9 and source.timing.generated_tokens == 2 * 15
    one = samples.take([1])  # prompt 1, sample 1: "1", the tool, "1"
    assert one.answers == ["1TT1"] and one.rewards.tolist() == [2]
    assert one.loss_mask.tolist() == [0, 0, 1, 0, 0, 1] and one.weight_versions.tolist() == [-1, -1, 5, -1, -1, 5]
    np.testing.assert_allclose(one.rollout_log_probs, [0, 0, -0.5, 0, 0, -0.5])
    assert source.evaluate().prompts == 3


def test_recorded_experts_of_turns() -> None:
    """Of the last turn, with a tool's tokens behind it unknown; a history that was rewritten has no record."""

    async def ends_with_a_tool(sample: Sample, engine: Any) -> Sample:
        sample = await two_turns(sample, engine)
        sample.tokens, sample.response_length = [*sample.tokens, *TOOL], sample.response_length + 2
        sample.loss_mask, sample.rollout_log_probs = [*sample.loss_mask, 0, 0], [*sample.rollout_log_probs, 0.0, 0.0]
        return sample

    async def rewrites(sample: Sample, engine: Any) -> Sample:
        sample = await two_turns(sample, engine)
        sample.tokens[2] += 1
        return sample

    for talk, behind in ((None, 0), (two_turns, 0), (ends_with_a_tool, 2), (rewrites, 0)):
        source = talking(talk)
        source.engine.records = True
        s = Samples.concat(list(source.groups(0, [1], 0))).sorted()
        assert s.routing is not None and s.routing.shape == (len(s.tokens), 3, 2)
        for start, end in zip(s.offsets[:-1], s.offsets[1:], strict=True):
            known = 0 if talk is rewrites else end - start - behind - 1
            expected = np.where(np.arange(end - start) < known, s.tokens[start:end], 0)
            assert (s.routing[start:end] == expected[:, None, None]).all()
    assert Samples.concat(list(talking(two_turns).groups(0, [1], 0))).routing is None


async def forgets(sample: Sample, engine: Any) -> Sample:
    await engine.generate(sample.tokens)
    return sample


async def raises(sample: Sample, engine: Any) -> Sample:
    raise ValueError("no such tool")


async def nothing(sample: Sample, engine: Any) -> None:
    return None


async def cuts(sample: Sample, engine: Any) -> Sample:
    sample = await two_turns(sample, engine)
    sample.rollout_log_probs = sample.rollout_log_probs[:-1]
    return sample


async def greedy(sample: Sample, engine: Any) -> Sample:
    await engine.generate([1] * 5000)
    return sample


@pytest.mark.parametrize(
    ("talk", "what"),
    [(forgets, "0 answer tokens"), (raises, "ValueError: no such tool"), (nothing, "no Sample"),
     (cuts, "rollout_log_probs must have"), (greedy, "leave no room")],
)  # fmt: skip
def test_bad_generate_functions_are_named(talk: Any, what: str) -> None:
    with pytest.raises(EdgeError, match=what) as caught:
        list(talking(talk).groups(0, [3], 0))
    assert "rollout.generate (prompt 3, sample " in caught.value.what and "conversation.py:" in caught.value.where


def test_a_conversation_whose_request_the_engine_refuses_drops_its_group_alone() -> None:
    source = talking(two_turns, reward_error="drop")
    source.engine.refused = {3}
    samples = Samples.concat(list(source.groups(0, [1, 3], version=0)))
    assert set(samples.prompt_ids) == {1} and "out of memory" in source.reward_errors[3]


def ends(status: Any, **changes: Any) -> Any:
    """Two turns of which sample 1 ends with `status`; None: nobody says how."""

    async def talk(sample: Sample, engine: Any) -> Sample:
        sample = await two_turns(sample, engine)
        if sample.index == 1:
            sample.status = status
            vars(sample).update(changes)
        return sample

    return talk


@pytest.mark.parametrize("status", Sample.Status)
def test_a_removed_sample_counts_in_its_group_and_has_no_loss_whatever_its_status(status: Sample.Status) -> None:
    source, seen = talking(ends(status, remove_sample=True)), []
    source.judge = Judge(filters=[lambda samples: seen.extend((s.remove_sample, sum(s.loss_mask)) for s in samples) or ""])
    found, plain = (Samples.concat(list(s.groups(0, [1], 5))).sorted() for s in (source, talking(two_turns)))
    assert seen == [(False, 4), (True, 2), (False, 4)]
    assert found.answer_lengths.tolist() == [4, 0, 4] and found.generated.tolist() == plain.generated.tolist() == [4, 2, 4]
    for name in ("rewards", "tokens", "rollout_log_probs", "weight_versions"):
        np.testing.assert_array_equal(getattr(found, name), getattr(plain, name))


@pytest.mark.parametrize("status", [Sample.Status.ABORTED, Sample.Status.FAILED, Abroad.FAILED])
def test_a_sample_without_an_answer_is_as_one_without_a_reward(status: Any) -> None:
    """It may have no tokens either."""
    for changes in ({}, {"tokens": [1], "response_length": 0, "rollout_log_probs": None}):
        talk = ends(status, **changes)
        with pytest.raises(EdgeError, match=rf"prompt 3, sample 1: its status is {status.name}") as caught:
            list(talking(talk).groups(0, [3], 0))
        assert "remove_sample" in caught.value.next_step and "test_conversation.py:" in caught.value.where
        source = talking(talk, reward_error="drop")
        assert list(source.groups(0, [3], 0)) == [] and list(source.reward_errors) == [3]


def test_who_does_not_say_how_an_answer_ended_leaves_it_to_the_engine() -> None:
    async def pending(sample: Sample, engine: Any) -> Sample:
        sample = await two_turns(sample, engine)
        sample.status = Sample.Status.PENDING
        return sample

    samples = Samples.concat(list(talking(pending).groups(0, [1], 0))).sorted()
    assert samples.status.tolist() == [STOPPED, TRUNCATED, STOPPED]  # even samples end with a stop token


@pytest.mark.parametrize(
    ("status", "stored"), [(Abroad.TRUNCATED, TRUNCATED), (Abroad.COMPLETED, STOPPED), ("truncated", TRUNCATED)]
)
def test_statuses_of_an_installed_slime_count(status: Any, stored: int) -> None:
    samples = Samples.concat(list(talking(ends(status)).groups(0, [1], 0))).sorted()
    assert samples.status.tolist() == [STOPPED, stored, STOPPED]


async def written(sample: Sample, engine: Any) -> Sample:
    """An answer that the engine never gave."""
    sample.tokens, sample.response_length, sample.rollout_log_probs = [*sample.tokens, 65], 1, [-1.0]
    return sample


@pytest.mark.parametrize(
    ("talk", "what"),
    [(written, "status Status.PENDING does not say"), (ends("tired"), "status tired does not say"),
     (ends(Sample.Status.COMPLETED, loss_mask=[0] * 4), "loss_mask has no 1, and remove_sample is not set")],
)  # fmt: skip
def test_what_is_neither_trained_nor_kept_out_is_named(talk: Any, what: str) -> None:
    with pytest.raises(EdgeError, match=what):
        list(talking(talk).groups(0, [1], 0))


def test_a_tool_that_hangs_is_named() -> None:
    async def hangs(sample: Sample, engine: Any) -> Sample:
        await asyncio.sleep(60)
        return sample

    with pytest.raises(DeadlineExceeded, match="neither asked the engine nor returned"):
        list(talking(hangs, timeout_seconds=0.2).groups(0, [3], 0))


def test_the_engine_hears_of_all_conversations_before_anybody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """To wait for an answer before each further request would keep the engine's batch small."""
    source, waits = talking(two_turns), []

    def look(self: Any, seconds: float) -> Any:
        waits.append(len(self.open))
        time.sleep(0.1)  # for the others to ask
        return self.next() if len(self.open) == 9 or len(waits) > 9 else None

    monkeypatch.setattr(Flight, "look", look)
    list(source.groups(0, [7, 1, 3], 0))
    assert waits.index(9) < 5


def test_a_request_that_a_function_no_longer_waits_for_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def impatient(sample: Sample, engine: Any) -> Sample:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(engine.generate(sample.tokens), 0.01)
        return await two_turns(sample, engine)

    source, failed = talking(impatient), []
    monkeypatch.setattr(Flight, "look", lambda self, seconds: time.sleep(0.05) or self.next())
    monkeypatch.setattr(asyncio.BaseEventLoop, "call_exception_handler", lambda self, context: failed.append(context))
    assert len(Samples.concat(list(source.groups(0, [1], 0)))) == 3 and not failed


def test_nothing_is_left_open_behind_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    loops, new = [], asyncio.new_event_loop
    monkeypatch.setattr(asyncio, "new_event_loop", lambda: loops.append(new()) or loops[-1])
    list(talking(two_turns).groups(0, [1], 0))
    with pytest.raises(EdgeError):
        list(talking(raises).groups(0, [1], 0))
    assert len(loops) == 2 and all(loop.is_closed() for loop in loops)


SLIME = """
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

async def generate(args, sample: Sample, sampling_params) -> Sample:
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    payload = {"input_ids": prompt_ids, "sampling_params": sampling_params, "return_logprob": True}
    output = await post(url, payload)
    new = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
    sample.tokens = prompt_ids + new
    sample.response_length = len(new)
    sample.response = output["text"]
    sample.rollout_log_probs = [item[0] for item in output["meta_info"]["output_token_logprobs"]]
    match output["meta_info"]["finish_reason"]["type"]:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    return sample
"""


def test_a_generate_file_of_slime_gives_what_the_engine_alone_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "slime_generate.py").write_text(SLIME)
    sections = config(generate="slime_generate:generate")
    sections = sections.model_copy(update={"run": sections.run.model_copy(update={"edges_folder": str(tmp_path)})})
    source = generator(by_index)
    plain = Samples.concat(list(source.groups(0, [1, 3], 0))).sorted()
    source.talk = attach.attach(sections, "rollout.generate", sections.rollout.generate)
    found = Samples.concat(list(source.groups(0, [1, 3], 0))).sorted()
    for name in ("tokens", "loss_mask", "rollout_log_probs", "rewards", "status"):
        np.testing.assert_array_equal(getattr(found, name), getattr(plain, name))


@pytest.mark.parametrize(("line", "value"), [("0.5", 0.5), ("{'score': 0.25, 'pred': 'x'}", 0.25)])
def test_a_reward_that_a_generate_function_sets_counts(
    line: str, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Miles and slime, where the reward model is asked only for samples without a reward."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"slime_judges_{len(line)}"
    (tmp_path / f"{name}.py").write_text(SLIME.replace("    return sample", f"    sample.reward = {line}\n    return sample"))
    sections = config(generate=f"{name}:generate")
    sections = sections.model_copy(update={"run": sections.run.model_copy(update={"edges_folder": str(tmp_path)})})
    source = generator(by_index)
    source.talk = attach.attach(sections, "rollout.generate", sections.rollout.generate)
    assert set(Samples.concat(list(source.groups(0, [1, 3], 0))).rewards.tolist()) == {value}
