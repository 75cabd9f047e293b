"""`miles-submit logs`: one rank's log, or the batch script's."""

import shlex
import time
from pathlib import Path

from miles_hpc import config as configuration
from miles_hpc import verdicts
from miles_hpc.errors import UserError
from miles_hpc.launchers.state import Follower
from miles_hpc.paths import RunPaths

POLL_SECONDS = 0.5


def show(folder: Path, role: str | None, rank: int | None, attempt: int | None, follow: bool) -> int:
    """Print a log; with `follow` go on until the run has ended.

    Raises:
        UserError: there is no such log (yet).
    """
    file = locate(folder, role, rank, attempt)
    if not follow:
        if not file.exists():
            status = f"miles-submit status {shlex.quote(str(folder))}"
            hint = f"{status}; what the batch script said: {verdicts.logs(folder, 'job')}"
            raise UserError("no such log", where=str(file), next_step=hint)
        print(file.read_text(encoding="utf-8", errors="replace"), end="")
        return 0
    position, follower = 0, Follower(folder)
    while True:
        ended = follower.look().ended
        newest = locate(folder, role, rank, attempt)
        if newest != file:
            _print_from(file, position)  # what a rank said at its end
            file, position = newest, 0
        position = _print_from(file, position)
        if ended:
            return 0
        time.sleep(POLL_SECONDS)


def locate(folder: Path, role: str | None, rank: int | None, attempt: int | None) -> Path:
    """The log of a rank in the MPI world, by default of the newest attempt and of the role's first rank."""
    paths = RunPaths(folder)
    if role == "job":
        return paths.job_log
    train = configuration.read(paths.config).slurm.train.ranks
    if role is None:
        role = "rollout" if rank is not None and rank >= train else "train"
    if rank is None:
        rank = 0 if role == "train" else train  # an engine has its rollout rank's number
    return paths.log(attempt or max(paths.attempt_numbers(), default=1), role, rank)


def _print_from(file: Path, position: int) -> int:
    if not file.exists():
        return position
    with file.open("rb") as stream:
        stream.seek(position)
        data = stream.read()
    print(data.decode("utf-8", errors="replace"), end="", flush=True)
    return position + len(data)
