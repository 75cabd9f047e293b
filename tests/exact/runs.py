"""Whole runs on this machine: miles-submit, MPI, SGLang, Megatron-core."""

import hashlib
import json
import time
from pathlib import Path
from typing import Any

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
    folder.mkdir()
    (folder / "beside.py").write_text(REWARD)
    (folder / "job.toml").write_text(TOML)
    overrides = [word for text in (f"run.folder={folder / 'run'}", *settings) for word in ("--set", text)]
    assert cli.main(["run", str(folder / "job.toml"), "--local", *overrides]) == 0
    paths = RunPaths(folder / "run")
    deadline = time.monotonic() + 400
    while not state.state_of(paths.folder).ended:
        assert time.monotonic() < deadline, logs(paths)
        time.sleep(0.2)
    return paths


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
