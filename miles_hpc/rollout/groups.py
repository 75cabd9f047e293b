"""`rollout.function`: a user's async generator that answers all groups of an engine's share in a way of its own.

To the generator it looks like a flight of single answers, as conversations do: rewards, filters, shards and restarts stay as
they are.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from miles_hpc import edges
from miles_hpc.errors import EdgeError
from miles_hpc.rollout.conversation import Conversations, SampleClient, checked
from miles_hpc.rollout.request import Output, Request
from miles_hpc.sample import Sample

KEY = "rollout.function"

Rollout = Callable[[list[list[Sample]], "GroupClient"], AsyncIterator[list[Sample]]]


class GroupClient:
    """The engine, as a rollout function sees it: every request belongs to a sample."""

    def __init__(self, clients: Mapping[tuple[int, int], SampleClient]) -> None:
        self._clients = clients
        client = next(iter(clients.values()))
        self.tokenizer, self.max_new_tokens = client.tokenizer, client.max_new_tokens

    async def generate(self, sample: Sample, tokens: Sequence[int], max_new_tokens: int | None = None) -> Output:
        """Continue `tokens` with the noise of `sample` at these positions: the same tokens are continued in the same way.

        Raises:
            ValueError: there is no room for a single token.
        """
        return await self.of(sample).generate(tokens, max_new_tokens)

    def of(self, sample: Sample) -> SampleClient:
        """What asks the engine for `sample` alone."""
        return self._clients[_name(sample)]


class GroupConversations(Conversations):
    """As `Conversations`; the function is called once for all requests that are added together."""

    def add(self, requests: Sequence[Request]) -> list[int]:
        """Begin to answer them; returns their keys."""
        keys = self._keys(requests)
        if keys:
            asyncio.run_coroutine_threadsafe(self._answer(dict(zip(keys, requests, strict=True))), self._loop)
        return keys

    async def _answer(self, requests: dict[int, Request]) -> None:
        samples = [self.describe(request) for request in requests.values()]
        keys = dict(zip(map(_name, samples), requests, strict=True))
        clients = dict(zip(map(_name, samples), map(self._client, requests.values()), strict=True))
        key = next(iter(requests))
        last: Output | BaseException | None = None
        try:
            async for name, output in perform(self.function, samples, GroupClient(clients)):
                key = keys.pop(name)
                if keys:
                    self._events.put(("done", key, output))
                else:  # told when the function has ended: it may still raise, and nobody listens after the last answer
                    last = output
        except BaseException as error:
            key, last = next(iter(keys.values()), key), error
        self._events.put(("done", key, last))


async def perform(function: Any, samples: list[Sample], client: GroupClient) -> AsyncIterator[tuple[tuple[int, int], Output]]:
    """Every sample's (prompt id, number) with its answer, checked.

    Raises:
        EdgeError: the function raised, yielded what it was not asked for, or left something out.
    """
    prompts = {_name(sample): list(sample.tokens) for sample in samples}
    try:
        async for group in function(_groups(samples), client):
            for sample in group:
                if not isinstance(sample, Sample) or _name(sample) not in prompts:
                    raise edges.wrong(KEY, function, "groups of the samples that it was given, each once", sample)
                key = f"{KEY} (prompt {sample.group_index}, sample {sample.index})"
                yield _name(sample), checked(key, function, sample, prompts.pop(_name(sample)), client.of(sample))
    except EdgeError:
        raise
    except Exception as error:
        raise EdgeError(f"{KEY} raised {edges.describe(error)}", where=edges.location(error)) from error
    if prompts:
        prompt_id, index = next(iter(prompts))
        what = f"{KEY} ended without {len(prompts)} of its answers, the first: prompt {prompt_id}, sample {index}"
        raise EdgeError(what, where=edges.place(function))


def _name(sample: Sample) -> tuple[int, int]:
    return sample.group_index or 0, sample.index or 0


def _groups(samples: list[Sample]) -> list[list[Sample]]:
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(_name(sample)[0], []).append(sample)
    return list(groups.values())
