"""The rank's side of an engine: start, generate, call, stop. No torch, no sglang, no mpi4py.

The engine runs in a host process (`rollout/sglang.py`); its death is an `EngineDied` here, after which `start` brings up a
new one.
"""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from miles_hpc.config import Config
from miles_hpc.errors import DeadlineExceeded, EngineDied, EngineError
from miles_hpc.rollout.arguments import EngineArguments, environment
from miles_hpc.rollout.request import Output, Request

POLL_SECONDS = 0.1
LOG_TAIL_BYTES = 4000


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

    module = "miles_hpc.rollout.sglang"
    """Of the host process."""

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
        self._ids = itertools.count()
        self._pending: set[int] = set()
        self._ready = False

    @property
    def pid(self) -> int | None:
        """Process id of the host, None when there is none."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the host and return at once; a host left from before is ended first.

        Call it from the main thread: the kernel ends the host when the thread that started it ends.
        """
        self._reap()
        ours, theirs = Pipe()
        with theirs, self._output() as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.module, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                env=environment(dict(os.environ)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._connection, self._pending, self._ready = ours, set(), False
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
            EngineError: a request was refused. EngineDied. DeadlineExceeded: no answer within `timeout`.
        """
        with self.flight() as flight:
            index = {key: i for i, key in enumerate(flight.add(requests))}
            while flight.open:
                key, output = flight.next()
                yield index[key], output

    def flight(self) -> "Flight":
        """Requests under way, to which more may be added."""
        return Flight(self)

    def call(self, name: str, timeout: float | None = None, **fields: Any) -> Any:
        """A call between generations: see `CALLS` in `rollout/sglang.py` for names, SGLang's request classes for fields.

        Raises:
            EngineError: the engine answered False; the message is its own. EngineDied. DeadlineExceeded.
        """
        wanted = next(self._ids)
        self._pending.add(wanted)
        self._send(name, ("call", wanted, name, fields))
        deadline = time.monotonic() + (timeout or self.timeout)
        while True:
            key, value = self._next(name, deadline - time.monotonic())
            if key == wanted:
                return value

    def shutdown(self, timeout: float = 60.0) -> None:
        """Stop the engine and leave no process behind; safe to call twice, or after the engine's death."""
        if self._process and self._connection:
            with contextlib.suppress(OSError):
                self._connection.send(("exit",))
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)
        self._reap()

    def _output(self) -> Any:
        return self.log.open("ab") if self.log else contextlib.nullcontext()

    def _next(self, doing: str, timeout: float) -> tuple[int, Any]:
        """The next answer that somebody waits for."""
        while True:
            kind, key, value = self._receive(doing, timeout)
            if key not in self._pending:
                continue  # of a generation that was left early
            self._pending.discard(key)
            if kind == "error":
                raise EngineError(f"the engine refused {doing.split(' ')[0]}: {value}", where=self._where())
            return key, value

    def _abandon(self, keys: Any) -> None:
        """Tell a living engine to drop the requests that nobody will read."""
        if keys and self._process and self._process.poll() is None and self._connection:
            self._pending -= set(keys)
            with contextlib.suppress(OSError):
                self._connection.send(("abort",))

    def _send(self, doing: str, message: Any) -> None:
        if self._connection is None:
            raise EngineDied(f"there is no engine to {doing}: it was not started or has ended", where=self._where())
        try:
            self._connection.send(message)
        except OSError:
            self._died(doing)

    def _receive(self, doing: str, timeout: float) -> Any:
        if self._connection is None:
            raise EngineDied(f"there is no engine to wait for ({doing})", where=self._where())
        deadline = time.monotonic() + timeout
        self.poll_hook()
        while not self._connection.poll(min(POLL_SECONDS, max(0.0, deadline - time.monotonic()))):
            self.poll_hook()
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"the engine did not answer within {timeout:.0f} s: {doing}",
                    where=self._where(),
                    next_step="look for the reason in the log; if the engine is only slow, raise rollout.timeout_seconds",
                )
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            self._died(doing)

    def _died(self, doing: str) -> Any:
        assert self._process
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        code, where, tail = self._process.poll(), self._where(), self._tail()
        self._reap()
        raise EngineDied(f"the engine's host process ended with {_reason(code)} during {doing}{tail}", where=where) from None

    def _reap(self) -> None:
        """End whatever is left of the host's process group."""
        if self._connection:
            self._connection.close()
        if self._process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
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
    """Requests under way on one engine; leaving the context aborts those without an answer."""

    def __init__(self, engine: EngineHost) -> None:
        self.engine = engine
        self.open: set[int] = set()
        """Keys of the requests without an answer."""

    def __enter__(self) -> "Flight":
        return self

    def __exit__(self, *error: object) -> None:
        self.engine._abandon(self.open)

    def add(self, requests: Sequence[Request]) -> list[int]:
        """Send requests; returns their keys. Raises: EngineDied."""
        keys = [next(self.engine._ids) for _ in requests]
        self.engine._pending |= set(keys)
        self.open |= set(keys)
        self.engine._send("generate", ("generate", list(zip(keys, requests, strict=True))))
        return keys

    def ready(self, seconds: float) -> bool:
        """Wait for an answer to be there, at most so long."""
        self.engine.poll_hook()
        return self.engine._connection is None or self.engine._connection.poll(seconds)

    def next(self) -> tuple[int, Output]:
        """The next answer and its request's key.

        Raises:
            EngineError: a request was refused. EngineDied. DeadlineExceeded: no answer within the engine's time-out.
        """
        while True:
            key, output = self.engine._next(f"generate ({len(self.open)} answers outstanding)", self.engine.timeout)
            if key in self.open:
                self.open.discard(key)
                return key, output


def _reason(code: int | None) -> str:
    if code is None:
        return "no exit code (it does not end)"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
