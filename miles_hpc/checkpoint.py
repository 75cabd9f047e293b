"""Checkpoints of a run: each appears whole or not at all, and is read back only if every byte is there.

    <run>/checkpoints/step-SSSSSS/   what the trainer wrote, and manifest.json: version, model, size and CRC-32 of every file

All training ranks write into a hidden folder; after a barrier the first rank adds the manifest and renames the folder.
"""

import json
import shlex
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from miles_hpc import disk, durable, logline, sections, statement
from miles_hpc.archive import Archive
from miles_hpc.durable import fsync
from miles_hpc.errors import CheckpointError, ModelError, ResumeError
from miles_hpc.paths import RunPaths

MANIFEST = "manifest.json"
CHUNK = 1 << 22


@dataclass(frozen=True)
class Manifest:
    """What manifest.json must say."""

    version: int
    model: dict[str, Any]
    files: dict[str, tuple[int, int]]
    """Size in bytes and CRC-32, by name."""


class State(Protocol):
    """What is saved and restored; every method is collective over the training ranks."""

    rank: int
    size: int

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What must be equal at a load: sizes of the model and of the layout."""

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        """Write this rank's files into `folder`, and `extra` beside them."""

    def load(self, folder: Path) -> dict[str, Any]:
        """Take everything back from `folder` -> what `extra` was."""

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, on every rank."""


class Checkpoints:
    """The checkpoints of a run.

    Args:
        paths: of the run.
        rules: what is kept, of checkpoints and of samples.
        barrier: returns when all training ranks have called it.
        leads: True on the first training rank, which alone renames and removes.
        archive: the user's store, on the first training rank if there is one.
    """

    def __init__(
        self,
        paths: RunPaths,
        rules: sections.Checkpoint,
        barrier: Callable[[], None],
        leads: bool,
        archive: Archive | None = None,
    ) -> None:
        self.paths, self.rules, self.barrier, self.leads, self.archive = paths, rules, barrier, leads, archive

    def save(self, state: State, version: int) -> None:
        """Save `state` as version `version`, then remove what the rules no longer keep; collective.

        Raises:
            CheckpointError: the folder cannot be written. EdgeError: the archive refused it.
        """
        folder = self.paths.checkpoint(version)
        partial = folder.with_name(f".{folder.name}.partial")
        try:
            if self.leads:
                shutil.rmtree(partial, ignore_errors=True)
                # Not the run's own folder: where a mount has gone, a new one would be of the local disk.
                self.paths.checkpoints.mkdir(exist_ok=True)
                fsync(self.paths.folder)
                partial.mkdir()
                if warning := disk.shortage(self.paths):
                    logline.say(f"warning: {warning}")
            self.barrier()
            state.save(partial, {"version": version})
            self.barrier()
            # Every rank reads back a share of the files, so that the sums cost little on many nodes. A shared file system may
            # not list to one what another has just written: what any of them sees is there.
            names = sorted({name for seen in state.gather(_files(partial)) for name in seen})
            parts = state.gather({name: _sum(partial / name) for name in _share(names, state)})
            if self.leads:
                manifest = _manifest_of(version, state.fingerprint, parts)
                _commit(partial, folder, manifest)
        except BaseException as error:  # torch's CheckpointException is no Exception
            if (refused := _refused(error, partial, folder)) is error:
                raise
            raise refused from error
        if self.leads:
            self._prune()
        if self.archive:
            self.archive.put(version)
        self.barrier()

    def resume(self, state: State) -> int | None:
        """Load the newest checkpoint that is complete; collective.

        One that is incomplete, damaged or gone is fetched from the archive if that has it, else passed over; this rank's log
        names it and says why.

        Returns:
            Its version, or None if there is no checkpoint at all.

        Raises:
            ModelError: it is of another model. ResumeError: there are some, but none is whole. EdgeError: the archive failed.
        """
        problems = {}
        for version in state.gather(self._versions())[0][::-1]:
            folder = self.paths.checkpoint(version)
            problem = _problem(folder, state)
            if problem and self._fetched(state, version):
                logline.say(f"checkpoint {folder} taken from checkpoint.backend, since here {problem}")
                problem = _problem(folder, state)
            if problem:
                logline.say(f"checkpoint {folder} passed over: {problem}")
                problems[folder.name] = problem
                continue
            _check_model(folder, state.fingerprint)
            return int(state.load(folder)["version"])
        if problems:
            raise _none_whole(self.paths, problems)
        return None

    def _versions(self) -> list[int]:
        """Of the run folder and, on the first training rank, of the archive; ascending."""
        return sorted({*self.paths.saved_steps(), *(self.archive.versions() if self.archive else ())})

    def _fetched(self, state: State, version: int) -> bool:
        """True if the archive has the version, which is then in the run folder; collective."""
        found = bool(self.archive and self.archive.fetch(version))
        self.barrier()
        return bool(state.gather(found)[0])

    def _prune(self) -> None:
        """Remove old ones, what attempts that ended while saving left behind, and samples that nobody needs any more.

        What cannot be removed now the next save tries again: a checkpoint that is written is none that failed.
        """
        found = self.paths.saved_steps()
        unfinished = self.paths.checkpoints.glob(".step-*")
        for folder in [*map(self.paths.checkpoint, self.rules.outdated(found)), *unfinished]:
            _remove(folder)
        if self.rules.keep_samples:
            recent = found[-self.rules.keep :]
            # A resume from any of the recent checkpoints takes the samples from its step on from the disk.
            _remove_samples(self.paths, min(recent[0], recent[-1] - self.rules.keep_samples))


def _remove(folder: Path) -> None:
    """Remove a folder, or say why not: on NFS, files that somebody holds open keep theirs."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        logline.say(f"warning: {folder} cannot be removed, the next save tries again: {error}")


