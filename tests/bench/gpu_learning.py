"""What SmolLM2-135M learnt of real prompts on a GPU: finished runs as a table and as docs/benchmarks/gpu-learning.json.

python tests/bench/gpu_learning.py RUN...

The runs are docs/examples/smollm2-math.toml with sizes for a GPU.
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


def measure(run: Path) -> dict[str, Any]:
    """Rewards of all steps, held-out accuracy, and how far sampler and trainer were apart."""
    paths = RunPaths(run)
    config = configuration.read(paths.config)
    events = [json.loads(line) for line in paths.events.read_text(encoding="utf-8").splitlines()]
    steps = [e for e in events if e["event"] == "step"]
    rewards = [round(e["metrics"]["reward/mean"], 3) for e in steps]
    return {
        "run": run.name,
        "lr": config.train.lr,
        "samples per step": config.rollout.prompts_per_step * config.rollout.samples_per_prompt,
        "steps": len(steps),
        "reward, first five": statistics.mean(rewards[:5]),
        "reward, last five": statistics.mean(rewards[-5:]),
        "held out, greedy": {e["step"]: round(e["accuracy"], 3) for e in events if e["event"] == "eval"},
        "held-out prompts": next(e["prompts"] for e in events if e["event"] == "eval"),
        "answer tokens, first and last step": [round(e["metrics"]["response/length_mean"], 1) for e in (steps[0], steps[-1])],
        "entropy, first and last step": [round(e["metrics"]["train/entropy"], 3) for e in (steps[0], steps[-1])],
        "log-prob difference, mean": statistics.median(e["metrics"]["train/logp_abs_diff_mean"] for e in steps),
        "log-prob difference, max": max(e["metrics"]["train/logp_abs_diff_max"] for e in steps),
        "step s": statistics.median(e["seconds"] for e in steps[1:]),
        "rewards": rewards,
    }


def main(runs: list[str]) -> int:
    """One column per run."""
    import torch

    rows = [measure(Path(run)) for run in runs]
    bench.show(bench.transposed(rows))
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    result = {"machine": bench.machine() | {"gpu": gpu}, "what": (__doc__ or "").strip().splitlines()[0], "rows": rows}
    (bench.RESULTS / "gpu-learning.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
