"""`miles-submit report`: a run in one table, computed from the files of its folder; `audit` recounts it.

Works while the run goes on and after it died; what cannot be known yet is None (`null`, a dash).
"""

import json
import math
import shlex
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from miles_hpc import config as configuration
from miles_hpc.config import Config
from miles_hpc.launchers import amendment, autopsy, history, verdict
from miles_hpc.launchers.amendment import Changes
from miles_hpc.launchers.history import History, Line
from miles_hpc.metrics import PHASES
from miles_hpc.paths import RunPaths

MEANS = ("logp_abs_diff_mean", "rollout_kl_k1", "rollout_kl_k3", "ratio_outside", "routing_mismatch")
"""Figures of the trainer whose mean over steps is reported."""
WINDOW = 5
"""Steps in `reward_first` and `reward_last`."""
SILENT_SECONDS = 120.0
"""Without a heartbeat for so long, an attempt without a verdict is not called running."""


@dataclass(frozen=True)
class Report:
    """The keys of `report --json`, in order. None: not known (yet)."""

    state: str
    """Kind of the newest attempt's verdict; before it ends: queued, running, or lost (no verdict, no heartbeat)."""
    steps: int
    """Steps complete."""
    attempts: int
    engine_restarts: int
    """Engines that died or hung and were started again inside an attempt."""
    reward_first: float | None
    """Mean reward of the first five steps."""
    reward_last: float | None
    """Mean reward of the last five steps."""
    eval_first: float | None
    eval_last: float | None
    samples: int
    """Samples of complete steps."""
    prompts_lost: int
    """Prompts that a complete step, or a gap between two, should have and the ledger does not know."""
    prompts_duplicated: int
    """Ledger lines beyond one per prompt id."""
    logp_abs_diff_max: float | None
    """Largest |log p_train - log p_rollout| of an answer token, over all steps."""
    logp_abs_diff_mean: float | None
    """Mean over steps, as the three that follow."""
    rollout_kl_k1: float | None
    """KL(sampler || trainer) in nats per token, estimator k1."""
    rollout_kl_k3: float | None
    """The same, estimator k3."""
    ratio_outside: float | None
    """Share of answer tokens whose p_train / p_rollout leaves [0.9, 1.1]."""
    routing_mismatch: float | None
    """Share of choices of experts that trainer and engine make differently; only with train.routing_replay."""
    weight_sync_seconds_median: float | None
    weight_sync_gb_per_s: float | None
    """Median over syncs of bytes x engines / seconds / 1e9."""
    rollout_tokens_per_s: float | None
    """Answer tokens generated / seconds of generation."""
    train_tokens_per_s: float | None
    """Tokens, prompt and answer / seconds of training."""
    wall_seconds: float | None
    """From the first attempt's start to the newest sign of life, queueing between attempts included."""
    phase_seconds: dict[str, float]
    """Sum over complete steps."""
    export_path: str | None
    changes: dict[int, Changes]
    """By attempt, the keys that were changed before it: values before and after."""


def report(folder: Path, as_json: bool) -> int:
    """Print the report of the run in `folder`; exit code 0.

    Raises:
        ConfigError: the folder has no readable config.toml.
    """
    found = compute(folder)
    if as_json:
        print(json.dumps(strict(asdict(found)), indent=1))
    else:
        _show(found, RunPaths(folder))
    return 0


def compute(folder: Path) -> Report:
    """The report of the run in `folder`."""
    paths = RunPaths(folder)
    config = configuration.read(paths.config)
    past = history.read(paths)
    steps = list(past.steps.values())
    rewards = [value for e in steps if (value := e["metrics"].get("reward/mean")) is not None]
    accuracies = [e["accuracy"] for e in past.evals.values()]
    engines = past.starts[-1].get("engines", config.engines) if past.starts else config.engines
    return Report(
        state=state_of(paths),
        steps=len(steps),
        attempts=len(paths.attempt_numbers()),
        engine_restarts=sum(e.get("event") == "engine_restart" for e in past.events),
        reward_first=_mean(rewards[:WINDOW]),
        reward_last=_mean(rewards[-WINDOW:]),
        eval_first=accuracies[0] if accuracies else None,
        eval_last=accuracies[-1] if accuracies else None,
        samples=sum(line["samples"] for ledger in past.ledger.values() for line in ledger),
        prompts_lost=lost(past, config),
        prompts_duplicated=duplicated(past),
        logp_abs_diff_max=_largest(e["metrics"].get("train/logp_abs_diff_max") for e in steps),
        **{name: _mean(_known(e["metrics"].get(f"train/{name}") for e in steps)) for name in MEANS},
        weight_sync_seconds_median=_median([e["seconds"] for e in past.syncs]),
        weight_sync_gb_per_s=_median([e["bytes"] * engines / max(e["seconds"], 1e-9) / 1e9 for e in past.syncs]),
        rollout_tokens_per_s=_speed(steps, "speed/rollout_tokens_per_s", "rollout"),
        train_tokens_per_s=_speed(steps, "speed/train_tokens_per_s", "train"),
        wall_seconds=_wall_seconds(paths, past),
        phase_seconds={phase: sum(e["phase_seconds"].get(phase, 0.0) for e in steps) for phase in PHASES},
        export_path=str(paths.export) if (paths.export / "config.json").exists() else None,
        changes={n: changed for n in paths.attempt_numbers() if (changed := amendment.changes(paths, n))},
    )


