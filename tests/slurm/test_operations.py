"""Every command of docs/operations.md, in the page's order, on a run that ended badly in a real Slurm."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from miles_hpc.launchers import verdict

pytestmark = pytest.mark.slurm
PAGE = Path(__file__).parents[2] / "docs/operations.md"
SAYS = {
    "miles-submit why runs/mine-000": "rank_died",
    "miles-submit why runs/mine-000 --attempt 1": "attempt 1 of",
    "miles-submit status runs/mine-000": "disk ",
    "miles-submit logs runs/mine-000 --role rollout --rank 5": "rollout rank 5 of 6",
    "miles-submit logs runs/mine-000 --role job": "attempt 1: rank_died (rollout rank 5 on r1",
    "miles-submit report runs/mine-000": "rank_died",
    "miles-submit audit runs/mine-000": "ok   No prompt is in the ledger twice",
    "miles-submit resume runs/mine-000": "Slurm job",
    "df -h .": "Filesystem",
    'sinfo -N -o "%N %T"': "r1 ",
}
"""What some of them must say."""


def commands() -> list[str]:
    """Of the page's blocks and of its tables, each once, in that order."""
    text = PAGE.read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    lines += re.findall(r"`(miles-submit [^`]*runs/mine-000[^`]*)`", text)
    found = list(dict.fromkeys(line.split("  ")[0].split(" #")[0].strip() for line in lines))
    return sorted(found, key=lambda command: command.split()[1] in ("resume", "cancel"))


def test_every_command_of_the_page_works_on_a_run_that_died(submit, ended):
    run = submit("kill", "slurm.max_restarts=0", "run.name=mine")
    assert ended(run).word == "rank_died" and run.name == "mine-000"
    program = shlex.quote(str(Path(sys.executable).with_name("miles-submit")))
    tried = {}
    for command in commands():
        line = re.sub(r"^miles-submit", program, command)
        if " resume " in command:  # the page has it more than once
            ended(run)
        tried[command] = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)
    for command, result in tried.items():
        assert (result.returncode, result.stderr.count("Traceback")) == (0, 0), (command, result)
        assert SAYS.get(command, "") in result.stdout, (command, result)
    assert tried.keys() >= SAYS.keys()


def test_the_page_knows_every_kind_of_verdict():
    kinds = verdict.RESTART | verdict.REQUEUE | verdict.STOP | {"done"}
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)) == kinds
