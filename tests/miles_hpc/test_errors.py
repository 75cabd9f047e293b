"""The error tree: messages, exit codes, and that errors survive a trip between processes."""

import pickle

import pytest

from miles_hpc import errors


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
