"""What every rank runs: `python -m miles_hpc.main --role train|rollout --run FOLDER --attempt N --world-size W`.

The only place that catches everything: whatever ends a rank leaves a verdict, then ends the world.
"""

import argparse
import contextlib
import gc
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from miles_hpc import config as configuration
from miles_hpc import logline, loop, signals, verdicts
from miles_hpc.config import Config
from miles_hpc.errors import Stopped, UserError
from miles_hpc.heartbeat import Heartbeat
from miles_hpc.paths import RunPaths
from miles_hpc.watch import Limits, Watch
from miles_hpc.watchdog import Watchdog
from miles_hpc.world import World, connect

BEREFT_SECONDS = 5.0
"""How long a rank that lost another leaves it to the launcher to end the world."""


def main(arguments: list[str] | None = None) -> None:
    """Run this rank to its verdict; never returns an exit code other than through `sys.exit` or the end of the world."""
    told = _parse(arguments)
    signals.install()
    paths = RunPaths(told.run)
    rank = int(os.environ.get("SLURM_PROCID", os.environ.get("PMI_RANK", 0)))
    heartbeat = Heartbeat(paths.heartbeat(rank), told.role, rank, told.attempt)
    heartbeat.enter("start")
    world: list[World] = []
    try:
        config = configuration.read(paths.config)
        watchdog = _watchdog(told, config, paths, heartbeat)
        watchdog.start()
        kind = _run(told, config, paths, heartbeat, world)
        watchdog.stop()
        _end_forks()
    except BaseException as error:
        try:
            _fail(error, paths, told.attempt, heartbeat)
        finally:  # a full disk takes no verdict; to leave by an exception would wait for the other ranks in MPI's finalisation
            _end_forks()
            _end(world)
    if rank == 0:
        _conclude(kind, paths, told.attempt, heartbeat)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m miles_hpc.main", description=__doc__)
    parser.add_argument("--role", choices=("train", "rollout"), required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    return parser.parse_args(arguments)


def _watchdog(told: argparse.Namespace, config: Config, paths: RunPaths, heartbeat: Heartbeat) -> Watchdog:
    """Of this rank; the first of each role watch all others and each other."""
    first = config.slurm.train.ranks
    roles = {rank: "train" if rank < first else "rollout" for rank in range(told.world_size)}
    watch = Watch(roles, Limits(long=config.hang_seconds))
    return Watchdog(heartbeat, paths, told.attempt, watch, watching=heartbeat.rank in (0, first))


def _run(told: argparse.Namespace, config: Config, paths: RunPaths, heartbeat: Heartbeat, world: list[World]) -> str:
    """Build this rank's role and run it; `world` receives the world as soon as there is one."""
    from miles_hpc import versions

    found = ", ".join(f"{name} {version}" for name, version in versions.check().items())
    place = f"{told.role} rank {heartbeat.rank} of {told.world_size} on {heartbeat.node}"
    logline.say(f"{place}, attempt {told.attempt}: {found}")
    if told.role == "train":
        from miles_hpc.train.build import build as build_trainer

        world.append(connect("train", told.world_size, signals.check))
        kind = loop.train(build_trainer(config, paths, world[0], told.attempt, heartbeat))
    else:
        gc.disable()  # until all is imported: a fifth of the time of the imports
        from miles_hpc.rollout.build import build as build_rollout
        from miles_hpc.rollout.build import start_engine

        # Before MPI: the engine needs the longest to start, and its host must never see the world.
        engine = start_engine(config, paths, told.attempt, heartbeat)
        world.append(connect("rollout", told.world_size, signals.check))
        sampler = build_rollout(config, paths, world[0], told.attempt, heartbeat, engine)
        gc.enable()
        kind = loop.rollout(sampler)
        heartbeat.enter("end")
        engine.shutdown()
    if kind != "done" and heartbeat.rank == 0:  # the rest may take longer than Slurm waits
        _conclude(kind, paths, told.attempt, heartbeat)
    heartbeat.enter("end")
    logline.say(f"end: {kind}")
    world[0].end(config.patience_seconds)
    return kind


def _conclude(kind: str, paths: RunPaths, attempt: int, heartbeat: Heartbeat) -> None:
    verdicts.write(paths, attempt, kind=kind, **heartbeat.state() | {"signal": signals.noted()})


def _fail(error: BaseException, paths: RunPaths, attempt: int, heartbeat: Heartbeat) -> None:
    """The error in the verdict, if no other rank was faster, and in this rank's log."""
    logs = verdicts.logs(paths.folder, heartbeat.role, heartbeat.rank, attempt)
    fields = heartbeat.state() | verdicts.of_error(error, logs)
    if signals.noted() == signal.SIGTERM and fields["kind"] in ("rank_died", "peer_lost", "bug", "hang"):
        # Slurm ends every process of the step, the engine's too: what broke then broke because of that.
        fields["kind"] = "preempted"
    if fields["kind"] == "preempted":
        fields["signal"] = signals.noted()
    try:
        verdicts.write(paths, attempt, **fields)
    finally:
        _log(error)
    if fields["kind"] == "peer_lost":
        _leave_it_to_the_launcher()


def _log(error: BaseException) -> None:
    """As far as there is a log: an edge may have closed it, or the disk be full."""
    with contextlib.suppress(OSError, ValueError):
        if isinstance(error, UserError | Stopped):
            print(f"error: {error}", file=sys.stderr)
        else:
            traceback.print_exception(error)
        sys.stderr.flush()
        sys.stdout.flush()


def _leave_it_to_the_launcher() -> None:
    """It ends the world once it knows which rank was lost; were this one to end before, it might be blamed itself."""
    end = time.monotonic() + BEREFT_SECONDS
    while time.monotonic() < end and signals.noted() != signal.SIGTERM:
        time.sleep(0.05)


def _end_forks() -> None:
    """Kill what an edge has forked and not ended: it holds this rank's connections too, and mpiexec waits for their end."""
    rank = Path("/proc/self/cmdline").read_bytes()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and (process / "cmdline").read_bytes() == rank:
                os.kill(int(process.name), signal.SIGKILL)


def _end(world: list[World]) -> None:
    """End all ranks. No clean-up of process groups: after a failed collective that would hang."""
    if world:
        world[0].abort(1)
    os._exit(1)


if __name__ == "__main__":
    main()
