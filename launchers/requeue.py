"""Back to the queue, from the batch script's own shell: ranks need no scontrol, and Slurm ends this shell for it."""

import re
import signal
import time
from collections.abc import Iterable

from miles_hpc.launchers import controller

TRIES, PAUSE_SECONDS = 12, 10.0
"""A controller that restarts is away for a minute or two."""


def send_back(job_id: str, avoid: Iterable[str]) -> str:
    """Requeue this job, and keep it off the nodes to avoid; what went wrong, empty if nothing did.

    No hold is needed: the job cannot start again before this shell has ended, and a job that is not held never waits for a
    release that did not come.
    """
    # Slurm ends every process of the shell as soon as the first request is granted; those started here inherit this.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    before = controller.excluded(job_id) if avoid else ()
    if problem := _insist("scontrol", "requeue", job_id):
        return problem
    if not avoid:
        return ""
    names = ",".join(sorted({*avoid, *before}))
    return _insist("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={names}")


def _insist(*command: str) -> str:
    """Give an order until the controller takes it; its refusal, empty if it did."""
    for number in range(TRIES):
        refusal = controller.order(*command)
        if refusal is None or "pending execution" in refusal:  # a node failure: Slurm has requeued the job already
            return ""
        if not re.search("contact|timed out|respond|temporarily", refusal, re.IGNORECASE):
            return refusal
        if number < TRIES - 1:
            time.sleep(PAUSE_SECONDS)
    return refusal or ""
