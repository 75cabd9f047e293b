"""What a node says about itself, and what the batch host makes of it."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from miles_hpc import config as configuration
from miles_hpc.launchers import batch, health, node, verdict
from miles_hpc.launchers.health import Check
from miles_hpc.paths import RunPaths
from miles_hpc.sections import Component, Slurm

GOOD = {
    "node": "t0",
    "time": 1000.0,
    "scratch": [],
    "sees_run": True,
    "free_memory_mib": 4000,
    "gpus": 4,
    "gpu_faults": [],
    "stale": [],
    "stuck": [],
}
CHECK = Check({"t0": GOOD}, begin=999.0, end=1002.0)


@pytest.mark.parametrize(
    ("report", "said"),
    [
        ({}, []),
        ({"scratch": ["/tmp: No space left on device"]}, ["cannot write /tmp: No space left on device"]),
        ({"sees_run": False}, ["does not see the run folder as it is"]),
        ({"free_memory_mib": 3000}, []),
        ({"free_memory_mib": 2000}, ["has 2000 MiB of free memory, 2048 are needed"]),
        ({"time": 1006.0}, []),
        ({"time": 1009.0}, ["its clock is 7 s away from the batch host's"]),
        ({"time": 900.0}, ["its clock is 99 s away from the batch host's"]),
        ({"gpus": 3}, ["has 3 GPUs, 4 are needed"]),
        ({"gpus": None}, []),
        ({"gpu_faults": ["GPU 1: 2 uncorrected ECC errors"]}, ["GPU 1: 2 uncorrected ECC errors"]),
        ({"stuck": ["cannot end 7 python"]}, ["cannot end 7 python"]),
    ],
)
def test_what_is_good_enough(report, said):
    assert health.problems(GOOD | report, Component(gpus_per_node=4, memory_gb=4), CHECK) == said


def test_a_silent_node_and_one_that_the_job_does_not_have():
    slurm = Slurm(train=Component(nodes=1), rollout=Component(nodes=1))
    check = replace(CHECK, reports={"t0": GOOD, "else": GOOD})
    assert health.judge(check, [["t0"], ["r0"]], slurm) == {"r0": ["did not answer within 60 s"]}


def test_what_fails_everywhere_is_not_the_nodes():
    slurm, pools = Slurm(), [["t0"], ["r0"]]
    check = Check({name: GOOD | {"node": name, "sees_run": False} for name in ("t0", "r0")}, 999.0, 1002.0)
    assert "every node fails" in health.hopeless(check, health.judge(check, pools, slurm), pools)
    assert "no node answered the health check: srun: error: x" in health.hopeless(
        Check({}, 0, 1, "srun: error: x\n"), {}, pools
    )
    assert health.hopeless(CHECK, {"r0": ["did not answer"]}, pools) is None


@pytest.fixture
def paths(tmp_path, launch_config, no_slurm) -> RunPaths:
    """A run whose first attempt is open, on this machine without Slurm."""
    found = RunPaths(tmp_path / "my run")
    found.folder.mkdir()
    found.config.write_text(configuration.dump(launch_config))
    found.job.write_text(json.dumps({"scheduler": "local", "job_id": "", "first_attempt": 1}))
    batch.begin(found.folder)
    return found


def test_this_machine_is_fit(paths):
    assert health.main(paths.folder, 1, []) == 0
    told = json.loads(paths.health(1).read_text())
    assert told["bad"] == {} and len(told["nodes"]) == 1
    assert paths.nodes(1, "train").read_text() == "localhost"


def test_a_folder_that_cannot_be_written_is_said_with_its_name(paths, monkeypatch, tmp_path):
    assert node.unwritable(tmp_path) == "" and not list(tmp_path.glob(".health*"))
    assert node.unwritable(tmp_path / "gone") == f"{tmp_path / 'gone'}: No such file or directory"
    monkeypatch.setattr(health, "problems", lambda *_: ["cannot write /scratch"])
    assert health.main(paths.folder, 1, []) == 1
    found = verdict.newest(paths)
    assert (found.kind, found.phase) == ("user_error", "health") and "cannot write /scratch" in found.error


def test_a_run_folder_that_shows_something_older_is_not_the_run_folder(paths, monkeypatch):
    monkeypatch.setattr(node, "SIGHT_SECONDS", 0.3)
    stamp = str(json.loads(paths.start(1).read_text())["time"])
    assert node.sees(paths.start(1), stamp)
    assert not node.sees(paths.start(1), "1.0") and not node.sees(paths.start(9), stamp)


@pytest.mark.parametrize(
    ("script", "gpus", "faults"),
    [
        ('echo "0, 0"; echo "1, 0"', 2, []),
        ('echo "0, 12"; echo "1, [N/A]"', 2, ["GPU 0: 12 uncorrected ECC errors"]),
        ('echo "0, 0"; echo "Unable to determine the device handle for GPU1: Unknown Error"', 1, ["nvidia-smi: Unable"]),
        ('echo "Unable to determine the device handle for GPU1: Unknown Error"; exit 15', 0, ["nvidia-smi: Unable"]),
    ],
)
def test_what_nvidia_smi_says(tmp_path, monkeypatch, script, gpus, faults):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/bash\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = node.gpus()
    assert found["gpus"] == gpus and len(found["gpu_faults"]) == len(faults)
    assert all(said.startswith(start) for said, start in zip(found["gpu_faults"], faults, strict=True))


KERNEL = """\
2026-11-29T16:00:00,5+00:00 NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
2026-11-29T17:00:00,5+00:00 usb 1-1: new device
2026-11-29T17:00:01,5+00:00 NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=python, MMU Fault
2026-11-29T17:00:02,5+00:00 NVRM: Xid (PCI:0000:3b:00): 79, pid=7, name=python, GPU has fallen off the bus.
2026-11-29T17:00:03,5+00:00 NVRM: Xid (PCI:0000:3b:00): 79, pid=8, name=python, GPU has fallen off the bus.
2026-11-29T17:00:04,5+00:00 NVRM: Xid (PCI:0000:4c:00): 95, pid=9, Uncontained: DRAM
"""


def test_gpus_that_the_kernel_has_reported_since_the_attempt_before_are_named(paths, tmp_path, monkeypatch):
    """Not what programs did wrong, not what was before, nothing for a first attempt."""
    program = tmp_path / "dmesg"
    program.write_text(f"#!/bin/bash\ncat {tmp_path}/kernel.log\n")
    program.chmod(0o755)
    (tmp_path / "kernel.log").write_text(KERNEL)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert node.xids(node.since(paths, 1)) == []
    begun = json.loads(paths.start(1).read_text()) | {"time": datetime.fromisoformat("2026-11-29T16:30:00+00:00").timestamp()}
    paths.start(1).write_text(json.dumps(begun))
    paths.start(2).parent.mkdir()
    paths.start(2).write_text(json.dumps(begun | {"time": 5}))
    assert health.main(paths.folder, 2, []) == 1
    said = json.loads(paths.health(2).read_text())["nodes"].popitem()[1]["gpu_faults"]
    assert [line.split(", ")[0] for line in said] == ["GPU 0000:4c:00: Xid 95", "GPU 0000:3b:00: Xid 79"]
    assert "fallen off the bus" in said[1] and "Xid 95" in verdict.newest(paths).error


def test_a_kernel_log_that_is_closed_to_users_says_nothing(tmp_path, monkeypatch):
    program = tmp_path / "dmesg"
    program.write_text("#!/bin/bash\necho dmesg: read kernel buffer failed: Operation not permitted >&2; exit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}")
    assert node.xids(0.0) == []
    program.unlink()
    assert node.xids(0.0) == []


def test_ranks_of_this_run_and_what_they_started_are_ended_and_nobody_else(paths):
    other = paths.folder.with_name("my run 2")
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]

    def rank(run: Path) -> list[str]:
        return [*sleep, "--role", "train", "--run", str(run), "--attempt", "1"]

    ours = [subprocess.Popen(rank(paths.folder)), subprocess.Popen(["sleep", "600"], env={"MILES_RANK_OF": str(paths.folder)})]
    others = [
        subprocess.Popen(rank(other)),
        subprocess.Popen(["sleep", "600"], env={"MILES_RANK_OF": str(other)}),
        subprocess.Popen([*sleep, "logs", str(paths.folder), "--attempt", "1"]),  # someone reads a log
    ]
    try:
        while not all(Path(f"/proc/{process.pid}/cmdline").read_bytes() for process in (*ours, *others)):
            pass  # a program that has just begun has none yet
        assert {pid for pid, _ in node.stale(paths.folder)} == {process.pid for process in ours}
        assert health.main(paths.folder, 1, []) == 0
        assert [process.wait(60) for process in ours] == [-signal.SIGKILL] * 2
        assert [process.poll() for process in others] == [None] * 3
    finally:
        for process in (*ours, *others):
            process.kill()
            process.wait()
