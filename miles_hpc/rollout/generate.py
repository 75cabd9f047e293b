"""Generation and reward of one engine: prompts in, finished and scored groups out."""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from miles_hpc import edges
from miles_hpc.config import Config
from miles_hpc.data import Prompts
from miles_hpc.errors import DeadlineExceeded, EdgeError, EngineError
from miles_hpc.rollout.answers import Answer, Group, as_samples, failed, rewards, samples_of
from miles_hpc.rollout.conversation import Conversations, Generate
from miles_hpc.rollout.engine import EngineHost
from miles_hpc.rollout.flight import Flight
from miles_hpc.rollout.groups import GroupConversations, Rollout
from miles_hpc.rollout.judge import Judge
from miles_hpc.rollout.pool import Pool
from miles_hpc.rollout.request import Draft, Output, Request
from miles_hpc.rollout.reward import Reward, given
from miles_hpc.sample import Sample
from miles_hpc.samples.schema import Samples

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
        self._drafts: Mapping[tuple[int, int], Draft] = {}
        self._left: list[Group] = []
        self._under_way: dict[int, tuple[Group, Request]] = {}
        self._flight: Flight | None = None
        """Of what is being generated: groups without a judgement, requests without an answer."""
        self._pool = Pool(config.rollout.reward_threads, "reward")

    def groups(
        self,
        step: int,
        prompt_ids: Sequence[int] | np.ndarray,
        version: int,
        spare: Mapping[int, Sequence[int]] | None = None,
        drafts: Mapping[tuple[int, int], Draft] | None = None,
    ) -> Iterator[Samples]:
        """Yield finished groups, `rollout.flush_groups` at a time, in the order in which they finish.

        A group that a filter refuses is yielded too, with the reason in `refusals`; a spare prompt is generated in its place at
        once, while the others go on.

        Args:
            step: for messages.
            prompt_ids: this engine's share of the step.
            version: of the engine's weights.
            spare: for a prompt id, those to try after it.
            drafts: by prompt id and sample index, what an earlier attempt had of their answers.

        Raises:
            EdgeError, EngineError: a reward failed, a function gave no answer, or the engine refused a request twice, and
                `rollout.reward_error = "fail"`.
            EngineDied, DeadlineExceeded: the engine, where it is not started again.
        """
        self.reward_errors, self.unwritten, self.version, self._drafts = {}, [], version, drafts or {}
        others = spare or {}
        for group in self._judged([self._group(self.prompts, int(i), spare=others.get(int(i), ())) for i in prompt_ids]):
            self.unwritten += self._accept(step, group)
            if len(self.unwritten) >= self.config.rollout.flush_groups:
                yield self._written()
        if self.unwritten:
            yield self._written()

    def interrupted(self) -> list[Draft]:
        """After `Stopped`: what there is of the answers of groups that are not finished."""
        found = self._flight.interrupt() if self._flight else {}
        begun = [(request, found.get(key, request.begun)) for key, (_, request) in self._under_way.items()]
        answers = [answer for group in self._left for answer in group.answers]
        answers += [Answer(request, output, "", Future(), self.version) for request, output in begun]
        return [answer.draft for answer in answers if answer.output.tokens]

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
        return Evaluation(sum(rewards(group)[0] for group in groups), len(rows))

    def _written(self) -> Samples:
        groups, self.unwritten = self.unwritten, []
        return Samples.concat(groups)

    def _group(self, prompts: Prompts, prompt_id: int, greedy: bool = False, spare: Sequence[int] = ()) -> Group:
        row, rollout = prompt_id % len(prompts), self.config.rollout
        tokens, samples = prompts.tokens(row), 1 if greedy else rollout.samples_per_prompt
        drafts = [None if greedy else self._draft(tokens, prompt_id, i) for i in range(samples)]
        requests = [Request(tokens, prompt_id, i, rollout.max_new_tokens, greedy, draft) for i, draft in enumerate(drafts)]
        return Group(prompts.text(row), prompts.rows[row], requests, [int(i) for i in spare])

    def _draft(self, prompt: list[int], prompt_id: int, index: int) -> Draft | None:
        """To go on with, if it is of the same prompt, which another tokenizer would change."""
        draft = self._drafts.get((prompt_id, index))
        return draft if draft and draft.prompt == prompt else None

    def _judged(self, groups: list[Group], filtering: bool = True) -> Iterator[Group]:
        """The groups as their judgements come in, and those that were generated in place of refused ones."""
        started, idle, waited = time.perf_counter(), 0.0, 0.0
        everything, self._left, self._under_way = list(groups), list(groups), {}
        with self.engine.flight() as self._flight, self._through_edge(self._flight, everything) as flight:
            self._send(flight, groups)
            while self._left:
                if flight.open:
                    self._receive(flight)
                else:
                    seconds = self._wait(self._left, waited)
                    waited, idle = waited + seconds, idle + seconds
                for group in self._decided(filtering):
                    waited = 0.0
                    self._left.remove(group)
                    if group.refusal and group.spare:
                        other = self._group(self.prompts, group.spare[0], spare=group.spare[1:])
                        everything.append(other)  # before it is sent: the edge finds its sample there
                        self._left.append(other)
                        self._send(flight, [other])
                    yield group
        self.timing = _timing(everything, time.perf_counter() - started - idle, idle)

    def _through_edge(self, flight: Flight, groups: list[Group]) -> AbstractContextManager[Flight | Conversations]:
        """The flight itself, or what the generate or rollout edge makes of it."""
        function = self.whole or self.talk
        if function is None:
            return nullcontext(flight)

        def describe(request: Request) -> Sample:
            group = next(group for group in reversed(groups) if group.prompt_id == request.prompt_id)
            label, metadata = group.row.copies()
            facts = {"prompt": group.prompt, "tokens": list(request.tokens), "label": label, "metadata": metadata}
            return Sample(group_index=request.prompt_id, index=request.sample_index, **facts)

        longest, seconds = self.config.model.context_length, self.config.rollout.timeout_seconds
        kind: type[Conversations] = GroupConversations if self.whole else Conversations
        return kind(flight, function, describe, self.prompts.tokenizer, longest, seconds)

    def _send(self, flight: Flight | Conversations, groups: list[Group]) -> None:
        """Ask for all answers that are not there already."""
        work = [(group, request) for group in groups for request in group.requests]
        asked = [(group, request) for group, request in work if not request.begun.whole]
        self._under_way.update(zip(flight.add([request for _, request in asked]), asked, strict=True))
        for group, request in work:
            if request.begun.whole:
                group.answers.append(self._score(group, request, request.begun))

    def _receive(self, flight: Flight | Conversations) -> None:
        """The next answer; its score is under way afterwards."""
        key, output = flight.next()
        group, request = self._under_way.pop(key)
        if isinstance(output, Output) and not output.failure:
            group.answers.append(self._score(group, request, output))
        else:
            error = output if isinstance(output, EngineError) else self._unanswered(request, output.failure)
            group.answers.append(failed(request, error))

    def _unanswered(self, request: Request, failure: str) -> EdgeError:
        """What a generate or rollout function has said of a sample in place of an answer."""
        name = "rollout.function" if self.whole else "rollout.generate"
        what = f"{name} has no answer for prompt {request.prompt_id}, sample {request.sample_index}: its status is {failure}"
        hint = 'set remove_sample to keep the sample out of the loss alone, or rollout.reward_error = "drop" to drop its group'
        return EdgeError(what, where=edges.place(self.whole or self.talk or self.reward), next_step=hint)

    def _decided(self, filtering: bool) -> list[Group]:
        """The groups that are decided; scored ones are given to the judge."""
        decided = []
        for group in self._left:
            if group.scored and group.judgement is None and not group.error:
                group.judgement = self._pool.submit(self.judge, as_samples(group), filtering)
            if group.scored and (group.judgement is None or group.judgement.done()):
                decided.append(group)
        return decided

    def _score(self, group: Group, request: Request, output: Output) -> Answer:
        text = self.prompts.tokenizer.decode(output.tokens, skip_special_tokens=True)
        facts = {"finished": output.stopped, "tokens": sum(output.mask), "max_new_tokens": request.max_new_tokens}
        label, metadata = group.row.copies()
        sample = f"prompt {request.prompt_id}, sample {request.sample_index}"
        if output.reward is None:
            score = self._pool.submit(self.reward, group.prompt, text, label, metadata | facts, sample)
        else:
            score = self._pool.submit(given, output.reward, self.whole or self.talk or self.reward, sample)
        return Answer(request, output, text, score, self.version)

    def _wait(self, groups: list[Group], waited: float) -> float:
        """A short wait for scores and judgements, whose seconds are returned; what hangs is named."""
        started = time.perf_counter()
        time.sleep(POLL_SECONDS)
        self.engine.poll_hook()
        if waited > self.config.rollout.timeout_seconds:
            raise _hangs(groups, waited)
        return time.perf_counter() - started

    def _accept(self, step: int, group: Group) -> list[Samples]:
        """The group's samples, or nothing if a request or a reward of it failed and the policy is to drop."""
        if not group.error:
            return [samples_of(group)]
        if self.config.rollout.reward_error == "fail" or not isinstance(group.error, EdgeError | EngineError):
            raise group.error
        self.reward_errors[group.prompt_id] = f"step {step}: {group.error}"
        return []


def _hangs(groups: list[Group], waited: float) -> DeadlineExceeded:
    """Of groups whose answers are all there: the first answer without a score, else the first group without a judgement."""
    slow = next((answer for group in groups for answer in group.answers if not answer.score.done()), None)
    what, where = "rollout.group_reward or a filter", f"prompt {groups[0].prompt_id}"
    if slow:
        what = "rollout.reward"
        where = f"prompt {slow.request.prompt_id}, sample {slow.request.sample_index}, answer {slow.text[:200]!r}"
    hint = "give the function a time limit of its own, or raise rollout.timeout_seconds"
    return DeadlineExceeded(f"{what} did not return within {waited:.0f} s", where=where, next_step=hint)


def _timing(groups: list[Group], generate: float, reward: float) -> Timing:
    answers = [answer for group in groups for answer in group.answers]
    work = sum(answer.score.result().seconds for answer in answers if answer.score.exception() is None)
    return Timing(generate, reward, work, sum(sum(answer.output.mask) for answer in answers))
