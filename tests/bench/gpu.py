"""`make bench-gpu`: engine and trainer on one GPU, dense and MoE, and more; tables here, JSON in docs/benchmarks/gpu-NAME.json.

python tests/bench/gpu.py [NAME ...] [--out FOLDER] [--rounds N] [--modes native exact]
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
import all as bench
import bench_routing_replay
import gpu_generation
import gpu_models
import gpu_sync
import gpu_training

Tables = Iterator[tuple[str, list[dict[str, Any]]]]


def measure(name: str, folder: Path, options: argparse.Namespace) -> Tables:
    """The tables of one model."""
    active = gpu_models.write(gpu_models.MODELS[name], folder / name)
    hosts, seconds = gpu_generation.start(folder / name, options.modes, options.out)
    try:
        yield "start", [{"engines at once": len(hosts), "start s": seconds, "GiB used": gpu_training.used_gib()}]
        rows, long = gpu_generation.measure_long(hosts, options.rounds)
        yield "generation from long prompts", rows
        rows, pairs = gpu_generation.measure(hosts, options.rounds)
        yield "generation", rows
    finally:
        for host in hosts.values():
            host.shutdown()
    kinds = ("exact", "native")
    yield "training", [gpu_training.measure(folder / name, kind, long[kind], pairs[kind], active, folder) for kind in kinds]


def replay(folder: Path) -> Tables:
    """The table of `make bench`, on a GPU."""
    yield "routing replay", bench_routing_replay.run()


OTHERS: dict[str, Callable[[Path], Tables]] = {"routing-replay": replay, "sync": gpu_sync.measure}
"""Benchmarks of something else than a model; the second needs two GPUs."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", help=f"of {', '.join([*gpu_models.MODELS, *OTHERS])}; default: what can be run here"
    )
    parser.add_argument("--out", type=Path, default=bench.RESULTS)
    parser.add_argument("--rounds", type=int, default=gpu_generation.ROUNDS, help="turns of native and exact")
    parser.add_argument("--modes", nargs="+", choices=list(gpu_generation.MODES), default=list(gpu_generation.MODES))
    options = parser.parse_args()
    if unknown := set(options.names) - {*gpu_models.MODELS, *OTHERS}:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}")
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device: make bench-gpu needs one", file=sys.stderr)
        return 1
    names = options.names or [*gpu_models.MODELS, *list(OTHERS)[: torch.cuda.device_count()]]
    there = bench.machine() | {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()}
    print(json.dumps(there), flush=True)
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            tables = OTHERS[name](work) if name in OTHERS else measure(name, work, options)
            _write(name, there, tables, options.out)
    return 0


def _write(name: str, there: dict[str, Any], tables: Tables, out: Path) -> None:
    """Print and keep each table as soon as it is there."""
    found: dict[str, Any] = {"machine": there}
    for title, rows in tables:
        print(f"\n{name}, {title}", flush=True)
        bench.show(rows)
        found[title] = rows
        (out / f"gpu-{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
