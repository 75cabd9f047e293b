"""What a run would be: the batch arithmetic and the exact script. Writes nothing."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from miles_hpc import config as configuration
from miles_hpc.config import Config
from miles_hpc.errors import SiteError
from miles_hpc.launchers import controller, script, site, spec
from miles_hpc.launchers import local as on_this_machine
from miles_hpc.launchers.checks import check_files, check_nodes
from miles_hpc.launchers.spec import JobSpec


def text(file: Path, overrides: Sequence[str], *, local: bool) -> str:
    """The plan of a TOML file as text. Nothing is written and nothing of the user's is imported.

    Raises:
        UserError: the file, or something it names.
        SiteError: partitions or nodes that this Slurm does not have.
    """
    config = configuration.load(file, overrides)
    notes = []
    try:
        cluster = "" if local else controller.find(controller.BRIEF)
    except SiteError as error:
        cluster = ""
        notes.append(f"# {error.what}; this is the script for the site profile, unchecked")
    job = job_spec(config, cluster, folder_of(config, taken=False))
    check_files(config)
    if cluster:
        check_nodes(job, controller.partitions())
    return "\n".join([*arithmetic(config, job, local), *notes, "", job_text(job, local)])


def job_spec(config: Config, cluster: str, folder: Path) -> JobSpec:
    """The job of a configuration on a cluster (its ClusterName, empty without Slurm)."""
    return spec.build(config, site.load(site_of(config), cluster), folder)


def site_of(config: Config) -> str:
    """`slurm.site`; the name of a file is relative to the TOML file."""
    named = config.slurm.site
    return str(Path(config.run.edges_folder) / configuration.expanded(named)) if named.endswith(".toml") else named


def job_text(job: JobSpec, without_slurm: bool) -> str:
    """The script, with the rank map it refers to."""
    if without_slurm:
        return script.text(job, on_this_machine.mpiexec(job.python))
    ranks = f"\n# ranks.conf:\n{script.rank_map(job)}" if job.single else ""
    return script.text(job) + ranks


def folder_of(config: Config, taken: bool = True) -> Path:
    """The run's own folder: `run.folder`, else the first `runs/<name>-NNN` that does not exist.

    Args:
        taken: look at the disk; else the name with 000 will do.
    """
    if config.run.folder:
        return configuration.expanded(config.run.folder).resolve()
    candidates = (Path("runs", f"{config.run.name}-{n:03d}").resolve() for n in range(100000))
    return next(folder for folder in candidates if not taken or not folder.exists())


def arithmetic(config: Config, job: JobSpec, without_slurm: bool) -> Iterator[str]:
    """What the numbers come to, as comment lines."""
    rollout, train, samples = config.rollout, config.train, config.samples_per_step
    per_update = samples // config.data_parallel // train.mini_batches
    replicas, updates = _count(config.data_parallel, "data-parallel rank"), _count(train.mini_batches, "mini-batch")
    share = f"{samples / config.engines:g} samples each, at most {rollout.max_new_tokens} new tokens"
    parallel = f"tensor parallel {train.tensor_parallel}, expert parallel {train.expert_parallel}"
    yield f"# run        {config.run.name}: {config.run.steps} steps in {job.folder}"
    yield f"# rollout    {rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} samples = {samples} samples per step"
    yield f"#            on {_count(config.engines, 'engine')}, {share}"
    yield f"# train      {samples} samples / {replicas} / {updates} = {per_update} samples per rank and optimizer step"
    yield f"#            {parallel}, at most {train.micro_batch_tokens} tokens per micro-batch"
    for component in job.components:
        gpus = f", {_count(component.gpus_per_node, 'GPU')} per node" if component.gpus_per_node else ""
        ranks = f"{_count(component.nodes, 'node')} x {_count(component.ranks_per_node, 'rank')}"
        yield f"# {component.role + ' on':10} {ranks} x {_count(component.cpus_per_rank, 'core')}{gpus}"
    kind = "heterogeneous job" if job.single is None else "homogeneous job"
    if config.colocated:
        kind = "one component, both roles on its nodes"
    how = (
        "mpiexec on this machine"
        if without_slurm
        else f"{kind}, site {job.site}, srun --mpi={job.mpi}, {job.time_minutes} minutes"
    )
    yield f"# world      {job.world_size} ranks: {how}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun.replace('batch', 'batche')}s"
