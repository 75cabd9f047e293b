"""What a training and a rollout rank do to a run folder, each call in a process of its own, with the real trainer.

A process can be told to die in the middle: at a call of a function of `os` with a certain file, before or after it.
"""

import contextlib
import hashlib
import io
import logging
import multiprocessing
import os
import resource
import signal
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from miles_hpc import config as configuration
from miles_hpc.paths import RunPaths

SPAWN = multiprocessing.get_context("forkserver")
SPAWN.set_forkserver_preload(["miles_hpc.train.trainer"])
NOBODY = 65534


@dataclass(frozen=True)
class Bomb:
    """SIGKILL at the first call of `os.<function>` with a path that matches."""

    function: str
    path: str
    after: bool = False


@dataclass
class Found:
    """What a loader found in a run folder."""

    version: int | None = None
    """Of the checkpoint it resumed from."""
    digest: str = ""
    """sha256 of its weights."""
    groups: dict[int, list[int]] = field(default_factory=dict)
    """Prompt ids in the shards that it took over, by step."""
    said: str = ""
    """Log, output and error."""


def load(folder: Path) -> Found:
    """Resume and list what is left, as ranks do at their start."""
    return call(_load, folder)


def save(folder: Path, **fault: Any) -> Found:
    """Resume, then save the next version."""
    return call(_save, folder, **fault)


def write(folder: Path, **fault: Any) -> Found:
    """Write the shards that an earlier attempt has left once more, as a rank of another number."""
    return call(_write, folder, **fault)


def call(function: Callable[..., None], folder: Path, **fault: Any) -> Found:
    """Run `function` in a new process; what it had found until its end."""
    ours, theirs = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=_run, args=(theirs, function, folder), kwargs=fault)
    process.start()
    theirs.close()
    process.join(240)
    process.kill()
    return ours.recv() if process.exitcode == 0 else Found(said=f"exit code {process.exitcode}")


def _run(pipe: Connection, function: Callable[..., None], folder: Path, **fault: Any) -> None:
    found, said = Found(), io.StringIO()
    warnings.simplefilter("ignore")
    logging.basicConfig(stream=said, level=logging.ERROR, force=True)
    with contextlib.redirect_stdout(said):
        try:
            function(RunPaths(folder), found, **fault)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}")
    found.said = said.getvalue()
    pipe.send(found)
    os._exit(0)  # process groups of torch are of no interest any more


def _scratch(paths: RunPaths) -> Path:
    """A folder beside the run folder, whose owner removes it; another user could not."""
    return Path(tempfile.mkdtemp(dir=paths.folder.parent))


def _trainer(paths: RunPaths) -> tuple[Any, Any]:
    from miles_hpc.checkpoint import Checkpoints
    from miles_hpc.train.trainer import Trainer

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    config = configuration.read(paths.config)
    trainer = Trainer(config, paths.model_of(config), 0, 1, f"file://{_scratch(paths)}/store")
    return trainer, Checkpoints(paths, config.checkpoint, lambda: None, True)


def _load(paths: RunPaths, found: Found) -> None:
    from miles_hpc.rollout.role import leftovers

    trainer, checkpoints = _trainer(paths)
    found.version = checkpoints.resume(trainer)
    found.digest = _digest(trainer)
    left = leftovers(paths, found.version or 0, configuration.read(paths.config).run.steps)
    found.groups = {step: sorted(i for shard in shards for i in shard.prompt_ids) for step, shards in left.items()}


def _save(paths: RunPaths, found: Found, before: Callable[[RunPaths], None] | None = None, **fault: Any) -> None:
    trainer, checkpoints = _trainer(paths)
    found.version = checkpoints.resume(trainer)
    trainer.save(_scratch(paths), {})  # loads what another user may not read
    if before:
        before(paths)
    _suffer(**fault)
    checkpoints.save(trainer, (found.version or 0) + 1)


def _write(paths: RunPaths, found: Found, **fault: Any) -> None:
    from miles_hpc.samples import store

    store.FULL_SECONDS = 0.0
    step = max(int(folder.name.removeprefix("step-")) for folder in paths.samples.iterdir())
    samples = store.read(store.on_disk(paths, step)[0])
    _suffer(**fault)
    store.write(paths, step, 99, 1, samples)


def _digest(trainer: Any) -> str:
    found = hashlib.sha256()
    for name, tensor in trainer.weights():
        found.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def _suffer(bomb: Bomb | None = None, limit: int = 0, deadly: bool = False, user: int = 0) -> None:
    """Have what is done next fail: by a death, by a disk on which no file may have more than `limit` bytes (to try is `deadly`
    or an error), as another user."""
    if bomb:
        _arm(bomb)
    if limit:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if deadly else signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if user:
        os.setuid(user)


def _arm(bomb: Bomb) -> None:
    original = getattr(os, bomb.function)

    def fatal(target: Any, *others: Any) -> Any:
        path = str(Path(f"/proc/self/fd/{target}").readlink() if isinstance(target, int) else target)
        hit = fnmatch(path, bomb.path)
        result = None if hit and not bomb.after else original(target, *others)
        if hit:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(os, bomb.function, fatal)
