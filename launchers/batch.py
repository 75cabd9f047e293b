"""What the batch script asks: `begin RUN` opens an attempt, `end RUN ATTEMPT CODE SIGNAL` says what follows.

`begin` prints the attempt's number and fails where no further attempt makes sense; `end` prints done, restart, requeue or stop.
`setup-failed RUN CODE LINE` leaves the verdict of a run whose setup fails. Whatever else they have to say goes to stderr, that
is into the run's job.log.
"""

import json
import os
import shlex
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

from miles_hpc import config as configuration
from miles_hpc import disk, durable, statement, verdicts
from miles_hpc.errors import MilesError, SiteError
from miles_hpc.launchers import amendment, autopsy, controller, history, nodes, policy, requeue, verdict
from miles_hpc.launchers.state import Submission
from miles_hpc.launchers.verdict import Attempt, Situation
from miles_hpc.paths import RunPaths

ATTEMPTS_IN_FULL = 20
"""Newest attempts that keep their logs."""


def begin(run: Path) -> str | None:
    """Open the next attempt; its number as its folder is named, or None where the history says stop."""
    paths = RunPaths(run)
    autopsy.close_last(paths)
    situation = situation_of(paths)
    if situation.history and (action := _decide(paths, situation)) in ("done", "stop"):
        _say(paths, situation.history[-1].number, action)
        return None
    return paths.attempt(_open(paths, verdict.avoided(situation.history))).name


def end(run: Path, attempt: int, code: int, signal: str) -> str:
    """Make sure that there is a verdict; what the batch script does next."""
    paths = RunPaths(run)
    seen = autopsy.seen_now(paths, attempt, code, signal)
    autopsy.close(paths, attempt, seen)
    situation = situation_of(paths, seen.job_state)
    action = _decide(paths, situation)
    avoid = verdict.avoided(situation.history) if action == "requeue" else ()
    verdict.amend(paths, attempt, action=action, avoided=avoid)
    _say(paths, attempt, action + (f" without {', '.join(avoid)}" if avoid else ""))
    if action == "requeue" and (problem := requeue.send_back(os.environ.get("SLURM_JOB_ID", ""), avoid)):
        hint = "miles-submit resume does it from the login node, `--watch` by itself"
        print(f"the job could not go back to the queue: {problem}; {hint}", file=sys.stderr)
    if action == "restart":
        time.sleep(verdict.pause_before_restart(situation.history))
    return action


def _decide(paths: RunPaths, situation: Situation) -> str:
    return policy.decide(situation, configuration.read(paths.config))


def setup_failed(run: Path, code: int, line: str) -> None:
    """The verdict of an attempt that ended in a line of `slurm.setup`."""
    paths = RunPaths(run)
    autopsy.close_last(paths)
    number = _open(paths, ())
    what = f"a line of the setup ended with code {code}: {line.strip()}"
    where = "slurm.setup of the run, or setup of its site profile"
    again = f"miles-submit resume {shlex.quote(str(run))}"
    hint = f"mend the line in {paths.config}, then {again}; what it said: {verdicts.logs(run, 'job')}"
    verdicts.write(paths, number, kind="user_error", phase="setup", error=what, where=where, next=hint, action="stop")
    _say(paths, number, "stop")


def _open(paths: RunPaths, avoid: tuple[str, ...]) -> int:
    """The next attempt's folder, with where it starts."""
    number = max(paths.attempt_numbers(), default=0) + 1
    paths.attempt(number).mkdir(parents=True)
    _thin_out(paths)
    if warning := disk.shortage(paths):
        print(f"warning: {warning}", file=sys.stderr)
    pools = nodes.allocated()
    config = configuration.read(paths.config)
    hosts = nodes.hosts(pools, config, avoid) or nodes.hosts(pools, config) or []
    durable.replace(paths.hosts(number), "".join(f"{host}\n" for host in hosts))
    start = {
        "attempt": number,
        "time": time.time(),
        "steps": completed_steps(paths),
        "job_id": os.environ.get("SLURM_JOB_ID", ""),
        "nodes": sorted(set(hosts)),
        "job_log_bytes": paths.job_log.stat().st_size if paths.job_log.exists() else 0,
        "changed": (changed := amendment.noted(paths, number)),
    }
    durable.replace(paths.start(number), json.dumps(start))
    since = f"; changed: {amendment.sentence(changed)}" if changed else ""
    print(f"attempt {number} on {', '.join(sorted(set(hosts)))}{since}", file=sys.stderr)
    return number


