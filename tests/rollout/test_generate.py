"""Groups and rewards, with a stand-in at the border to the engine's process."""

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollout_parts import by_index, generator

from miles_hpc.errors import DeadlineExceeded, EdgeError, EngineError
from miles_hpc.rollout.generate import POLL_SECONDS, Generator
from miles_hpc.rollout.judge import Judge
from miles_hpc.rollout.request import Output, Request
from miles_hpc.samples.schema import Samples


def test_every_sample_comes_back_once_with_its_own_fields() -> None:
    samples = Samples.concat(list(generator(by_index).groups(0, [7, 1, 3], version=5))).sorted()
    assert samples.prompt_ids.tolist() == [1] * 3 + [3] * 3 + [7] * 3
    assert samples.sample_index.tolist() == [0, 1, 2] * 3
    assert samples.rewards.tolist() == [0, 1, 2] * 3
    assert samples.status.tolist() == [0, 1, 0] * 3
    assert samples.prompts[0] == "p1" and samples.prompts[-1] == "p2" and samples.labels[-1] == '{"n": 2}'
    first = slice(samples.offsets[0], samples.offsets[1])
    assert samples.tokens[first].tolist() == [ord("p"), ord("1"), ord("0"), 0]
    assert samples.loss_mask[first].tolist() == [0, 0, 1, 1]
    assert samples.weight_versions[first].tolist() == [-1, -1, 5, 5]
    np.testing.assert_allclose(samples.rollout_log_probs[first], [0, 0, -0.5, -0.5])


def test_groups_come_whole_and_in_chunks() -> None:
    chunks = list(generator(by_index, flush_groups=2).groups(0, range(5), version=0))
    assert [len(chunk) for chunk in chunks] == [6, 6, 3]
    assert all((np.unique(chunk.prompt_ids, return_counts=True)[1] == 3).all() for chunk in chunks)


def test_nothing_to_do() -> None:
    assert list(generator(by_index).groups(0, [], version=0)) == []


def test_components_of_a_reward_are_kept() -> None:
    def parts(prompt: str, answer: str, label: Any, metadata: dict[str, Any]) -> dict[str, float]:
        return {"reward": 1.0, "finished": metadata["finished"], "n": metadata["k"]}

    samples = Samples.concat(list(generator(parts).groups(0, [4], version=0))).sorted()
    assert samples.reward_parts["finished"].tolist() == [1, 0, 1]
    assert samples.reward_parts["n"].tolist() == [4, 4, 4]


def test_a_group_whose_request_the_engine_refuses_is_dropped_alone_and_counted() -> None:
    source: Any = generator(by_index, reward_error="drop")
    source.engine.refused = {3}
    samples = Samples.concat(list(source.groups(2, [1, 3, 4], version=0)))
    assert set(samples.prompt_ids) == {1, 4} and len(samples) == 6
    assert list(source.reward_errors) == [3] and "step 2: the engine refused" in source.reward_errors[3]


def test_a_refused_request_ends_the_run_where_errors_do() -> None:
    source: Any = generator(by_index, reward_error="fail")
    source.engine.refused = {3}
    with pytest.raises(EngineError, match="out of memory"):
        list(source.groups(0, [1, 3], version=0))
    source.engine.refused = {2}
    with pytest.raises(EngineError):
        source.evaluate()


def test_answers_carry_the_version_of_the_engine_that_gave_them() -> None:
    source: Any = generator(by_index)
    answer, left = source.engine.answer, iter(range(15))

    def starts_again(request: Request) -> Output:
        source.version = 7 if next(left) < 5 else 8
        return answer(request)

    source.engine.answer = starts_again
    samples = Samples.concat(list(source.groups(0, [0, 1, 2, 3, 4], version=7)))
    versions = samples.weight_versions[samples.offsets[1:] - 1]
    assert sorted(versions) == [7] * 5 + [8] * 10


def fails_on(wanted: str, result: Any) -> Callable[..., Any]:
    def reward(prompt: str, answer: str, label: Any, metadata: dict[str, Any]) -> Any:
        if (prompt, answer) != ("p3", wanted):
            return 1.0
        return result() if callable(result) else result

    return reward


def boom() -> float:
    raise ValueError("no such unit")


@pytest.mark.parametrize(
    "result",
    [
        *(boom, sys.exit, float("nan"), float("inf"), 1e300, 10**400, "1.0", None, [1.0], 1j),
        *({"score": 1.0}, {"reward": float("nan")}, {"reward": 1.0, "part": 1e39}, {"reward": 1.0, 2: 1.0}),
    ],
)
def test_a_bad_reward_ends_the_run_and_names_the_sample(result: Any) -> None:
    with pytest.raises(EdgeError, match=r"prompt 8, sample 2, answer '2'") as caught:
        list(generator(fails_on("2", result)).groups(0, [2, 8], version=0))
    assert "test_generate.py:" in caught.value.where


