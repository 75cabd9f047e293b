"""From a TOML file to a job that is queued, and from a run folder to the next one."""

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from miles_hpc import config as configuration
from miles_hpc import durable
from miles_hpc.config import Config
from miles_hpc.errors import SiteError, UserError
from miles_hpc.launchers import amendment, autopsy, batch, controller, local, plan, provenance, verdict
from miles_hpc.launchers.checks import check_files, check_nodes
from miles_hpc.launchers.spec import MAIN, PREPARE, JobSpec
from miles_hpc.launchers.state import job_of, state_of
from miles_hpc.paths import RunPaths

Program = tuple[str, ...]


def run(file: Path, overrides: Sequence[str], *, without_slurm: bool, main: Program = MAIN, prepare: Program = PREPARE) -> Path:
    """Check, make the run folder, submit; the folder.

    Args:
        main, prepare: arguments of Python for the ranks and for the preparation.

    Raises:
        UserError: the file, or a run folder that exists.
        SiteError: no Slurm, or not what the run wants of it; nothing is left behind.
    """
    config = configuration.load(file, overrides)
    cluster = "" if without_slurm else controller.find()
    check_files(config)
    job = _job_in_new_folder(config, cluster, replace_main=(main, prepare))
    try:
        if cluster:
            check_nodes(job, controller.partitions())
        _write(job.folder, _resolved(config, job))
        _submit(job, config, without_slurm)
    except BaseException:
        shutil.rmtree(job.folder)  # made a moment ago, by us alone
        raise
    return job.folder


def resume(
    folder: Path,
    overrides: Sequence[str] = (),
    *,
    without_slurm: bool,
    main: Program = MAIN,
    prepare: Program = PREPARE,
) -> Path:
    """Submit a run that has ended again; it goes on from its newest checkpoint.

    Args:
        overrides: keys to change in the run's config.toml, which stays as it was where the run is not submitted.

    Raises:
        UserError: it has not ended, has nothing left to do, or a key may not change.
        SiteError: nobody can say whether it has ended.
    """
    with _alone(folder):
        config = _may_resume(folder, overrides, without_slurm)
        without_slurm = without_slurm or _last_job(RunPaths(folder))["scheduler"] == "local"
        with _written(folder, config) if overrides else contextlib.nullcontext():
            return _again(folder, config, without_slurm, main, prepare)


@contextlib.contextmanager
def _written(folder: Path, config: Config) -> Iterator[None]:
    """The configuration is in the run folder, before the job can read it; taken back if there is no job."""
    file = RunPaths(folder).config
    before = file.read_text(encoding="utf-8")
    durable.replace(file, configuration.dump(config))
    try:
        yield
    except BaseException:
        durable.replace(file, before)
        raise


def go_on(folder: Path, *, main: Program = MAIN, prepare: Program = PREPARE) -> bool:
    """Submit again a job that should have gone back to the queue and could not: its shell has no scontrol, or Slurm ended it
    before it could ask. The history goes on, nodes that are to be avoided are. False where the run has ended for good.
    """
    paths = RunPaths(folder)
    with _alone(folder):
        now = state_of(folder)
        if now.job["scheduler"] != "slurm" or not now.slurm.ended or now.slurm.state == "CANCELLED":
            return False
        autopsy.close_last(paths, now.slurm.state)
        situation = batch.situation_of(paths, now.slurm.state)
        if not situation.history:
            return False
        found = verdict.read(paths, situation.history[-1].number)
        if found is None or (found.action or verdict.decide(situation)) != "requeue":
            return False
        keep = {"first_attempt": now.job["first_attempt"]}
        _again(folder, configuration.read(paths.config), False, main, prepare, verdict.avoided(situation.history), keep)
        return True


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One `resume` at a time: the second sees the job of the first. Without effect where a filesystem has no locks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _may_resume(folder: Path, overrides: Sequence[str], without_slurm: bool) -> Config:
    """The configuration of a run that has ended and has something left to do."""
    paths = RunPaths(folder)
    config, before = configuration.read(paths.config), _last_job(paths)
    now = state_of(folder, controller.BRIEF)
    if now.slurm.state == "NO_ANSWER":
        # Whoever says --local knows that this Slurm is gone.
        if now.word != "done" and not without_slurm:
            hint = "try again when squeue answers; two jobs in one run folder would spoil it"
            raise SiteError("Slurm does not answer: the run may still be queued or running", where=str(folder), next_step=hint)
    elif not now.ended:
        hint = f"miles-submit status {shlex.quote(str(folder))}"
        raise UserError(f"the run is still {now.word}", where=str(folder), next_step=hint)
    config = amendment.amended(folder, config, overrides)
    if now.word == "done" and config.run.steps <= before.get("steps", 0):
        hint = f"to train longer: miles-submit resume {shlex.quote(str(folder))} --set run.steps=N"
        raise UserError(f"the run is complete, all {config.run.steps} steps", where=str(folder), next_step=hint)
    return config


