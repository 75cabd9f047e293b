"""Threads for users' functions, which may hang: the end of a process does not wait for them as for `ThreadPoolExecutor`'s."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

Work = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class Pool:
    """Daemon threads that take calls in turn."""

    def __init__(self, threads: int, name: str) -> None:
        self._work: queue.SimpleQueue[Work] = queue.SimpleQueue()
        for number in range(threads):
            threading.Thread(target=self._serve, name=f"{name}-{number}", daemon=True).start()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call `function` when a thread is free; what it returns or raises goes into the future."""
        future: Future[Any] = Future()
        self._work.put((future, function, arguments))
        return future

    def _serve(self) -> None:
        while True:
            future, function, arguments = self._work.get()
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)
