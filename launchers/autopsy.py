"""The verdict of an attempt from outside: written where no rank could, corrected where Slurm knows more, completed always."""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from miles_hpc import config as configuration
from miles_hpc import durable, statement, verdicts
from miles_hpc.launchers import controller, evidence, verdict
from miles_hpc.launchers.evidence import Evidence
from miles_hpc.launchers.verdict import Verdict
from miles_hpc.paths import RunPaths

# Slurm sends the warning of a time limit up to a minute early.
WARNING_EARLY_SECONDS = 65


@dataclass(frozen=True)
class Start:
    """Where an attempt began, as its batch script noted."""

    time: float = 0.0
    steps: int = -1
    """Complete by then."""
    nodes: tuple[str, ...] = ()
    job_log_bytes: Annotated[int, Field(ge=0)] = 0
    """What the attempts before had said in job.log."""
    changed: dict[str, list[Any]] = field(default_factory=dict)
    """Keys of the configuration that differ from the attempt before, each with the value before and the one now."""


def close(paths: RunPaths, attempt: int, seen: Evidence) -> None:
    """Make sure that an attempt that has ended has a verdict, and that it holds what every rank last said.

    Raises:
        OSError: the filesystem refused; the verdict is as it was.
    """
    write(paths, attempt, conclusion(paths, attempt, seen))


def conclusion(paths: RunPaths, attempt: int, seen: Evidence) -> dict[str, Any]:
    """All fields of the verdict of an attempt that has ended: a rank's, corrected, or the likeliest where none can stand."""
    found = verdict.read(paths, attempt)
    if found and evidence.collateral(found, seen):
        seen, found = evidence.of_others(found, seen), None
    if found:
        known = verdict.fields(paths, attempt) | evidence.refine(found, seen)
    else:
        judged = evidence.judge(seen)
        known = judged.fields() | {"next": _next_step(paths, attempt, judged), "attempt": attempt, "time": time.time()}
    # those of a rank that hung are in its verdict: as the watcher saw them, not as they were when Slurm had woken it
    last_words = known.get("heartbeats") or evidence.last_words(paths.folder, attempt)
    return known | {"heartbeats": last_words, "bad_nodes": list(seen.bad_nodes), "job_state": seen.job_state}


def write(paths: RunPaths, attempt: int, known: Mapping[str, Any]) -> None:
    """Let this be the verdict of an attempt; one that does not stand is put aside."""
    file, before = paths.verdict(attempt), verdict.fields(paths, attempt)
    if file.exists() and before.get("time") != known.get("time"):
        aside = file.with_suffix(".collateral.json" if before else ".unreadable.json")
        aside.unlink(missing_ok=True)
        os.link(file, aside)
    durable.replace(file, json.dumps(known, indent=1))


def close_last(paths: RunPaths, job_state: str = "") -> None:
    """Close the newest attempt if its batch script vanished.

    Args:
        job_state: what Slurm says about the job now that it has ended.
    """
    if open_end := open_last(paths, job_state):
        write(paths, *open_end)


def open_last(paths: RunPaths, job_state: str = "") -> tuple[int, dict[str, Any]] | None:
    """Number and verdict-to-be of the newest attempt if its batch script vanished: its node died, or Slurm killed it before
    it could ask. A rank may have written a verdict all the same; it lacks what only the batch side adds.
    """
    numbers = paths.attempt_numbers()
    if not numbers or "bad_nodes" in verdict.fields(paths, numbers[-1]):
        return None
    start = started(paths, numbers[-1])
    state = end_of_job(paths, start) or (job_state if job_state in controller.ENDED else "")
    nodes = controller.bad_nodes(",".join(start.nodes))
    return numbers[-1], conclusion(paths, numbers[-1], Evidence(code=-1, job_state=state, bad_nodes=nodes, vanished=True))


def seen_now(paths: RunPaths, attempt: int, code: int, signal: str) -> Evidence:
    """All that the batch script can know about an attempt that has just ended."""
    job_id = os.environ.get("SLURM_JOB_ID", "")
    job = controller.job(job_id) if job_id else controller.JobState("")
    slurm = configuration.read(paths.config).slurm
    log, hosts = paths.launcher_log(attempt), paths.hosts(attempt)
    names = hosts.read_text(encoding="utf-8").split() if hosts.exists() else []
    said = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    notes = paths.ends(attempt).read_text(encoding="utf-8") if paths.ends(attempt).exists() else ""
    start = started(paths, attempt)
    ended = end_of_job(paths, start) or "CANCELLED"  # to stop too early can be mended
    return Evidence(
        code=code,
        prepared=log.exists(),
        job_state=ended if signal == "TERM" else job.state,
        bad_nodes=controller.bad_nodes(",".join(start.nodes or job.nodes)),  # a job that waits again has none
        losses=evidence.losses(said, names, slurm.train.ranks, notes),
        left=evidence.left(said),
        heartbeats=evidence.heartbeats(paths.folder, attempt),
        near_limit=time.time() > job.end - slurm.warning_seconds - WARNING_EARLY_SECONDS,
    )


def started(paths: RunPaths, attempt: int) -> Start:
    """start.json of an attempt; nothing known where it cannot be read."""
    try:
        return statement.of(Start, statement.read(paths.start(attempt))) or Start()
    except OSError:
        return Start()


def end_of_job(paths: RunPaths, start: Start) -> str:
    """Why Slurm ended this attempt's job, in the words it left in job.log; empty where it left none."""
    if not paths.job_log.exists():
        return ""
    with paths.job_log.open("rb") as file:
        file.seek(start.job_log_bytes)
        return evidence.ended_by(file.read().decode("utf-8", errors="replace"))


def _next_step(paths: RunPaths, attempt: int, judged: Verdict) -> str:
    """The command that shows more: the rank's log, its engine's, or the batch script's, the first that is not empty."""
    for role in (judged.role, "engine") if judged.role else ():
        log = paths.log(attempt, role, judged.rank)
        if log.exists() and log.stat().st_size:
            return verdicts.logs(paths.folder, role, judged.rank, attempt)
    return verdicts.logs(paths.folder, "job")