def _again(
    folder: Path,
    config: Config,
    without_slurm: bool,
    main: Program,
    prepare: Program,
    exclude: tuple[str, ...] = (),
    keep: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Submit in a folder that has a run already; `keep`: what job.json takes over from the last job."""
    cluster = "" if without_slurm else controller.find()
    check_files(config)
    job = replace(plan.job_spec(config, cluster, folder), main=main, prepare=prepare, exclude=exclude)
    if cluster:
        check_nodes(job, controller.partitions())
    _submit(job, config, without_slurm, keep)
    return folder


def follow(folder: Path, *, watch: bool) -> int:
    """Say what was submitted and what to type next, or watch it to its end."""
    job = json.loads(RunPaths(folder).job.read_text(encoding="utf-8"))
    name = os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)
    what = f"process {job['job_id']} on this machine" if job["scheduler"] == "local" else f"Slurm job {job['job_id']}"
    print(f"{name}: {what}, {job['world_size']} ranks")
    if watch:
        from miles_hpc.launchers import watch as watching

        return watching.watch(folder, name)
    quoted = shlex.quote(name)
    for command in ("status {}", "logs {} -f", "cancel {}", "report {}"):
        print(f"  miles-submit {command.format(quoted)}")
    print(f"  tensorboard --logdir {quoted}/tensorboard")
    return 0


def _job_in_new_folder(config: Config, cluster: str, replace_main: tuple[Program, Program]) -> JobSpec:
    """The job, in a folder that this process has made."""
    while True:
        job = plan.job_spec(config, cluster, plan.folder_of(config))
        try:
            job.folder.mkdir(parents=True)
        except FileExistsError:
            if not config.run.folder:
                continue  # another submission took the number
            hint = f"miles-submit resume {shlex.quote(str(job.folder))}, or another run.folder"
            raise UserError("the run folder exists", where=str(job.folder), next_step=hint) from None
        except OSError as error:
            what, hint = f"the run folder cannot be made: {error.strerror}", "set run.folder to a place that you may write to"
            raise UserError(what, where=str(job.folder), next_step=hint) from None
        main, prepare = replace_main
        return replace(job, main=main, prepare=prepare)


def _resolved(config: Config, job: JobSpec) -> Config:
    """The configuration with nothing left to be found out later."""
    run = config.run.model_copy(update={"folder": str(job.folder)})
    site = plan.site_of(config) if config.slurm.site.endswith(".toml") else job.site
    return config.model_copy(update={"run": run, "slurm": config.slurm.model_copy(update={"site": site})})


def _write(folder: Path, config: Config) -> None:
    paths = RunPaths(folder)
    durable.replace(paths.config, configuration.dump(config))
    durable.replace(paths.provenance, json.dumps(provenance.collect(config), indent=1))


def _submit(job: JobSpec, config: Config, without_slurm: bool, keep: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Submit; job.json is there before the job can start, since the batch script reads it."""
    paths = RunPaths(job.folder)
    record: dict[str, Any] = {
        "scheduler": "local" if without_slurm else "slurm",
        "job_id": "",
        "first_attempt": max(paths.attempt_numbers(), default=0) + 1,
        "steps": config.run.steps,
        "world_size": job.world_size,
        "site": job.site,
        "slurm_conf": "" if without_slurm else os.environ.get("SLURM_CONF", ""),
        "slurm_programs": "" if without_slurm else str(Path(shutil.which("sbatch") or "").parent),
        "submitted": time.time(),
        **keep,
    }
    before = paths.job.read_text(encoding="utf-8") if paths.job.exists() else None
    durable.replace(paths.job, json.dumps(record, indent=1))
    try:
        record["job_id"] = str(local.start(job)) if without_slurm else _sbatch(job)
        durable.replace(paths.job, json.dumps(record, indent=1))
    except BaseException:
        _withdraw(record, job.folder)
        if before is not None:
            durable.replace(paths.job, before)
        raise


def _withdraw(record: Mapping[str, Any], folder: Path) -> None:
    """End a job, if there is one, that the run folder cannot name: a second one would be submitted beside it."""
    job_id = record["job_id"]
    if job_id and record["scheduler"] == "local":
        local.cancel(int(job_id), folder)
    elif job_id and (problem := controller.order("scancel", job_id)):
        print(f"job {job_id} of {folder} is not wanted and could not be cancelled: {problem}", file=sys.stderr)


def _sbatch(job: JobSpec) -> str:
    from miles_hpc.launchers.hetjob import HetExecutor

    return HetExecutor(job).submit_run().job_id


def _last_job(paths: RunPaths) -> dict[str, Any]:
    if not paths.job.exists():
        what = "this run was never submitted (job.json is missing)"
        raise UserError(what, where=str(paths.folder), next_step="miles-submit run FILE")
    return job_of(paths)
