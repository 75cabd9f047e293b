"""How a run stands right now: its job's state, its attempt, its newest verdict."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import StringConstraints

from miles_hpc import statement
from miles_hpc.errors import UserError
from miles_hpc.launchers import controller, local, verdict
from miles_hpc.launchers.controller import JobState
from miles_hpc.launchers.verdict import Verdict
from miles_hpc.paths import RunPaths

FASTEST, SLOWEST = 0.5, 10.0  # seconds between two questions to Slurm


@dataclass(frozen=True)
class Submission:
    """What job.json must say; it also says with which Slurm, site and world."""

    scheduler: Literal["slurm", "local"]
    job_id: Annotated[str, StringConstraints(pattern=r"^\d*$")]
    """Or the process's; empty where the submission failed halfway."""
    first_attempt: int
    steps: int = 0
    slurm_conf: str = ""
    slurm_programs: str = ""


@dataclass(frozen=True)
class RunState:
    """One look at a run."""

    word: str
    """not submitted, pending, running, ending (the job, after its last attempt), requeued, done, cancelled, failed or a kind of
    verdict."""
    ended: bool
    job: dict[str, Any]
    """job.json"""
    slurm: JobState
    attempt: int
    """Number of the newest attempt; 0: none yet."""
    verdict: Verdict | None
    """Of the newest attempt."""

    @property
    def exit_code(self) -> int:
        """What `--watch` returns: 0 done, 2 the user's error, 1 anything else."""
        kind = self.verdict.kind if self.verdict else ""
        return {"done": 0, "user_error": 2}.get(kind, 1)


def state_of(folder: Path, patience: float = controller.PATIENT) -> RunState:
    """Look at a run: one question to Slurm, which has `patience` seconds to answer, or one look at a process."""
    paths = RunPaths(folder)
    job = job_of(paths)
    attempt = max(paths.attempt_numbers(), default=0)
    newest = verdict.read(paths, attempt) if attempt >= job["first_attempt"] else None
    slurm = _ask(folder, job, patience)
    # while Slurm does not answer only the files can say it: another attempt may follow a fault, or the job wait again
    ended = slurm.ended or slurm.state == "UNKNOWN" or (slurm.state == "NO_ANSWER" and newest is not None and newest.final)
    word = _word(slurm, newest, ended) if job["scheduler"] else "not submitted"
    return RunState(word, ended, job, slurm, attempt, newest)


def job_of(paths: RunPaths) -> dict[str, Any]:
    """How the run was submitted last, as job.json says; without a scheduler where it never was.

    Raises:
        UserError: job.json is damaged.
    """
    if not paths.job.exists():
        return {"scheduler": "", "job_id": "", "first_attempt": 1}
    job = statement.read(paths.job)
    if (said := statement.of(Submission, job)) is None:
        least = '{"scheduler": "local", "job_id": "", "first_attempt": 1}'  # enough for `resume`, which writes it anew
        hint = f"restore it, or once the job has ended write {least} there; report, audit and samples work without it"
        raise UserError("it does not say how the run was submitted", where=str(paths.job), next_step=hint)
    return job | asdict(said)


def _ask(folder: Path, job: dict[str, Any], patience: float) -> JobState:
    if job["scheduler"] == "slurm" and job["job_id"]:
        controller.use(job.get("slurm_conf", ""), job.get("slurm_programs", ""))
        return controller.job(job["job_id"], patience)
    if job["scheduler"] == "local" and job["job_id"]:
        return JobState("RUNNING" if local.alive(int(job["job_id"]), folder) else "COMPLETED")
    return JobState("UNKNOWN")


def _word(slurm: JobState, newest: Verdict | None, ended: bool) -> str:
    if not ended and slurm.state == "NO_ANSWER":
        return "unknown (Slurm does not answer)"
    if not ended:
        return "ending" if slurm.state == "RUNNING" and newest and newest.last else slurm.state.lower()
    if slurm.state == "CANCELLED":
        return "cancelled"
    return newest.word if newest else slurm.state.lower()


class Follower:
    """`state_of`, as often as a shared controller can bear: twice a second at first, then less and less, down to every 10 s.

    An attempt that has ended is looked at more often again, since the run's end is near. A Slurm that did not answer soon has
    more time from then on: it may only be busy.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.begin, self.due, self.patience = folder, time.monotonic(), 0.0, controller.BRIEF

    def look(self) -> RunState:
        """The newest state that is young enough."""
        now = time.monotonic()
        if now >= self.due:
            self.last = state_of(self.folder, self.patience)
            if self.last.slurm.state == "NO_ANSWER":
                self.patience = controller.PATIENT
            self.due = now + (FASTEST if self.last.verdict else min(SLOWEST, FASTEST + (now - self.begin) / 30))
        elif verdict.read(RunPaths(self.folder), self.last.attempt):
            self.due = min(self.due, now + FASTEST)
        return self.last
