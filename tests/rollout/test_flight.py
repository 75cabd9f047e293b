"""Requests that outlive their engine, with the engine's program replaced by `host.py`."""

import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

sys.path.append(str(Path(__file__).parent))
from host import DIES, REFUSED, REFUSED_ONCE, STOPS
from rollout_parts import config

from miles_hpc import pace
from miles_hpc.errors import DeadlineExceeded, EngineDied, EngineError
from miles_hpc.heartbeat import Heartbeat
from miles_hpc.rollout import engine as engine_module
from miles_hpc.rollout.conversation import Conversations
from miles_hpc.rollout.engine import EngineHost
from miles_hpc.rollout.request import Output, Request
from miles_hpc.rollout.restarts import Restarts
from miles_hpc.sample import Sample


class Engine(EngineHost):
    program = (str(Path(__file__).with_name("host.py")),)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    (tmp_path / "config.json").write_text('{"eos_token_id": 0}')
    host = Engine(config(timeout_seconds=60.0), tmp_path, tmp_path / "engine.log")
    host.start()
    host.wait_ready()
    yield host
    host.shutdown()


def requests(*prompts: int, length: int = 1) -> list[Request]:
    return [Request([1] * length, prompt, 0, 4) for prompt in prompts]


def answered(engine: EngineHost, wanted: list[Request]) -> dict[int, Output | EngineError]:
    """By prompt; every request has exactly one answer."""
    with engine.flight() as flight:
        prompts = dict(zip(flight.add(wanted), (request.prompt_id for request in wanted), strict=True))
        found: dict[int, Output | EngineError] = {}
        while flight.open:
            key, output = flight.next()
            assert prompts[key] not in found
            found[prompts[key]] = output
    assert set(found) == set(prompts.values())
    return found


def starting_again(engine: Engine, seen: list[Exception]) -> Any:
    def recover(error: Exception, requests: Mapping[int, Request]) -> dict[int, Output]:
        seen.append(error)
        engine.start()
        engine.wait_ready()
        return {}

    return recover


def test_a_request_that_is_refused_once_is_answered_and_one_that_is_refused_twice_is_named(engine: Engine) -> None:
    found = answered(engine, requests(1, REFUSED_ONCE, 2, REFUSED, 3))
    error = found.pop(REFUSED)
    assert isinstance(error, EngineError) and "out of memory" in error.what and f"prompt {REFUSED}" in error.where
    assert all(isinstance(output, Output) and output.tokens[0] == prompt for prompt, output in found.items())


def test_the_answers_of_a_dead_engine_stay_and_the_rest_is_asked_again(engine: Engine) -> None:
    seen: list[Exception] = []
    engine.recover, first = starting_again(engine, seen), engine.pid
    found = answered(engine, requests(1, 2, DIES, 3))
    assert [output.tokens for output in found.values()][:2] == [[1, first], [2, first]]
    assert found[DIES].tokens == [DIES, engine.pid] and found[3].tokens == [3, engine.pid] and engine.pid != first
    assert len(seen) == 1 and "SIGKILL" in str(seen[0]) and "the host is up" in str(seen[0])


def test_an_engine_that_stops_is_found_by_its_silence_and_nothing_of_it_is_left(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Exception] = []
    engine.recover = starting_again(engine, seen)
    answered(engine, requests(*range(20)))  # warm: the deadline fits from now on
    old = [psutil.Process(engine.pid), *psutil.Process(engine.pid).children()]
    monkeypatch.setattr(pace, "LEAST_SECONDS", 1.0)
    found = answered(engine, requests(1, STOPS, 2))
    assert found[STOPS].tokens[1] == engine.pid
    assert isinstance(seen[0], DeadlineExceeded) and re.search(r"silent for \d+ s", str(seen[0]))
    assert not psutil.wait_procs(old, timeout=60)[1]


