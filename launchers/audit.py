"""`miles-submit audit`: count a run again from its raw shards and compare with the ledger, the events and the report.

Only steps that count are looked at (`history`); each check prints one line, `ok` or `BAD` with files and values.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from miles_hpc import config as configuration
from miles_hpc.config import Config
from miles_hpc.errors import UserError
from miles_hpc.launchers import advantages, history, recount, report
from miles_hpc.launchers.history import History, Line
from miles_hpc.launchers.recount import Key, Step
from miles_hpc.paths import RunPaths

SHOWN = 5
"""Mismatches printed per check."""
SPARE_EPOCHS = 1 << 31
"""Prompt ids of later epochs than this replace refused ones."""

Problems = Iterator[str]


@dataclass(frozen=True)
class Count:
    """What remains of a step when its shards are closed again."""

    samples: int
    prompts: frozenset[int]
    reward: float | None
    distances: dict[str, float]
    """Between trainer and sampler, see `recount.distances`."""


class NotChecked(Exception):
    """A check that this machine cannot make."""


class Audit:
    """A run's claims, checked step by step against its shards (one step in memory at a time), then as a whole."""

    def __init__(self, folder: Path) -> None:
        self.paths = RunPaths(folder)
        self.config: Config = configuration.read(self.paths.config)
        self.past: History = history.read(self.paths)
        self.counts: dict[int, Count] = {}

    def results(self) -> Iterator[tuple[str, Problems]]:
        """Every check's text and its mismatches; NotChecked comes out of a check's iterator."""
        of_step = [self.complete, self.ledger, self.as_sampled, self.versions, self.advantages, self.events]
        if self.config.train.routing_replay:
            of_step.append(self.routing)
        found: dict[str, list[str]] = {check.__doc__ or "": [] for check in of_step}
        damaged: list[str] = []
        for n in self.past.ledger:
            if n < self.past.removed:
                self.counts[n] = self._said(n)
                continue
            step = recount.read(self.paths.step_samples(n))
            damaged += step.problems
            self.counts[n] = _count(step)
            for check in of_step:
                found[check.__doc__ or ""] += check(n, step)
        yield "The samples of every step are on the disk.", self.there()
        yield "Every shard can be read, and no sample is in two.", iter(damaged)
        yield from ((text, iter(problems)) for text, problems in found.items())
        for whole in (self.lines, self.once, self.none_lost, self.order, self.reported):
            yield whole.__doc__ or "", whole()

    def there(self) -> Problems:
        """Nothing, unless retention removed samples. Raises: NotChecked."""
        if any(n < self.past.removed for n in self.past.ledger):
            raise NotChecked(f"samples of steps < {self.past.removed} removed by retention; ledger and events speak for them")
        yield from ()

    def _said(self, n: int) -> Count:
        """What ledger and events say of a step whose samples were removed."""
        lines, figures = self.past.ledger[n], self.past.steps.get(n, {}).get("metrics", {})
        return Count(
            samples=sum(line["samples"] for line in lines),
            prompts=frozenset(line["prompt_id"] for line in lines),
            reward=figures.get("reward/mean"),
            distances={name: figures.get(f"train/{name}", 0.0) for name in ("logp_abs_diff_max", *recount.MEANS)},
        )

    def complete(self, n: int, step: Step) -> Problems:
        """Every group has samples 0 to samples_per_prompt - 1."""
        expected = list(range(self.config.rollout.samples_per_prompt))
        for prompt_id, indices in step.groups.items():
            if indices != expected:
                yield f"{self.paths.step_samples(n)}: prompt {prompt_id} has samples {indices}, expected {expected}"

    def ledger(self, n: int, step: Step) -> Problems:
        """Ledger and shards name the same prompts, each with the same samples, mean reward and fate."""
        folder = self.paths.step_samples(n)
        lines = {line["prompt_id"]: line for line in self.past.ledger[n] if line["fate"] != "reward_error"}
        for prompt_id in sorted(lines.keys() - step.groups.keys()):
            yield f"{folder}: prompt {prompt_id} is in the ledger but in no rollout shard"
        for prompt_id in sorted(step.groups.keys() - lines.keys()):
            yield f"{folder}: prompt {prompt_id} has a rollout shard but no line in the ledger"
        values, always = self._advantages(step), advantages.always(self.config.train)
        for prompt_id in sorted(lines.keys() & step.groups.keys()):
            expected = _fate(step, prompt_id, values, always)
            for mismatch in _compared(lines[prompt_id], step.rewards(prompt_id), expected, step.refusal(prompt_id)):
                yield f"{self.paths.ledger}: step {n}, prompt {prompt_id}: {mismatch}"

    def as_sampled(self, n: int, step: Step) -> Problems:
        """Train shards hold every sample, with its loss mask and the sampler's log-probs bit for bit."""
        if n not in self.past.steps:  # the attempt ended within the step; a later one writes its train shards
            return
        for key in sorted(step.accepted.keys() ^ step.train.keys()):
            where = "rollout" if key in step.accepted else "train"
            yield f"{self.paths.step_samples(n)}: sample {key} is in {where} shards only"
        for key in sorted(step.accepted.keys() & step.train.keys()):
            for row, name in product(step.train[key], ("loss_mask", "rollout_log_probs")):
                if row.values[name].tobytes() != step.rollout[key].values[name].tobytes():
                    yield f"{row.file}: {name} of sample {key} is not that of {step.rollout[key].file.name}"

    def versions(self, n: int, step: Step) -> Problems:
        """Answer tokens come from weights no older than rollout.staleness allows."""
        for key, row in step.rollout.items():
            found = row.values["weight_versions"][row.values["loss_mask"] > 0]
            if len(found) and not n - self.config.rollout.staleness <= found.min() <= found.max() <= n:
                yield f"{row.file}: sample {key} has weights {found.min()} to {found.max()} at step {n}"

    def routing(self, n: int, step: Step) -> Problems:
        """The experts of every token that an answer's token follows are on record."""
        yield from recount.unrouted(step)

    def advantages(self, n: int, step: Step) -> Problems:
        """Advantages follow from the rewards by the formula of train.advantage."""
        for key, value in self._advantages(step).items():
            for row in step.train.get(key, []):
                got = float(row.values["advantages"])
                if not _close(got, value, 1e-5):
                    yield f"{row.file}: advantage of sample {key} is {got}, expected {value}"

    def _advantages(self, step: Step) -> dict[Key, float]:
        """By the formula; of an edge, whose formula is not known here, as the train shards say."""
        kind = self.config.train.advantage
        if kind not in advantages.FORMULAS:
            return {key: float(rows[0].values["advantages"]) for key, rows in step.train.items()}
        return advantages.recount(step, kind)

    def events(self, n: int, step: Step) -> Problems:
        """Events give the shards' mean reward and distances between trainer and sampler."""
        if n not in self.past.steps:
            # The ledger's lines are written first, the event when the new weights are out.
            if n != max(self.past.ledger):
                yield f"{self.paths.events}: step {n} is missing"
            return
        metrics, count = self.past.steps[n]["metrics"], self.counts[n]
        for name, value in ({"reward/mean": count.reward} | {f"train/{k}": v for k, v in count.distances.items()}).items():
            if not _close(metrics.get(name), value):
                yield f"{self.paths.events}: step {n} says {name} = {metrics.get(name)}, its shards {value}"

    def lines(self) -> Problems:
        """Every line of events and ledger can be read, and the ledger knows every step of the events."""
        # The death of an attempt may cut the line it was writing, one in each file; the next attempt does that step again.
        cut = 2 * max(0, len({start["attempt"] for start in self.past.starts}) - 1)
        if self.past.damaged > cut:
            yield f"{self.paths.events.name} and {self.paths.ledger.name}: {self.past.damaged} lines are not JSON"
        for n in self.past.steps.keys() - self.past.ledger.keys():
            yield f"{self.paths.ledger}: step {n} is missing"

    def once(self) -> Problems:
        """No prompt is in the ledger twice."""
        seen: dict[int, int] = {}
        for n, lines in self.past.ledger.items():
            for prompt_id in (line["prompt_id"] for line in lines):
                if prompt_id in seen:
                    yield f"{self.paths.ledger}: prompt {prompt_id} is in steps {seen[prompt_id]} and {n}"
                seen[prompt_id] = n

    def none_lost(self) -> Problems:
        """Every step from 0 to the last has rollout.prompts_per_step prompts."""
        expected, steps = self.config.rollout.prompts_per_step, self.past.ledger
        for n in range(max(steps, default=-1) + 1):
            count = len({line["prompt_id"] for line in steps.get(n, []) if line["prompt_id"] < SPARE_EPOCHS})
            if count != expected:
                yield f"{self.paths.ledger}: step {n} has {count} prompts, expected {expected}"

    def order(self) -> Problems:
        """Every step has the prompts that configuration and seed give it."""
        from miles_hpc import data

        try:
            prompts = data.load(self.config, "train")
        except (UserError, ImportError) as error:
            raise NotChecked(f"the prompts cannot be read here: {str(error).splitlines()[0]}") from None
        rollout = self.config.rollout
        tries = rollout.max_tries - 1 if rollout.filters else 0
        for n, lines in self.past.ledger.items():
            first = prompts.ids_of_step(n, rollout.prompts_per_step)[:, None]
            places = np.concatenate([first, prompts.spare_ids(n, len(first), tries)], 1)
            expected = set(_drawn(places.tolist(), {line["prompt_id"] for line in lines if line["fate"] == "refused"}))
            for prompt_id in sorted(expected ^ {line["prompt_id"] for line in lines}):
                yield f"step {n}: prompt {prompt_id} {'is missing' if prompt_id in expected else 'belongs to another step'}"

    def reported(self) -> Problems:
        """The report's figures are those of the shards."""
        said = report.compute(self.paths.folder)
        complete = [count for n, count in self.counts.items() if n in self.past.steps]
        rewards = [count.reward for count in complete if count.reward is not None]
        prompts = [count.prompts for count in self.counts.values()]
        counted = {
            "steps": len(complete),
            "reward_first": _mean(rewards[: report.WINDOW]),
            "reward_last": _mean(rewards[-report.WINDOW :]),
            "samples": sum(count.samples for count in self.counts.values()),
            "prompts_duplicated": sum(len(ids) for ids in prompts) - len(frozenset().union(*prompts)),
            "logp_abs_diff_max": max((count.distances["logp_abs_diff_max"] for count in complete), default=None),
            **{name: _mean([count.distances[name] for count in complete]) for name in recount.MEANS},
        }
        for name, value in counted.items():
            if not _close(getattr(said, name), value):
                yield f"report says {name} = {getattr(said, name)}, the shards {value}"


