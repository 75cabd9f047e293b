"""Generation and reward of one engine: prompts in, finished and scored groups out."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miles_hpc.config import Config
from miles_hpc.data import Prompts, Row
from miles_hpc.errors import DeadlineExceeded, EdgeError, EngineError
from miles_hpc.rollout.conversation import Conversations, Generate
from miles_hpc.rollout.engine import EngineHost, Flight
from miles_hpc.rollout.ensemble import Ensemble, Rollout
from miles_hpc.rollout.judge import Judge, Verdict
from miles_hpc.rollout.request import Output, Request
from miles_hpc.rollout.reward import Reward, Score, given
from miles_hpc.sample import Sample
from miles_hpc.samples.schema import STOPPED, TRUNCATED, Samples

POLL_SECONDS = 0.01


@dataclass
class Timing:
    """Of the last call of `groups` or `evaluate`."""

    generate_seconds: float = 0.0
    """With requests under way."""
    reward_seconds: float = 0.0
    """Without any, waiting for scores: what scoring cost beyond generation."""
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
    version: int
    """Of the weights that gave it."""


@dataclass(eq=False)
class Group:
    """The answers of one prompt."""

    prompt: str
    """The text the model saw."""
    row: Row
    requests: list[Request]
    spare: list[int] = field(default_factory=list)
    """Prompt ids to try instead, should a filter refuse it."""
    answers: list[Answer] = field(default_factory=list)
    verdict: Future[Verdict] | None = None
    """None before all answers are scored, and where a score failed."""

    @property
    def prompt_id(self) -> int:
        """Of all its requests."""
        return self.requests[0].prompt_id

    @property
    def answered(self) -> bool:
        """Every request has its answer."""
        return len(self.answers) == len(self.requests)

    @property
    def scored(self) -> bool:
        """Every answer has its reward, or the reward failed."""
        return self.answered and all(answer.score.done() for answer in self.answers)

    @property
    def error(self) -> BaseException | None:
        """Of the first answer whose reward failed, else of the verdict."""
        errors = [answer.score.exception() for answer in self.answers] + ([self.verdict.exception()] if self.verdict else [])
        return next((error for error in errors if error), None)

    @property
    def refusal(self) -> str:
        """Why a filter refused the group; empty if none did, or if a reward failed."""
        return self.verdict.result().refusal if self.verdict and not self.error else ""


class Generator:
    """Generates groups on one engine and scores them meanwhile.

    Args:
        config: of the run.
        engine: ready.
        prompts: of the training split, with a tokenizer.
        reward: the reward edge. It runs in threads: its Python time competes with this process, not with the engine.
        held_out: prompts of the evaluation, None if there are none.
        judge: group reward and filters; runs in the same threads.
        talk: the generate edge; None: the engine answers each prompt once.
        whole: the rollout function instead.
    """

    def __init__(
        self,
        config: Config,
        engine: EngineHost,
        prompts: Prompts,
        reward: Reward,
        held_out: Prompts | None = None,
        judge: Judge | None = None,
        talk: Generate | None = None,
        whole: Rollout | None = None,
    ) -> None:
        self.config, self.engine, self.prompts, self.reward, self.held_out = config, engine, prompts, reward, held_out
        self.judge, self.talk, self.whole = judge or Judge(), talk, whole
        self.timing = Timing()
        self.version = 0
        """Of the engine's weights; written on every answer token. It may change on the way, if the engine starts again."""
        self.reward_errors: dict[int, str] = {}
        """Of the last call of `groups`: dropped prompt ids (`rollout.reward_error = "drop"`), each with its first error."""
        self.unwritten: list[Samples] = []
        """Finished groups that `groups` has not yielded yet."""
        self._pool = ThreadPoolExecutor(config.rollout.reward_threads, thread_name_prefix="reward")

    def groups(
        self, step: int, prompt_ids: Sequence[int] | np.ndarray, version: int, spare: Mapping[int, Sequence[int]] | None = None
    ) -> Iterator[Samples]:
        """Yield finished groups, `rollout.flush_groups` at a time, in the order in which they finish.

        A group that a filter refuses is yielded too, with the reason in `refusals`; a spare prompt is generated in its place at
        once, while the others go on.

        Args:
            step: for messages.
            prompt_ids: this engine's share of the step.
            version: of the engine's weights.
            spare: for a prompt id, those to try after it.

        Raises:
            EdgeError, EngineError: a reward failed, or the engine refused a request twice, and `rollout.reward_error = "fail"`.
            EngineDied, DeadlineExceeded: the engine, where it is not started again.
        """
        self.reward_errors, self.unwritten, self.version = {}, [], version
        others = spare or {}
        for group in self._judged([self._group(self.prompts, int(i), spare=others.get(int(i), ())) for i in prompt_ids]):
            self.unwritten += self._accept(step, group)
            if len(self.unwritten) >= self.config.rollout.flush_groups:
                yield self._written()
        if self.unwritten:
            yield self._written()

    def evaluate(self, index: int = 0, count: int = 1) -> Evaluation:
        """Greedy answers to every `count`-th held-out prompt from `index` on, at most `eval.prompts` over all engines.

        Raises:
            EdgeError, EngineError: whatever `rollout.reward_error` says: a mean over the rest would not be comparable.
            EngineDied, DeadlineExceeded: the engine, where it is not started again.
        """
        if self.held_out is None:
            return Evaluation(0.0, 0)
        rows = range(min(len(self.held_out), self.config.eval.prompts))[index::count]
        groups = self._judged([self._group(self.held_out, row, greedy=True) for row in rows], filtering=False)
        return Evaluation(sum(_rewards(group)[0] for group in groups), len(rows))

    def _written(self) -> Samples:
        groups, self.unwritten = self.unwritten, []
        return Samples.concat(groups)

    def close(self) -> None:
        """Stop the reward threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _group(self, prompts: Prompts, prompt_id: int, greedy: bool = False, spare: Sequence[int] = ()) -> Group:
        row, rollout = prompt_id % len(prompts), self.config.rollout
        tokens, samples = prompts.tokens(row), 1 if greedy else rollout.samples_per_prompt
        requests = [Request(tokens, prompt_id, i, rollout.max_new_tokens, greedy) for i in range(samples)]
        return Group(prompts.text(row), prompts.rows[row], requests, [int(i) for i in spare])

    def _judged(self, groups: list[Group], filtering: bool = True) -> Iterator[Group]:
        """The groups as their verdicts come in, and those that were generated in place of refused ones."""
        started, idle, waited = time.perf_counter(), 0.0, 0.0
        everything, left = list(groups), list(groups)
        under_way: dict[int, tuple[Group, Request]] = {}
        with self.engine.flight() as direct, self._through_edge(direct, everything) as flight:
            self._send(flight, groups, under_way)
            while left:
                if flight.open:
                    self._receive(flight, under_way)
                else:
                    seconds = self._wait(left, waited)
                    waited, idle = waited + seconds, idle + seconds
                for group in self._take_judged(left, filtering):
                    waited = 0.0
                    if group.refusal and group.spare:
                        other = self._group(self.prompts, group.spare[0], spare=group.spare[1:])
                        everything.append(other)  # before it is sent: the edge finds its sample there
                        left.append(other)
                        self._send(flight, [other], under_way)
                    yield group
        self.timing = _timing(everything, time.perf_counter() - started - idle, idle)

    def _through_edge(self, flight: Flight, groups: list[Group]) -> AbstractContextManager[Flight | Conversations]:
        """The flight itself, or what the generate or rollout edge makes of it."""
        function = self.whole or self.talk
        if function is None:
            return nullcontext(flight)

        def describe(request: Request) -> Sample:
            group = next(group for group in reversed(groups) if group.prompt_id == request.prompt_id)
            facts = {"prompt": group.prompt, "label": group.row.label, "metadata": dict(group.row.metadata)}
            return Sample(group_index=request.prompt_id, index=request.sample_index, tokens=list(request.tokens), **facts)

        longest, seconds = self.config.model.context_length, self.config.rollout.timeout_seconds
        kind: type[Conversations] = Ensemble if self.whole else Conversations
        return kind(flight, function, describe, self.prompts.tokenizer, longest, seconds)

    def _send(self, flight: Flight | Conversations, groups: list[Group], under_way: dict[int, tuple[Group, Request]]) -> None:
        work = [(group, request) for group in groups for request in group.requests]
        under_way.update(zip(flight.add([request for _, request in work]), work, strict=True))

    def _receive(self, flight: Flight | Conversations, under_way: dict[int, tuple[Group, Request]]) -> None:
        """The next answer; its score is under way afterwards."""
        key, output = flight.next()
        group, request = under_way.pop(key)
        group.answers.append(
            _failed(request, output) if isinstance(output, EngineError) else self._score(group, request, output)
        )

    def _take_judged(self, groups: list[Group], filtering: bool) -> list[Group]:
        """Remove the groups that are decided from `groups` and return them; scored ones are given to the judge."""
        decided = []
        for group in groups:
            if group.scored and group.verdict is None and not group.error:
                group.verdict = self._pool.submit(self.judge, _as_samples(group), filtering)
            if group.scored and (group.verdict is None or group.verdict.done()):
                decided.append(group)
        groups[:] = [group for group in groups if group not in decided]
        return decided

    def _score(self, group: Group, request: Request, output: Output) -> Answer:
        text = self.prompts.tokenizer.decode(output.tokens, skip_special_tokens=True)
        facts = {"finished": output.stopped, "tokens": sum(output.mask), "max_new_tokens": request.max_new_tokens}
        metadata = {**group.row.metadata, **facts}
        sample = f"prompt {request.prompt_id}, sample {request.sample_index}"
        if output.reward is None:
            score = self._pool.submit(self.reward, group.prompt, text, group.row.label, metadata, sample)
        else:
            score = self._pool.submit(given, output.reward, self.whole or self.talk or self.reward, sample)
        return Answer(request, output, text, score, self.version)

    def _wait(self, groups: list[Group], waited: float) -> float:
        """A short wait for scores, whose seconds are returned; a reward that hangs is named."""
        started = time.perf_counter()
        time.sleep(POLL_SECONDS)
        self.engine.poll_hook()
        if waited > self.config.rollout.timeout_seconds:
            answers = [answer for group in groups for answer in group.answers]
            slow = next((answer for answer in answers if not answer.score.done()), answers[0])
            raise DeadlineExceeded(
                f"rollout.reward did not return within {waited:.0f} s",
                where=f"prompt {slow.request.prompt_id}, sample {slow.request.sample_index}, answer {slow.text[:200]!r}",
                next_step="give the reward function a time limit of its own, or raise rollout.timeout_seconds",
            )
        return time.perf_counter() - started

    def _accept(self, step: int, group: Group) -> list[Samples]:
        """The group's samples, or nothing if a request or a reward of it failed and the policy is to drop."""
        if not group.error:
            return [_samples(group)]
        if self.config.rollout.reward_error == "fail" or not isinstance(group.error, EdgeError | EngineError):
            raise group.error
        self.reward_errors[group.prompt_id] = f"step {step}: {group.error}"
        return []


