"""`rollout.generate`: users' coroutines that talk with the engine in several turns, many at a time.

They run in an event loop of their own thread; their requests reach the engine through the rank's main thread, which alone
holds the connection. To the generator this looks like a flight of single answers.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Self

import numpy as np

from miles_hpc import edges
from miles_hpc.errors import DeadlineExceeded, EdgeError, EngineError
from miles_hpc.rollout.flight import Flight
from miles_hpc.rollout.request import Output, Request
from miles_hpc.sample import Sample

KEY = "rollout.generate"
POLL_SECONDS = 0.02

Generate = Callable[[Sample, "SampleClient"], Awaitable[Sample]]


class SampleClient:
    """The engine, as a generate function sees it."""

    def __init__(self, ask: Callable[[Request], Awaitable[Output]], request: Request, tokenizer: Any, longest: int) -> None:
        self._ask, self._request, self.longest = ask, request, longest
        self.tokenizer = tokenizer
        self.max_new_tokens = request.max_new_tokens
        self._turns: list[tuple[list[int], Output]] = []
        """Tokens of a request and its answer, and the answer."""

    async def generate(self, tokens: Sequence[int], max_new_tokens: int | None = None) -> Output:
        """Continue `tokens`. The noise is that of the sample at these positions: the same tokens are continued in the same way.

        Raises:
            ValueError: there is no room for a single token.
        """
        room = min(max_new_tokens or self.max_new_tokens, self.longest - len(tokens))
        if room < 1:
            raise ValueError(f"{len(tokens)} tokens leave no room for an answer in {self.longest}")
        output = await self._ask(replace(self._request, tokens=list(tokens), max_new_tokens=room))
        self._turns.append(([*tokens, *output.tokens], output))
        return output

    def routing(self, tokens: Sequence[int]) -> np.ndarray | None:
        """`Samples.routing` of a conversation: of its longest beginning that is a whole turn, zeros behind."""
        recorded = next((output.routing for _, output in self._turns if output.routing is not None), None)
        if recorded is None:
            return None
        whole = np.zeros((len(tokens), *recorded.shape[1:]), recorded.dtype)
        for turn, output in self._within(tokens):
            if output.routing is not None:
                whole[: len(turn)] = output.routing
        return whole

    def stopped(self, tokens: Sequence[int]) -> bool | None:
        """How the last answer in a conversation ended, see `Output.stopped`; None: there is none of the engine's in it."""
        turns = self._within(tokens)
        return turns[-1][1].stopped if turns else None

    def _within(self, tokens: Sequence[int]) -> list[tuple[list[int], Output]]:
        """The turns with which a conversation begins, shortest first."""
        return sorted((pair for pair in self._turns if list(tokens[: len(pair[0])]) == pair[0]), key=lambda pair: len(pair[0]))


class Conversations:
    """A flight whose answers are made by a generate function.

    Args:
        flight: to the engine, entered.
        function: the edge.
        describe: the sample of a request before its answer.
        tokenizer: of the model.
        longest: tokens of prompt and answer together.
        seconds: longest silence of all conversations together.
    """

    def __init__(
        self,
        flight: Flight,
        function: Callable[..., Any],
        describe: Callable[[Request], Sample],
        tokenizer: Any,
        longest: int,
        seconds: float,
    ) -> None:
        self.flight, self.function, self.describe = flight, function, describe
        self.tokenizer, self.longest, self.seconds = tokenizer, longest, seconds
        self.open: dict[int, Request] = {}
        self._events: queue.SimpleQueue[tuple[str, Any, Any]] = queue.SimpleQueue()
        self._asked: dict[int, asyncio.Future[Output]] = {}
        self._loop = asyncio.new_event_loop()
        self._count = 0

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._loop.run_forever, name="generate", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self._thread.join(5)
        if not self._thread.is_alive():  # else a function blocks the loop, which then ends with the process
            self._loop.close()

    def add(self, requests: Sequence[Request]) -> list[int]:
        """Begin conversations; returns their keys."""
        keys = self._keys(requests)
        for key, request in zip(keys, requests, strict=True):
            asyncio.run_coroutine_threadsafe(self._talk(key, request), self._loop)
        return keys

    def _keys(self, requests: Sequence[Request]) -> list[int]:
        keys = list(range(self._count, self._count + len(requests)))
        self._count += len(requests)
        self.open |= dict(zip(keys, requests, strict=True))
        return keys

    def next(self) -> tuple[int, Output | EngineError]:
        """The next conversation that is over; an error if it ended because the engine refused a request twice.

        Raises:
            EdgeError: the function raised, or returned a sample that does not fit. EngineDied, DeadlineExceeded.
        """
        since = time.monotonic()
        while True:
            if event := self._event(0.0 if self.flight.open else POLL_SECONDS):
                kind, key, value = event
                if kind == "done":
                    return self._finished(key, value)
                self._asked[self.flight.add([key])[0]] = value
            elif not self.flight.open:
                self._check_silence(time.monotonic() - since)
                continue
            elif answer := self.flight.look(POLL_SECONDS):
                self._loop.call_soon_threadsafe(_tell, self._asked.pop(answer[0]), answer[1])
            since = time.monotonic()

    def _event(self, seconds: float) -> tuple[str, Any, Any] | None:
        try:
            return self._events.get(timeout=seconds) if seconds else self._events.get_nowait()
        except queue.Empty:
            return None

    def _check_silence(self, silent: float) -> None:
        self.flight.engine.poll_hook()
        if silent > self.seconds:
            request = next(iter(self.open.values()))
            raise DeadlineExceeded(
                f"{KEY} neither asked the engine nor returned within {silent:.0f} s",
                where=f"prompt {request.prompt_id}, sample {request.sample_index}, and {len(self.open) - 1} more",
                next_step="give tools a time limit of their own, or raise rollout.timeout_seconds",
            )

    def _finished(self, key: int, value: Output | BaseException) -> tuple[int, Output | EngineError]:
        self.open.pop(key)
        if isinstance(value, BaseException) and not isinstance(value, EngineError):
            raise value
        return key, value

    async def _end(self) -> None:
        """Cancel what is still talking, then stop the loop."""
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.wait(rest, timeout=2) if rest else None
        await self._loop.shutdown_asyncgens()
        self._loop.stop()

    async def _talk(self, key: int, request: Request) -> None:
        try:
            self._events.put(("done", key, await converse(self.function, self.describe(request), self._client(request))))
        except BaseException as error:
            refused = isinstance(error.__cause__, EngineError)  # twice, which is this request's misfortune alone
            self._events.put(("done", key, error.__cause__ if refused else error))

    def _client(self, request: Request) -> SampleClient:
        def ask(asked: Request) -> asyncio.Future[Output]:
            future: asyncio.Future[Output] = self._loop.create_future()
            self._events.put(("ask", asked, future))
            return future

        return SampleClient(ask, request, self.tokenizer, self.longest)


