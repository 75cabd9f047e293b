"""The text of the batch script and of the rank-to-role map: pure functions of a JobSpec, no Slurm needed."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from string import Template

import miles_hpc.slurm
from miles_hpc.launchers.spec import Component, JobSpec
from miles_hpc.paths import RunPaths

SLURM = Path(miles_hpc.slurm.__file__).parent
RANK = SLURM / "rank.sh"
# All ranks leave a barrier together. One that ends with code 0 long before the others (a library or an edge called exit) is no
# "bad exit" to srun, and the others would wait for it in vain.
LEAVE_SECONDS = 60


def text(spec: JobSpec, mpiexec: str = "") -> str:
    """The whole batch script; with `mpiexec` (a program) the one for this machine, without Slurm."""
    template = Template((SLURM / "job.sbatch").read_text(encoding="utf-8"))
    return template.substitute(
        name=spec.name,
        world=spec.world_size,
        layout=", ".join(f"{c.ranks} {c.role} on {c.nodes} node{'s' * (c.nodes > 1)}" for c in spec.components),
        directives="# Without Slurm: bash runs this file." if mpiexec else "\n".join(directives(spec)),
        variables="\n".join(_variables(spec, mpiexec)),
        environment="\n".join(f"export {name}={shlex.quote(value)}" for name, value in spec.environment),
        site=spec.site,
        setup="\n".join(spec.setup) or ":",
        launch=_launch(spec, mpiexec),
        srun="" if mpiexec else shlex.join(["srun", *spec.srun_options]),
        prepare=shlex.join(spec.prepare),
    )


def _variables(spec: JobSpec, mpiexec: str) -> Iterator[str]:
    yield f"RUN={shlex.quote(str(spec.folder))}"
    yield f"PYTHON={shlex.quote(spec.python)}"
    if mpiexec or spec.single is None:  # else the rank map names it
        yield f"RANK={shlex.quote(str(RANK))}"


def _launch(spec: JobSpec, mpiexec: str) -> str:
    if mpiexec:
        return _mpiexec(spec, mpiexec)
    return _het_srun(spec) if spec.single is None else _homogeneous_srun(spec, spec.single)


def directives(spec: JobSpec) -> Iterator[str]:
    """The #SBATCH lines: job, component 0 and, in a heterogeneous job, component 1."""
    job = {
        "job-name": spec.name,
        "output": RunPaths(spec.folder).job_log,
        "open-mode": "append",
        "signal": f"USR2@{spec.warning_seconds}",
    }
    yield from (_directive(key, value) for key, value in job.items())
    yield "#SBATCH --requeue"
    if spec.single is not None:
        yield from _component_directives(spec, spec.single)
        return
    yield "# Component 0: training"
    yield from _component_directives(spec, spec.train)
    yield "#SBATCH hetjob"
    yield "# Component 1: rollout"
    yield from _component_directives(spec, spec.rollout)


def _component_directives(spec: JobSpec, component: Component) -> Iterator[str]:
    values = {
        "partition": component.partition,
        "account": spec.account,
        "qos": spec.qos,
        "constraint": component.constraint,
        "exclude": ",".join(spec.exclude),
        "time": spec.time_minutes,
        "nodes": component.nodes + component.spares,
        "ntasks-per-node": component.ranks_per_node,
        "cpus-per-task": component.cpus_per_rank,
        "gpus-per-node": component.gpus_per_node,
        "mem": f"{component.memory_gb}G" if component.memory_gb else "",
    }
    yield from (_directive(key, value) for key, value in values.items() if value)
    yield from (f"#SBATCH {option}" for option in component.extra)


def _directive(key: str, value: object) -> str:
    return f"#SBATCH --{key}={shlex.quote(str(value))}"


def _mpiexec(spec: JobSpec, program: str) -> str:
    """All ranks on this machine; `fork` also where an outer Slurm job would make mpiexec call srun."""
    parts = [f"-n {c.ranks} {_rank(spec, c)}" for c in spec.components]
    return f"    exec {shlex.quote(program)} -launcher fork -hosts localhost {_mpmd(parts)}"


def _het_srun(spec: JobSpec) -> str:
    """One srun over both components; the role is an argument, since Slurm tells no task which component it is in."""
    sizes = [f"--nodes={c.nodes} --ntasks={c.ranks} --cpus-per-task={c.cpus_per_rank}{_chosen(c)}" for c in spec.components]
    parts = [f"--het-group={n} {sizes[n]} {_rank(spec, c)}" for n, c in enumerate(spec.components)]
    return f"    exec {_srun(spec)} {_mpmd(parts)}"


def _chosen(component: Component) -> str:
    """With spares in the allocation: the nodes that the health check has chosen."""
    return f' --nodelist="$(cat "$RUN/attempts/$MILES_ATTEMPT/{component.role}.nodes")"' if component.spares else ""


def _mpmd(parts: list[str]) -> str:
    return "\\\n        " + " : \\\n        ".join(parts)


def _rank(spec: JobSpec, component: Component) -> str:
    return f'"$RANK" {component.role} "$RUN" {spec.world_size} "$PYTHON" {shlex.join(spec.main)}'


def _homogeneous_srun(spec: JobSpec, single: Component) -> str:
    """One srun over one component; the hosts of the ranks are in a file, since they differ by attempt."""
    options = f"--nodes={single.nodes} --ntasks={spec.world_size} --cpus-per-task={single.cpus_per_rank} --cpu-bind=none"
    return (
        f'    SLURM_HOSTFILE="$RUN/attempts/$MILES_ATTEMPT/hosts" exec {_srun(spec)} \\\n'
        f"        --distribution=arbitrary {options} \\\n"
        f'        --multi-prog "$RUN/ranks.conf"'
    )


def _srun(spec: JobSpec) -> str:
    return shlex.join(["srun", f"--mpi={spec.mpi}", "--kill-on-bad-exit=1", f"--wait={LEAVE_SECONDS}", *spec.srun_options])


def rank_map(spec: JobSpec) -> str:
    """The file of `srun --multi-prog`: a range of ranks and its command per role."""
    last, lines = -1, []
    for component in spec.components:
        first, last = last + 1, last + component.ranks
        command = [str(RANK), component.role, str(spec.folder), str(spec.world_size), spec.python, *spec.main]
        lines.append(f"{first}-{last} {' '.join(_quoted(word) for word in command)}")
    return "\n".join(lines) + "\n"


def _quoted(word: str) -> str:
    """srun reads single quotes in a rank map, neither double ones nor backslashes."""
    return f"'{word}'" if " " in word else word
