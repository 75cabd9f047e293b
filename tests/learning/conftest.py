"""Series of runs with one engine: `series({"name": overrides, ...})` gives a report by name."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from miles_hpc import config, prepare
from miles_hpc.launchers import report
from miles_hpc.paths import RunPaths

EXAMPLE = Path(__file__).parents[2] / "docs/examples/arithmetic-moe.toml"
Series = Callable[[Mapping[str, list[str]], Mapping[str, str]], dict[str, dict]]


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Series:
    """Run the arithmetic example with overrides; `warm` names the run whose warm start another one takes over.

    `{folder}` in an override is where the runs lie. What names another run's model or export is not there yet, so it is not
    checked before the start.
    """

    def run(runs: Mapping[str, list[str]], warm: Mapping[str, str]) -> dict[str, dict]:
        folder = tmp_path_factory.mktemp("series")
        for name, overrides in runs.items():
            changes = [text.replace("{folder}", str(folder)) for text in overrides]
            plan = config.load(EXAMPLE, [*changes, f"run.name={name}", f"run.folder={folder / name}"])
            paths = RunPaths(folder / name)
            paths.folder.mkdir()
            paths.config.write_text(config.dump(plan))
            if str(folder) not in f"{plan.model.path}{plan.train.teacher}":
                prepare.prepare(plan, paths)
        (folder / "series.json").write_text(json.dumps([{"name": name, "from": warm.get(name)} for name in runs]))
        _launch(folder)
        return {name: report.compute(folder / name).__dict__ for name in runs}

    return run


def _launch(folder: Path) -> None:
    program = [sys.executable, str(Path(__file__).parent / "series.py")]
    ranks = [["-n", "1", *program, role, "2", str(folder)] for role in ("train", "rollout")]
    command = [str(Path(sys.executable).with_name("mpiexec")), "-launcher", "fork", "-hosts", "localhost"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([*command, *ranks[0], ":", *ranks[1]], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