@pytest.mark.parametrize("result", [boom, float("nan")])
def test_a_bad_reward_drops_its_group_and_is_counted(result: Any) -> None:
    source = generator(fails_on("1", result), reward_error="drop")
    samples = Samples.concat(list(source.groups(0, [2, 8], version=0)))
    assert set(samples.prompt_ids.tolist()) == {2}
    assert list(source.reward_errors) == [8] and "sample 1" in source.reward_errors[8]
    list(source.groups(1, [2], version=0))
    assert source.reward_errors == {}


def test_rewards_run_while_answers_come_in() -> None:
    """The first answers are being scored before the last one is generated."""
    seen = threading.Event()

    def reward(prompt: str, answer: str, label: Any, metadata: dict[str, Any]) -> float:
        seen.set()
        return 0.0

    source = generator(reward)
    engine: Any = source.engine
    answer, number = engine.answer, itertools.count()

    def slow(request: Request) -> Output:
        assert next(number) == 0 or seen.wait(60)
        return answer(request)

    engine.answer = slow
    assert sum(map(len, source.groups(0, [0, 1], version=0))) == 6


def test_timing_separates_generation_and_reward() -> None:
    """No score comes before all answers are there and the rank waits for scores alone."""
    waits = threading.Event()

    def reward(prompt: str, answer: str, label: Any, metadata: dict[str, Any]) -> float:
        assert waits.wait(60)
        time.sleep(0.02)
        return 0.0

    source: Any = generator(reward, reward_threads=15)
    answer, source.engine.poll_hook = source.engine.answer, waits.set
    source.engine.answer = lambda request: time.sleep(0.002) or answer(request)
    began = time.perf_counter()
    list(source.groups(0, range(5), version=0))
    seconds, timing = time.perf_counter() - began, source.timing
    assert timing.generated_tokens == 5 * (2 + 1 + 2) and timing.reward_work_seconds >= 15 * 0.02
    assert timing.generate_seconds >= 15 * 0.002 and timing.reward_seconds >= POLL_SECONDS
    assert timing.generate_seconds + timing.reward_seconds <= seconds


def test_a_reward_that_hangs_is_named() -> None:
    release = threading.Event()
    source = generator(fails_on("0", release.wait), timeout_seconds=0.2)  # the first: others may be slow too
    try:
        with pytest.raises(DeadlineExceeded) as caught:
            list(source.groups(0, [3], version=0))
    finally:
        release.set()
    assert "prompt 3, sample 0" in caught.value.where


def test_a_group_reward_or_filter_that_hangs_is_named() -> None:
    release = threading.Event()
    source = generator(by_index, timeout_seconds=0.2)
    source.judge = Judge(filters=[lambda samples: str(release.wait())])
    try:
        with pytest.raises(DeadlineExceeded, match=r"rollout\.group_reward or a filter did not return") as caught:
            list(source.groups(0, [3], version=0))
    finally:
        release.set()
    assert caught.value.where == "prompt 3"


HANGS = """
import sys, threading
sys.path.append(sys.argv[1])
from rollout_parts import generator
begun = threading.Event()
def hangs(*ignored):
    begun.set()
    threading.Event().wait()
source = generator(hangs)
source._pool.submit(hangs)
begun.wait()
"""


def test_a_reward_that_hangs_does_not_keep_the_process_alive() -> None:
    subprocess.run([sys.executable, "-c", HANGS, str(Path(__file__).parent)], check=True, timeout=60)


def test_evaluation_is_greedy_and_shared_out() -> None:
    source = generator(lambda prompt, answer, label, metadata: metadata["k"])
    whole, shares = source.evaluate(), [source.evaluate(i, 2) for i in range(2)]
    assert all(request.greedy and request.sample_index == 0 for request in source.engine.requests)
    assert (whole.reward_sum, whole.prompts) == (0 + 1 + 2, 3)  # eval.prompts = 3
    assert (sum(s.reward_sum for s in shares), sum(s.prompts for s in shares)) == (3, 3)
    assert Generator(source.config, source.engine, source.prompts, source.reward).evaluate().prompts == 0


def test_a_bad_reward_in_an_evaluation_always_fails() -> None:
    with pytest.raises(EdgeError, match="prompt 2, sample 0"):
        generator(lambda prompt, answer, label, metadata: 1 / (2 - metadata["k"]), reward_error="drop").evaluate()
