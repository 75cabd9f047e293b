"""Reading what the policy said."""

import numpy as np
import pytest

from miles_hpc.errors import UserError
from miles_hpc.launchers.samples import samples


def test_the_newest_step_group_by_group(make_run, capsys):
    run = make_run(3)
    assert samples(run.folder, None) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("step 2: 4 prompts, 8 samples, mean reward")
    ids = [int(line.split()[1]) for line in printed.splitlines() if line.startswith("prompt ")]
    assert ids == sorted(run.ids(2))
    assert f"  > question {ids[0]}" in printed and "reward 0" in printed and "form 1" in printed and "      answer " in printed


def test_a_step_by_number(make_run, capsys):
    run = make_run(3)
    assert samples(run.folder, 0) == 0
    assert capsys.readouterr().out.startswith("step 0:")


def test_a_step_that_is_not_there(make_run, fresh_run):
    with pytest.raises(UserError, match="there are none yet"):
        samples(fresh_run.folder, None)
    run = make_run(2)
    with pytest.raises(UserError, match="no samples of step 7") as raised:
        samples(run.folder, 7)
    assert "steps 0 to 1" in raised.value.next_step


def test_a_damaged_shard_is_left_out_and_named(make_run, capsys):
    run = make_run(1)
    shard = run.paths.rollout_shard(0, 1, 0)
    shard.write_bytes(b"no HDF5")
    assert samples(run.folder, 0) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("step 0: 2 prompts") and f"where: {shard}" in printed


def test_long_and_empty_answers(fresh_run, capsys):
    from dataclasses import replace

    from miles_hpc.samples import store

    group = fresh_run.groups(0, np.array([3]))
    group = replace(group, answers=["", "line one\nline two ü"])
    store.write(fresh_run.paths, 0, 1, 1, group)
    assert samples(fresh_run.folder, 0) == 0
    assert "      line one\n      line two ü" in capsys.readouterr().out
