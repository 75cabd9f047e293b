"""`begin` and `end` as the batch script calls them, outside Slurm."""

import json
import re
import resource
import sys
import time
from pathlib import Path

import pytest

from miles_hpc import config as configuration
from miles_hpc import verdicts
from miles_hpc.launchers import batch, controller, verdict
from miles_hpc.paths import RunPaths


@pytest.fixture
def paths(tmp_path: Path, launch_config, no_slurm) -> RunPaths:
    """A submitted run before its first attempt."""
    found = RunPaths(tmp_path / "run")
    found.folder.mkdir()
    found.config.write_text(configuration.dump(launch_config))
    found.job.write_text(json.dumps({"scheduler": "slurm", "job_id": "", "first_attempt": 1}))
    found.job_log.touch()
    return found


@pytest.fixture(autouse=True)
def pauses(monkeypatch) -> list[float]:
    """Seconds that `end` would have slept."""
    slept: list[float] = []
    monkeypatch.setattr(batch.time, "sleep", slept.append)
    return slept


def end(paths: RunPaths, attempt: int, code: int = 143, signal: str = "none", **written) -> str:
    paths.launcher_log(attempt).touch()
    if written:
        verdicts.write(paths, attempt, **written)
    return batch.end(paths.folder, attempt, code, signal)


def test_attempts_are_counted_and_named_as_their_folders(paths):
    assert batch.begin(paths.folder) == "001"
    assert end(paths, 1, kind="rank_died") == "restart"
    assert batch.begin(paths.folder) == "002"
    assert end(paths, 2, code=0, kind="done") == "done"
    assert paths.attempt_numbers() == [1, 2]


def test_the_verdict_of_a_rank_stands(paths):
    batch.begin(paths.folder)
    assert end(paths, 1, kind="user_error", error="no such column") == "stop"
    assert verdict.newest(paths).error == "no such column"


def test_without_a_verdict_one_is_written(paths):
    batch.begin(paths.folder)
    assert end(paths, 1, code=137) == "restart"
    assert verdict.newest(paths).kind == "rank_died"
    assert verdict.newest(paths).next == f"miles-submit logs {paths.folder} --role job"


@pytest.mark.parametrize(
    ("logs", "named"),
    [
        ({"rollout": "said", "engine": "said"}, "--role rollout --rank 4 --attempt 1"),
        ({"rollout": "", "engine": "said"}, "--role engine --rank 4 --attempt 1"),
        ({"rollout": "", "train": "another's"}, "--role job"),
        ({}, "--role job"),
    ],
)
def test_the_next_step_names_a_log_that_says_something_of_the_attempt_that_ended(paths, logs, named):
    batch.begin(paths.folder)
    for role, text in logs.items():
        paths.log(1, role, 4).write_text(text)
    paths.ends(1).write_text("4 137\n")
    paths.heartbeat(4).parent.mkdir()
    paths.heartbeat(4).write_text(json.dumps({"rank": 4, "role": "rollout", "attempt": 1}))
    end(paths, 1, code=137)
    assert verdict.newest(paths).next == f"miles-submit logs {paths.folder} {named}"


@pytest.mark.parametrize(
    ("reason", "kind", "action"),
    [
        ("", "preempted", "stop"),
        (" DUE TO TIME LIMIT", "time_limit", "requeue"),
        (" DUE TO PREEMPTION", "preempted", "requeue"),
    ],
)
def test_a_job_that_slurm_ends(paths, reason, kind, action):
    # of an earlier attempt; must not count again
    paths.job_log.write_text("slurmstepd-t0: error: *** JOB 3 ON t0 CANCELLED AT 2026-01-01T00:00:00 DUE TO JOB REQUEUE ***\n")
    batch.begin(paths.folder)
    with paths.job_log.open("a") as log:
        log.write(f"slurmstepd-t0: error: *** JOB 3 ON t0 CANCELLED AT 2026-01-01T00:00:01{reason} ***\n")
    assert end(paths, 1, signal="TERM") == action
    assert verdict.newest(paths).kind == kind


def test_slurm_knows_more_than_a_rank_that_got_a_signal(paths):
    batch.begin(paths.folder)
    paths.job_log.write_text(
        "slurmstepd-t0: error: *** JOB 3 ON t0 CANCELLED AT 2026-01-01T00:00:01 DUE TO NODE FAILURE, SEE SLURMCTLD LOG ***\n"
    )
    assert end(paths, 1, signal="TERM", kind="preempted", rank=2) == "requeue"
    assert (verdict.newest(paths).kind, verdict.newest(paths).rank) == ("node_failure", 2)


