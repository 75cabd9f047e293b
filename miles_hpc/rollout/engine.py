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
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn

from miles_hpc.config import Config
from miles_hpc.errors import DeadlineExceeded, EngineDied, EngineError
from miles_hpc.pace import Pace
from miles_hpc.rollout.arguments import EngineArguments, environment
from miles_hpc.rollout.flight import Flight, Recover, give_up
from miles_hpc.rollout.request import Output, Request

POLL_SECONDS = 0.1
EXIT_SECONDS, SHUTDOWN_SECONDS = 5.0, 20.0
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

    def flight(self, recovering: bool = True) -> Flight:
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

    def shutdown(self) -> None:
        """Stop the engine and leave no process behind; safe to call twice, or after the engine's death."""
        if self._process:
            self._messages.put(("exit",))
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(SHUTDOWN_SECONDS)
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
        left = timeout
        while not self._connection.poll(min(POLL_SECONDS, max(0.0, left))):
            if left <= 0:  # before that look: what came while this process itself was stopped is in time
                return False
            self.poll_hook()
            left = deadline - time.monotonic()
        return True

    def _died(self, doing: str) -> NoReturn:
        assert self._process
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_SECONDS)
        code, where, tail = self._process.poll(), self._where(), self._tail()
        self._reap()
        raise EngineDied(f"the engine's host process ended with {_reason(code)} during {doing}{tail}", where=where) from None

    def _reap(self) -> None:
        """End whatever is left of the host's process group; what a broken driver does not let die is left behind."""
        if self._process:
            _end_group(self._process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(EXIT_SECONDS)
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
