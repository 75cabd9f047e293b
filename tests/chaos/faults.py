"""Every fault that `make chaos` does to a run from outside: one line each, what it does and what must follow."""

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from subject import Subject

from miles_hpc.samples import store

STOPPED_SECONDS = 5.0
GONE_SECONDS = 20.0
TRAINER, ENGINE_A, ENGINE_B = 0, 1, 2
"""Ranks of the world under test."""


@dataclass(frozen=True)
class Fault:
    """One fault."""

    name: str
    kind: str
    """`world`: the attempt ends and another goes on; `engine`: an engine dies; `attempt`: nothing dies; see `ends`."""
    rank: int
    """Whom it hits."""
    phase: str
    """When: as soon as that rank is in this phase."""
    inject: Callable[[Subject, int], float | None]
    """Comes back when the fault is over, if it is one that passes; with its time, if it was not now."""
    verdict: dict[str, Any] = field(default_factory=dict)
    """Fields that the attempt's verdict must have; empty: the attempt goes on."""
    noticed: Callable[[Subject, int, float], bool] | None = None
    """True once the run has said so since that time, of a fault that leaves no verdict; None: nothing need be said."""
    abrupt: bool = False
    """All other ranks must be gone at once."""
    copied: bool = False
    """The folder is copied when all ranks have ended, for the storage faults."""
    seconds: float = 0.0
    """How long it lasts."""


def kill(subject: Subject, rank: int) -> None:
    os.kill(subject.beat(rank)["pid"], signal.SIGKILL)


def kill_midway(subject: Subject, rank: int) -> float:
    """When the first shard of the step is there, and others are not: in a moment in which the rank stands still."""

    def caught() -> bool:
        pid, step = subject.beat(rank)["pid"], subject.beat(rank)["step"]
        if not store.on_disk(subject.paths, step):
            return False
        os.kill(pid, signal.SIGSTOP)
        now = subject.beat(rank)
        if not (midway := (now["phase"], now["step"]) == ("rollout", step)):
            os.kill(pid, signal.SIGCONT)
        return midway

    subject.until(caught, "a step of which there is a shard")
    kill(subject, rank)
    return time.time()


def term(subject: Subject, rank: int) -> None:
    os.kill(subject.beat(rank)["pid"], signal.SIGTERM)


def stop(subject: Subject, rank: int) -> None:
    os.kill(subject.beat(rank)["pid"], signal.SIGSTOP)


def pause(subject: Subject, rank: int) -> None:
    pid = subject.beat(rank)["pid"]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(STOPPED_SECONDS)
    os.kill(pid, signal.SIGCONT)


def pause_engine(subject: Subject, rank: int) -> None:
    worker = subject.engine(rank, "scheduler")
    worker.suspend()
    time.sleep(STOPPED_SECONDS)
    worker.resume()


def kill_engine(process: str, subject: Subject, rank: int) -> None:
    subject.engine(rank, process).kill()


def warn(subject: Subject, rank: int) -> None:
    """USR2 to all ranks, again and again, as some Slurms send it."""
    for _ in range(5):
        slurm(subject, "scancel", "--signal=USR2", subject.job_id)
        time.sleep(0.1)


def warn_shell(subject: Subject, rank: int) -> None:
    """USR2 to the batch shell, again and again."""
    for _ in range(5):
        slurm(subject, "scancel", "--batch", "--signal=USR2", subject.job_id)
        time.sleep(0.1)


def node_down(subject: Subject, rank: int) -> None:
    node = subject.beat(rank)["node"]
    slurm(subject, "scontrol", "update", f"nodename={node}", "state=down", "reason=chaos")


def requeue(subject: Subject, rank: int) -> None:
    slurm(subject, "scontrol", "requeue", subject.job_id)


def controller_gone(subject: Subject, rank: int) -> None:
    """The controller dies and comes back."""
    daemon = subject.cluster._daemon("slurmctld")
    os.kill(daemon.pid, signal.SIGKILL)
    time.sleep(GONE_SECONDS)
    daemon.start(subject.cluster._environment())


def full_disk(subject: Subject, rank: int) -> None:
    """No file of the rank may grow beyond 10 kB: its shards of 15 kB do not fit, its log does."""
    pid = subject.beat(rank)["pid"]
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        subject.until(lambda: says_full(subject, rank, 0.0), "the rank to say that the disk is full")
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def says_full(subject: Subject, rank: int, since: float) -> bool:
    return subject.says(rank, "shard cannot be written")


