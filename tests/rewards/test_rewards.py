"""Rewards in the box: right answers, wrong ones, and what tries to break them."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest

from miles_hpc.rewards import choice, code, exact, form, group, gym, math, remote
from miles_hpc.sample import Sample


@pytest.mark.parametrize(
    ("answer", "label", "expected"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{3}", 3, 1.0),
        ("the answer is $2x + 1$", "$1 + 2x$", 1.0),
        (r"\boxed{4}", "5", 0.0),
        ("no idea", "5", 0.0),
        ("", "5", 0.0),
        (r"\boxed{", "5", 0.0),
    ],
)
def test_math(answer, label, expected):
    assert math.score("p", answer, label, {}) == expected


def test_math_runs_in_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(math.score("p", r"\boxed{7}", "7", {})))
    thread.start()
    thread.join()
    assert found == [1.0]


def test_exact_and_f1():
    assert exact.match("p", "The  Eiffel Tower!", "eiffel tower", {}) == 1
    assert exact.match("p", r"hm \boxed{Paris}", ["London", "paris"], {}) == 1
    assert exact.match("p", "thinking; Answer: 12", "12", {}, marker="Answer:") == 1
    assert exact.match("p", "12", "12", {}, marker="Answer:") == 0
    assert exact.f1("p", "big red dog", "red dog", {}) == pytest.approx(0.8)
    assert exact.f1("p", "", "x", {}) == 0 and exact.f1("p", "the", "a", {}) == 1


@pytest.mark.parametrize(
    ("answer", "label", "expected"),
    [
        ("The answer is (B).", "B", 1),
        (r"\boxed{C}", 2, 1),
        ("A or B? Answer: a", "A", 1),
        ("D", "A", 0),
        ("", "A", 0),
        ("The answer is a number; I take B", "A", 0),
        ("the answer is d) or so", "D", 1),
        ("The answer is B because", "B", 1),
    ],
)
def test_choice(answer, label, expected):
    assert choice.letter("p", answer, label, {}) == expected


def test_form_and_length():
    assert form.pattern("p", "<think>x\ny</think> 3", None, {}) == 1 and form.pattern("p", "3", None, {}) == 0
    assert form.finished("p", "", None, {"finished": True}) == 1
    lengths = {
        tokens: form.overlong("p", "", None, {"tokens": tokens, "max_new_tokens": 100}, buffer=20) for tokens in (80, 90, 100)
    }
    assert lengths == {80: 0.0, 90: -0.5, 100: -1.0}
    assert form.overlong("p", "", None, {"tokens": 101, "max_new_tokens": 100}) == -1
    assert form.length("p", "", None, {"tokens": 500}) == -0.5


def test_reasoning_gym():
    assert gym.score("p", "1 + 2 = 3", "3", {"source_dataset": "chain_sum"}, marker="= ") == 1
    assert gym.score("p", "31", "3", {}, task="chain_sum") == 0
    assert gym.score("p", "31", "3", {}, task="chain_sum", full_only=False) == 0.5


def test_group_rewards():
    samples = [Sample(reward=r, response_length=n) for r, n in ((1.0, 10), (0.0, 5), (1.0, 30), (1.0, 20))]
    assert group.shortest_right(samples) == [1.0, 0.0, 0.5, 0.75]
    assert group.ranked(samples) == [0.25, -0.75, 0.25, 0.25]
    assert group.ranked([Sample(reward=2.0)] * 3) == [0, 0, 0]


PROGRAM = "Sure:\n```python\ndef double(x):\n    return 2 * x\n```\n"


def test_code_counts_the_tests_passed():
    patience = {"seconds": 60.0}
    tests = ["assert double(2) == 4", "assert double('a') == 'aa'", "assert double(1) == 3"]
    assert code.unit_tests("p", PROGRAM, tests, {}, **patience) == pytest.approx(2 / 3)
    assert code.unit_tests("p", PROGRAM, tests, {}, all_or_nothing=True, **patience) == 0
    echo = "print(int(input()) + 1)"
    cases = [{"input": "1\n", "output": "2"}, {"input": "1\n", "output": "3"}]
    assert code.unit_tests("p", echo, cases, {}, **patience) == 0.5


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "x = bytearray(2 << 30)",
        "open('big', 'wb').write(bytes(5 << 20))",
        "while True: print('x' * 10000)",
        "def f(: pass",
        "import sys; sys.exit(3)",
        "import sys; sys.exit()",  # before the test
        "import os; os._exit(0)",
        "x = '\0'",
        "import time; time.sleep(1000)",
    ],
)
def test_code_is_limited(program):
    assert code.unit_tests("p", program, [""], {}, seconds=1.0) == 0


@pytest.mark.parametrize(
    "program", ["#" * 300_000 + "\nx = 1", "x = 1  # \ud800", "import io, sys; sys.stdout = io.StringIO(); x = 1"]
)
def test_code_may_look_like_anything(program):
    assert code.unit_tests("p", program, ["assert x == 1"], {}, seconds=60.0) == 1


def test_code_leaves_no_process():
    program = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)']).pid)"
    status, output = code.run(program, "", 60.0, 2048, 1)
    assert status == 0
    with contextlib.suppress(psutil.NoSuchProcess):
        left = psutil.Process(int(output))
        while left.status() != psutil.STATUS_ZOMBIE:  # killed, though nobody may have reaped it
            time.sleep(0.01)


class Service(BaseHTTPRequestHandler):
    """Rewards by the length of the answer; fails as often as the answer says."""

    failures, under_way, most = 0, 0, 0
    lock, over = threading.Lock(), threading.Event()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = type(self)
        with kind.lock:
            kind.under_way += 1
            kind.most = max(kind.most, kind.under_way)
        kind.over.wait(0.02 if body["response"] != "slow" else 600)
        with kind.lock:
            kind.under_way -= 1
            kind.failures -= 1
        status = 503 if kind.failures >= 0 else 400 if body["response"] == "bad" else 200
        self.send_response(status)
        if body["response"] == "cut":
            self.send_header("Content-Length", "100")
        self.end_headers()
        self.wfile.write(b"not json" if body["response"] == "text" else json.dumps(float(len(body["response"]))).encode())

    def log_message(self, *unused) -> None:
        pass


@pytest.fixture
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    server.daemon_threads = False
    Service.failures = Service.under_way = Service.most = 0
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    Service.over.clear()
    yield f"http://127.0.0.1:{server.server_port}/score"
    Service.over.set()
    server.shutdown()
    server.server_close()  # waits for what is under way


def test_remote_retries(url):
    Service.failures = 2
    assert remote.score("p", "abc", None, {}, url=url) == 3.0


@pytest.mark.parametrize(
    ("answer", "reason"),
    [("bad", "status 400"), ("slow", "imeout|timed out"), ("text", "JSONDecodeError"), ("cut", "IncompleteRead")],
)
def test_remote_gives_up(url, answer, reason):
    with pytest.raises(remote.RemoteError, match=reason):
        remote.score("p", answer, None, {}, url=url, timeout_seconds=0.2 if answer == "slow" else 60.0, retries=1)


def test_remote_refused():
    with pytest.raises(remote.RemoteError, match="refused"):
        remote.score("p", "a", None, {}, url="http://127.0.0.1:9/", retries=0)


def test_remote_bounds_what_is_under_way(url):
    threads = [threading.Thread(target=remote.score, args=("p", "a", None, {}, url, 60.0, 0, 2)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Service.most <= 2
