"""Generation and reward of one engine: prompts in, finished and scored groups out."""

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miles_hpc.config import Config
from miles_hpc.data import Prompts, Row
from miles_hpc.errors import DeadlineExceeded, EdgeError
from miles_hpc.rollout.engine import EngineHost
from miles_hpc.rollout.request import Output, Request
from miles_hpc.rollout.reward import Reward, Score
from miles_hpc.samples.schema import STOPPED, TRUNCATED, Samples

REWARD_THREADS = 4
POLL_SECONDS = 0.01


@dataclass
class Timing:
    """Of the last call of `groups` or `evaluate`."""

    generate_seconds: float = 0.0
    """From the first request to the last answer."""
    reward_seconds: float = 0.0
    """From the last answer to the last score: what scoring cost beyond generation."""
    reward_work_seconds: float = 0.0
    """Sum over all calls of the reward function, most of it hidden behind generation."""
    generated_tokens: int = 0


@dataclass(frozen=True)
class Evaluation:
    """This engine's share of a held-out evaluation."""

    reward_sum: float
    prompts: int


@dataclass(frozen=True)
class Answer:
    """A generated answer on its way to a score."""

    request: Request
    output: Output
    text: str
    score: Future[Score]


@dataclass(eq=False)
class Group:
    """The answers of one prompt."""

    prompt: str
    """The text the model saw."""
    row: Row
    requests: list[Request]
    answers: list[Answer] = field(default_factory=list)

    @property
    def answered(self) -> bool:
        return len(self.answers) == len(self.requests)

    @property
    def scored(self) -> bool:
        return self.answered and all(answer.score.done() for answer in self.answers)


class Generator:
    """Generates groups on one engine and scores them meanwhile.

    Args:
        config: of the run.
        engine: ready.
        prompts: of the training split, with a tokenizer.
        reward: the reward edge. It runs in threads: its Python time competes with this process, not with the engine.
        held_out: prompts of the evaluation, None if there are none.
    """

    def __init__(
        self, config: Config, engine: EngineHost, prompts: Prompts, reward: Reward, held_out: Prompts | None = None
    ) -> None:
        self.config, self.engine, self.prompts, self.reward, self.held_out = config, engine, prompts, reward, held_out
        self.timing = Timing()
        self.reward_errors: dict[int, str] = {}
        """Of the last call of `groups`: dropped prompt ids (`rollout.reward_error = "drop"`), each with its first error."""
        self._pool = ThreadPoolExecutor(REWARD_THREADS, thread_name_prefix="reward")

    def groups(self, step: int, prompt_ids: Sequence[int] | np.ndarray, version: int) -> Iterator[Samples]:
        """Yield finished groups, `rollout.flush_groups` at a time, in the order in which they finish.

        Args:
            step: for messages.
            prompt_ids: this engine's share of the step.
            version: of the engine's weights; written on every answer token.

        Raises:
            EdgeError: a reward failed and `rollout.reward_error = "fail"`. EngineDied, EngineError, DeadlineExceeded.
        """
        self.reward_errors = {}
        flush, finished = self.config.rollout.flush_groups, []
        for group in self._scored([self._group(self.prompts, int(i)) for i in prompt_ids]):
            finished += self._accept(step, group, version)
            if len(finished) >= flush:
                yield Samples.concat(finished)
                finished = []
        if finished:
            yield Samples.concat(finished)

    def evaluate(self, index: int = 0, count: int = 1) -> Evaluation:
        """Greedy answers to every `count`-th held-out prompt from `index` on, at most `eval.prompts` over all engines.

        Raises:
            EdgeError: a reward failed, whatever `rollout.reward_error` says: a mean over the rest would not be comparable.
            EngineDied, EngineError, DeadlineExceeded.
        """
        if self.held_out is None:
            return Evaluation(0.0, 0)
        rows = range(min(len(self.held_out), self.config.eval.prompts))[index::count]
        groups = self._scored([self._group(self.held_out, row, greedy=True) for row in rows])
        return Evaluation(sum(group.answers[0].score.result().value for group in groups), len(rows))

    def close(self) -> None:
        """Stop the reward threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _group(self, prompts: Prompts, prompt_id: int, greedy: bool = False) -> Group:
        row, rollout = prompt_id % len(prompts), self.config.rollout
        tokens, samples = prompts.tokens(row), 1 if greedy else rollout.samples_per_prompt
        requests = [Request(tokens, prompt_id, i, rollout.max_new_tokens, greedy) for i in range(samples)]
        return Group(prompts.text(row), prompts.rows[row], requests)

    def _scored(self, groups: list[Group]) -> Iterator[Group]:
        """The groups as their last score comes in."""
        self.timing, started = Timing(), time.perf_counter()
        open_groups: list[Group] = []
        for group in self._answered(groups):
            open_groups.append(group)
            yield from _take_scored(open_groups)
        generated = time.perf_counter()
        while open_groups:
            yield from _take_scored(open_groups)
            self._wait(open_groups, time.perf_counter() - generated)
        self.timing = _timing(groups, generated - started, time.perf_counter() - generated)

    def _answered(self, groups: list[Group]) -> Iterator[Group]:
        """The groups as their last answer comes in, scoring under way."""
        work = [(group, request) for group in groups for request in group.requests]
        for index, output in self.engine.generate([request for _, request in work]):
            group, request = work[index]
            group.answers.append(self._score(group, request, output))
            if group.answered:
                yield group

    def _score(self, group: Group, request: Request, output: Output) -> Answer:
        text = self.prompts.tokenizer.decode(output.tokens, skip_special_tokens=True)
        metadata = {**group.row.metadata, "finished": output.stopped}
        sample = f"prompt {request.prompt_id}, sample {request.sample_index}"
        return Answer(
            request, output, text, self._pool.submit(self.reward, group.prompt, text, group.row.label, metadata, sample)
        )

    def _wait(self, groups: list[Group], waited: float) -> None:
        """A short wait for scores; a reward that hangs is named."""
        if not groups:
            return
        time.sleep(POLL_SECONDS)
        self.engine.poll_hook()
        if waited > self.config.rollout.timeout_seconds:
            slow = next(answer for group in groups for answer in group.answers if not answer.score.done())
            raise DeadlineExceeded(
                f"rollout.reward did not return within {waited:.0f} s",
                where=f"prompt {slow.request.prompt_id}, sample {slow.request.sample_index}, answer {slow.text[:200]!r}",
                next_step="give the reward function a time limit of its own, or raise rollout.timeout_seconds",
            )

    def _accept(self, step: int, group: Group, version: int) -> list[Samples]:
        """The group's samples, or nothing if a reward of it failed and the policy is to drop."""
        errors = [error for answer in group.answers if (error := answer.score.exception())]
        if not errors:
            return [_samples(group, version)]
        if self.config.rollout.reward_error == "fail" or not isinstance(errors[0], EdgeError):
            raise errors[0]
        self.reward_errors[group.requests[0].prompt_id] = f"step {step}: {errors[0]}"
        return []


