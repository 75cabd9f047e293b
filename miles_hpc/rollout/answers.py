"""Answers on their way to a group of samples."""

import json
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miles_hpc.errors import EdgeError, EngineError
from miles_hpc.records import Row
from miles_hpc.rollout.judge import Judgement
from miles_hpc.rollout.request import Draft, Output, Request
from miles_hpc.rollout.reward import Score
from miles_hpc.sample import Sample
from miles_hpc.samples.schema import STOPPED, TRUNCATED, Samples, flat


@dataclass(frozen=True)
class Answer:
    """A generated answer on its way to a score."""

    request: Request
    output: Output
    text: str
    score: Future[Score]
    version: int
    """Of the weights that gave it, or what a draft lacked of it."""

    @property
    def versions(self) -> list[int]:
        """Of each token, -1 on those of a tool."""
        kept = self.request.draft.versions if self.request.draft else []
        return [*kept, *(self.version if own else -1 for own in self.output.mask[len(kept) :])]

    @property
    def draft(self) -> Draft:
        """What another attempt can go on with."""
        return Draft((self.request.prompt_id, self.request.sample_index), self.request.tokens, self.output, self.versions)


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
    judgement: Future[Judgement] | None = None
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
        """Of the first answer whose reward failed, else of the judgement."""
        asked: list[Future[Any]] = [*(answer.score for answer in self.answers), *([self.judgement] if self.judgement else [])]
        errors = (future.exception() for future in asked)
        return next((error for error in errors if error), None)

    @property
    def refusal(self) -> str:
        """Why a filter refused the group; empty if none did, or if a reward failed."""
        return self.judgement.result().refusal if self.judgement and not self.error else ""


def failed(request: Request, error: EngineError | EdgeError) -> Answer:
    """In place of an answer that the engine, or a generate or rollout function, did not give."""
    score: Future[Score] = Future()
    score.set_exception(error)
    return Answer(request, Output([], [], False), "", score, -1)


def as_samples(group: Group) -> list[Sample]:
    """As group rewards and filters see them, by sample index: theirs to change, nothing of it is what is stored."""
    return [_as_sample(group, answer) for answer in _sorted(group)]


def _as_sample(group: Group, answer: Answer) -> Sample:
    label, metadata = group.row.copies()
    return Sample(
        group_index=group.prompt_id,
        index=answer.request.sample_index,
        prompt=group.prompt,
        tokens=[*answer.request.tokens, *answer.output.tokens],
        response=answer.text,
        response_length=len(answer.output.tokens),
        loss_mask=list(answer.output.mask),
        label=label,
        reward=_reward(answer.score.result()),
        rollout_log_probs=list(answer.output.log_probs),
        status=Sample.Status.COMPLETED if answer.output.stopped else Sample.Status.TRUNCATED,
        metadata=metadata,
        remove_sample=answer.output.removed,
    )


def _sorted(group: Group) -> list[Answer]:
    return sorted(group.answers, key=lambda answer: answer.request.sample_index)


def _reward(score: Score) -> Any:
    return {"reward": score.value, **score.parts} if score.parts else score.value


def rewards(group: Group) -> list[float]:
    """Of the group, where there is a group reward, else of each answer. Raises: EdgeError if one failed."""
    if group.error:
        raise group.error
    whole = group.judgement.result().rewards if group.judgement else None
    return whole or [answer.score.result().value for answer in _sorted(group)]


def samples_of(group: Group) -> Samples:
    """Of a group without an error, as they are stored, by sample index."""
    answers = _sorted(group)
    scores = [answer.score.result() for answer in answers]
    names = sorted({name for score in scores for name in score.parts})
    lengths = [len(a.request.tokens) + len(a.output.tokens) for a in answers]
    label = json.dumps(group.row.label, ensure_ascii=False, default=str)
    return Samples(
        prompt_ids=np.array([a.request.prompt_id for a in answers], np.int64),
        sample_index=np.array([a.request.sample_index for a in answers], np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        tokens=flat([(a.request.tokens, a.output.tokens) for a in answers], np.int32),
        loss_mask=flat([([0] * len(a.request.tokens), a.output.carrying) for a in answers], np.uint8),
        rollout_log_probs=flat([([0.0] * len(a.request.tokens), a.output.log_probs) for a in answers], np.float32),
        weight_versions=flat([([-1] * len(a.request.tokens), a.versions) for a in answers], np.int32),
        rewards=np.array(rewards(group), np.float32),
        status=np.array([STOPPED if a.output.stopped else TRUNCATED for a in answers], np.uint8),
        prompts=[group.prompt] * len(answers),
        answers=[answer.text for answer in answers],
        labels=[label] * len(answers),
        refusals=[group.refusal] * len(answers),
        reward_parts={name: np.array([score.parts.get(name, np.nan) for score in scores], np.float32) for name in names},
        routing=_routing([answer.output for answer in answers]),
    )


def _routing(outputs: list[Output]) -> np.ndarray | None:
    found = [output.routing for output in outputs if output.routing is not None]
    return np.concatenate(found) if len(found) == len(outputs) else None