def audit(folder: Path) -> int:
    """Check the run in `folder`, one line per check; exit code 1 on any mismatch.

    Raises:
        ConfigError: the folder has no readable config.toml.
    """
    run = Audit(folder)
    failed = [_failed(text.rstrip("."), problems) for text, problems in run.results()]
    counts = run.counts.values()
    print(
        f"{len(counts)} steps, {sum(len(c.prompts) for c in counts)} prompts, {sum(c.samples for c in counts)} samples counted"
    )
    return 1 if any(failed) else 0


def _failed(text: str, found: Problems) -> bool:
    """Print a check's line; True on a mismatch."""
    try:
        problems = list(found)
    except NotChecked as reason:
        print(f"--   {text}: not checked, {reason}", flush=True)
        return False
    lines = [f"{'BAD' if problems else 'ok '}  {text}", *(f"       {problem}" for problem in problems[:SHOWN])]
    if len(problems) > SHOWN:
        lines.append(f"       and {len(problems) - SHOWN} more")
    print("\n".join(lines), flush=True)
    return bool(problems)


def _drawn(places: list[list[int]], refused: set[int]) -> Iterator[int]:
    """Prompts that a step draws: for each place its ids in turn, up to the first that was not refused."""
    for place in places:
        for prompt_id in place:
            yield prompt_id
            if prompt_id not in refused:
                break


