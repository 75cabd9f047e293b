"""`miles-submit status` and `cancel`."""

import shlex
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from miles_hpc import config as configuration
from miles_hpc import disk
from miles_hpc.errors import SiteError
from miles_hpc.launchers import amendment, controller, evidence, local, verdict
from miles_hpc.launchers.progress import duration, progress_of
from miles_hpc.launchers.state import RunState, state_of
from miles_hpc.paths import RunPaths


def text(folder: Path) -> str:
    """A run's state, progress, ranks and verdict, for a pending, running or ended run."""
    return "\n".join(f"{name:9}{value}" for name, value in _rows(folder, state_of(folder, controller.BRIEF)))


def _rows(folder: Path, now: RunState) -> Iterator[tuple[str, str]]:
    config = configuration.read(RunPaths(folder).config)
    yield "run", f"{config.run.name} in {folder}"
    yield "state", _state(now)
    if now.slurm.state == "NO_ANSWER":
        yield "slurm", "did not answer; all of this is from the run's files"
    progress = progress_of(folder, config.run.steps)
    yield "progress", progress.line()
    if not now.ended:
        for beat in evidence.heartbeats(folder, now.attempt):
            age = max(0.0, time.time() - beat.time)
            yield (
                "rank",
                f"{beat.rank} {beat.role} on {beat.node or beat.host}: {beat.phase}, step {beat.step}, {age:.0f} s ago",
            )
    if changed := amendment.sentence(amendment.changes(RunPaths(folder), now.attempt)):
        yield "changed", f"for attempt {now.attempt}: {changed}"
    yield "disk", _disk(RunPaths(folder))
    if warning := disk.shortage(RunPaths(folder)):
        yield "warning", warning
    if not now.ended and (progress.seconds_left or 0.0) > (limit := now.slurm.end - time.time()):
        yield (
            "warning",
            f"the time limit comes in {duration(max(0.0, limit))}, before the last step: saved then, and queued again",
        )
    if now.verdict:
        yield "verdict", verdict.sentence(now.verdict)
    for command in _next(folder, now):
        yield "next", command


def _state(now: RunState) -> str:
    kind = {"slurm": "job", "local": "process"}.get(now.job["scheduler"])
    parts = [now.word, *([f"{kind} {now.job['job_id']}"] if kind else [])]
    if now.slurm.nodes and not now.ended:
        parts.append(f"on {','.join(now.slurm.nodes)}")
    if now.attempt:
        parts.append(f"attempt {now.attempt}")
    if now.slurm.state == "PENDING" and now.slurm.reason:
        parts.append(f"waits for {now.slurm.reason}")
    return ", ".join(parts)


def _disk(paths: RunPaths) -> str:
    """What the run takes, as a whole and in its large parts."""
    parts = {name: disk.size(getattr(paths, name)) for name in ("checkpoints", "samples", "attempts")}
    said = ", ".join(f"{name} {disk.text(size)}" for name, size in parts.items())
    return f"{disk.text(disk.size(paths.folder))} ({said}), {disk.text(shutil.disk_usage(paths.folder).free)} free"


def _next(folder: Path, now: RunState) -> Iterator[str]:
    name = shlex.quote(str(folder))
    if now.verdict and now.verdict.kind == "done":
        yield f"miles-submit report {name}"
    elif now.word == "ending":
        yield (now.verdict and now.verdict.next) or f"miles-submit why {name}"
    elif not now.ended:
        yield f"miles-submit logs {name} -f"
    elif now.job["scheduler"]:
        if now.verdict and now.verdict.next:
            yield now.verdict.next
        yield verdict.resume(folder, now.verdict)


def cancel(folder: Path) -> str:
    """End a run that has not ended; all its components.

    Raises:
        SiteError: Slurm does not answer, or says no.
    """
    now = state_of(folder, controller.BRIEF)
    if now.slurm.state == "NO_ANSWER" and now.word != "done":
        hint = "try again when squeue answers; until then the job may go on"
        raise SiteError("Slurm did not answer: the job was not cancelled", where=f"job {now.job['job_id']}", next_step=hint)
    if now.ended:
        return f"the run has ended already: {now.word}"
    if now.job["scheduler"] == "local":
        local.cancel(int(now.job["job_id"]), folder)
    else:
        controller.cancel(now.job["job_id"])
    return f"cancelled; to go on later: miles-submit resume {shlex.quote(str(folder))}"
