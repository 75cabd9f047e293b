"""Seconds from `sbatch` to the first completed training step of a real job of one training and one rollout rank.

Seconds since submission at each mark, once per row. Beside it, in the same run: a Slurm job that does nothing, and the start of
the engine alone (which the job overlaps with MPI, Megatron and the first weights).
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from miles_hpc import config as configuration
from miles_hpc.paths import RunPaths

ROOT = Path(__file__).resolve().parents[2]
SUBMIT = Path(sys.executable).with_name("miles-submit")
EXAMPLE = ROOT / "docs/examples/arithmetic-moe.toml"
SMALL = ["run.steps=1", "eval.prompts=8", "warm_start.steps=1", "rollout.prompts_per_step=8", "checkpoint.every_steps=1"]
REPEATS = 2


def run() -> list[dict[str, Any]]:
    """One row per repeat."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        home, environment = Path(folder) / "cluster", dict(os.environ)
        _command("cluster", "up", "--home", home)
        try:
            exports = shlex.split(_command("cluster", "env", "--home", home))
            environment |= dict(word.split("=", 1) for word in exports if "=" in word)
            return [_repeat(Path(folder) / f"run-{i}", environment) for i in range(REPEATS)]
        finally:
            _command("cluster", "down", "--home", home)


def _repeat(folder: Path, environment: dict[str, str]) -> dict[str, float]:
    started = time.time()
    job = ["sbatch", "--wait", "--output=/dev/null", "--wrap", "srun true"]
    subprocess.run(job, env=environment, check=True, capture_output=True)
    nothing = time.time() - started
    overrides = [word for text in [*SMALL, f"run.folder={folder}"] for word in ("--set", text)]
    _command("run", EXAMPLE, *overrides, "--watch", environment=environment)
    paths = RunPaths(folder)
    return row(paths, nothing, _engine_alone(paths))


def row(paths: RunPaths, nothing: float, alone: float) -> dict[str, float]:
    """Seconds since submission at each mark of a run, beside those of a job that does nothing and of an engine alone."""
    events = [json.loads(line) for line in paths.events.read_text(encoding="utf-8").splitlines()]
    submitted = paths.script.stat().st_mtime
    at = {event["event"]: event["time"] - submitted for event in reversed(events)}
    begun = json.loads(paths.start(1).read_text(encoding="utf-8"))["time"] - submitted
    return {
        "job that does nothing": nothing,
        "engine alone": alone,
        "attempt begins": begun,
        "trainer ready, warm start": at["start"],
        "first weights in the engine": at["sync"],
        "first evaluation": at["eval"],
        "first training step": at["step"],
    }


def _engine_alone(paths: RunPaths) -> float:
    from miles_hpc.rollout.engine import EngineHost

    config = configuration.read(paths.config)
    started = time.monotonic()
    engine = EngineHost(config, paths.model_of(config), log=paths.folder / "engine.log")
    engine.start()
    try:
        engine.wait_ready()
        return time.monotonic() - started
    finally:
        engine.shutdown()


def _command(*words: object, environment: dict[str, str] | None = None) -> str:
    result = subprocess.run([str(w) for w in (SUBMIT, *words)], capture_output=True, text=True, env=environment)
    if result.returncode:
        said = result.stdout[-2000:] + result.stderr[-2000:]
        raise RuntimeError(f"miles-submit {words[0]} ended with {result.returncode}:\n{said}")
    return result.stdout