def test_a_warning_near_the_time_limit_is_the_time_limit(paths, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "3")
    monkeypatch.setattr(controller, "_ask", lambda *command: "")
    batch.begin(paths.folder)
    running = controller.JobState("RUNNING", end=time.time() + 100)
    monkeypatch.setattr(controller, "job", lambda job_id: running)
    assert end(paths, 1, code=0, kind="preempted") == "requeue"
    assert verdict.newest(paths).kind == "time_limit"
    batch.begin(paths.folder)
    running = controller.JobState("RUNNING", end=time.time() + 1000)
    assert end(paths, 2, code=0, kind="preempted") == "requeue"
    assert verdict.newest(paths).kind == "preempted"


def test_term_without_a_word_from_slurm_never_requeues(paths):
    batch.begin(paths.folder)
    assert end(paths, 1, signal="TERM", kind="preempted") == "stop"
    found = verdict.newest(paths)
    assert (found.kind, found.word, verdict.sentence(found)) == ("preempted", "cancelled", "cancelled")


def test_an_attempt_whose_batch_script_vanished_counts_as_a_node_failure(paths):
    batch.begin(paths.folder)
    assert batch.begin(paths.folder) == "002"
    assert verdict.read(paths, 1).kind == "node_failure"


def test_colocated_ranks_of_both_roles_are_on_the_nodes_of_training(paths, launch_config, monkeypatch):
    slurm = {"train": {"nodes": 2, "ranks_per_node": 2}}
    run = launch_config.run.model_dump() | {"placement": "colocate"}
    values = launch_config.model_dump(exclude_none=True) | {"run": run, "slurm": slurm}
    paths.config.write_text(configuration.dump(configuration.Config.model_validate(values)))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    batch.begin(paths.folder)
    assert paths.hosts(1).read_text().split() == ["n1", "n1", "n2", "n2"] * 2


@pytest.mark.parametrize(
    ("partitions", "nodes", "action"),
    [
        (["gpu", "gpu"], 4, "stop"),  # 2 and 2 of the 3 that are left
        (["gpu", "gpu"], 5, "requeue"),
        (["train", "rollout"], 3, "requeue"),
        (["train", "rollout"], 2, "stop"),
        (["gpu", "gpu"], 0, "requeue"),  # Slurm does not say
    ],
)
def test_a_job_goes_back_to_the_queue_only_if_its_partitions_have_enough_other_nodes(
    paths, monkeypatch, partitions, nodes, action
):
    monkeypatch.setattr(controller, "usable_nodes", lambda partition: tuple(f"n{i}" for i in range(nodes)))
    monkeypatch.setattr(batch.requeue, "send_back", lambda job_id, avoid: "")
    for group, (partition, names) in enumerate(zip(partitions, ("n[0-1]", "n[2-3]"), strict=True)):
        monkeypatch.setenv(f"SLURM_JOB_NODELIST_HET_GROUP_{group}", names)
        monkeypatch.setenv(f"SLURM_JOB_PARTITION_HET_GROUP_{group}", partition)
    batch.begin(paths.folder)
    assert end(paths, 1, kind="bad_node", nodes=["n1"]) == action


def test_of_attempts_long_ago_the_next_step_names_no_log_that_is_gone(paths, monkeypatch):
    monkeypatch.setattr(batch, "ATTEMPTS_IN_FULL", 2)
    hints = [
        "miles-submit logs RUN --role train --rank 0 --attempt 1; stacks",
        "mend the file",
        "miles-submit logs RUN --attempt 3",
    ]
    for number, hint in enumerate(hints, start=1):
        batch.begin(paths.folder)
        paths.log(number, "train", 0).touch()
        end(paths, number, kind="preempted", next=hint)
    batch.begin(paths.folder)
    assert [paths.log(number, "train", 0).exists() for number in (1, 2, 3)] == [False, False, True]
    found = [verdict.read(paths, number).next for number in (1, 2, 3)]
    assert found[0].endswith(f"are removed; miles-submit logs {paths.folder} --role job") and found[1:] == hints[1:]


def test_no_fourth_attempt_without_progress(paths, capsys):
    for number in (1, 2, 3):
        assert batch.begin(paths.folder) == f"{number:03d}"
    assert batch.begin(paths.folder) is None
    assert "node_failure" in capsys.readouterr().err