def _thin_out(paths: RunPaths) -> None:
    """Of attempts long ago only what the history is read from is kept: a run that is preempted every hour has many."""
    for number in paths.attempt_numbers()[:-ATTEMPTS_IN_FULL]:
        needed = {paths.start(number), paths.verdict(number), paths.hosts(number)}
        gone = [file for file in paths.attempt(number).iterdir() if file not in needed]
        for file in gone:
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        if gone and (found := verdict.read(paths, number)) and f" --attempt {number}" in found.next:
            hint = f"the logs of an attempt so long ago are removed; {verdicts.logs(paths.folder, 'job')}"
            verdict.amend(paths, number, next=hint)


def situation_of(paths: RunPaths, job_state: str = "") -> Situation:
    """The attempts since the user's last `run` or `resume`, and the run's limits."""
    job = _submission(paths)
    numbers = [n for n in paths.attempt_numbers() if n >= job.first_attempt]
    steps = [autopsy.started(paths, n).steps for n in numbers] + [completed_steps(paths)]
    attempts = (_attempt(paths, n, steps[i], steps[i + 1]) for i, n in enumerate(numbers))
    past = tuple(attempt for attempt in attempts if attempt)
    config, pools = configuration.read(paths.config), nodes.allocated()
    avoid = verdict.avoided(past)
    return Situation(
        past,
        config.slurm.max_restarts,
        job_state,
        slurm=job.scheduler == "slurm",
        replaceable=nodes.hosts(pools, config, avoid) is not None,
        others=not avoid or _others(pools, avoid),
    )


def _submission(paths: RunPaths) -> Submission:
    """How the run was submitted; where job.json is damaged, as the environment tells, and every attempt counts."""
    if found := statement.of(Submission, statement.read(paths.job)):
        return found
    print(f"warning: {paths.job} does not say how the run was submitted; all of its attempts count as of now", file=sys.stderr)
    return Submission("slurm" if "SLURM_JOB_ID" in os.environ else "local", "", first_attempt=1)


def _others(pools: nodes.Pools, avoid: tuple[str, ...]) -> bool:
    """True where every partition has enough nodes for its components together without those to avoid, or Slurm does not say."""
    wanted: Counter[str] = Counter()
    for group, pool in enumerate(pools):
        plain = os.environ.get("SLURM_JOB_PARTITION", "")
        wanted[os.environ.get(f"SLURM_JOB_PARTITION_HET_GROUP_{group}", plain)] += len(pool)
    usable = {partition: controller.usable_nodes(partition) for partition in wanted}
    return all(not usable[name] or len({*usable[name]} - {*avoid}) >= count for name, count in wanted.items())


def _attempt(paths: RunPaths, number: int, first_step: int, last_step: int) -> Attempt | None:
    if (found := verdict.read(paths, number)) is None:
        return None
    blamed = found.nodes or ((found.node,) if found.node else ())
    return Attempt(number, found.kind, first_step, last_step, blamed)


def completed_steps(paths: RunPaths) -> int:
    """Steps done so far, by events or checkpoints, whichever knows of more; -1: not even the first weights are saved."""
    events, _ = history.lines(paths.events)
    done = [e["step"] + 1 for e in events if e.get("event") == "step"]
    return max([-1, *paths.saved_steps(), *done])


def _say(paths: RunPaths, attempt: int, action: str) -> None:
    found = verdict.read(paths, attempt)
    if found:
        print(f"attempt {attempt}: {verdict.sentence(found)} -> {action}", file=sys.stderr)


def main(arguments: list[str]) -> int:
    """`begin RUN`, `end RUN ATTEMPT CODE SIGNAL` or `setup-failed RUN CODE LINE`."""
    try:
        return _answer(arguments)
    except MilesError as error:  # such as a config.toml that somebody has damaged since
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # a full disk, a folder that may not be written
        place = SiteError.of(error)
        print(f"error: {place}", file=sys.stderr)
        return place.exit_code


def _answer(arguments: list[str]) -> int:
    match arguments:
        case ["begin", run]:
            if (attempt := begin(Path(run))) is None:
                return 1
            print(attempt)
        case ["end", run, attempt, code, signal]:
            print(end(Path(run), int(attempt), int(code), signal))
        case ["setup-failed", run, code, line]:
            setup_failed(Path(run), int(code), line)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
