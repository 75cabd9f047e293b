"""What taking turns on one GPU costs: figures of finished colocated runs as a table and as docs/benchmarks/gpu-colocate.json.

python tests/bench/gpu_colocate.py RUN...
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
import all as bench

from miles_hpc import config as configuration
from miles_hpc.paths import RunPaths

WARM_UP = 1
"""Steps left out: kernels are compiled, host memory is pinned."""


def measure(run: Path) -> dict[str, Any]:
    """Medians over the steps of one run; memory in GiB of the first training rank's GPU."""
    paths = RunPaths(run)
    config = configuration.read(paths.config)
    events = [json.loads(line) for line in paths.events.read_text(encoding="utf-8").splitlines()]
    steps = [e for e in events if e["event"] == "step"]
    syncs = [e for e in events if e["event"] == "sync"][1 + WARM_UP :]
    seconds = statistics.median(e["seconds"] for e in syncs)
    return {
        "run": run.name,
        "numerics": config.run.numerics,
        "offload": config.train.offload,
        "GB": syncs[0]["bytes"] / 1e9,
        "sync s": seconds,
        "sync s, all": [round(e["seconds"], 4) for e in syncs],
        "sync GB/s": syncs[0]["bytes"] / 1e9 / seconds,
        "digests": syncs[0]["digests"],
        **_engine(paths),
        **{
            f"{name} s": statistics.median(e["phase_seconds"][name] for e in steps[WARM_UP:])
            for name in steps[0]["phase_seconds"]
            if name != "sync"
        },
        "given back after the sync s": statistics.median(_after_sync(e) for e in steps[WARM_UP:]),
        "step s": statistics.median(e["seconds"] for e in steps[WARM_UP:]),
        "outside rollout, train, sync %": statistics.median(_outside(e) for e in steps[WARM_UP:]),
        **{name.removeprefix("memory/"): _median(steps, name) for name in steps[0]["metrics"] if name.startswith("memory/")},
        "sampled tokens/s": _median(steps, "speed/rollout_tokens_per_s"),
        "trained tokens/s": _median(steps, "speed/train_tokens_per_s"),
        "log-prob difference, max": max(e["metrics"]["train/logp_abs_diff_max"] for e in steps),
        "rewards": [round(e["metrics"]["reward/mean"], 3) for e in steps],
        "held out": [round(e["accuracy"], 3) for e in events if e["event"] == "eval"],
    }


def _after_sync(step: dict[str, Any]) -> float:
    """Seconds of the phase that pass while the engine generates."""
    return step["phase_seconds"]["sync"] - step["metrics"]["sync/seconds"]


def _outside(step: dict[str, Any]) -> float:
    """Share of a step that is neither rollout nor train nor sync; what is given back after a sync is, beside the generation."""
    spent = step["phase_seconds"]["rollout"] + step["phase_seconds"]["train"] + step["metrics"]["sync/seconds"]
    return 100 * (1 - spent / step["seconds"])


def _median(steps: list[dict[str, Any]], name: str) -> float:
    return statistics.median(e["metrics"][name] for e in steps[WARM_UP:])


def _engine(paths: RunPaths) -> dict[str, float]:
    """Seconds of sleeping and waking, by the first rollout rank."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(paths.tensorboard("rollout")))
    board.Reload()
    tags = [tag for tag in board.Tags()["scalars"] if tag.startswith(("engine/sleep", "engine/wake"))]
    return {tag: statistics.median(point.value for point in board.Scalars(tag)[WARM_UP:]) for tag in tags}


def main(runs: list[str]) -> int:
    """One column per run."""
    import torch

    rows = [measure(Path(run)) for run in runs]
    bench.show(bench.transposed(rows))
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    result = {"machine": bench.machine() | {"gpu": gpu}, "what": (__doc__ or "").strip().splitlines()[0], "rows": rows}
    (bench.RESULTS / "gpu-colocate.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
