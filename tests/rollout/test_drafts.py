"""What an interruption leaves of answers, on its way over the disk."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollout_parts import by_index, config, generator

from miles_hpc.paths import RunPaths
from miles_hpc.rollout import drafts
from miles_hpc.rollout.request import Draft, Output
from miles_hpc.samples import store
from miles_hpc.samples.schema import Samples

BEGUN = Draft((7, 1), [5, 6], Output([8, 9], [-0.5, -1.5], False, whole=False), [3, 4])
STOPPED = Draft((7, 0), [5, 6], Output([8, 1], [-0.5, -0.25], True), [3, 3])
CUT = Draft((2, 1), [5], Output([8], [-0.5], False), [3])


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    (tmp_path / "samples").mkdir()
    return RunPaths(tmp_path)


def keep(paths: RunPaths, *kept: Draft, rank: int = 1) -> Path:
    return store.write(paths, 3, rank, 1, drafts.pack(kept), drafts=True)


def test_drafts_come_back_as_they_were_and_are_no_shards(paths: RunPaths) -> None:
    keep(paths, BEGUN, STOPPED)
    keep(paths, CUT, rank=0)
    assert drafts.on_disk(paths, 3) == {draft.sample: draft for draft in (BEGUN, STOPPED, CUT)}
    assert store.on_disk(paths, 3) == [] and drafts.on_disk(paths, 4) == {}


def test_the_longest_draft_of_an_answer_counts(paths: RunPaths) -> None:
    shorter = replace(BEGUN, output=replace(BEGUN.output, tokens=[8], log_probs=[-0.5]), versions=[3])
    for kept in ([shorter, CUT], [BEGUN], [shorter]):
        keep(paths, *kept)
    assert drafts.on_disk(paths, 3) == {BEGUN.sample: BEGUN, CUT.sample: CUT}


def test_a_damaged_file_is_named_and_passed_over(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = keep(paths, BEGUN)
    damaged.write_bytes(damaged.read_bytes()[:-100])
    keep(paths, CUT)
    assert drafts.on_disk(paths, 3) == {CUT.sample: CUT}
    assert damaged.name in capsys.readouterr().out


def test_recorded_experts_are_kept_of_whole_answers(paths: RunPaths) -> None:
    routing = np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2)
    keep(paths, BEGUN, replace(STOPPED, output=replace(STOPPED.output, routing=routing)))
    found = drafts.on_disk(paths, 3)
    assert found[BEGUN.sample].output.routing is None
    np.testing.assert_array_equal(found[STOPPED.sample].output.routing, routing)


def test_what_is_whole_is_scored_again_and_not_asked_for() -> None:
    source: Any = generator(by_index)
    prompt = source.prompts.tokens(1)
    whole = Draft((1, 0), prompt, Output([ord("7"), 0], [-0.1, -0.2], True), [2, 2])
    other = Draft((3, 0), [1, 2, 3], Output([ord("7"), 0], [-0.1, -0.2], True), [2, 2])  # another tokenizer's
    kept = {draft.sample: draft for draft in (whole, other)}
    samples = Samples.concat(list(source.groups(0, [1, 3], 5, drafts=kept))).sorted()
    assert len(source.engine.requests) == 5
    assert samples.rewards.tolist() == [7, 1, 2, 0, 1, 2] and samples.answers[0] == "7"
    assert samples.weight_versions[: len(prompt) + 2].tolist() == [-1] * len(prompt) + [2, 2]
    np.testing.assert_allclose(samples.rollout_log_probs[len(prompt) : len(prompt) + 2], [-0.1, -0.2])
    assert source.interrupted() == []
    source.evaluate()
    assert len(source.engine.requests) == 3  # an evaluation goes on with nothing


@pytest.mark.parametrize("edge", ["generate", "function"])
def test_a_conversation_has_no_half(edge: str) -> None:
    with pytest.raises(ValueError, match=rf"cannot go on in the middle of a rollout\.{edge}"):
        config(unfinished="continue", **{edge: "a:b"})
