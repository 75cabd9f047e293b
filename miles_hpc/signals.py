"""Signals from Slurm: the handler only notes them; `stop.py` says what ranks make of it.

USR2 is the early warning of a time limit or preemption, TERM the last word before KILL.
"""

import signal

from miles_hpc.errors import Stopped

EARLY_WARNING = signal.SIGUSR2
_noted: list[int] = []


def install() -> None:
    """Note USR2 and TERM instead of dying of them. Call from the main thread."""
    for number in (EARLY_WARNING, signal.SIGTERM):
        signal.signal(number, lambda received, _frame: _noted.append(received))
    # NCCL and some site tools use USR1 among themselves; its default action would kill the rank.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def note(number: int) -> None:
    """Note a signal that another rank got."""
    _noted.append(number)


def noted() -> int:
    """The first signal noted, or 0."""
    return _noted[0] if _noted else 0


def check() -> None:
    """While a rank starts, there is nothing to lose, and the whole attempt ends. Raises: Stopped if a signal was noted."""
    if _noted:
        raise Stopped(f"{signal.Signals(_noted[0]).name} before the first step")
