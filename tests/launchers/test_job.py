"""The handle that submitit gives of a run."""

import pytest

from miles_hpc.launchers.job import HetInfoWatcher


@pytest.mark.parametrize("name", ["demo", "grid", "a b"])
def test_jobs_are_told_apart_whatever_their_names(name):
    """`scontrol -o show job`, shortened: a line per component, between lines that say which job was asked for."""
    line = "JobId={} JobName={} UserId=root(0) JobState={} Reason=None NodeList={} WorkDir=/scratch/grid Power= "
    text = f"id 7\n{line.format(7, name, 'RUNNING', 't0')}\n{line.format(8, name, 'RUNNING', 'r0')}\nid 9\nid 12\n"
    text += f"{line.format(12, name, 'COMPLETED', 't1')}\n"
    found = HetInfoWatcher().read_info(text.encode())
    assert {job: (facts["State"], facts["NodeList"]) for job, facts in found.items()} == {
        "7": ("RUNNING", "t0,r0"),
        "9": ("UNKNOWN", ""),
        "12": ("COMPLETED", "t1"),
    }
    assert HetInfoWatcher().read_info("") == {}