def test_the_shell_that_vanished_is_closed_with_what_slurm_and_the_ranks_said(paths):
    """Killed at a time limit before it could ask: the next attempt reads why in job.log, and how far the ranks were."""
    batch.begin(paths.folder)
    with paths.job_log.open("a") as log:
        log.write("slurmstepd-t0: error: *** JOB 3 ON t0 CANCELLED AT 2026-01-01T00:00:01 DUE TO TIME LIMIT ***\n")
    beat = {"rank": 1, "role": "train", "node": "t1", "phase": "train", "step": 4, "peak_memory_mib": 77, "attempt": 1}
    paths.heartbeat(1).parent.mkdir()
    paths.heartbeat(1).write_text(json.dumps(beat))
    paths.heartbeat(2).write_text(json.dumps(beat | {"rank": 2, "attempt": 0}))
    assert batch.begin(paths.folder) == "002"
    told = json.loads(paths.verdict(1).read_text())
    assert (told["kind"], told["heartbeats"]) == ("time_limit", [beat])


def test_a_verdict_cut_by_a_full_disk_is_put_aside_and_written_anew(paths):
    batch.begin(paths.folder)
    paths.verdict(1).write_text('{"kind": "rank_d')
    assert end(paths, 1, code=137) == "restart"
    assert verdict.newest(paths).kind == "rank_died"


def test_steps_in_the_events_are_progress_and_a_repeated_one_is_not(paths):
    """Checkpoints are rarer than steps: a run that dies on the way to its first one has still got somewhere, once."""
    step = {"event": "step", "metrics": {}, "phase_seconds": {}, "time": 0}
    for attempt, last in enumerate([3, 5, 5, 4], start=1):
        batch.begin(paths.folder)
        with paths.events.open("a") as events:
            events.writelines(json.dumps(step | {"step": n, "attempt": attempt}) + "\n" for n in range(last))
        action = end(paths, attempt, kind="rank_died")
    assert [(a.first_step, a.last_step) for a in batch.situation_of(paths).history] == [(-1, 3), (3, 5), (5, 5), (5, 5)]
    assert action == "stop"  # of the bound; without progress it would have been one attempt later


def test_checkpoints_are_progress(paths):
    for number in range(1, 7):
        assert batch.begin(paths.folder) == f"{number:03d}"
        paths.checkpoint(number).mkdir(parents=True)
        (paths.checkpoints / ".step-000099.tmp").mkdir(exist_ok=True)
        (paths.checkpoints / "step-000099.damaged").mkdir(exist_ok=True)
    assert batch.completed_steps(paths) == 6


def test_a_resume_starts_counting_anew(paths, pauses):
    for number in (1, 2, 3):
        batch.begin(paths.folder)
        end(paths, number, kind="rank_died")
    assert pauses == [0.0, 10.0]
    assert batch.begin(paths.folder) is None
    paths.job.write_text(json.dumps({"scheduler": "slurm", "job_id": "", "first_attempt": 4}))
    assert batch.begin(paths.folder) == "004"
    assert end(paths, 4, kind="rank_died") == "restart"


def test_the_command_line_prints_what_the_script_reads(paths, capsys):
    assert batch.main(["begin", str(paths.folder)]) == 0
    assert capsys.readouterr().out == "001\n"
    assert batch.main(["end", str(paths.folder), "001", "2", "none"]) == 0
    assert capsys.readouterr().out == "stop\n"
    assert batch.main(["begin", str(paths.folder)]) == 1
    assert batch.main([]) == 2


