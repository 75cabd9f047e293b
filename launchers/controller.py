"""Questions to Slurm's controller, by its own programs; and which Slurm is used: the one that answers, else `./.cluster`."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime
from math import inf
from pathlib import Path

from miles_hpc.errors import SiteError
from miles_hpc.launchers import nodes

PATIENT, BRIEF = 30.0, 5.0
"""Seconds that an answer of Slurm's programs is waited for; BRIEF where a person waits and files say most of it,
PATIENT where a wrong no costs more than the wait: a submission, a verdict, another attempt."""
NO_SLURM = "miles-submit cluster up    (a private Slurm on this machine), or add --local (mpiexec, no Slurm)"
# Worst first: the state of a heterogeneous job is that of its worst component, once all have ended.
ENDED = ("NODE_FAIL", "OUT_OF_MEMORY", "CANCELLED", "TIMEOUT", "DEADLINE", "FAILED", "BOOT_FAIL", "COMPLETED")
STATES = ("COMPLETING", "SUSPENDED", "PREEMPTED", "REQUEUED", "PENDING", "CONFIGURING", "RUNNING", *ENDED)


@dataclass(frozen=True)
class Kind:
    """Nodes of a partition that are alike."""

    nodes: int
    """All of them, also those that are down or drained."""
    cpus: int
    memory_mb: int
    gpus: int


@dataclass(frozen=True)
class Partition:
    """One partition as `sinfo` describes it."""

    name: str
    default: bool
    kinds: tuple[Kind, ...]

    @property
    def nodes(self) -> int:
        """How many there are of all kinds."""
        return sum(kind.nodes for kind in self.kinds)


@dataclass(frozen=True)
class JobState:
    """One job over all its components."""

    state: str
    """Slurm's word, such as PENDING or RUNNING; UNKNOWN where Slurm has forgotten the job, NO_ANSWER where it did not say."""
    nodes: tuple[str, ...] = ()
    """Node lists of the components, as Slurm writes them."""
    restarts: int = 0
    reason: str = ""
    end: float = inf
    """When its time limit is reached, in seconds since 1970."""

    @property
    def ended(self) -> bool:
        """Slurm will not run it again."""
        return self.state in ENDED


def find(patience: float = PATIENT) -> str:
    """Make this process use a Slurm that answers within `patience` seconds; returns its ClusterName.

    Raises:
        SiteError: none answers and no private cluster runs in `./.cluster`.
    """
    _forget_outer_job()
    if shutil.which("sinfo") and (name := cluster_name(patience)):
        return name
    if (home := Path(".cluster").resolve()).is_dir():
        from miles_hpc.launchers.cluster import Cluster

        cluster = Cluster(home)
        if cluster.running:
            os.environ.update(cluster.exports())
            print(f"using the private Slurm in {home}", file=sys.stderr)
            return cluster_name(patience)
    conf = os.environ.get("SLURM_CONF")
    what = f"the Slurm of SLURM_CONF={conf} does not answer" if conf else "no Slurm answers here"
    raise SiteError(what, next_step=NO_SLURM)


def use(slurm_conf: str, programs: str) -> None:
    """Make this process use the Slurm that a run was submitted to."""
    _forget_outer_job()
    if slurm_conf:
        os.environ["SLURM_CONF"] = slurm_conf
    if programs and programs not in os.environ.get("PATH", "").split(":"):
        os.environ["PATH"] = f"{programs}:{os.environ.get('PATH', os.defpath)}"


def _forget_outer_job() -> None:
    """Submitted from inside a job, a run must not inherit that job's sizes; srun and sbatch read them from the environment."""
    if "SLURM_JOB_ID" in os.environ:
        for name in [n for n in os.environ if n.startswith(("SLURM_", "PMI_", "PMIX_")) and n != "SLURM_CONF"]:
            del os.environ[name]


def cluster_name(patience: float) -> str:
    """ClusterName, empty where no controller answers."""
    said, _ = _said("scontrol", "show", "config", patience=patience)
    found = re.search(r"^ClusterName\s*=\s*(\S+)", said, flags=re.MULTILINE)
    return found[1] if found else ""


def partitions() -> dict[str, Partition]:
    """Partitions by name.

    Raises:
        SiteError: Slurm names none, or does not answer.
    """
    if not (found := parse_partitions(_ask("sinfo", "--noheader", "--noconvert", "--format=%P|%D|%c|%m|%G"))):
        raise SiteError("Slurm names no partition", where="sinfo", next_step="try again when `sinfo -s` shows some")
    return found


