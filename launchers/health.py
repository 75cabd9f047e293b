"""Health of the nodes before ranks start on them: `python -m miles_hpc.launchers.health RUN ATTEMPT [SRUN...]`.

Every node of the allocation reports (`node`), through one short srun per component; those that said nothing are asked once
more, each by itself. Nodes that pass are dealt out to the ranks, spare ones in place of bad ones. Where too few are left the
attempt ends here, with a verdict `bad_node` that names them. `attempts/NNN/health.json` keeps what every node said.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_hpc import config as configuration
from miles_hpc import verdicts
from miles_hpc.launchers import autopsy, batch, nodes, verdict
from miles_hpc.launchers.nodes import Pools
from miles_hpc.paths import RunPaths
from miles_hpc.sections import Component, Slurm

CHECK_SECONDS = 60.0
"""For one question to all nodes."""
GRACE_SECONDS = 10.0
SKEW_SECONDS = 5.0
FREE_SHARE = 0.5
"""Of the memory asked for; the rest may be the kernel's caches and daemons."""
LEAST_FREE_MIB = 512
ASKED_AGAIN = 16
"""Nodes; where more say nothing it is not the nodes."""

Report = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """One round of questions: what the nodes said, and when on the clock of this host."""

    reports: dict[str, Report]
    begin: float
    end: float
    complaints: str = ""
    """What srun said on stderr."""


def main(run: Path, attempt: int, srun: list[str]) -> int:
    """Check, deal out, say what is wrong; exit code 1 where the attempt cannot start."""
    paths = RunPaths(run)
    pools = nodes.allocated() if srun else []
    config = configuration.read(paths.config)
    check = ask(paths, attempt, srun, pools)
    bad = judge(check, pools, config.slurm)
    _keep(paths, attempt, check, bad)
    if (what := hopeless(check, bad, pools)) is not None:
        kind = "user_error" if check.reports else "bug"
        hint = "look at slurm.setup, TMPDIR and what the nodes share, then miles-submit resume " + shlex.quote(str(run))
        return _refuse(paths, attempt, kind, what, hint, ())
    avoid = {*bad, *verdict.avoided(batch.situation_of(paths).history)}
    hosts = nodes.hosts(pools, config, avoid) or nodes.hosts(pools, config, bad)
    if hosts is None:
        what = "; ".join(f"{node}: {', '.join(problems)}" for node, problems in bad.items())
        return _refuse(paths, attempt, "bad_node", what, f"sinfo -R; tell your site about {', '.join(bad)}", tuple(bad))
    _deal(paths, attempt, hosts, config.slurm)
    return 0


def ask(paths: RunPaths, attempt: int, srun: list[str], pools: Pools) -> Check:
    """The report of every node, as far as it came."""
    stamp = str(autopsy.started(paths, attempt).time)
    program = [sys.executable, "-m", "miles_hpc.launchers.node", str(paths.folder), str(attempt), stamp]
    begin = time.time()
    if not pools:
        reports, said = _gather([program])
        return Check(reports, begin, time.time(), said)
    everyone = {node: group for group, pool in enumerate(pools) for node in pool}
    het = len(pools) == 2
    reports, said = _gather([_step(srun, pool, group if het else None, program) for group, pool in enumerate(pools)])
    silent = [node for node in everyone if node not in reports]
    if silent and len(silent) <= ASKED_AGAIN:
        more, again = _gather([_step(srun, [node], everyone[node] if het else None, program) for node in silent])
        reports, said = reports | more, said + again
    return Check(reports, begin, time.time(), said)


def _step(srun: list[str], names: list[str], group: int | None, program: list[str]) -> list[str]:
    """One task on each of the nodes."""
    place = [f"--nodes={len(names)}", f"--ntasks={len(names)}", "--ntasks-per-node=1", f"--nodelist={','.join(names)}"]
    het = [] if group is None else [f"--het-group={group}"]
    return [*srun, *het, *place, "--mpi=none", *program]