def _tell(asked: asyncio.Future[Output], output: Output | EngineError) -> None:
    if asked.cancelled():  # the function waits no longer, as after `asyncio.wait_for`
        return
    if isinstance(output, EngineError):
        asked.set_exception(output)
    else:
        asked.set_result(output)


async def converse(function: Generate, sample: Sample, client: SampleClient) -> Output:
    """One conversation, its result checked.

    Raises:
        EdgeError: the function raised, or returned a sample that does not fit.
    """
    prompt = list(sample.tokens)
    key = f"{KEY} (prompt {sample.group_index}, sample {sample.index})"
    try:
        found = await function(sample, client)
    except Exception as error:
        raise EdgeError(f"{key} raised {edges.describe(error)}", where=edges.location(error)) from error
    answer = checked(key, function, found, prompt, client)
    return answer if answer.failure else replace(answer, routing=client.routing(found.tokens))


def checked(key: str, function: Any, found: Any, prompt: list[int], client: SampleClient) -> Output:
    """The answer of a sample that `function` has finished, or that there is none.

    Raises:
        EdgeError: it does not fit.
    """
    status = _status(found)
    if status in (Sample.Status.ABORTED, Sample.Status.FAILED) and not found.remove_sample:
        return Output([], [], False, failure=status.name)
    if problem := _problem(found, prompt, client.longest):
        raise edges.wrong(f"{key}: {problem};", function, "the sample with its answer", found)
    stopped = client.stopped(found.tokens) if status is Sample.Status.PENDING else status is Sample.Status.COMPLETED
    if (status is None or stopped is None) and not found.remove_sample:
        problem = f"status {found.status} does not say whether the answer is COMPLETED or TRUNCATED"
        raise edges.wrong(f"{key}: {problem};", function, "the sample with its answer", found)
    length = found.response_length
    mask = [1] * length if found.loss_mask is None else [int(flag) for flag in found.loss_mask]
    tokens = [int(token) for token in found.tokens[len(prompt) :]]
    log_probs = [float(value) * flag for value, flag in zip(found.rollout_log_probs or (), mask, strict=True)]
    return Output(tokens, log_probs, bool(stopped), mask, copy(found.reward), removed=bool(found.remove_sample))


def _status(found: Any) -> Sample.Status | None:
    """By its value: an installed Miles or slime has an enumeration of its own."""
    try:
        return Sample.Status(getattr(found.status, "value", found.status)) if isinstance(found, Sample) else None
    except ValueError:
        return None


def _problem(sample: Any, prompt: list[int], longest: int) -> str:
    if not isinstance(sample, Sample):
        return "no Sample"
    if list(sample.tokens[: len(prompt)]) != prompt:
        return "tokens do not begin with the prompt"
    length = len(sample.tokens) - len(prompt)
    if not 0 < length <= longest - len(prompt) or length != sample.response_length:
        return f"{length} answer tokens, response_length {sample.response_length}, at most {longest - len(prompt)} fit"
    for name in ("rollout_log_probs", "loss_mask"):
        values = getattr(sample, name)
        if (values is None and name != "loss_mask") or (values is not None and len(values) != length):
            return f"{name} must have {length} entries"
    carries = sample.loss_mask is None or any(sample.loss_mask)
    return "" if carries or sample.remove_sample else "loss_mask has no 1, and remove_sample is not set"
