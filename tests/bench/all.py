"""`make bench`: every benchmark beside its baseline, both measured in this run; tables here, JSON in docs/benchmarks."""

import json
import os
import platform
import runpy
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "docs" / "benchmarks"
PACKAGES = ("miles-hpc", "torch", "h5py", "numpy", "sglang", "megatron-core")


def machine() -> dict[str, Any]:
    """Where and with what this is measured."""
    commit = subprocess.run(["git", "-C", HERE, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Rows of one benchmark as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=160).print(table)


def transposed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows for a table of one column per `run`; what a run has not is None."""
    keys = dict.fromkeys(key for row in rows for key in row if key != "run")
    return [{"": key, **{row["run"]: row.get(key) for row in rows}} for key in keys]


def main(names: list[str]) -> int:
    """Run the benchmarks named (default: all of this folder); each has `run() -> list of rows`."""
    files = {file.stem.removeprefix("bench_").replace("_", "-"): file for file in sorted(HERE.glob("bench_*.py"))}
    if unknown := set(names) - set(files):
        print(f"no benchmark {', '.join(sorted(unknown))}: name some of {', '.join(files)}", file=sys.stderr)
        return 2
    there = machine()
    print(json.dumps(there))
    for name, file in files.items():
        if names and name not in names:
            continue
        module = runpy.run_path(str(file))
        print(f"\n{name}: {module['__doc__'].strip()}")
        rows = module["run"]()
        show(rows)
        text = json.dumps({"machine": there, "what": module["__doc__"].strip(), "rows": rows}, indent=1)
        (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    return 0


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