def parse_partitions(text: str) -> dict[str, Partition]:
    """Partitions by name; a line is a kind of nodes of one: partition, nodes, cores, megabytes, generic resources."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        name, nodes, cpus, memory, resources = line.split("|")
        plain = name.rstrip("*")
        kind = Kind(_number(nodes), _number(cpus), _number(memory), _gpus(resources))
        before = found[plain].kinds if plain in found else ()
        found[plain] = Partition(plain, name.endswith("*"), (*before, kind))
    return found


def _number(text: str) -> int:
    """A count as sinfo prints it: 12, or 12+ where nodes differ."""
    return int(text.strip().rstrip("+"))


def _gpus(resources: str) -> int:
    """GPUs of a node, from generic resources such as `gpu:h200:8(S:0-1),nvme:1`."""
    words = [word.split(":") for word in re.sub(r"\(.*?\)", "", resources.strip()).split(",")]
    return sum(int(word[-1]) if word[-1].isdigit() else 1 for word in words if word[0] == "gpu")


def job(job_id: str, patience: float = PATIENT) -> JobState:
    """State of a job over all its components; works without accounting."""
    answer, complaint = _said("scontrol", "-o", "show", "job", job_id, patience=patience)
    # A controller that restarts is not one that has forgotten: a run that may still be there must not be resumed.
    return parse_job(answer) if answer or "Invalid job id" in complaint else JobState("NO_ANSWER")


def parse_job(text: str) -> JobState:
    """The components of one job, as `scontrol -o show job` prints them, merged: worst state, all nodes."""
    components = [
        dict(word.split("=", 1) for word in line.split() if "=" in word) for line in text.splitlines() if "JobId=" in line
    ]
    components.sort(key=lambda c: int(c.get("HetJobOffset", "0")))
    if not components:
        return JobState("UNKNOWN")
    states = {c.get("JobState", "UNKNOWN") for c in components}
    return JobState(
        state=next((s for s in STATES if s in states), min(states)),
        nodes=tuple(c["NodeList"] for c in components if c.get("NodeList", "(null)") not in ("(null)", "")),
        restarts=max(int(c.get("Restarts", "0")) for c in components),
        end=min(_seconds(c.get("EndTime", "")) for c in components),
        reason=next((c["Reason"] for c in components if c.get("Reason", "None") != "None"), ""),
    )


def _seconds(text: str) -> float:
    """A local time as scontrol prints it."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:  # Unknown, N/A
        return inf


def excluded(job_id: str) -> tuple[str, ...]:
    """Nodes that a job is kept off, over all its components."""
    found = re.findall(r" ExcNodeList=(\S+)", _ask("scontrol", "-o", "show", "job", job_id))
    return tuple(name for text in found if text != "(null)" for name in nodes.expanded(text))


def usable_nodes(partition: str) -> tuple[str, ...]:
    """Nodes of a partition (empty: of the default one) that are neither down nor drained."""
    said = _ask("sinfo", "--noheader", "--Node", *([f"--partition={partition}"] if partition else []), "--format=%N %T")
    rows = (line.split() for line in said.splitlines())
    return tuple(name for name, state in rows if not re.match("down|drain|fail|maint", state) and not state.endswith("*"))


def order(*command: str) -> str | None:
    """Give Slurm an order; None if it was obeyed, else what Slurm's program said."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{error}" if isinstance(error, OSError) else "timed out"
    return None if result.returncode == 0 else (result.stderr or result.stdout).strip() or f"exit code {result.returncode}"


def bad_nodes(node_list: str) -> tuple[str, ...]:
    """Nodes of a list that are down or do not respond."""
    said = _ask("sinfo", "--noheader", "--Node", f"--nodes={node_list}", "--format=%N %T") if node_list else ""
    rows = (line.split() for line in said.splitlines())
    return tuple(sorted({name for name, state in rows if state.endswith("*") or state.startswith(("down", "fail"))}))


def cancel(job_id: str) -> None:
    """End a job, all components.

    Raises:
        SiteError: Slurm says no.
    """
    if problem := order("scancel", job_id):
        raise SiteError(f"the job was not cancelled: {problem}", where=f"scancel {job_id}", next_step="squeue --me, then again")


def _ask(*command: str) -> str:
    """Output of one of Slurm's programs, empty where it does not answer."""
    return _said(*command)[0]


def _said(*command: str, patience: float = PATIENT) -> tuple[str, str]:
    """Output and complaints of one of Slurm's programs."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=patience)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    return result.stdout, result.stderr