def test_a_conversation_whose_engine_stops_goes_on_with_another(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Exception] = []
    engine.recover = starting_again(engine, seen)
    answered(engine, requests(*range(20)))
    engine.call("alive")  # no answer to a ping is left unread
    monkeypatch.setattr(pace, "LEAST_SECONDS", 1.0)

    async def talk(sample: Sample, client: Any) -> Sample:
        output = await client.generate(sample.tokens)
        sample.tokens, sample.response_length = [*sample.tokens, *output.tokens], len(output.tokens)
        sample.rollout_log_probs = output.log_probs
        return sample

    def sample(request: Request) -> Sample:
        return Sample(group_index=request.prompt_id, index=0, tokens=list(request.tokens))

    with engine.flight() as flight, Conversations(flight, talk, sample, None, 10, 60.0) as conversations:
        conversations.add(requests(STOPS, 1, 2))
        found = [conversations.next()[1].tokens for _ in range(3)]
    assert sorted(tokens[0] for tokens in found) == [1, 2, STOPS] and [STOPS, engine.pid] in found
    assert len(seen) == 1 and re.search(r"silent for \d+ s", str(seen[0]))


def test_an_engine_is_not_silent_while_nobody_listens(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward or a tool may take minutes; the answer to a ping then lies unread."""
    ahead, clock = [0.0], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + ahead[0])
    engine.pace.took(0.01)
    with engine.flight() as flight:
        for prompt in (1, 2):
            flight.add(requests(prompt))
            assert flight.next()[1].tokens == [prompt, engine.pid]
            assert flight._ping is not None
            ahead[0] += 1000.0
    assert engine.pace.longest < 500  # nor was the pause measured as its pace


def test_requests_to_a_stopped_engine_do_not_block_their_sender(engine: Engine) -> None:
    polls: list[int] = []
    stopped = psutil.Process(engine.pid)
    stopped.suspend()
    engine.timeout, engine.poll_hook = 1.0, lambda: polls.append(1)
    with pytest.raises(DeadlineExceeded):
        answered(engine, requests(*range(100), length=10_000))
    assert len(polls) > 1  # a blocked sender would neither poll nor raise
    stopped.resume()


def test_what_came_while_the_rank_itself_was_stopped_came_in_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is over when it goes on: it looks once more."""
    looks, poll, clock = list[float](), engine._connection.poll, time.monotonic
    monkeypatch.setattr(engine._connection, "poll", lambda seconds: looks.append(seconds) or (len(looks) > 1 and poll(60)))
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 1000 * len(looks))
    assert engine.call("alive", timeout=60) is None


def test_a_process_that_cannot_be_killed_does_not_block_its_rank(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one within a broken GPU's driver."""
    monkeypatch.setattr(engine_module, "EXIT_SECONDS", 0.2)
    host = psutil.Process(engine.pid)
    host.suspend()  # its connection is closed: it would end by itself
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "_end_group", lambda leader: None)
        engine.start()  # another in its place
        engine.wait_ready()
        assert host.is_running() and engine.pid != host.pid
    engine_module._end_group(host.pid)


def test_without_recovery_the_death_is_raised(engine: Engine) -> None:
    with pytest.raises(EngineDied, match="SIGKILL"):
        answered(engine, requests(DIES))


def test_repeated_deaths_end_it_with_the_log_and_what_to_type(engine: Engine, tmp_path: Path) -> None:
    told: list[Any] = []
    world: Any = SimpleNamespace(rank=1, train=(0,), send=lambda value, *_: told.append(value))
    restarts = Restarts(engine, world, Heartbeat(tmp_path / "beat.json", "rollout", 1, 1), 5.0, "miles-submit logs R")
    for version in (0, 9):  # far apart
        restarts.version = version
        restarts.again(EngineDied("first"))
    restarts.again(EngineDied("second"))
    with pytest.raises(EngineDied, match="3 times within 5 versions") as caught:
        restarts.again(EngineDied("third\nlast lines of its log:\n  the host is up"))
    assert "the host is up" in str(caught.value) and caught.value.next_step == "miles-submit logs R"
    assert [death.version for death in told] == [0, 9, 9] and all(death.seconds > 0 for death in told)
