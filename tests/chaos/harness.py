"""A run with a fault every other step, what must follow each, and what must be equal to the same run without faults."""

import contextlib
import hashlib
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from faults import FAULTS, REWARDS, Fault
from subject import GaveUp, Subject, alive

from miles_hpc import config as configuration
from miles_hpc import data
from miles_hpc.launchers import audit, history, report, state, submission
from miles_hpc.launchers.cluster import Cluster, Settings
from miles_hpc.paths import RunPaths

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs/examples/exact-moe.toml"
SEED = 7
FIRST, EVERY = 2, 2
"""Steps of the first fault but one in step 0, and from one fault to the next."""
GONE_SECONDS = 2.0
"""Until all processes of an attempt have ended for the death of one rank."""
STEPS_PER_SECOND = 0.5
"""As many more are planned for a fault that lasts, such as a controller that is gone for 20 s."""
SMALL = [
    "warm_start.steps=20",
    "rollout.prompts_per_step=16",
    "rollout.samples_per_prompt=4",
    "rollout.flush_groups=4",
    "rollout.unfinished=continue",
    "rollout.reward=misbehaving:reward",
    "rollout.reward_error=drop",
    "checkpoint.every_steps=1",
    "slurm.rollout.nodes=2",
    "slurm.max_restarts=99",
]


@dataclass
class Outcome:
    """What came of one fault; times are seconds since 1970, of which the others are differences."""

    name: str
    kind: str
    target: str
    injected: float
    step: int = -1
    detected: float | None = None
    again: float | None = None
    """The first new training step was done."""
    gone_seconds: float | None = None
    """Until no process of any rank was left."""
    lost_steps: int = 0
    """Complete steps that were done again."""
    verdict: str = ""
    """Path below the run folder."""
    problems: list[str] = field(default_factory=list)

    @property
    def survived(self) -> bool:
        return not self.problems


def start(cluster: Cluster, folder: Path, plan: list[tuple[int, Fault]], *overrides: str) -> Subject:
    """Submit the run of the plan, in which its rewards fail; everything else is still to be done."""
    folder.mkdir(parents=True)
    shutil.copy(EXAMPLE, folder / "job.toml")
    shutil.copy(Path(__file__).with_name("misbehaving.py"), folder)
    settings = [*SMALL, f"run.steps={length(plan)}", f"run.folder={folder / 'run'}", *overrides]
    config = configuration.load(folder / "job.toml", settings)
    prompts, what_of = data.load(config, "train"), {name: what for what, name in REWARDS.items()}
    steps = {what_of[fault.name]: step for step, fault in plan if fault.name in what_of}
    ids = {what: int(prompts.ids_of_step(step, config.rollout.prompts_per_step)[0]) for what, step in steps.items()}
    (folder / "plan.json").write_text(json.dumps({prompts.row(i).prompt: what for what, i in ids.items()}))
    os.environ.update(cluster.exports())
    submission.run(folder / "job.toml", settings, without_slurm=False)
    return Subject(RunPaths(folder / "run"), cluster, ids)


def planned(faults: Iterable[Fault]) -> list[tuple[int, Fault]]:
    """The faults in a random order, the same every time, each with its step.

    The death of a trainer, if there is one, is in step 0: the next attempt begins with what the warm start has left.
    """
    faults = list(faults)
    order = random.Random(SEED).sample(faults, len(faults))
    early = [fault for fault in order if fault.name == FAULTS[0].name]
    late = [(FIRST + EVERY * i, fault) for i, fault in enumerate(fault for fault in order if fault.name != FAULTS[0].name)]
    return [(0, fault) for fault in early] + late


def length(plan: list[tuple[int, Fault]]) -> int:
    """Steps of a run in which all of the plan finds its place."""
    return plan[-1][0] + EVERY + int(STEPS_PER_SECOND * sum(fault.seconds for _, fault in plan))


def strike(subject: Subject, plan: list[tuple[int, Fault]], log: Path) -> list[Outcome]:
    """Do all faults, each at its step or later; one line of `log` for each."""
    outcomes = []
    for step, fault in plan:
        outcomes.append(_strike(subject, fault, step))
        note(outcomes[-1], log)
    return outcomes


def note(outcome: Outcome, log: Path) -> None:
    """To the file and to the terminal."""
    with log.open("a") as file:
        file.write(json.dumps(asdict(outcome) | {"survived": outcome.survived}) + "\n")
    print(line(outcome), flush=True)


def line(outcome: Outcome) -> str:
    again = f"training again after {outcome.again - outcome.injected:.1f} s" if outcome.again else ""
    return f"step {outcome.step:3}  {outcome.name:32} {'; '.join([again, *outcome.problems])}"


