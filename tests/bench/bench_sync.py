"""Weight sync into a real engine (buckets, names checked, loaded, digests compared) against a plain broadcast of as many bytes.

SmolLM2-135M, one training and one rollout rank under mpiexec; the broadcast is torch.distributed's between two processes, in
buckets of the same size, nothing checked, nothing loaded. Medians. The first sync of a run also compares every tensor.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from miles_hpc.paths import RunPaths

ROOT = Path(__file__).resolve().parents[2]
SUBMIT = Path(sys.executable).with_name("miles-submit")
EXAMPLE = ROOT / "docs/examples/smollm2-math.toml"
STEPS, REPEATS = 4, 5
SMALL = [f"run.steps={STEPS}", f"checkpoint.every_steps={STEPS}", "eval.prompts=1"]
SMALL += ["rollout.prompts_per_step=2", "rollout.max_new_tokens=4"]


def run() -> list[dict[str, Any]]:
    """One row: medians over the syncs after the first."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        syncs = _syncs(Path(folder) / "run")
    return [row(syncs, broadcast(syncs[0]["bytes"]))]


def row(syncs: list[dict[str, Any]], plain: float) -> dict[str, Any]:
    """Of the `sync` events of a run and the seconds of a plain broadcast."""
    size, later = syncs[0]["bytes"], [s["seconds"] for s in syncs[1:]]
    seconds = statistics.median(later)
    return {
        "MB": size / 1e6,
        "first sync s": syncs[0]["seconds"],
        "sync s": seconds,
        "slowest s": max(later),
        "sync GB/s": size / seconds / 1e9,
        "plain broadcast s": plain,
        "plain GB/s": size / plain / 1e9,
        "share of plain": plain / seconds,
        "syncs": len(later),
        "broadcasts": REPEATS,
    }


def _syncs(folder: Path) -> list[dict[str, Any]]:
    overrides = [word for text in [*SMALL, f"run.folder={folder}"] for word in ("--set", text)]
    command = [str(SUBMIT), "run", str(EXAMPLE), *overrides, "--local", "--watch"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"the run ended with {result.returncode}:\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    events = [json.loads(line) for line in RunPaths(folder).events.read_text(encoding="utf-8").splitlines()]
    return [event for event in events if event["event"] == "sync"]


def broadcast(size: int) -> float:
    """Median seconds of the sender, from before the first bucket to the receiver's answer."""
    from miles_hpc.buckets import BUCKET_MIB

    bucket = BUCKET_MIB["cpu"] << 20
    with tempfile.TemporaryDirectory() as folder:
        code = f"""
import sys, time, torch, torch.distributed as dist
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://{folder}/group", rank=rank, world_size=2)
bucket, answer = torch.zeros({bucket}, dtype=torch.uint8), torch.zeros(1)
for _ in range({REPEATS + 1}):
    started, left = time.monotonic(), {size}
    while left:
        part = min(left, {bucket})
        dist.broadcast(bucket[:part], 0)
        left -= part
    dist.broadcast(answer, 1)
    if rank == 0: print(time.monotonic() - started, flush=True)
dist.destroy_process_group()
"""
        command = [sys.executable, "-c", code]
        ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in (0, 1)]
        printed = ranks[0].communicate(timeout=300)[0]
        ranks[1].communicate(timeout=300)
    return statistics.median(float(line) for line in printed.split()[1:])