def state_of(paths: RunPaths) -> str:
    """Kind of the newest verdict, or what the files say about an attempt that has none."""
    numbers = paths.attempt_numbers()
    if not numbers:
        return "queued" if paths.job.exists() else "not submitted"
    if found := verdict.read(paths, numbers[-1]):
        return found.kind
    signs = [_modified(file) for file in paths.heartbeat(0).parent.glob("*.json")] + [_modified(paths.start(numbers[-1]))]
    return "running" if time.time() - max(signs) < SILENT_SECONDS else "lost"


def lost(past: History, config: Config) -> int:
    """Prompts missing from the ledger between its first and its last step."""
    if not past.ledger:
        return 0
    expected = config.rollout.prompts_per_step
    span = range(min(past.ledger), max(past.ledger) + 1)
    return sum(max(0, expected - len({line["prompt_id"] for line in past.ledger.get(step, [])})) for step in span)


def duplicated(past: History) -> int:
    """Ledger lines beyond one per prompt id."""
    ids = [line["prompt_id"] for ledger in past.ledger.values() for line in ledger]
    return len(ids) - len(set(ids))


def strict(value: Any) -> Any:
    """`value` with None for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: strict(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _wall_seconds(paths: RunPaths, past: History) -> float | None:
    numbers = paths.attempt_numbers()
    begun = [autopsy.started(paths, n).time for n in numbers]
    ended = [found.time for n in numbers if (found := verdict.read(paths, n))]
    times = [e["time"] for e in past.events if "time" in e] + [time for time in begun + ended if time]
    return max(times) - min(times) if times else None


def _speed(steps: Sequence[Line], speed: str, phase: str) -> float | None:
    """Tokens of all steps over their seconds, from each step's speed and seconds."""
    pairs = [(e["metrics"][speed], e["phase_seconds"].get(phase, 0.0)) for e in steps if speed in e["metrics"]]
    seconds = sum(s for _, s in pairs)
    return sum(v * s for v, s in pairs) / seconds if seconds else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _largest(values: Iterable[float | None]) -> float | None:
    return max(_known(values), default=None)


def _known(values: Iterable[float | None]) -> list[float]:
    return [v for v in values if v is not None]


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:  # heartbeats are replaced, attempts may be being made
        return 0.0


def _show(found: Report, paths: RunPaths) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(f"run {paths.folder.name}"), show_header=False, title_justify="left")
    for _ in range(2):
        table.add_column(overflow="fold")  # else what is too long for a narrow terminal is cut
    values = asdict(found)
    phases, _ = values.pop("phase_seconds"), values.pop("changes")
    for key, value in values.items():
        table.add_row(key, _text(value))
    for phase, seconds in phases.items():
        table.add_row(f"phase_seconds.{phase}", _text(seconds))
    console = Console(highlight=False, width=shutil.get_terminal_size().columns)  # rich takes COLUMNS=0 at its word
    console.print(table)
    changed = [f"changed      for attempt {n}: {amendment.sentence(keys)}" for n, keys in found.changes.items()]
    for line in [*changed, *_places(paths)]:
        console.print(line, soft_wrap=True, markup=False)


def _text(value: Any) -> str:
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    if not math.isfinite(value):
        return "-"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _places(paths: RunPaths) -> list[str]:
    """Where to look next."""
    run = shlex.quote(str(paths.folder))
    attempts = paths.attempt_numbers()
    logs = paths.attempt(attempts[-1]) if attempts else paths.job_log
    saved = [paths.checkpoint(step).name for step in paths.saved_steps()]
    return [
        f"logs         {logs}",
        f"checkpoints  {paths.checkpoints} ({', '.join(saved) or 'none yet'})",
        f"export       {paths.export if paths.export.exists() else 'none yet'}",
        f"curves       tensorboard --logdir {shlex.quote(str(paths.tensorboard('train').parent))}",
        f"verdict      miles-submit why {run}",
    ]
