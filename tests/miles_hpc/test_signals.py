"""Signals are noted, nothing else happens; run in a process of its own."""

import subprocess
import sys

PROGRAM = """
import os, signal
from miles_hpc import signals
signals.install()
assert signals.noted() == 0
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGUSR2):
    os.kill(os.getpid(), number)
print(signals.noted() == signal.SIGUSR2)
try:
    signals.check()
except Exception as error:
    print(type(error).__name__, error)
"""


def test_the_first_of_usr2_and_term_is_noted_and_usr1_is_ignored():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "True\nStopped SIGUSR2 before the first step"), done.stderr
