"""The rank's side of an engine: start, generate, call, stop. No torch, no sglang, no mpi4py.

The engine runs in a host process (`rollout/sglang.py`); its death is an `EngineDied` here, after which `start` brings up a
new one.
"""

import contextlib
import itertools
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn

from miles_hpc.config import Config
from miles_hpc.errors import DeadlineExceeded, EngineDied, EngineError
from miles_hpc.pace import Pace
from miles_hpc.rollout.arguments import EngineArguments, environment
from miles_hpc.rollout.request import Output, Request

POLL_SECONDS = 0.1
PING_SECONDS = 1.0
EXIT_SECONDS = 5.0
LOG_TAIL_BYTES = 4000


Recover = Callable[[EngineDied | DeadlineExceeded, Mapping[int, Request]], dict[int, Output]]


class EngineHost:
    """One engine and its host process.

    Args:
        config: of the run.
        model_folder: a Hugging Face checkpoint.
        log: file for the output of the engine's processes; None: this process's own.
        poll_hook: called at least every 0.2 s in any wait (signals, heartbeat); an exception it raises leaves the wait.
        number: among the engines of the run; decides on its GPUs.

    Any wait lasts at most `rollout.timeout_seconds` unless its caller says otherwise.
    """

    program: Sequence[str] = ("-m", "miles_hpc.rollout.sglang")
    """The host."""

    def __init__(
        self,
        config: Config,
        model_folder: Path,
        log: Path | None = None,
        poll_hook: Callable[[], None] = lambda: None,
        number: int = 0,
    ) -> None:
        self.arguments = EngineArguments.of(config, model_folder, number)
        self.timeout = config.rollout.timeout_seconds
        self.log, self.poll_hook = log, poll_hook
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """On their way to the host."""
        self.recover: Recover = give_up
        """Called by a flight whose engine died or hangs, with the requests that have no answer; when it returns, there is a new
        engine with the right weights. What it returns are answers that others gave meanwhile, by key."""
        self.pace = Pace(self.timeout)
        """Of the scheduler's answers to pings."""
        self.warm = False
        """The engine has answered before: nothing is compiled any more."""
        self._ids = itertools.count()
        self._ready = False

    @property
    def pid(self) -> int | None:
        """Process id of the host, None when there is none."""
        return self._process.pid if self._process else None

    @property
    def ended(self) -> bool:
        """True if there was a host process and it has ended."""
        return self._process is not None and self._process.poll() is not None

    def start(self) -> None:
        """Start the host and return at once; a host left from before is ended first.

        Call it from the main thread: the kernel ends the host when the thread that started it ends.
        """
        self._reap()
        ours, theirs = Pipe()
        with theirs, self._output() as output:
            self._process = subprocess.Popen(
                [sys.executable, *self.program, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                env=environment(dict(os.environ)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._connection, self._ready, self.warm = ours, False, False
        self._messages = queue.SimpleQueue()
        threading.Thread(target=_write, args=(ours, self._messages), name="engine-requests", daemon=True).start()
        self._send("start", self.arguments)

    def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until the engine can generate; at once if it can already.

        Raises:
            EngineError: it refused to start (the reason is in the text). EngineDied. DeadlineExceeded.
        """
        if self._ready:
            return
        message = self._receive("start-up", timeout or self.timeout)
        if message[0] == "error":
            self._reap()
            raise EngineError(f"the engine did not start:\n{message[2]}", where=self._where())
        self._ready = True

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, Output]]:
        """Yield (index in `requests`, output) as answers finish. Leaving the iterator early aborts the rest.

        Raises:
            EngineError: a request was refused twice. EngineDied. DeadlineExceeded: no answer within `timeout`.
        """
        with self.flight() as flight:
            index = {key: i for i, key in enumerate(flight.add(requests))}
            while flight.open:
                key, output = flight.next()
                if isinstance(output, EngineError):
                    raise output
                yield index[key], output

    def flight(self, recovering: bool = True) -> "Flight":
        """Requests under way, to which more may be added."""
        return Flight(self, recovering)

    def call(self, name: str, timeout: float | None = None, **fields: Any) -> Any:
        """A call between generations: see `CALLS` in `rollout/sglang.py` for names, SGLang's request classes for fields.

        Raises:
            EngineError: the engine answered False; the message is its own. EngineDied. DeadlineExceeded.
        """
        wanted = self._call(name, fields)
        deadline = time.monotonic() + (timeout or self.timeout)
        kind, key, value = self._receive(name, deadline - time.monotonic())
        while key != wanted:  # of a generation that was left early, or of a call that was given up
            kind, key, value = self._receive(name, deadline - time.monotonic())
        if kind == "error":
            raise EngineError(f"the engine refused {name}: {value}", where=self._where())
        return value

    def shutdown(self, timeout: float = 20.0) -> None:
        """Stop the engine and leave no process behind; safe to call twice, or after the engine's death."""
        if self._process:
            self._messages.put(("exit",))
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)
        self._reap()

    def _output(self) -> Any:
        return self.log.open("ab") if self.log else contextlib.nullcontext()

    def _call(self, name: str, fields: dict[str, Any]) -> int:
        """Send a call; returns the key of its answer."""
        key = next(self._ids)
        self._send(name, ("call", key, name, fields))
        return key

    def _abandon(self, keys: Any) -> None:
        """Tell a living engine to drop the requests that nobody will read."""
        if keys:
            self._messages.put(("abort",))

    def _send(self, doing: str, message: Any) -> None:
        if self._connection is None:
            raise EngineDied(f"there is no engine to {doing}: it was not started or has ended", where=self._where())
        self._messages.put(message)

    def _receive(self, doing: str, timeout: float) -> tuple[str, int, Any]:
        """The next message."""
        if not self._arrived(doing, timeout):
            raise DeadlineExceeded(
                f"the engine did not answer within {timeout:.0f} s: {doing}{self._tail()}",
                where=self._where(),
                next_step="look for the reason in the log; if the engine is only slow, raise rollout.timeout_seconds",
            )
        assert self._connection
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            self._died(doing)

    def _arrived(self, doing: str, timeout: float) -> bool:
        """Wait for a message; False if there is none after `timeout`."""
        if self._connection is None:
            raise EngineDied(f"there is no engine to wait for ({doing})", where=self._where())
        deadline = time.monotonic() + timeout
        self.poll_hook()
        while not self._connection.poll(min(POLL_SECONDS, max(0.0, deadline - time.monotonic()))):
            self.poll_hook()
            if time.monotonic() >= deadline:
                return False
        return True

    def _died(self, doing: str) -> NoReturn:
        assert self._process
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_SECONDS)
        code, where, tail = self._process.poll(), self._where(), self._tail()
        self._reap()
        raise EngineDied(f"the engine's host process ended with {_reason(code)} during {doing}{tail}", where=where) from None

    def _reap(self) -> None:
        """End whatever is left of the host's process group."""
        if self._process:
            _end_group(self._process.pid)
            self._process.wait()
        if self._connection:
            self._messages.put(None)
            self._connection.close()
        self._process = self._connection = None

    def _where(self) -> str:
        host = f"engine host pid {self.pid}" if self.pid else "engine host"
        return f"{host}, log {self.log}" if self.log else host

    def _tail(self) -> str:
        """The last lines of the engine's log, to be put into an error."""
        if not self.log or not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[-15:]
        return "\nlast lines of its log:\n  " + "\n  ".join(lines) if lines else ""


class Flight:
    """Requests under way on an engine, which outlive it; leaving the context aborts those without an answer.

    When the engine dies, or its scheduler stops to answer, `EngineHost.recover` brings up another one, which gets the requests
    without an answer again; keyed sampling makes their answers the same.
    """

    def __init__(self, engine: EngineHost, recovering: bool = True) -> None:
        self.engine, self.recovering = engine, recovering
        self._given: dict[int, Output] = {}
        """Answers of other engines."""
        self.open: dict[int, Request] = {}
        """Requests without an answer."""
        self.refused: dict[int, str] = {}
        """Why the engine refused a request that was then sent a second time."""
        self._ping: int | None = None
        """Key of the ping without an answer."""
        self._pinged = self._sign = 0.0
        """When the last ping went out, and the last sign of life since."""

    def __enter__(self) -> "Flight":
        return self

    def __exit__(self, *error: object) -> None:
        self.engine._abandon(self.open)

    def add(self, requests: Sequence[Request]) -> list[int]:
        """Send requests; returns their keys."""
        added = {next(self.engine._ids): request for request in requests}
        self.open |= added
        self._send(added)
        return list(added)

    def ready(self, seconds: float) -> bool:
        """Wait for an answer to be there, at most so long."""
        self.engine.poll_hook()
        return bool(self._given) or self.engine._connection is None or self.engine._connection.poll(seconds)

    def next(self) -> tuple[int, Output | EngineError]:
        """The next answer and its request's key; an error if the engine refused the request twice.

        Raises:
            EngineDied, DeadlineExceeded: the engine, where it is not to be started again.
        """
        since = time.monotonic()
        while True:
            try:
                if answer := self._answer(since):
                    return answer
            except (EngineDied, DeadlineExceeded) as error:
                self._recover(error)
                since = time.monotonic()

    def _answer(self, since: float) -> tuple[int, Output | EngineError] | None:
        """An answer, or None for anything else that came or did not come."""
        for key in self._given.keys() & self.open.keys():
            self.open.pop(key)
            return key, self._given.pop(key)
        doing = f"generate ({len(self.open)} answers outstanding)"
        self._check(doing, since)
        if not self.engine._arrived(doing, PING_SECONDS):
            return None
        kind, key, value = self.engine._receive(doing, PING_SECONDS)
        self._alive(key)
        if key not in self.open:
            return None
        if kind == "error":
            return self._refuse(key, value)
        self.engine.warm = True
        self.open.pop(key)
        return key, value

    def _check(self, doing: str, since: float) -> None:
        """Ping the scheduler now and then. Raises: DeadlineExceeded if it is silent, or without an answer since too long."""
        now = time.monotonic()
        if self._ping is None and now > self._pinged + PING_SECONDS:
            self._ping, self._pinged, self._sign = self.engine._call("alive", {}), now, now
        limit = self.engine.pace.limit if self.engine.warm else self.engine.timeout
        if self._ping is not None and now - self._sign > limit:
            self.engine.pace.took(now - self._sign)  # should it only be slow, it gets more time henceforth
            raise DeadlineExceeded(f"the engine's scheduler has been silent for {limit:.0f} s: {doing}{self.engine._tail()}")
        if now - since > self.engine.timeout:
            raise DeadlineExceeded(f"no answer within {self.engine.timeout:.0f} s: {doing}{self.engine._tail()}")

    def _alive(self, key: int) -> None:
        """Any message is a sign of life."""
        now = time.monotonic()
        if self._ping is not None:
            self.engine.pace.took(now - self._sign)
        self._sign, self._ping = now, None if key == self._ping else self._ping

    def _refuse(self, key: int, reason: str) -> tuple[int, EngineError] | None:
        """Send the request once more; the second refusal is its answer."""
        if key in self.refused:
            request = self.open.pop(key)
            sample = f"prompt {request.prompt_id}, sample {request.sample_index}"
            return key, EngineError(f"the engine refused to generate: {reason}", where=f"{sample}, {self.engine._where()}")
        self.refused[key] = reason
        self._send({key: self.open[key]})
        return None

    def _send(self, requests: dict[int, Request]) -> None:
        try:
            self.engine._send("generate", ("generate", list(requests.items())))
        except EngineDied as error:
            self._recover(error)

    def _recover(self, error: EngineDied | DeadlineExceeded) -> None:
        """Another engine for all requests without an answer."""
        recover = self.engine.recover if self.recovering else give_up
        self._given |= recover(error, self.open)
        self._ping = None
        self._send({key: request for key, request in self.open.items() if key not in self._given})


def give_up(error: EngineDied | DeadlineExceeded, requests: Mapping[int, Request]) -> dict[int, Output]:
    """The recovery of a client that has none. Raises: what it is given."""
    raise error


def _write(connection: Connection, messages: "queue.SimpleQueue[Any]") -> None:
    """Send what comes; a host that is stopped would block whoever does this. The reader learns of a broken pipe."""
    with contextlib.suppress(OSError):
        while message := messages.get():
            connection.send(message)


def _end_group(leader: int) -> None:
    """Kill a process group and wait until its members are gone: only then is a GPU's memory free."""
    end = time.monotonic() + EXIT_SECONDS
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
    while _alive(leader) and time.monotonic() < end:
        time.sleep(0.01)


def _alive(group: int) -> bool:
    """True if a process of the group is there and no zombie."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, of = file.read_text().rpartition(")")[2].split()[:3]
            if int(of) == group and state != "Z":
                return True
    return False


def _reason(code: int | None) -> str:
    if code is None:
        return "no exit code (it does not end)"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
