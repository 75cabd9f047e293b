"""What is to be started: two roles (train, rollout), as one heterogeneous job, one homogeneous job or on this machine."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from miles_hpc import config as configuration
from miles_hpc.config import Config
from miles_hpc.errors import UserError
from miles_hpc.launchers.site import Site
from miles_hpc.sections import CONTROL

MAIN = ("-m", "miles_hpc.main")
PREPARE = ("-m", "miles_hpc.prepare")


@dataclass(frozen=True)
class Component:
    """Nodes of one role."""

    role: str
    nodes: int
    spares: int
    ranks_per_node: int
    cpus_per_rank: int
    gpus_per_node: int
    memory_gb: int
    partition: str
    constraint: str
    extra: tuple[str, ...]

    @property
    def ranks(self) -> int:
        """MPI ranks of all its nodes."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class JobSpec:
    """One run as the launcher sees it."""

    name: str
    folder: Path
    site: str
    train: Component
    rollout: Component
    time_minutes: int
    warning_seconds: int
    account: str
    qos: str
    mpi: str
    single: Component | None
    """The component of a homogeneous job: colocated, or where the site does not start steps over a heterogeneous one."""
    setup: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    srun_options: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    """Nodes to be kept off."""
    python: str = sys.executable
    main: tuple[str, ...] = MAIN
    """Arguments of Python for every rank."""
    prepare: tuple[str, ...] = PREPARE
    """Arguments of Python for the preparation on the first node."""

    @property
    def components(self) -> tuple[Component, Component]:
        """In the order of their ranks."""
        return self.train, self.rollout

    @property
    def world_size(self) -> int:
        """MPI ranks of the job."""
        return self.train.ranks + self.rollout.ranks


def build(config: Config, site: Site, folder: Path) -> JobSpec:
    """The job of a resolved configuration at a site.

    Raises:
        UserError: a folder that Slurm would misread.
    """
    _check_folder(folder)
    slurm = config.slurm
    train = _component("train", slurm.train, site.train_partition)
    rollout = _component("rollout", config.rollout_component, site.rollout_partition)
    return JobSpec(
        name=config.run.name,
        folder=folder,
        site=site.name,
        train=train,
        rollout=rollout,
        time_minutes=slurm.time_minutes,
        # Slurm ignores a warning that would come before the start
        warning_seconds=min(slurm.warning_seconds, slurm.time_minutes * 30),
        account=slurm.account,
        qos=slurm.qos,
        mpi=slurm.mpi or site.mpi,
        single=_single(train, rollout, site, config.colocated),
        setup=(*site.setup, *slurm.setup),
        environment=tuple(_environment(train, rollout, site)),
        srun_options=tuple(site.srun_options),
    )


def _single(train: Component, rollout: Component, site: Site, colocated: bool) -> Component | None:
    if colocated:
        return _shared(train, rollout)
    return None if site.het else _homogeneous(train, rollout, site)


def _shared(train: Component, rollout: Component) -> Component:
    """The nodes of training, with room for the ranks of both roles."""
    ranks = train.ranks_per_node + rollout.ranks_per_node
    cores = sum(c.ranks_per_node * c.cpus_per_rank for c in (train, rollout))
    return replace(train, ranks_per_node=ranks, cpus_per_rank=-(-cores // ranks))


def _homogeneous(a: Component, b: Component, site: Site) -> Component:
    """Nodes that suit either role."""
    ranks = max(a.ranks_per_node, b.ranks_per_node)
    cores = max(c.ranks_per_node * c.cpus_per_rank for c in (a, b))
    return Component(
        role="all",
        nodes=a.nodes + b.nodes,
        spares=a.spares + b.spares,
        ranks_per_node=ranks,
        cpus_per_rank=-(-cores // ranks),
        gpus_per_node=max(a.gpus_per_node, b.gpus_per_node),
        memory_gb=max(a.memory_gb, b.memory_gb),
        partition=a.partition if a.partition == b.partition else site.partition,
        constraint=a.constraint,
        extra=a.extra,
    )


def _component(role: str, section: configuration.Component, partition: str) -> Component:
    return Component(
        role=role,
        nodes=section.nodes,
        spares=section.spares,
        ranks_per_node=section.ranks_per_node,
        cpus_per_rank=section.cpus_per_rank,
        gpus_per_node=section.gpus_per_node,
        memory_gb=section.memory_gb,
        partition=section.partition or partition,
        constraint=section.constraint,
        extra=tuple(section.extra),
    )


def _environment(train: Component, rollout: Component, site: Site):
    yield from {
        "PYTHONSAFEPATH": "1",  # the current folder must not shadow installed packages
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HDF5_USE_FILE_LOCKING": "FALSE",
        # MPICH's ucx sends 4 KB of heap beyond its address through PMI2, which now and then breaks the start (decisions/008)
        "MPIR_CVAR_CH4_NETMOD": "ofi",
    }.items()
    if not train.gpus_per_node and not rollout.gpus_per_node:
        yield "SGLANG_USE_CPU_ENGINE", "1"
    yield from site.environment.items()


def _check_folder(folder: Path) -> None:
    """Words and signs in a path that sbatch takes for something else."""
    text = str(folder)
    if "hetjob" in text:
        raise UserError(
            "sbatch takes the word 'hetjob' in a path for a directive", where=text, next_step="choose another run.folder"
        )
    if CONTROL.search(text) or any(sign in text for sign in "\"'\\%"):
        raise UserError(
            "sbatch misreads quotes, backslashes, % and control characters in a path",
            where=text,
            next_step="choose another run.folder",
        )