def _failed(request: Request, error: EngineError) -> Answer:
    """In place of an answer that the engine refused to give."""
    score: Future[Score] = Future()
    score.set_exception(error)
    return Answer(request, Output([], [], False), "", score, -1)


def _as_samples(group: Group) -> list[Sample]:
    """As group rewards and filters see them, by sample index."""
    return [
        Sample(
            group_index=group.prompt_id,
            index=answer.request.sample_index,
            prompt=group.prompt,
            tokens=[*answer.request.tokens, *answer.output.tokens],
            response=answer.text,
            response_length=len(answer.output.tokens),
            loss_mask=answer.output.mask,
            label=group.row.label,
            reward=_reward(answer.score.result()),
            rollout_log_probs=answer.output.log_probs,
            status=Sample.Status.COMPLETED if answer.output.stopped else Sample.Status.TRUNCATED,
            metadata=dict(group.row.metadata),
        )
        for answer in _sorted(group)
    ]


def _sorted(group: Group) -> list[Answer]:
    return sorted(group.answers, key=lambda answer: answer.request.sample_index)


def _reward(score: Score) -> Any:
    return {"reward": score.value, **score.parts} if score.parts else score.value


def _rewards(group: Group) -> list[float]:
    """Of the group, where there is a group reward, else of each answer. Raises: EdgeError if one failed."""
    if group.error:
        raise group.error
    whole = group.verdict.result().rewards if group.verdict else None
    return whole or [answer.score.result().value for answer in _sorted(group)]


