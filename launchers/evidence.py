"""What is left of an attempt whose ranks wrote no verdict, and the likeliest verdict from it: a pure function.

srun loses the exit code of a rank that died in a heterogeneous step (it returns 137 or 143), so its words, the heartbeats and
the state of the job and of its nodes have to do. mpiexec names any rank; there the shells of the ranks keep notes (`rank.sh`).
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from miles_hpc import statement
from miles_hpc.launchers.verdict import Verdict


@dataclass(frozen=True)
class Heartbeat:
    """What a rank last said it was doing."""

    rank: int
    role: str = ""
    host: str = ""
    node: str = ""
    phase: str = ""
    step: int = -1
    time: float = 0.0
    peak_memory_mib: int = 0


@dataclass(frozen=True)
class Loss:
    """One rank that ended badly."""

    rank: int
    reason: str
    signal: int = 0
    exit_code: int = 0


@dataclass(frozen=True)
class Evidence:
    """All that can be known about an attempt that left no verdict."""

    code: int
    """Exit code of srun, mpiexec or the preparation."""
    prepared: bool = True
    """The preparation had ended and ranks were started."""
    job_state: str = ""
    """Slurm's state of the job, such as RUNNING, CANCELLED, TIMEOUT; empty without Slurm."""
    bad_nodes: tuple[str, ...] = ()
    """Nodes of the job that are down or do not respond."""
    losses: tuple[Loss, ...] = ()
    heartbeats: tuple[Heartbeat, ...] = ()
    near_limit: bool = False
    """The warning of the time limit was due."""
    left: bool = False
    """A rank had ended with code 0 long before srun ended the others."""
    vanished: bool = False
    """The attempt's batch script ended before it could ask for a verdict."""


def judge(seen: Evidence) -> Verdict:
    """The likeliest verdict where no rank could write one."""
    allocation = _of_allocation(seen)
    if allocation:
        return Verdict(kind=allocation[0], error=allocation[1], exit_code=max(seen.code, 0), nodes=seen.bad_nodes)
    if not seen.prepared:
        kind = "user_error" if seen.code == 2 else "bug"
        return Verdict(kind=kind, phase="prepare", exit_code=seen.code, error="the preparation on the first node failed")
    if seen.code == 0:
        return Verdict(kind="bug", error="all ranks ended without an error and without a verdict")
    return _of_ranks(seen)


def refine(found: Verdict, seen: Evidence) -> dict[str, str]:
    """Fields of a rank's verdict that Slurm knows better; none where it does not.

    A rank that got a signal can only say `preempted`, one that lost its engine or its peers not even that; Slurm knows whether
    it was the time limit or a lost node.
    """
    if found.kind not in ("preempted", "rank_died", "peer_lost", "bug", "hang"):
        return {}
    allocation = _of_allocation(seen)
    if allocation is None:
        return {"kind": "time_limit"} if seen.near_limit and found.kind == "preempted" else {}
    kind, error = allocation
    if kind == found.kind:
        return {}
    return {"kind": kind} if found.error else {"kind": kind, "error": error}


def collateral(found: Verdict, seen: Evidence) -> bool:
    """True where another rank was lost, which is to be named: this one failed in a collective with it, or failed or left after
    TERM because srun ended the step. USR2 is no word of srun: a rank that obeys it while it starts takes the others with it."""
    ended = found.kind == "preempted" and found.signal == signal.SIGTERM
    another = any(map(_by_itself, of_others(found, seen).losses))
    return (ended or found.kind == "peer_lost") and another and _of_allocation(seen) is None


def of_others(found: Verdict, seen: Evidence) -> Evidence:
    """What is left to judge by once the rank of a verdict is known not to have been the first."""
    return replace(seen, losses=tuple(loss for loss in seen.losses if loss.rank != found.rank))


def _by_itself(loss: Loss) -> bool:
    """True if a rank was not ended along with others: killed, or by the kernel for its memory."""
    return loss.signal not in (0, signal.SIGTERM) or "memory" in loss.reason.lower()


def _of_allocation(seen: Evidence) -> tuple[str, str] | None:
    """Kind and sentence where the allocation itself ended."""
    if seen.bad_nodes or seen.job_state == "NODE_FAIL":
        which = f"node {', '.join(seen.bad_nodes)}" if seen.bad_nodes else "a node of the job, back by now,"
        return "node_failure", f"{which} was down or did not respond"
    if seen.job_state == "TIMEOUT":
        return "time_limit", "the job reached its time limit before the ranks had ended"
    if seen.job_state == "CANCELLED":
        return "preempted", "the job was cancelled"
    if seen.job_state in ("PREEMPTED", "PENDING", "REQUEUED", "SUSPENDED"):
        return "preempted", f"Slurm took the nodes back (job state {seen.job_state})"
    if seen.vanished:
        return "node_failure", "the batch script vanished without a word: its node died, or something killed it"
    return None