def _remove_samples(paths: RunPaths, before: int) -> None:
    """Remove the samples of steps below `before`; first note it, for the audit."""
    old = [step for step in paths.sampled_steps() if step < before]
    if not old:
        return
    try:
        durable.replace(paths.removed_samples, json.dumps({"before": before}))
    except OSError as error:
        logline.say(f"warning: {paths.removed_samples} cannot be written, the next save removes the samples: {error}")
        return
    for step in old:
        _remove(paths.step_samples(step))


def _none_whole(paths: RunPaths, problems: dict[str, str]) -> ResumeError:
    """To begin anew without a word would throw away what was learnt."""
    folder, run = shlex.quote(str(paths.checkpoints)), shlex.quote(str(paths.folder))
    return ResumeError(
        "no checkpoint of the run is whole: " + "; ".join(f"{name}: {problem}" for name, problem in problems.items()),
        where=str(paths.checkpoints),
        next_step=f"put one back from a copy, or begin again: mv {folder} {folder}.damaged; then miles-submit resume {run}",
    )


def _refused(error: BaseException, partial: Path, folder: Path) -> BaseException:
    """What to raise for a save that failed; its files are removed, since on a full disk the verdict needs their place."""
    free = shutil.disk_usage(folder.parent).free if folder.parent.exists() else 0
    shutil.rmtree(partial, ignore_errors=True)
    # megatron's writers keep what the disk said to themselves
    if not isinstance(error, OSError) and type(error).__name__ != "CheckpointException":
        return error
    said = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    next_step = "check space and quota of the file system (df -h), then miles-submit resume"
    return CheckpointError(f"cannot be written, {free / 1e6:,.0f} MB are free: {said}", where=str(folder), next_step=next_step)


def _version(folder: Path) -> int:
    """The number in `step-SSSSSS`."""
    return int(folder.name.removeprefix("step-"))


def _files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def _share(names: list[str], state: State) -> list[str]:
    return names[state.rank :: state.size]


def _sum(file: Path) -> tuple[int, int]:
    """Size in bytes and CRC-32 of a file."""
    size = crc = 0
    with file.open("rb") as stream:
        while block := stream.read(CHUNK):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return size, crc


def _commit(partial: Path, folder: Path, manifest: dict[str, Any]) -> None:
    """Make everything durable, manifest last, then rename. A folder of the same version is moved aside, to be pruned."""
    for name in manifest["files"]:
        fsync(partial / name)
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
    fsync(partial / MANIFEST)
    fsync(partial)
    durable.swap(partial, folder)


def _manifest_of(version: int, model: dict[str, Any], parts: list[dict[str, tuple[int, int]]]) -> dict[str, Any]:
    return {"version": version, "model": model, "files": {name: sums for part in parts for name, sums in part.items()}}


def _manifest(folder: Path) -> Manifest:
    """Raises: FileNotFoundError: there is none. ValueError: it does not say what a manifest says."""
    if (found := statement.of(Manifest, statement.parsed((folder / MANIFEST).read_bytes()) or {})) is None:
        raise ValueError(f"{MANIFEST} does not state version, model and files")
    return found


def _problem(folder: Path, state: State) -> str:
    """What is wrong with a checkpoint, the same answer on every rank: a shared file system may show a file to one and not yet
    to another. Empty if nothing is; collective."""
    return next((problem for problem in state.gather(_own_problem(folder, state)) if problem), "")


def _own_problem(folder: Path, state: State) -> str:
    """What is wrong with this rank's share of the files; empty if nothing is."""
    try:
        manifest = _manifest(folder)
        if manifest.version != _version(folder):
            return f"{MANIFEST} is of version {manifest.version}"
        for name in _share(sorted(manifest.files), state):
            if (found := _sum(folder / name)) != manifest.files[name]:
                return f"{name} is damaged (size and CRC-32 {found}, written {manifest.files[name]})"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError too
        return f"unreadable: {error}"
    return ""


def _check_model(folder: Path, model: dict[str, Any]) -> None:
    saved = _manifest(folder).model
    keys = [k for k in sorted(saved | model) if saved.get(k) != model.get(k)]
    differences = [f"{k} = {saved.get(k)} (this model: {model.get(k)})" for k in keys]
    if differences:
        next_step = "set model.path to the model this run began with, or begin a new run"
        raise ModelError(f"a checkpoint of another model: {', '.join(differences)}", where=str(folder), next_step=next_step)