def test_a_configuration_that_was_damaged_is_named_without_a_traceback(paths, capsys):
    paths.config.write_text("[train")
    assert batch.main(["begin", str(paths.folder)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: not valid TOML") and str(paths.config) in said.err


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"scheduler": "slurm", "job_id": "7", "first_attempt": "x"}', None])
def test_a_run_whose_job_json_is_damaged_goes_on_and_still_ends(paths, monkeypatch, capsys, text):
    """The environment tells whether it is Slurm's, and all attempts count."""
    monkeypatch.setenv("SLURM_JOB_ID", "3")
    monkeypatch.setattr(controller, "_ask", lambda *command: "")
    monkeypatch.setattr(batch.requeue, "send_back", lambda job_id, avoid: "")
    batch.begin(paths.folder)
    paths.job.write_text(text) if text is not None else paths.job.unlink()
    assert batch.main(["end", str(paths.folder), "1", "0", "none"]) == 0
    assert end(paths, 1, kind="bug") == "restart"
    assert batch.begin(paths.folder) == "002"
    assert end(paths, 2, kind="time_limit") == "requeue"
    assert batch.begin(paths.folder) == "003"
    assert end(paths, 3, kind="bug") == "stop"
    said = capsys.readouterr().err
    assert f"warning: {paths.job} does not say" in said and "Traceback" not in said


@pytest.mark.parametrize(("command", "file"), [("begin", "hosts"), ("end", "verdict.json")])
def test_a_full_disk_ends_the_batch_script_with_the_file_and_what_to_do(paths, capsys, command, file):
    if command == "end":
        batch.begin(paths.folder)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
    code = batch.main([command, str(paths.folder), *(["1", "137", "none"] if command == "end" else [])])
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr()
    assert (code, said.out) == (3, "") and re.search(rf"where: \S*/{file}\n  next: ", said.err), said.err
    assert batch.begin(paths.folder)  # with room again


@pytest.mark.parametrize(
    ("number", "error", "action", "blamed"),
    [
        (15, "the engine's host process ended", "restart", ("rank_died", 0, 9)),  # since srun ended the step
        (12, "SIGUSR2 before the first step", "requeue", ("preempted", 1, 12)),  # Slurm's warning, which takes all along
    ],
)
def test_who_is_to_blame_where_one_rank_left_and_another_was_killed(paths, number, error, action, blamed):
    batch.begin(paths.folder)
    said = "srun: error: t0: task 0: Killed\nsrun: error: r0: task 0: Exited with exit code 1\n"
    paths.hosts(1).write_text("t0\nr0\n")
    verdicts.write(paths, 1, kind="preempted", rank=1, role="rollout", signal=number, error=error)
    paths.launcher_log(1).write_text(said)
    assert batch.end(paths.folder, 1, 143, "none") == action
    found = verdict.newest(paths)
    assert (found.kind, found.rank, found.signal) == blamed


def test_a_rank_that_saved_and_ended_before_another_was_killed_is_preempted(paths):
    batch.begin(paths.folder)
    verdicts.write(paths, 1, kind="preempted", rank=0, role="train")
    paths.hosts(1).write_text("t0\nr0\n")
    paths.launcher_log(1).write_text("srun: error: r0: task 0: Killed\n")
    assert batch.end(paths.folder, 1, 143, "none") == "requeue"


POLICY = """
def patient(situation, default):
    print("noise on stdout")
    again = situation.history[-1].kind == "diverged" and len(situation.history) < 3
    return "restart" if again else default

def breaks(situation, default):
    return situation.history[9]

def nonsense(situation, default):
    return "later"
"""


@pytest.fixture
def policy(paths, launch_config, tmp_path, monkeypatch):
    """Name a failure policy in the run's configuration."""
    monkeypatch.setattr("sys.path", list(sys.path))
    (tmp_path / "batch_policy.py").write_text(POLICY)

    def name(function: str) -> None:
        slurm = launch_config.slurm.model_copy(update={"failure_policy": f"batch_policy:{function}"})
        run = launch_config.run.model_copy(update={"edges_folder": str(tmp_path)})
        paths.config.write_text(configuration.dump(launch_config.model_copy(update={"slurm": slurm, "run": run})))

    return name


def test_a_failure_policy_has_the_last_word(paths, policy, capsys):
    policy("patient")
    for attempt, action in ((1, "restart"), (2, "restart"), (3, "stop")):
        assert batch.begin(paths.folder) == f"{attempt:03d}"
        assert end(paths, attempt, kind="diverged") == action
    assert batch.begin(paths.folder) is None
    said = capsys.readouterr()
    assert said.out == "" and "noise on stdout" in said.err


@pytest.mark.parametrize(
    ("function", "said"), [("breaks", "IndexError"), ("nonsense", "must return one of restart, requeue, stop")]
)
def test_a_failure_policy_that_fails_is_named_and_the_default_applies(paths, policy, function, said, capsys):
    policy(function)
    batch.begin(paths.folder)
    assert end(paths, 1, kind="rank_died") == "restart"
    told = capsys.readouterr().err
    assert said in told and "batch_policy.py:" in told and "slurm.failure_policy has no say this time: restart" in told


def test_a_failure_policy_is_not_asked_about_what_is_done_or_cancelled(paths, policy, monkeypatch, capsys):
    policy("breaks")
    batch.begin(paths.folder)
    assert end(paths, 1, code=0, kind="done") == "done"
    monkeypatch.setattr(batch.autopsy, "end_of_job", lambda paths, attempt: "CANCELLED")
    paths.attempt(1).joinpath("verdict.json").unlink()
    assert end(paths, 1, signal="TERM") == "stop"
    assert "no say" not in capsys.readouterr().err