def _strike(subject: Subject, fault: Fault, step: int) -> Outcome:
    """Wait for the moment, do it, watch what follows."""
    outcome = Outcome(fault.name, fault.kind, f"rank {fault.rank} in {fault.phase}", time.time())
    try:
        subject.until(lambda: _in_phase(subject, fault, step), f"rank {fault.rank} to be in {fault.phase}")
        outcome.step, attempt, processes = subject.beat(fault.rank)["step"], subject.attempt, subject.processes()
        outcome.injected = time.time()
        with subject.shell_held() if fault.copied else contextlib.nullcontext():
            outcome.injected = fault.inject(subject, fault.rank) or outcome.injected
            if fault.verdict:
                subject.until(lambda: not alive(processes), "all processes to end", 120)
                outcome.gone_seconds = time.time() - outcome.injected
            if fault.copied:
                shutil.copytree(subject.paths.folder, interrupted(subject))
        (_watch_end if fault.verdict else _watch_survival)(subject, fault, outcome, attempt)
    except (GaveUp, OSError) as error:
        outcome.problems.append(str(error))
    return outcome


def _in_phase(subject: Subject, fault: Fault, step: int) -> bool:
    beat = subject.beat(fault.rank)
    return beat.get("phase") == fault.phase and beat["step"] >= step


def _watch_end(subject: Subject, fault: Fault, outcome: Outcome, attempt: int) -> None:
    """The attempt has ended with the right verdict, and the next goes on at the same step."""
    subject.until(lambda: subject.verdict(attempt), "a verdict", 120)
    done = max((e["step"] + 1 for e in subject.events("step") if e["attempt"] <= attempt), default=0)
    later = subject.until(lambda: _steps(subject, attempt + 1), "a step of the next attempt", 420)
    outcome.again = later[0]["time"]
    verdict = subject.verdict(attempt)
    outcome.detected, outcome.verdict = verdict["time"], str(subject.paths.verdict(attempt).relative_to(subject.paths.folder))
    outcome.lost_steps = max(0, done - next(e["step"] for e in subject.events("start") if e["attempt"] > attempt))
    wrong = {key: verdict.get(key) for key, value in fault.verdict.items() if verdict.get(key) != value}
    if wrong:
        outcome.problems.append(f"the verdict says {wrong}, expected {fault.verdict}: {verdict.get('error', '')}")
    if outcome.lost_steps:
        outcome.problems.append(f"{outcome.lost_steps} complete steps were done again")
    if fault.abrupt and outcome.gone_seconds and outcome.gone_seconds > GONE_SECONDS:
        outcome.problems.append(f"processes were left for {outcome.gone_seconds:.1f} s")


def _watch_survival(subject: Subject, fault: Fault, outcome: Outcome, attempt: int) -> None:
    """The attempt goes on, and says what happened where it should."""
    over = time.time()
    outcome.again = subject.until(lambda: [e for e in _steps(subject, attempt) if e["time"] > over], "a step")[0]["time"]
    if fault.noticed:
        subject.until(lambda: fault.noticed(subject, fault.rank, outcome.injected), "the run to say what happened", 300)
        outcome.detected = time.time()
    if subject.attempt != attempt:
        outcome.problems.append(f"the attempt ended: {subject.verdict(attempt)}")


def _steps(subject: Subject, first_attempt: int) -> list[dict[str, Any]]:
    return [event for event in subject.events("step") if event["attempt"] >= first_attempt]


def finish(subject: Subject) -> None:
    """Wait for the end of the run. Raises: GaveUp: it did not end well."""
    subject.until(lambda: subject.events("export"), "the export", 900)
    attempt = subject.attempt
    subject.until(lambda: subject.verdict(attempt).get("kind") == "done", "the verdict", 60)
    subject.until(lambda: state.state_of(subject.paths.folder).ended, "the end of the job", 60)


def interrupted(subject: Subject) -> Path:
    """The copy of the run as a rank's death in the middle of a step had left it."""
    return subject.paths.folder.parent / "interrupted"


def differences(subject: Subject, undisturbed: Subject) -> list[str]:
    """What the run lost or has twice, and every way in which it differs from the undisturbed one."""
    problems = [f"{count} prompts {what}" for what, count in counts(subject).items() if count]
    if audit.audit(subject.paths.folder):
        problems.append("the audit does not agree")
    if figures(subject) != figures(undisturbed):
        problems.append("rewards, losses or learning rates of some step differ from those of the undisturbed run")
    if weights(subject) != weights(undisturbed):
        problems.append("the final weights differ from those of the undisturbed run")
    return problems


def counts(subject: Subject) -> dict[str, int]:
    said = report.compute(subject.paths.folder)
    return {"lost": said.prompts_lost, "duplicated": said.prompts_duplicated}


def weights(subject: Subject) -> str:
    """sha256 of the exported policy."""
    return hashlib.sha256((subject.paths.export / "model.safetensors").read_bytes()).hexdigest()


def figures(subject: Subject) -> dict[int, dict[str, float]]:
    """What each step computed, without what it took."""
    steps = history.read(subject.paths).steps
    computed = ("reward/", "response/", "groups/", "train/")
    return {n: {k: v for k, v in step["metrics"].items() if k.startswith(computed)} for n, step in steps.items()}


@contextlib.contextmanager
def private_cluster() -> Iterator[Cluster]:
    """With spare nodes, since one whose ranks died again and again is avoided."""
    home = Path(tempfile.mkdtemp(prefix="miles-"))
    cluster = Cluster(home)
    try:
        cluster.up(Settings(train_nodes=4, rollout_nodes=6))
        yield cluster
    finally:
        cluster.down(purge=True)
        shutil.rmtree(home)