def _of_ranks(seen: Evidence) -> Verdict:
    """The rank that was lost first, and what it last said."""
    loss = seen.losses[0] if seen.losses else None
    silent = min(seen.heartbeats, key=lambda h: h.time, default=None)
    beat = next((h for h in seen.heartbeats if loss and h.rank == loss.rank), None if loss else silent)
    memory = seen.job_state == "OUT_OF_MEMORY" or (loss is not None and "memory" in loss.reason.lower())
    return Verdict(
        kind="out_of_memory" if memory else "rank_died",
        rank=beat.rank if beat else loss.rank if loss else -1,
        role=beat.role if beat else "",
        host=beat.host if beat else "",
        node=beat.node if beat else "",
        phase=beat.phase if beat else "",
        step=beat.step if beat else -1,
        exit_code=loss.exit_code if loss else seen.code,
        signal=loss.signal if loss else 0,
        error=_sentence(seen, loss),
    )


def _sentence(seen: Evidence, loss: Loss | None) -> str:
    if seen.left:
        return "a rank ended with code 0 before the others: something in it called exit"
    return f"a rank ended without a verdict: {loss.reason}" if loss else f"the ranks ended with code {seen.code}"


# srun: error: t0: task 1: Killed        srun: error: r0: tasks 2-3: Exited with exit code 3
_SRUN = re.compile(r"srun: error: (\S+): tasks? (\d+)[^:]*: (.+)")
# srun: First task exited 60s ago      (with code 0: srun --wait)
_LEFT = re.compile(r"^srun: First task exited \d+s ago", re.MULTILINE)
_SIGNALS = {
    "Killed": 9,
    "Terminated": 15,
    "Segmentation fault": 11,
    "Aborted": 6,
    "Bus error": 7,
    "Floating point exception": 8,
}


def losses(launcher_log: str, hosts: Sequence[str] = (), first_rollout: int = 0, ends: str = "") -> tuple[Loss, ...]:
    """Ranks that ended badly, first one first; ranks that were only ended along with it come last.

    Args:
        launcher_log: what srun said.
        hosts: node of every rank.
        first_rollout: first rank of the second component.
        ends: what `rank.sh` noted without Slurm.
    """
    launcher_log = _LEFT.split(launcher_log)[0]  # what follows is srun's own doing
    names = ((node, int(task), reason.strip()) for node, task, reason in _SRUN.findall(launcher_log))
    found = [_of_srun(_rank(node, task, hosts, first_rollout), reason) for node, task, reason in names]
    noted = ([int(word) for word in line.split()] for line in ends.splitlines())
    found += [_noted(rank, code) for rank, code in noted if code]
    return tuple(sorted(found, key=lambda loss: loss.signal == signal.SIGTERM))


def left(launcher_log: str) -> bool:
    """True where srun ended the ranks since one had left them with code 0."""
    return _LEFT.search(launcher_log) is not None


def _rank(node: str, task: int, hosts: Sequence[str], first_rollout: int) -> int:
    """Rank in the world of a task on a node: srun counts the tasks of each component from 0, the node tells which one it is."""
    candidates = (task, task + first_rollout)
    return next((rank for rank in candidates if rank < len(hosts) and hosts[rank] == node), task)


def _of_srun(rank: int, reason: str) -> Loss:
    number = next((number for word, number in _SIGNALS.items() if reason.startswith(word)), 0)
    code = re.search(r"exit code (\d+)", reason)
    return Loss(rank, reason, number, int(code[1]) if code else 0)


def _noted(rank: int, code: int) -> Loss:
    number = max(0, code - 128)  # as a shell counts
    return Loss(rank, f"killed by signal {number}" if number else f"exit code {code}", number, code)


# The batch step's last words, written as TERM is sent: *** JOB 16 ON t0 CANCELLED AT 2026-11-29T16:29:37 DUE TO TIME LIMIT ***
_BATCH_END = re.compile(r"\*\*\* JOB \d+ ON \S+ CANCELLED AT \S+(?: DUE TO ([A-Z ]+?))?(?:,[^*]*)? \*\*\*")
_REASONS = {"TIME LIMIT": "TIMEOUT", "PREEMPTION": "PREEMPTED", "JOB REQUEUE": "REQUEUED", "NODE FAILURE": "NODE_FAIL"}


def ended_by(job_log: str) -> str:
    """Why Slurm ends the job, as a job state: TIMEOUT, PREEMPTED, REQUEUED, NODE_FAIL, CANCELLED; empty where it does not say.

    scontrol cannot tell: while a job is being ended it says COMPLETING, be it for a time limit or for scancel, and a run that
    was cancelled must not requeue itself.
    """
    found = _BATCH_END.findall(job_log)
    return _REASONS.get(found[-1], "CANCELLED") if found else ""


def heartbeats(folder: Path, attempt: int) -> tuple[Heartbeat, ...]:
    """What every rank last said in this attempt."""
    return heartbeats_of(last_words(folder, attempt))


def heartbeats_of(words: object) -> tuple[Heartbeat, ...]:
    """Last words as far as the launcher needs them, without those that are no rank's."""
    found = (statement.of(Heartbeat, each) for each in (words if isinstance(words, list) else ()) if isinstance(each, dict))
    return tuple(beat for beat in found if beat)


def last_words(folder: Path, attempt: int) -> list[dict[str, Any]]:
    """The heartbeat files of an attempt as they are, by rank."""
    found = []
    for file in sorted((folder / "heartbeat").glob("rank-*.json")):
        try:
            values = statement.read(file)
        except OSError:
            continue
        if "rank" in values and values.get("attempt", attempt) == attempt:
            found.append(values)
    return found
