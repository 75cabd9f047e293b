"""What follows an attempt: `verdict.decide`, and the last word of the user's `slurm.failure_policy`."""

import sys
from contextlib import redirect_stdout

from miles_hpc import edges
from miles_hpc.attach import attach
from miles_hpc.config import Config
from miles_hpc.errors import EdgeError
from miles_hpc.launchers import verdict
from miles_hpc.launchers.verdict import Situation

KEY = "slurm.failure_policy"
CHOICES = ("restart", "requeue", "stop")


def decide(now: Situation, config: Config) -> str:
    """`done`, `restart`, `requeue` or `stop`.

    The user's function is not asked where the run is done or was cancelled. If it fails or answers something else, that is
    said on stderr (the run's job.log) and the default applies.
    """
    default = verdict.decide(now)
    if not config.slurm.failure_policy or default == "done" or now.job_state == "CANCELLED":
        return default
    try:
        return ask(now, default, config)
    except EdgeError as error:
        print(f"{error}\n{KEY} has no say this time: {default}", file=sys.stderr)
        return default


def ask(now: Situation, default: str, config: Config) -> str:
    """The user's decision.

    Raises:
        EdgeError: not importable, it raised, or it returned something that cannot be done.
    """
    with redirect_stdout(sys.stderr):  # the batch script reads the decision from stdout
        function = attach(config, KEY, config.slurm.failure_policy)
        decision = edges.call(function, now, default, key=KEY)
    possible = CHOICES if now.slurm else ("restart", "stop")
    if decision not in possible:
        raise edges.wrong(KEY, function, f"one of {', '.join(possible)}", decision)
    return decision
