"""What the batch script asks: `begin RUN` opens an attempt, `end RUN ATTEMPT CODE SIGNAL` says what follows.

`begin` prints the attempt's number and fails where no further attempt makes sense; `end` prints done, restart, requeue or stop.
Whatever else they have to say goes to stderr, that is into the run's job.log.
"""

import json
import os
import shlex
import sys
import time
from pathlib import Path

from miles_hpc import config as configuration
from miles_hpc import verdicts
from miles_hpc.launchers import controller, evidence, policy, verdict
from miles_hpc.launchers.evidence import Evidence
from miles_hpc.launchers.verdict import Attempt, Situation
from miles_hpc.paths import RunPaths

# Slurm sends the warning of a time limit up to a minute early.
WARNING_EARLY_SECONDS = 65


def begin(run: Path) -> str | None:
    """Open the next attempt; its number as its folder is named, or None where the history says stop."""
    paths = RunPaths(run)
    _close_last(paths)
    situation = situation_of(paths)
    if situation.history and (action := _decide(paths, situation)) in ("done", "stop"):
        _say(paths, situation.history[-1].number, action)
        return None
    number = max(paths.attempt_numbers(), default=0) + 1
    paths.attempt(number).mkdir(parents=True)
    hosts = rank_hosts(paths)
    nodes = sorted(set(hosts))
    paths.hosts(number).write_text("".join(f"{host}\n" for host in hosts), encoding="utf-8")
    start = {
        "attempt": number,
        "time": time.time(),
        "checkpoint": newest_checkpoint(paths),
        "job_id": os.environ.get("SLURM_JOB_ID", ""),
        "nodes": nodes,
        "job_log_bytes": paths.job_log.stat().st_size if paths.job_log.exists() else 0,
    }
    paths.start(number).write_text(json.dumps(start), encoding="utf-8")
    print(f"attempt {number} on {', '.join(nodes)}", file=sys.stderr)
    return paths.attempt(number).name


def end(run: Path, attempt: int, code: int, signal: str) -> str:
    """Make sure that there is a verdict; what the batch script does next."""
    paths = RunPaths(run)
    seen = gather(paths, attempt, code, signal)
    found = verdict.read(paths, attempt)
    if found and evidence.collateral(found, seen):
        paths.verdict(attempt).rename(paths.verdict(attempt).with_suffix(".collateral.json"))
        found = None
    if found is None:
        judged = evidence.judge(seen)
        verdicts.write(paths, attempt, **{**judged.fields(), "next": _next_step(run, judged)})
    elif (kind := evidence.refine(found.kind, seen)) != found.kind:
        verdict.rename(paths, attempt, kind)
    situation = situation_of(paths, seen.job_state)
    action = _decide(paths, situation)
    _say(paths, attempt, action)
    if action == "restart":
        time.sleep(verdict.pause_before_restart(situation.history))
    return action


def _decide(paths: RunPaths, situation: Situation) -> str:
    return policy.decide(situation, configuration.read(paths.config))


def gather(paths: RunPaths, attempt: int, code: int, signal: str) -> Evidence:
    """All that can be known from outside about an attempt that has just ended."""
    job_id = os.environ.get("SLURM_JOB_ID", "")
    job = controller.job(job_id) if job_id else controller.JobState("")
    log, hosts = paths.launcher_log(attempt), paths.hosts(attempt).read_text(encoding="utf-8").split()
    slurm = configuration.read(paths.config).slurm
    said = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return Evidence(
        code=code,
        prepared=log.exists(),
        job_state=_end_of_job(paths, attempt) if signal == "TERM" else job.state,
        bad_nodes=controller.bad_nodes(",".join(job.nodes)),
        losses=evidence.losses(said, hosts, slurm.train.ranks),
        left=evidence.left(said),
        heartbeats=evidence.heartbeats(paths.folder, attempt),
        near_limit=time.time() > job.end - slurm.warning_seconds - WARNING_EARLY_SECONDS,
    )


def _end_of_job(paths: RunPaths, attempt: int) -> str:
    """Why this shell got TERM. Without a word from Slurm: cancelled, since to stop too early can be mended."""
    with paths.job_log.open("rb") as file:
        file.seek(json.loads(paths.start(attempt).read_text(encoding="utf-8"))["job_log_bytes"])
        return evidence.ended_by(file.read().decode("utf-8", errors="replace")) or "CANCELLED"


def situation_of(paths: RunPaths, job_state: str = "") -> Situation:
    """The attempts since the user's last `run` or `resume`, and the run's limits."""
    job = json.loads(paths.job.read_text(encoding="utf-8"))
    numbers = [n for n in paths.attempt_numbers() if n >= job["first_attempt"]]
    starts = {n: json.loads(paths.start(n).read_text(encoding="utf-8"))["checkpoint"] for n in numbers}
    ends = {n: starts.get(n + 1, newest_checkpoint(paths)) for n in numbers}
    verdicts_ = {n: verdict.read(paths, n) for n in numbers}
    history = (Attempt(n, found.kind, starts[n], ends[n]) for n, found in verdicts_.items() if found)
    limit = configuration.read(paths.config).slurm.max_restarts
    return Situation(tuple(history), limit, job_state, slurm=job["scheduler"] == "slurm")


def newest_checkpoint(paths: RunPaths) -> int:
    """Step of the newest complete checkpoint; -1: none. An unfinished one has another name."""
    names = (p.name.removeprefix("step-") for p in paths.checkpoints.glob("step-*"))
    return max((int(name) for name in names if name.isdigit()), default=-1)


def rank_hosts(paths: RunPaths) -> list[str]:
    """Node of every rank: training on the first nodes, rollout on the rest; colocated, both on all."""
    config = configuration.read(paths.config)
    train, rollout = config.slurm.train, config.rollout_component
    lists = [os.environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{i}", "") for i in (0, 1)]
    names = [n for text in lists if text for n in controller.hostnames(text)]
    names = names or controller.hostnames(os.environ.get("SLURM_JOB_NODELIST", ""))
    if not names:
        return ["localhost"] * (train.ranks + rollout.ranks)
    hosts = [host for host in names[: train.nodes] for _ in range(train.ranks_per_node)]
    return hosts + [host for host in names[-rollout.nodes :] for _ in range(rollout.ranks_per_node)]


def _close_last(paths: RunPaths) -> None:
    """A verdict for an attempt whose batch script vanished: its node died, or Slurm killed it before it could ask."""
    numbers = paths.attempt_numbers()
    if numbers and verdict.read(paths, numbers[-1]) is None:
        judged = evidence.judge(Evidence(code=-1, restarted_by_slurm=True))
        verdicts.write(paths, numbers[-1], **judged.fields())


def _next_step(run: Path, judged: verdict.Verdict) -> str:
    """The command that shows more."""
    logs = f"miles-submit logs {shlex.quote(str(run))}"
    if judged.phase == "prepare":
        return f"{logs} --role job"
    return logs + (f" --role {judged.role} --rank {judged.rank}" if judged.role else "")


def _say(paths: RunPaths, attempt: int, action: str) -> None:
    found = verdict.read(paths, attempt)
    if found:
        print(f"attempt {attempt}: {verdict.sentence(found)} -> {action}", file=sys.stderr)


def main(arguments: list[str]) -> int:
    """`begin RUN` or `end RUN ATTEMPT CODE SIGNAL`."""
    match arguments:
        case ["begin", run]:
            if (attempt := begin(Path(run))) is None:
                return 1
            print(attempt)
        case ["end", run, attempt, code, signal]:
            print(end(Path(run), int(attempt), int(code), signal))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