def _gather(commands: list[list[str]]) -> tuple[dict[str, Report], str]:
    """Run the commands at once; reports by node, and complaints. One that takes too long is ended."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, **pipes) for command in commands]  # type: ignore[call-overload]
    reports: dict[str, Report] = {}
    deadline, complaints = time.monotonic() + CHECK_SECONDS, ""
    for process in running:
        try:
            out, said = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            out, said = _ended(process)
        complaints += said
        reports |= {report["node"]: report for line in out.splitlines() if (report := _report(line))}
    return reports, complaints


def _ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End an srun, and with it its tasks; what it had said."""
    process.terminate()
    try:
        return process.communicate(timeout=GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()


def _report(line: str) -> Report | None:
    """A node's line; a prolog or a module may print others."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) and "node" in values else None


def judge(check: Check, pools: Pools, slurm: Slurm) -> dict[str, list[str]]:
    """What is wrong with each node that is not good enough."""
    wanted = _wanted(pools, slurm) or dict.fromkeys(check.reports or ["localhost"], Component())
    found = {node: problems(check.reports.get(node), component, check) for node, component in wanted.items()}
    return {node: said for node, said in found.items() if said}


def _wanted(pools: Pools, slurm: Slurm) -> dict[str, Component]:
    """What each node is for; in a homogeneous job it must suit either role."""
    if len(pools) == 2:
        return {node: part for pool, part in zip(pools, (slurm.train, slurm.rollout), strict=True) for node in pool}
    most = {name: max(getattr(slurm.train, name), getattr(slurm.rollout, name)) for name in ("gpus_per_node", "memory_gb")}
    return {node: Component(**most) for pool in pools for node in pool}


def problems(report: Report | None, wanted: Component, check: Check) -> list[str]:
    """Why a node is not good enough; empty if it is."""
    if report is None:
        return [f"did not answer within {CHECK_SECONDS:.0f} s"]
    said = [f"cannot write {text}" for text in report["scratch"]] + report["gpu_faults"] + report["stuck"]
    if not report["sees_run"]:
        said.append("does not see the run folder as it is")
    if (free := report["free_memory_mib"]) < (least := max(LEAST_FREE_MIB, wanted.memory_gb * 1024 * FREE_SHARE)):
        said.append(f"has {free} MiB of free memory, {least:.0f} are needed")
    if (skew := max(check.begin - report["time"], report["time"] - check.end)) > SKEW_SECONDS:
        said.append(f"its clock is {skew:.0f} s away from the batch host's")
    if report["gpus"] is not None and report["gpus"] < wanted.gpus_per_node:
        said.append(f"has {report['gpus']} GPUs, {wanted.gpus_per_node} are needed")
    return said


def hopeless(check: Check, bad: dict[str, list[str]], pools: Pools) -> str | None:
    """What to say where no node is any good, so that another one would not be either; None where some are."""
    if not check.reports:
        last = (check.complaints.strip().splitlines() or ["srun said nothing"])[-1]
        return f"no node answered the health check: {last}"
    if len(bad) < max(1, sum(map(len, pools))):
        return None
    return f"every node fails the health check: {', '.join(next(iter(bad.values())))}"


def _keep(paths: RunPaths, attempt: int, check: Check, bad: dict[str, list[str]]) -> None:
    text = json.dumps({"seconds": check.end - check.begin, "bad": bad, "nodes": check.reports}, indent=1)
    paths.health(attempt).write_text(text, encoding="utf-8")
    for node, said in bad.items():
        print(f"health: {node} {', '.join(said)}", file=sys.stderr)
    for node, report in check.reports.items():
        for line in report["stale"]:
            print(f"health: {node} still had a process of an earlier attempt, ended now: {line}", file=sys.stderr)


def _refuse(paths: RunPaths, attempt: int, kind: str, what: str, next_step: str, names: tuple[str, ...]) -> int:
    named = {"nodes": list(names)} if names else {}
    verdicts.write(paths, attempt, kind=kind, phase="health", error=what, next=next_step, **named)
    return 1


def _deal(paths: RunPaths, attempt: int, hosts: list[str], slurm: Slurm) -> None:
    """The nodes of this attempt: of every rank, and of each role as srun reads them."""
    if (before := paths.hosts(attempt).read_text(encoding="utf-8").split()) != hosts:
        print(f"health: on {', '.join(dict.fromkeys(hosts))} instead of {', '.join(dict.fromkeys(before))}", file=sys.stderr)
    paths.hosts(attempt).write_text("".join(f"{host}\n" for host in hosts), encoding="utf-8")
    for role, names in (("train", hosts[: slurm.train.ranks]), ("rollout", hosts[slurm.train.ranks :])):
        paths.nodes(attempt, role).write_text(",".join(dict.fromkeys(names)), encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("MILES_ATTEMPT", sys.argv[2])
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
