"""Whole runs on this machine: miles-submit, MPI, SGLang, Megatron-core."""

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from miles_hpc.launchers import cli, state
from miles_hpc.paths import RunPaths

STEPS = 10
TOML = """\
run = { name = "small", steps = 10, seed = 3, numerics = "exact" }
model = { source = "miles_hpc.examples.arithmetic:model", context_length = 64 }
data = { prompts = "miles_hpc.examples.arithmetic:prompts" }
checkpoint = { every_steps = 100 }
train = { lr = 3e-3, micro_batch_tokens = 512 }

[rollout]
prompts_per_step = 16
samples_per_prompt = 4
max_new_tokens = 20
temperature = 0.9
flush_groups = 4
reward = "beside:reward"
"""
REWARD = """\
def reward(prompt, answer, label, metadata):
    return float(len(answer) % 3)
"""


def run(folder: Path, *settings: str) -> RunPaths:
    """Run TOML with `--set` overrides to its end, in a folder of its own."""
    paths = start(folder, *settings)
    wait(paths)
    return paths


def start(folder: Path, *settings: str) -> RunPaths:
    folder.mkdir()
    (folder / "beside.py").write_text(REWARD)
    (folder / "job.toml").write_text(TOML)
    overrides = [word for text in (f"run.folder={folder / 'run'}", *settings) for word in ("--set", text)]
    assert cli.main(["run", str(folder / "job.toml"), "--local", *overrides]) == 0
    return RunPaths(folder / "run")


def wait(paths: RunPaths) -> None:
    deadline = time.monotonic() + 400
    while not state.state_of(paths.folder).ended:
        assert time.monotonic() < deadline, logs(paths)
        time.sleep(0.2)


def strike(paths: RunPaths, step: int, number: int, act: Callable[[psutil.Process], None], seconds: float = 300) -> None:
    """Do something to the scheduler of a rollout rank that generates a step after `step`."""
    end = time.monotonic() + seconds
    while not state.state_of(paths.folder).ended and time.monotonic() < end:
        if scheduler := generating(paths, step, number):
            try:
                return act(scheduler)
            except psutil.NoSuchProcess:
                pass  # its engine is just being started again
        time.sleep(0.005)
    raise AssertionError(f"no rollout rank {number} generated a step after {step}\n{logs(paths)}")


def generating(paths: RunPaths, step: int, number: int) -> psutil.Process | None:
    """The scheduler of a rollout rank that generates a step after `step`; None if there is none now."""
    beats = [json.loads(f.read_text()) for f in sorted(paths.heartbeat(0).parent.glob("rank-*.json"))]
    ranks = [beat for beat in beats if beat["role"] == "rollout"]
    if not ranks or ranks[number]["phase"] != "rollout" or ranks[number]["step"] <= step:
        return None
    try:
        children = psutil.Process(ranks[number]["pid"]).children(recursive=True)
        return next((child for child in children if "scheduler" in child.name()), None)
    except psutil.NoSuchProcess:
        return None


def events(paths: RunPaths) -> list[dict[str, Any]]:
    return [json.loads(line) for line in paths.events.read_text().splitlines()]


def metrics(paths: RunPaths) -> list[dict[str, Any]]:
    """Of every step."""
    return [event["metrics"] for event in events(paths) if event["event"] == "step"]


def logs(paths: RunPaths) -> str:
    return "\n".join(f"== {file}\n{file.read_text()[-3000:]}" for file in sorted(paths.attempts.glob("*/*.log")))


def digest(paths: RunPaths) -> str:
    """sha256 of the exported weights."""
    return hashlib.sha256((paths.export / "model.safetensors").read_bytes()).hexdigest()
