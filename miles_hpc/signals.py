"""Signals from Slurm: the handler only notes them; ranks agree on what to do at the next step boundary.

USR2 is the early warning of a time limit or preemption, TERM the last word before KILL.
"""

import signal

EARLY_WARNING = signal.SIGUSR2
_noted: list[int] = []


def install() -> None:
    """Note USR2 and TERM instead of dying of them. Call from the main thread."""
    for number in (EARLY_WARNING, signal.SIGTERM):
        signal.signal(number, lambda received, _frame: _noted.append(received))
    # NCCL and some site tools use USR1 among themselves; its default action would kill the rank.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def noted() -> int:
    """The first signal noted, or 0."""
    return _noted[0] if _noted else 0
