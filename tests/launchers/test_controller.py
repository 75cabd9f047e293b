import pytest

from miles_hpc.errors import SiteError
from miles_hpc.launchers import controller
from miles_hpc.launchers.controller import JobState, parse_job


def component(offset: int, state: str, nodes: str, reason: str = "None") -> str:
    """A line of `scontrol -o show job`, shortened."""
    return (
        f"JobId={16 + offset} HetJobId=16 HetJobOffset={offset} JobName=a name with = in it JobState={state} Reason={reason} "
        f"Restarts=1 ReqNodeList=(null) NodeList={nodes} NumNodes=2"
    )


@pytest.mark.parametrize(
    ("states", "merged", "ended"),
    [
        (["RUNNING", "RUNNING"], "RUNNING", False),
        (["COMPLETED", "COMPLETED"], "COMPLETED", True),
        (["CANCELLED", "COMPLETED"], "CANCELLED", True),
        (["COMPLETED", "FAILED"], "FAILED", True),
        # an ended component beside one that is still being ended: nobody may resume yet
        (["COMPLETING", "CANCELLED"], "COMPLETING", False),
        (["PENDING", "COMPLETING"], "COMPLETING", False),
        (["PENDING", "PENDING"], "PENDING", False),
        (["SOMETHING_NEW", "SOMETHING_NEW"], "SOMETHING_NEW", False),
    ],
)
def test_components_are_merged(states, merged, ended):
    found = parse_job("\n".join(component(i, state, "t0") for i, state in enumerate(states)))
    assert (found.state, found.ended) == (merged, ended)


def test_nodes_of_all_components_in_order():
    found = parse_job("\n".join([component(1, "RUNNING", "r[0-1]"), component(0, "RUNNING", "t[0-1]")]))
    assert found == JobState("RUNNING", ("t[0-1]", "r[0-1]"), 1, "")


def test_a_pending_job_has_a_reason_and_no_nodes():
    found = parse_job(component(0, "PENDING", "(null)", "Resources"))
    assert (found.nodes, found.reason) == ((), "Resources")


def test_a_forgotten_job_is_unknown():
    assert parse_job("").state == "UNKNOWN"


@pytest.mark.parametrize(
    ("complaint", "state"),
    [
        ("slurm_load_jobs error: Invalid job id specified", "UNKNOWN"),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", "NO_ANSWER"),
        ("", "NO_ANSWER"),
    ],
)
def test_a_controller_that_is_away_has_not_forgotten(monkeypatch, complaint, state):
    monkeypatch.setattr(controller, "_said", lambda *command, patience: ("", complaint))
    assert controller.job("7").state == state


def test_no_slurm_names_both_ways_out(no_slurm):
    with pytest.raises(SiteError, match=r"no Slurm answers") as raised:
        controller.find()
    assert "cluster up" in raised.value.next_step
    assert "--local" in raised.value.next_step


def test_a_slurm_that_names_no_partition_is_not_one_without_the_wanted_one(monkeypatch):
    monkeypatch.setattr(controller, "_ask", lambda *command: "")
    with pytest.raises(SiteError, match="Slurm names no partition"):
        controller.partitions()


def test_sizes_of_an_outer_job_are_forgotten(no_slurm, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_NTASKS", "64")
    with pytest.raises(SiteError):
        controller.find()
    import os

    assert "SLURM_NTASKS" not in os.environ


def test_kinds_of_nodes_of_a_partition():
    text = """\
all*|4|8|8000|(null)
gpu|16|128+|1000000+|gpu:h200:8(S:0-1),nvme:1
gpu|2|64|512000|gpu:a100:4(S:0,1),gpu:t4:2
gpu|1|64|512000|gpu
"""
    found = controller.parse_partitions(text)
    assert (found["all"].default, found["all"].nodes, found["all"].kinds[0].gpus) == (True, 4, 0)
    assert (found["gpu"].default, found["gpu"].nodes) == (False, 19)
    assert found["gpu"].kinds[0] == controller.Kind(16, 128, 1_000_000, 8)
    assert [kind.gpus for kind in found["gpu"].kinds] == [8, 6, 1]
