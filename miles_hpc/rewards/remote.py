"""A reward service over HTTP: time-out, retries, and a bound on requests under way."""

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from functools import cache
from typing import Any


class RemoteError(RuntimeError):
    """The service did not answer with a reward."""


def score(
    prompt: str,
    answer: str,
    label: Any,
    metadata: Mapping[str, Any],
    url: str = "",
    timeout_seconds: float = 30.0,
    retries: int = 3,
    concurrency: int = 8,
) -> Any:
    """POST `{"prompt", "response", "label", "metadata"}` as JSON; the answer is a number, or an object with `reward`.

    Args:
        url: of the service, such as `http://host:8000/score`.
        timeout_seconds: of one attempt.
        retries: further attempts after a time-out, a connection that is refused or cut, or a status of 5xx or 429, each after
            twice the pause.
        concurrency: most requests under way from one rollout rank. `rollout.reward_threads` bounds it too.

    Raises:
        RemoteError: no attempt gave a reward.
    """
    body = json.dumps({"prompt": prompt, "response": answer, "label": label, "metadata": dict(metadata)}, default=str).encode()
    with _gate(url, concurrency):
        return _answer(url, body, timeout_seconds, retries)


@cache
def _gate(url: str, concurrency: int) -> threading.BoundedSemaphore:
    return threading.BoundedSemaphore(concurrency)


def _answer(url: str, body: bytes, timeout: float, retries: int) -> Any:
    reason = ""
    for attempt in range(retries + 1):
        time.sleep(0.1 * (2**attempt - 1))
        try:
            return _post(url, body, timeout)
        except urllib.error.HTTPError as error:
            reason = f"status {error.code}"
            if error.code < 500 and error.code != 429:
                break
        except (OSError, ValueError, http.client.HTTPException) as error:  # time-out, refused, not JSON, cut in the middle
            reason = f"{type(error).__name__}: {error}"
    raise RemoteError(f"{url} gave no reward: {reason}")


def _post(url: str, body: bytes, timeout: float) -> Any:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return json.loads(response.read())
