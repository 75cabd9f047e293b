"""Storage faults, each on a copy of the folder of an interrupted run, and what the real loaders make of it."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import h5py
import loader
from harness import SEED, Outcome, differences, finish
from loader import Bomb, Found
from subject import GaveUp, Subject

from miles_hpc.errors import MilesError
from miles_hpc.launchers import submission
from miles_hpc.paths import RunPaths
from miles_hpc.samples import store


@dataclass(frozen=True)
class StorageFault:
    """One fault: what is done to the folder, and what must be found there afterwards."""

    name: str
    damage: Callable[[RunPaths], Found | None]
    """What the process that was hit had to say, where there was one."""
    version: int = 0
    """Checkpoint to be found, counted from the newest before the fault."""
    said: tuple[str, ...] = ()
    """What must be said about it."""
    shards_lost: int = 0


def newest(paths: RunPaths) -> Path:
    return paths.checkpoint(paths.saved_steps()[-1])


def shard(paths: RunPaths) -> Path:
    """The last shard of the step that was interrupted."""
    return store.on_disk(paths, paths.saved_steps()[-1])[-1]


def largest(folder: Path) -> Path:
    return max((file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


def truncate(file: Path) -> None:
    os.truncate(file, random.Random(SEED).randrange(file.stat().st_size))


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[random.Random(SEED).randrange(len(data))] ^= 1
    file.write_bytes(data)


def flip_token(file: Path) -> None:
    """In the samples themselves; elsewhere in the file it might be harmless."""
    with h5py.File(file, "r", locking=False) as opened:
        place = opened["tokens"].id.get_offset()
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


def killed_at_some_byte(paths: RunPaths) -> Found:
    """By the kernel, as soon as a file of the new checkpoint has a certain size."""
    size = random.Random(SEED).randrange(1, largest(newest(paths)).stat().st_size)
    return loader.save(paths.folder, limit=size, deadly=True)


def save(paths: RunPaths, **fault) -> Found:
    return loader.save(paths.folder, **fault)


def write(paths: RunPaths, **fault) -> Found:
    return loader.write(paths.folder, **fault)


def vanish(paths: RunPaths) -> None:
    paths.folder.rename(paths.folder.with_suffix(".gone"))


def saved_into_nothing(paths: RunPaths) -> Found:
    """The run folder vanishes between loading and saving, and comes back."""
    found = loader.save(paths.folder, before=vanish)
    shutil.rmtree(paths.folder, ignore_errors=True)
    paths.folder.with_suffix(".gone").rename(paths.folder)
    return found


def read_only(paths: RunPaths, call: Callable[..., Found]) -> Found:
    """Nobody may write; root may always, so the process becomes another user."""
    folders = [paths.folder, *(p for p in paths.folder.rglob("*") if p.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        return call(paths.folder, user=0 if os.getuid() else loader.NOBODY)
    finally:
        for folder in folders:
            folder.chmod(0o755)


KILLED = ("exit code -9",)
FAULTS = [
    StorageFault("checkpoint truncated", lambda p: truncate(largest(newest(p))), -1, ("is damaged",)),
    StorageFault("bit flipped in a checkpoint", lambda p: flip(largest(newest(p))), -1, ("is damaged",)),
    StorageFault("checkpoint without its manifest", lambda p: (newest(p) / "manifest.json").unlink(), -1, ("is missing",)),
    StorageFault("shard truncated", lambda p: truncate(shard(p)), said=("set aside",), shards_lost=1),
    StorageFault("bit flipped in a shard", lambda p: flip_token(shard(p)), said=("set aside",), shards_lost=1),
    StorageFault("killed while saving", killed_at_some_byte, said=(f"exit code -{signal.SIGXFSZ}",)),
    StorageFault("killed before the manifest", partial(save, bomb=Bomb("fsync", "*.partial/*")), said=KILLED),
    StorageFault("killed before the rename of a checkpoint", partial(save, bomb=Bomb("rename", "*.partial")), said=KILLED),
    StorageFault(
        "killed after the rename of a checkpoint", partial(save, bomb=Bomb("rename", "*.partial", after=True)), 1, KILLED
    ),
    StorageFault("killed while writing a shard", partial(write, bomb=Bomb("fsync", "*.tmp")), said=KILLED),
    StorageFault("killed before the rename of a shard", partial(write, bomb=Bomb("rename", "*.tmp")), said=KILLED),
    StorageFault("disk full while saving", partial(save, limit=100_000), said=("CheckpointError", "cannot be written")),
    StorageFault("disk full at a shard", partial(write, limit=1000), said=("SampleError", "cannot be written")),
    StorageFault("checkpoints read-only", partial(read_only, call=loader.save), said=("CheckpointError", "cannot be written")),
    StorageFault("samples read-only", partial(read_only, call=loader.write), said=("SampleError", "cannot be written")),
    StorageFault("run folder vanishes", saved_into_nothing, said=("CheckpointError", "cannot be written")),
]


def strike(base: Path, scratch: Path, faults: list[StorageFault]) -> list[Outcome]:
    """Every fault on a copy of `base`, the folder of a run that was killed in the middle of a step."""
    before = loader.load(copy(base, scratch / "sound").folder)
    truth = {before.version: before.digest, before.version + 1: before.digest}  # a save of what was loaded
    older = copy(base, scratch / "older")
    shutil.rmtree(newest(older))
    truth |= {(found := loader.load(older.folder)).version: found.digest}
    outcomes = []
    for number, fault in enumerate(faults):
        paths = copy(base, scratch / f"{number:02d}")
        outcome = Outcome(fault.name, "storage", "a copy of the run folder", time.time(), before.version)
        hit = fault.damage(paths)
        found = loader.load(paths.folder)
        outcome.detected = time.time()
        outcome.problems += wrong(fault, before, truth, found, (hit.said if hit else "") + found.said)
        outcomes.append(outcome)
        shutil.rmtree(paths.folder)
    return outcomes


def resume(base: Path, undisturbed: Subject) -> Outcome:
    """Several kinds of damage at once, then `miles-submit resume` to the end: nothing is different there."""
    paths = RunPaths(base)
    outcome = Outcome("damaged, then resumed", "storage", "the run folder", time.time(), paths.saved_steps()[-1])
    flip(largest(newest(paths)))
    truncate(shard(paths))
    subject = Subject(paths, undisturbed.cluster, undisturbed.planned)
    try:
        submission.resume(base, without_slurm=False)
        later = subject.until(lambda: [e for e in subject.events("step") if e["time"] > outcome.injected], "a step")
        outcome.again = later[0]["time"]
        finish(subject)
        outcome.problems += differences(subject, undisturbed)
    except (GaveUp, MilesError) as error:
        outcome.problems.append(str(error))
    return outcome


def copy(base: Path, folder: Path) -> RunPaths:
    shutil.copytree(base, folder)
    return RunPaths(folder)


def wrong(fault: StorageFault, before: Found, truth: dict, found: Found, said: str) -> list[str]:
    """Everything that is not as it must be after the fault."""
    version = before.version + fault.version
    problems = [f"did not say {text!r} but {said!r}" for text in fault.said if text not in said]
    if found.version != version:
        problems.append(f"found version {found.version}, expected {version}: {said}")
    elif version in truth and found.digest != truth[version]:
        problems.append(f"the weights of version {version} are not those that were saved")
    if fault.version >= 0:  # an older checkpoint takes over older shards, too
        lost = sum(map(len, before.groups.values())) - sum(map(len, found.groups.values()))
        if (lost > 0) != bool(fault.shards_lost) and fault.version == 0:
            problems.append(f"{lost} groups of the interrupted step were not found again")
    return problems
