"""Edges: loading, signatures, and errors that name the place."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from miles_hpc import edges
from miles_hpc.errors import EdgeError
from miles_hpc.rollout.pool import Pool

ARGUMENTS = ("prompt", "answer")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for edge modules, forgotten afterwards."""
    before = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = before[0]
    for name in set(sys.modules) - before[1]:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def load(folder: Path, name: str) -> Any:
    return edges.load(name, str(folder), key="rollout.reward", arguments=ARGUMENTS)


def write(folder: Path, module: str, text: str) -> None:
    (folder / f"{module}.py").write_text(text)


def test_a_function_beside_the_file(folder: Path) -> None:
    write(folder, "edge_good", "def score(prompt, answer, extra=0):\n    return len(answer)\n")
    assert load(folder, "edge_good:score")("p", "abc") == 3


def test_modules_of_two_runs_may_have_the_same_name(folder: Path) -> None:
    for answer in (1, 2):
        (folder / str(answer)).mkdir()
        write(folder, f"{answer}/edge_twin_part", f"ANSWER = {answer}\n")
        write(
            folder,
            f"{answer}/edge_twin",
            "from edge_twin_part import ANSWER\n\ndef score(prompt, answer):\n    return ANSWER\n",
        )
    assert [load(folder / run, "edge_twin:score")("p", "a") for run in ("1", "2", "1")] == [1, 2, 1]


def test_the_folder_comes_last(folder: Path) -> None:
    write(folder, "json", "raise RuntimeError('must not be imported')\n")
    write(folder, "edge_last", "import json\ndef score(prompt, answer):\n    return json.loads('1')\n")
    assert load(folder, "edge_last:score")("p", "a") == 1
    assert sys.path[-1] == str(folder)


@pytest.mark.parametrize(
    ("module", "text", "what", "where"),
    [
        ("edge_none", None, "there is no module edge_none", "edge_none.py"),
        ("edge_other", "def other(prompt, answer): ...\n", "has no function score", "rollout.reward"),
        ("edge_value", "score = 3\n", "has no function score", "rollout.reward"),
        ("edge_import", "x = 1\nimport nowhere_to_be_found\n", "needs nowhere_to_be_found", "edge_import.py:2"),
        ("edge_raise", "x = 1\n\nraise ValueError('at import')\n", "ValueError: at import", "edge_raise.py:3"),
        ("edge_exit", "import sys\nsys.exit(0)\n", "SystemExit: 0", "edge_exit.py:2"),
        ("edge_syntax", "def score(prompt, answer):\n    return (\n", "SyntaxError", "edge_syntax.py:2"),
        ("edge_few", "x = 1\ndef score(prompt):\n    return 0\n", r"called with \(prompt, answer\)", "edge_few.py:2"),
        ("edge_many", "def score(prompt, answer, label):\n    return 0\n", "missing a required argument", "edge_many.py:1"),
        ("edge_keyword", "def score(prompt, *, answer):\n    return 0\n", "too many positional", "edge_keyword.py:1"),
    ],
)
def test_bad_edges(folder: Path, module: str, text: str | None, what: str, where: str) -> None:
    if text is not None:
        write(folder, module, text)
    with pytest.raises(EdgeError, match=what) as caught:
        load(folder, f"{module}:score")
    assert where in caught.value.where


def test_a_call_that_raises_names_the_line(folder: Path) -> None:
    write(folder, "edge_call", "def score(prompt, answer):\n    return 1 / len(answer)\n")
    with pytest.raises(EdgeError, match="ZeroDivisionError") as caught:
        edges.call(load(folder, "edge_call:score"), "p", "", key="rollout.reward")
    assert caught.value.where.endswith("edge_call.py:2")


def test_a_call_that_exits_is_an_error_too(folder: Path) -> None:
    write(folder, "edge_quits", "import sys\ndef score(prompt, answer):\n    sys.exit(0)\n")
    with pytest.raises(EdgeError, match="SystemExit: 0"):
        edges.call(load(folder, "edge_quits:score"), "p", "", key="rollout.reward")


@pytest.mark.parametrize(
    "name", ["KeyboardInterrupt", "GeneratorExit", "asyncio.CancelledError", "BaseException", "MemoryError"]
)
def test_whatever_a_call_raises_in_a_thread_is_named(folder: Path, name: str) -> None:
    module = f"edge_{name.replace('.', '_').lower()}"
    write(folder, module, f"import asyncio\ndef score(prompt, answer):\n    raise {name}\n")
    function = load(folder, f"{module}:score")
    with pytest.raises(EdgeError, match=f"reward raised {name.split('.')[-1]}") as caught:
        Pool(1, "rewards").submit(lambda: edges.call(function, "p", "", key="reward")).result()
    assert f"{module}.py:3" in caught.value.where


def test_an_interrupt_at_the_keyboard_stays_one(folder: Path) -> None:
    write(folder, "edge_interrupted", "def score(prompt, answer):\n    raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        edges.call(load(folder, "edge_interrupted:score"), "p", "", key="reward")


@pytest.mark.parametrize("end", ["return pid", "sys.exit(0) if pid == 0 else None; return pid", "return pid if 1 / pid else 0"])
def test_a_child_that_a_call_forked_does_not_come_back(folder: Path, end: str) -> None:
    module = f"edge_forks_{len(end)}"
    write(folder, module, f"import os, sys\ndef score(prompt, answer):\n    pid = os.fork()\n    {end}\n")
    child = edges.call(load(folder, f"{module}:score"), "p", "", key="rollout.reward")
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_a_wrong_return_value_names_the_function(folder: Path) -> None:
    write(folder, "edge_return", "\n\ndef score(prompt, answer):\n    return 'x' * 500\n")
    error = edges.wrong("rollout.reward", load(folder, "edge_return:score"), "a number", "x" * 500)
    assert error.where.endswith("edge_return.py:3") and "a number, got str" in error.what and len(error.what) < 200
