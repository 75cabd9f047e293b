"""How far a run is, from its events and heartbeats."""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from miles_hpc.paths import RunPaths

REWARD_NAMES = ("reward", "reward_mean", "reward/mean", "rollout/reward", "rollout/reward_mean")


@dataclass(frozen=True)
class Progress:
    """One look at events.jsonl."""

    done: int
    """Steps that are complete."""
    steps: int
    reward: float | None
    """Mean reward of the newest step."""
    phase_seconds: dict[str, float]
    """Of the newest step."""
    seconds_left: float | None
    """By the median of the last ten steps."""

    def line(self) -> str:
        """`step 12/40  reward 0.41  rollout 1.2 s  train 0.8 s  ETA 1:02`."""
        parts = [f"step {self.done}/{self.steps}"]
        if self.reward is not None:
            parts.append(f"reward {self.reward:.3f}")
        parts += [f"{name} {seconds:.1f} s" for name, seconds in self.phase_seconds.items() if seconds >= 0.05]
        if self.seconds_left is not None and self.done < self.steps:
            minutes, seconds = divmod(round(self.seconds_left), 60)
            parts.append(f"ETA {minutes}:{seconds:02d}")
        return "  ".join(parts)


def progress_of(folder: Path, steps: int) -> Progress:
    """Read a run's events; `steps` is the number it is to have."""
    events = [e for e in read_events(RunPaths(folder).events) if e.get("event") == "step"]
    last = events[-1] if events else {}
    numbers = {e["step"]: e for e in events}
    return Progress(
        done=len(numbers),
        steps=steps,
        reward=_reward(last.get("metrics", {})),
        phase_seconds=last.get("phase_seconds", {}),
        seconds_left=_seconds_left(events, steps - len(numbers)),
    )


def read_events(file: Path) -> list[dict[str, Any]]:
    """Complete lines of events.jsonl; the last one may be half written."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines if line.strip()]


def _reward(metrics: dict[str, float]) -> float | None:
    return next((metrics[name] for name in REWARD_NAMES if name in metrics), None)


def _seconds_left(events: list[dict[str, Any]], steps_left: int) -> float | None:
    times = [e["time"] for e in events[-11:]]
    gaps = [b - a for a, b in pairwise(times)]
    return median(gaps) * steps_left if gaps else None
