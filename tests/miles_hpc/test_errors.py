"""The error tree: messages, exit codes, and that errors survive a trip between processes."""

import ast
import pickle
from pathlib import Path

import pytest

from miles_hpc import errors

ROOT = Path(__file__).parents[2]


def tree(cls=errors.MilesError):
    return [cls, *(inner for sub in cls.__subclasses__() for inner in tree(sub))]


@pytest.mark.parametrize("cls", tree(), ids=lambda cls: cls.__name__)
def test_pickled_whole(cls):
    found = pickle.loads(pickle.dumps(cls("what", where="rank 3", next_step="resume")))
    assert type(found) is cls and (found.what, found.where, found.next_step) == ("what", "rank 3", "resume")


@pytest.mark.parametrize("cls", tree(), ids=lambda cls: cls.__name__)
def test_in_the_docstring(cls):
    assert cls.__name__ in errors.__doc__


def test_text():
    assert str(errors.Fault("broke")) == "broke"
    assert str(errors.Fault("broke", where="node r0", next_step="miles-submit why RUN")) == (
        "broke\n  where: node r0\n  next:  miles-submit why RUN"
    )


def test_exit_codes():
    assert {cls.exit_code for cls in tree(errors.UserError)} == {2}
    assert errors.SiteError.exit_code == 3
    assert {cls.exit_code for cls in tree(errors.Fault)} == {1}


def test_kinds_are_verdicts():
    kinds = {"done", "preempted", "time_limit", "node_failure", "rank_died", "out_of_memory", "hang", "diverged"}
    assert {cls.kind for cls in tree()} <= kinds | {"user_error", "bug"}


WHOLE = [file for folder in ("miles_hpc", "launchers") for file in sorted((ROOT / folder).rglob("*.py"))]
MINE = {cls.__name__: cls for cls in (*tree(errors.UserError), errors.SiteError)}


@pytest.mark.parametrize("file", WHOLE, ids=lambda file: file.stem)
def test_whoever_can_mend_something_is_told_how(file):
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    raised = [(call, MINE[call.func.id]) for call in calls if isinstance(call.func, ast.Name) and call.func.id in MINE]
    without = [call.lineno for call, cls in raised if not cls.remedy and "next_step" not in {k.arg for k in call.keywords}]
    assert without == []
