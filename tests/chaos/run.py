"""`make chaos`: the exact example with a fault every other step, beside the same run left alone; then faults of the disk.

run.py [FOLDER] [--only TEXT ...]
"""

import argparse
import json
import os
import runpy
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
import storage
from faults import FAULTS
from harness import (
    ROOT,
    Outcome,
    counts,
    differences,
    finish,
    interrupted,
    note,
    planned,
    private_cluster,
    start,
    strike,
    weights,
)
from subject import Subject

from miles_hpc.launchers.cluster import Cluster

BENCH = ROOT / "tests/bench/all.py"
RESULT = ROOT / "docs/benchmarks/chaos.json"
SLOWEST_RESTART = 1.3
"""Times a cold start."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="for the runs and faults.jsonl (default: a new one)")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="faults whose name holds one of these; writes no result")
    told = parser.parse_args()
    folder = (told.folder or Path(tempfile.mkdtemp(prefix="chaos-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    began = time.time()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not without stopping the cluster
    with private_cluster() as cluster:
        result = chaos(cluster, folder, told.only or [""])
    result["seconds"] = round(time.time() - began)
    show(result)
    if not told.only:
        machine = runpy.run_path(str(BENCH))["machine"]()
        RESULT.write_text(json.dumps({"machine": machine, "what": (__doc__ or "").splitlines()[0], **result}, indent=1) + "\n")
    return int(bool(result["problems"]))


def chaos(cluster: Cluster, folder: Path, only: list[str]) -> dict[str, Any]:
    """Both runs, then the storage faults on what the first rank's death had left; everything that came of it."""
    plan = planned(fault for fault in FAULTS if any(text in fault.name for text in only))
    undisturbed = start(cluster, folder / "undisturbed", plan)
    finish(undisturbed)
    subject = start(cluster, folder / "chaos", plan)
    outcomes = strike(subject, plan, folder / "faults.jsonl")
    finish(subject)
    problems = differences(subject, undisturbed)
    if interrupted(subject).exists():
        chosen = [fault for fault in storage.FAULTS if any(text in fault.name for text in only)]
        on_disk = storage.strike(interrupted(subject), folder / "storage", chosen)
        on_disk.append(storage.resume(interrupted(subject), undisturbed))
        for outcome in on_disk:
            note(outcome, folder / "faults.jsonl")
        outcomes += on_disk
    return summary(outcomes, problems, subject, undisturbed)


def summary(outcomes: list[Outcome], problems: list[str], subject: Subject, undisturbed: Subject) -> dict[str, Any]:
    """What is printed and kept."""
    deaths = [o for o in outcomes if o.kind == "world" and o.again and o.name.startswith("SIGKILL")]
    cold = undisturbed.events("step")[0]["time"] - undisturbed.paths.script.stat().st_mtime
    restarts = [round(o.again - o.injected, 1) for o in deaths if o.again]
    if restarts and statistics.median(restarts) > SLOWEST_RESTART * cold:
        problems.append(f"a restart takes more than {SLOWEST_RESTART} cold starts")
    return {
        "faults": len(outcomes),
        "survived": sum(outcome.survived for outcome in outcomes),
        **counts(subject),
        "equal": weights(subject) == weights(undisturbed),
        "cold_start_seconds": round(cold, 1),
        "restart_seconds": restarts,
        "gone_seconds": [round(o.gone_seconds, 2) for o in deaths if o.gone_seconds],
        "verdicts": sum(bool(o.verdict) for o in outcomes),
        "classes": table(outcomes),
        "problems": problems + [f"{o.name}: {problem}" for o in outcomes for problem in o.problems],
    }


def table(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """One row per class of faults."""
    rows = []
    for kind in dict.fromkeys(outcome.kind for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.kind == kind]
        row: dict[str, Any] = {"class": kind, "faults": len(mine), "survived": sum(outcome.survived for outcome in mine)}
        for name in ("detected", "again"):
            seconds = [getattr(o, name) - o.injected for o in mine if getattr(o, name)]
            row[f"{name}, median s"] = round(statistics.median(seconds), 2) if seconds else None
            row[f"{name}, max s"] = round(max(seconds), 2) if seconds else None
        rows.append(row)
    return rows


def show(result: dict[str, Any]) -> None:
    """The table, the figures, everything that is wrong, and the last line."""
    runpy.run_path(str(BENCH))["show"](result["classes"])
    print(
        f"from nothing to the first step {result['cold_start_seconds']} s; from a rank's death {result['restart_seconds']} s,"
    )
    print(f"until no process was left {result['gone_seconds']} s; {result['verdicts']} verdicts, {result['seconds']} s in all")
    for problem in result["problems"]:
        print(f"BAD  {problem}")
    equal = "equal" if result["equal"] else "differ"
    told = ", ".join(f"{result[what]} {what}" for what in ("survived", "lost", "duplicated"))
    print(f"chaos: {result['faults']} faults, {told}, weights {equal}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