def _take_scored(groups: list[Group]) -> list[Group]:
    """Remove the scored groups from `groups` and return them."""
    scored = [group for group in groups if group.scored]
    groups[:] = [group for group in groups if group not in scored]
    return scored


def _timing(groups: list[Group], generate: float, reward: float) -> Timing:
    answers = [answer for group in groups for answer in group.answers]
    work = sum(answer.score.result().seconds for answer in answers if answer.score.exception() is None)
    return Timing(generate, reward, work, sum(len(answer.output.tokens) for answer in answers))


def _samples(group: Group, version: int) -> Samples:
    answers = sorted(group.answers, key=lambda answer: answer.request.sample_index)
    scores = [answer.score.result() for answer in answers]
    names = sorted({name for score in scores for name in score.parts})
    lengths = [len(a.request.tokens) + len(a.output.tokens) for a in answers]
    label = json.dumps(group.row.label, ensure_ascii=False, default=str)
    return Samples(
        prompt_ids=np.array([a.request.prompt_id for a in answers], np.int64),
        sample_index=np.array([a.request.sample_index for a in answers], np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        tokens=_flat([(a.request.tokens, a.output.tokens) for a in answers], np.int32),
        loss_mask=_flat([([0] * len(a.request.tokens), [1] * len(a.output.tokens)) for a in answers], np.uint8),
        rollout_log_probs=_flat([([0.0] * len(a.request.tokens), a.output.log_probs) for a in answers], np.float32),
        weight_versions=_flat([([-1] * len(a.request.tokens), [version] * len(a.output.tokens)) for a in answers], np.int32),
        rewards=np.array([score.value for score in scores], np.float32),
        status=np.array([STOPPED if a.output.stopped else TRUNCATED for a in answers], np.uint8),
        prompts=[group.prompt] * len(answers),
        answers=[answer.text for answer in answers],
        labels=[label] * len(answers),
        reward_parts={name: np.array([score.parts.get(name, np.nan) for score in scores], np.float32) for name in names},
    )


def _flat(parts: list[tuple[list[Any], list[Any]]], kind: type) -> np.ndarray:
    """Prompt and answer values of all samples, one after the other."""
    return np.concatenate([np.asarray([*prompt, *answer], kind) for prompt, answer in parts])
