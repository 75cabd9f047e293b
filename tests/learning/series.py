"""series.py ROLE SIZE FOLDER: several runs one after the other in one MPI world, with one engine.

FOLDER/series.json lists them: `[{"name": ..., "from": name of an earlier run or null}, ...]`; each has a config.toml and a
model in FOLDER/<name>. A run with `from` begins with the checkpoint of version 0 of the other, so that a warm start is paid for
once.
"""

import json
import shutil
import sys
from pathlib import Path

from miles_hpc import config, loop
from miles_hpc.heartbeat import Heartbeat
from miles_hpc.paths import RunPaths
from miles_hpc.world import World, connect

PATIENCE_SECONDS = 1800


def train(world: World, folder: Path, runs: list[dict]) -> None:
    from miles_hpc.train.build import build

    for run in runs:
        paths = RunPaths(folder / run["name"])
        if run["from"] and world.leads:
            shutil.copytree(RunPaths(folder / run["from"]).folder / "first", paths.checkpoint(0))
        world.role_barrier()
        role = build(config.read(paths.config), paths, world, 1, Heartbeat(paths.heartbeat(world.rank), "train", world.rank, 1))
        _keep_first(role, paths)
        assert loop.train(role) == "done"
        world.barrier(PATIENCE_SECONDS)
        role.sender.close()
        role.trainer.close()


def _keep_first(role, paths: RunPaths) -> None:
    """A copy of the checkpoint of version 0, which the run itself will not keep."""
    begin = role.start

    def start() -> int:
        step = begin()
        if role.world.leads and paths.checkpoint(0).is_dir():
            shutil.copytree(paths.checkpoint(0), paths.folder / "first")
        return step

    role.start = start


def rollout(world: World, folder: Path, runs: list[dict], engine) -> None:
    from miles_hpc.rollout.build import build

    for run in runs:
        paths = RunPaths(folder / run["name"])
        heartbeat = Heartbeat(paths.heartbeat(world.rank), "rollout", world.rank, 1)
        role = build(config.read(paths.config), paths, world, 1, heartbeat, engine)
        assert loop.rollout(role) == "done"
        role.receiver.close()
        world.barrier(PATIENCE_SECONDS)


def main() -> None:
    role, size, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    runs = json.loads((folder / "series.json").read_text())
    if role == "train":
        return train(connect(role, size, lambda: None), folder, runs)
    from miles_hpc.rollout.engine import EngineHost

    first = RunPaths(folder / runs[0]["name"])
    engine = EngineHost(config.read(first.config), first.model_of(config.read(first.config)), log=folder / "engine.log")
    engine.start()
    rollout(connect(role, size, lambda: None), folder, runs, engine)
    engine.shutdown()


if __name__ == "__main__":
    main()