def _count(step: Step) -> Count:
    rewards = [float(row.values["rewards"]) for row in step.accepted.values()]
    return Count(len(step.rollout), frozenset(step.groups), _mean(rewards), recount.distances(step))


def _fate(step: Step, prompt_id: int, advantages: dict[Key, float], always: bool) -> str:
    if step.refusal(prompt_id):
        return "refused"
    keys = [(prompt_id, index) for index in step.groups[prompt_id]]
    carrying = [key for key in keys if step.rollout[key].values["loss_mask"].any()]
    if not carrying:
        return "removed"
    return "trained" if always or any(advantages.get(key) for key in carrying) else "zero_variance"


def _compared(line: Line, rewards: np.ndarray, fate: str, reason: str) -> Problems:
    """Where a ledger line and the shards of its group differ."""
    if line["fate"] != fate:
        yield f"fate = {line['fate']}, the shards say {fate}"
    if line.get("reason", "") != reason:
        yield f"reason = {line.get('reason')!r}, the shards say {reason!r}"
    for name, value in {"samples": len(rewards), "reward": float(rewards.mean())}.items():
        if not _close(line[name], value, 2e-6):
            yield f"{name} = {line[name]}, the shards say {value}"


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _close(a: float | None, b: float | None, tolerance: float = 1e-6) -> bool:
    if a is None or b is None:
        return a is b
    return abs(a - b) <= tolerance * max(1.0, abs(b))