def misbehave(what: str, subject: Subject, rank: int) -> float:
    """The reward does it by itself (`misbehaving.py`); wait for it."""
    return subject.until(lambda: subject.misbehaved().get(what), f"the reward to {what}")


def dropped(what: str, subject: Subject, rank: int, since: float) -> bool:
    """True once the ledger says that the prompt's group was dropped."""
    return any(line["fate"] == "reward_error" and line["prompt_id"] == subject.planned[what] for line in subject.ledger())


def slurm(subject: Subject, *command: str) -> None:
    """Tell the private Slurm something."""
    subprocess.run(command, env=subject.cluster._environment(), check=True, capture_output=True, timeout=30)


def _reward(name: str, what: str, drops: bool = True) -> Fault:
    noticed = partial(dropped, what) if drops else None
    return Fault(name, "attempt", ENGINE_A, "rollout", partial(misbehave, what), noticed=noticed)


def death(name: str, rank: int, phase: str, how: Callable[[Subject, int], float | None] = kill) -> Fault:
    verdict = {"kind": "rank_died", "signal": signal.SIGKILL, "rank": rank, "role": "rollout" if rank else "train"}
    return Fault(name, "world", rank, phase, how, verdict, abrupt=True, copied=how is kill_midway)


def started_again(subject: Subject, rank: int, since: float) -> bool:
    """True once the trainer has heard that the rank's engine was started again."""
    return any(event["rank"] == rank and event["time"] > since for event in subject.events("engine_restart"))


def _engine(name: str, rank: int, phase: str, process: str) -> Fault:
    return Fault(name, "engine", rank, phase, partial(kill_engine, process), noticed=started_again, seconds=20.0)


REWARDS = {"raise": "reward raises", "nan": "reward is NaN", "memory": "request out of memory", "sleep": "reward sleeps"}
"""What `misbehaving.py` does, and the name of the fault."""

FAULTS = [
    death("SIGKILL of a training rank", TRAINER, "train"),
    death("SIGKILL while saving", TRAINER, "checkpoint"),
    death("SIGKILL of a rollout rank", ENGINE_A, "rollout", kill_midway),
    death("SIGKILL while receiving weights", ENGINE_B, "sync"),
    Fault("node down", "world", ENGINE_B, "rollout", node_down, {"kind": "node_failure"}),
    Fault("scontrol requeue", "world", TRAINER, "wait", requeue, {"kind": "preempted"}),
    Fault("SIGTERM", "world", ENGINE_A, "rollout", term, {"kind": "preempted", "signal": signal.SIGTERM}),
    Fault("USR2 five times", "world", TRAINER, "wait", warn, {"kind": "preempted", "signal": signal.SIGUSR2}),
    Fault("a rank hangs", "world", ENGINE_A, "rollout", stop, {"kind": "hang", "rank": ENGINE_A, "role": "rollout"}),
    _engine("engine host killed", ENGINE_A, "rollout", "rollout.sglang"),
    _engine("scheduler killed", ENGINE_B, "rollout", "scheduler"),
    _engine("engine dies in sync", ENGINE_A, "sync", "rollout.sglang"),
    _engine("scheduler dies in sync", ENGINE_B, "sync", "scheduler"),
    *(_reward(name, what, drops=what != "sleep") for what, name in REWARDS.items()),
    Fault("no space for a shard", "attempt", ENGINE_B, "rollout", full_disk, noticed=says_full),
    Fault("USR2 to the batch shell", "attempt", TRAINER, "wait", warn_shell),
    Fault("training rank stopped for 5 s", "attempt", TRAINER, "train", pause, seconds=STOPPED_SECONDS),
    Fault("rollout rank stopped for 5 s", "attempt", ENGINE_A, "rollout", pause, seconds=STOPPED_SECONDS),
    Fault("engine stopped for 5 s", "attempt", ENGINE_B, "rollout", pause_engine, seconds=STOPPED_SECONDS),
    Fault("controller gone for 20 s", "attempt", TRAINER, "wait", controller_gone, seconds=GONE_SECONDS),
]
