"""A stand-in for `miles_hpc.main` and `miles_hpc.prepare`: an MPI world that does in a second what the tests ask for.

    probe.py MODE --role ROLE --run RUN --attempt N [--world-size W]

Modes: `done`, `kill` (the last rank dies of SIGKILL in attempt 1), `orphan` (the same, and leaves a process behind), `exit-3`
(the last rank ends like that in attempt 1, a thread of it does not), `dies-on-NODE` (so does every rank there), `hold` (waits
for a file `go` in the run folder, or TERM), `deaf` (as `hold`, but ignores TERM), `preempted` (attempt 1 says so), `steps` (a
step a second until there are 150, goes on where the last attempt ended), `prepare`, `prepare-fails`.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode")
    parser.add_argument("--role")
    parser.add_argument("--run", type=Path)
    parser.add_argument("--attempt", type=int)
    parser.add_argument("--world-size", type=int)
    options = parser.parse_args()
    if options.mode.startswith("prepare"):
        return 2 if options.mode == "prepare-fails" else 0

    from mpi4py import MPI

    from miles_hpc import verdicts
    from miles_hpc.heartbeat import Heartbeat
    from miles_hpc.paths import RunPaths

    world, paths = MPI.COMM_WORLD, RunPaths(options.run)
    if world.size != options.world_size:
        verdicts.write(
            paths, options.attempt, kind="user_error", rank=world.rank, error=f"the MPI world has {world.size} ranks"
        )
        return 2
    assert world.allreduce(1) == options.world_size
    Heartbeat(paths.heartbeat(world.rank), options.role, world.rank, options.attempt).enter("rollout", 3)
    rows = world.gather([world.rank, options.role, os.environ.get("SLURMD_NODENAME", "localhost")])
    if world.rank == 0:
        (paths.attempt(options.attempt) / "world.json").write_text(json.dumps(rows))
    print(f"{options.role} rank {world.rank} of {world.size}", flush=True)
    return act(options, world, paths, verdicts)


def act(options: argparse.Namespace, world, paths, verdicts) -> int:
    first = options.attempt == 1
    die(options, first and world.rank == world.size - 1)
    if options.mode in ("kill", "orphan", "exit-3") and first:
        time.sleep(600)
    if options.mode == "steps":
        return steps(paths, options.attempt, world, verdicts)
    if options.mode == "deaf" and first:
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        (paths.folder / f"holding-{world.rank}").touch()
        time.sleep(600)
    if options.mode == "preempted" and first:
        (paths.checkpoint(1)).mkdir(parents=True, exist_ok=True)
        verdicts.write(paths, options.attempt, kind="preempted", rank=world.rank, error="asked to")
        return 1
    if options.mode == "hold" and not (paths.folder / "go").exists() and hold(paths, options.attempt, world, verdicts):
        return 1
    world.Barrier()
    if world.rank == 0:
        verdicts.write(paths, options.attempt, kind="done", rank=0, role=options.role, step=3)
    return 0


def die(options: argparse.Namespace, last: bool) -> None:
    """End this rank as the mode wants it, if it does."""
    if options.mode == "orphan" and last:
        subprocess.Popen(["sleep", "3600"], start_new_session=True)
    if options.mode == f"dies-on-{os.environ.get('SLURMD_NODENAME')}" or (options.mode in ("kill", "orphan") and last):
        os.kill(os.getpid(), signal.SIGKILL)
    if options.mode == "exit-3" and last:
        threading.Thread(target=time.sleep, args=(600,)).start()
        os._exit(3)
    if options.mode.startswith("dies-on-") and f"/{options.mode.removeprefix('dies-on-')}" in f"/{_nodes(options)}":
        time.sleep(600)


def _nodes(options: argparse.Namespace) -> str:
    """Nodes of this attempt, with a slash before each."""
    return "/".join((options.run / f"attempts/{options.attempt:03d}/hosts").read_text().split())


def steps(paths, attempt: int, world, verdicts) -> int:
    """Steps of a second each with an event at the end, until USR2 says that time is up."""
    noted: list[int] = []
    signal.signal(signal.SIGUSR2, lambda received, _frame: noted.append(received))
    done = len(paths.events.read_text().splitlines()) if paths.events.exists() else 0
    while not world.allreduce(len(noted)) and done < 150:
        time.sleep(1)
        if world.rank == 0:
            with paths.events.open("a") as events:
                line = {"event": "step", "step": done, "attempt": attempt, "time": time.time(), "metrics": {}}
                events.write(json.dumps(line | {"phase_seconds": {}}) + "\n")
        done += 1
    if world.rank == 0:
        verdicts.write(paths, attempt, kind="done" if done == 150 else "preempted", rank=0)
    return 0


def hold(paths, attempt: int, world, verdicts) -> bool:
    """Wait for the file `go`; TERM is noted like a rank notes it, and answered with a verdict. True if it was TERM."""
    noted: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda received, _frame: noted.append(received))
    (paths.folder / f"holding-{world.rank}").touch()
    while not noted and not (paths.folder / "go").exists():
        time.sleep(0.05)
    if noted:
        print("noted", noted, flush=True)
        time.sleep(1)  # as long as saving would take
        verdicts.write(paths, attempt, kind="preempted", rank=world.rank, signal=noted[0])
        print("saved", flush=True)
    return bool(noted)


if __name__ == "__main__":
    sys.exit(main())