def _timing(groups: list[Group], generate: float, reward: float) -> Timing:
    answers = [answer for group in groups for answer in group.answers]
    work = sum(answer.score.result().seconds for answer in answers if answer.score.exception() is None)
    return Timing(generate, reward, work, sum(sum(answer.output.mask) for answer in answers))


def _samples(group: Group) -> Samples:
    answers = _sorted(group)
    scores = [answer.score.result() for answer in answers]
    names = sorted({name for score in scores for name in score.parts})
    lengths = [len(a.request.tokens) + len(a.output.tokens) for a in answers]
    label = json.dumps(group.row.label, ensure_ascii=False, default=str)
    return Samples(
        prompt_ids=np.array([a.request.prompt_id for a in answers], np.int64),
        sample_index=np.array([a.request.sample_index for a in answers], np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        tokens=_flat([(a.request.tokens, a.output.tokens) for a in answers], np.int32),
        loss_mask=_flat([([0] * len(a.request.tokens), a.output.mask) for a in answers], np.uint8),
        rollout_log_probs=_flat([([0.0] * len(a.request.tokens), a.output.log_probs) for a in answers], np.float32),
        weight_versions=_flat([([-1] * len(a.request.tokens), _versions(a)) for a in answers], np.int32),
        rewards=np.array(_rewards(group), np.float32),
        status=np.array([STOPPED if a.output.stopped else TRUNCATED for a in answers], np.uint8),
        prompts=[group.prompt] * len(answers),
        answers=[answer.text for answer in answers],
        labels=[label] * len(answers),
        refusals=[group.refusal] * len(answers),
        reward_parts={name: np.array([score.parts.get(name, np.nan) for score in scores], np.float32) for name in names},
        routing=_routing([answer.output for answer in answers]),
    )


def _versions(answer: Answer) -> list[int]:
    return [answer.version if own else -1 for own in answer.output.mask]


def _routing(outputs: list[Output]) -> np.ndarray | None:
    found = [output.routing for output in outputs if output.routing is not None]
    return np.concatenate(found) if len(found) == len(outputs) else None


def _flat(parts: list[tuple[list[Any], list[Any]]], kind: type) -> np.ndarray:
    """Prompt and answer values of all samples, one after the other."""
    return np.concatenate([np.asarray([*prompt, *answer], kind) for prompt, answer in parts])
