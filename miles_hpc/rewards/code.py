"""Code: the answer's program is run against tests, in a process with limits of time, memory and files.

The limits keep a careless program from harming the run. They are no security boundary: the program has the user's rights and
the network. Put hostile code into a container of your own, behind `miles_hpc.rewards.remote`.
"""

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FENCE = re.compile(r"```(?:python|py)?\s*\n(.*?)```", re.DOTALL)


def unit_tests(
    prompt: str,
    answer: str,
    label: Any,
    metadata: Mapping[str, Any],
    seconds: float = 5.0,
    memory_mb: int = 512,
    file_mb: int = 1,
    all_or_nothing: bool = False,
) -> float:
    """Share of tests passed by the last code block of the answer (without one, by the whole answer).

    Args:
        label: the tests: a list whose items are texts of Python that raise where the program is wrong (`assert f(2) == 4`),
            or mappings with `input` and `output`, the program's standard input and the output it must have. A program that
            ends before such a text has not passed it.
        seconds: wall time of one test.
        memory_mb: address space of one test.
        file_mb: largest file it may write.
        all_or_nothing: 1.0 if all pass, else 0.0.
    """
    tests = label if isinstance(label, list) else [label]
    program = (_FENCE.findall(answer) or [answer])[-1]
    passed = [_passes(program, test, seconds, memory_mb, file_mb) for test in tests]
    return float(all(passed)) if all_or_nothing else sum(passed) / len(passed)


def _passes(program: str, test: Any, seconds: float, memory_mb: int, file_mb: int) -> bool:
    if isinstance(test, Mapping):
        code, output = run(program, str(test["input"]), seconds, memory_mb, file_mb)
        return code == 0 and output.split() == str(test["output"]).split()
    end = uuid.uuid4().hex  # to leave with exit code 0 before the test would be the easiest way to pass it
    code, output = run(f"{program}\n{test}\n__import__('os').write(1, b'{end}')\n", "", seconds, memory_mb, file_mb)
    return code == 0 and end in output


def run(program: str, text: str, seconds: float, memory_mb: int, file_mb: int) -> tuple[int, str]:
    """Run a Python program in a folder of its own with `text` as standard input; returns exit code and standard output.

    All of its processes are killed at the end, also those that it left behind in its session.
    """
    limits = {
        resource.RLIMIT_CPU: int(seconds) + 1,
        resource.RLIMIT_AS: memory_mb << 20,
        resource.RLIMIT_FSIZE: file_mb << 20,
        resource.RLIMIT_CORE: 0,
    }
    with tempfile.TemporaryDirectory(prefix="miles-code-") as folder, tempfile.TemporaryFile(dir=folder) as output:
        source = Path(folder, "program")  # as an argument it could neither be long nor hold a NUL
        source.write_bytes(program.encode(errors="replace"))
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _LIMITED, repr({int(k): v for k, v in limits.items()}), str(source)],
            stdin=subprocess.PIPE,
            stdout=output,  # a file, so that the limit of file size bounds the output too
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.environ.get("PATH", ""), "HOME": folder, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            process.communicate(text.encode(errors="replace"), timeout=seconds)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            pass
        finally:
            _end(process)
        output.seek(0)
        return process.returncode, output.read().decode(errors="replace")


# Limits are set by the child itself: a preexec_fn may deadlock in a process with threads.
_LIMITED = """
import ast, resource, sys
limits, program = ast.literal_eval(sys.argv[1]), open(sys.argv[2], "rb").read()
sys.argv[:] = ["program"]
for kind, value in limits.items():
    resource.setrlimit(kind, (value, value))
exec(compile(program, "program", "exec"), {"__name__": "__main__"})
"""


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
