"""How far a run is, from its events and heartbeats."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from miles_hpc import logline
from miles_hpc.launchers import history
from miles_hpc.paths import RunPaths


@dataclass(frozen=True)
class Progress:
    """One look at events.jsonl."""

    done: int
    """Steps that are complete."""
    steps: int
    metrics: dict[str, float]
    """Of the newest step."""
    restarts: int
    """Engines started again, over all steps."""
    micro_batch_tokens: int
    """What memory has lowered it to; 0: it has not."""
    phase_seconds: dict[str, float]
    """Of the newest step."""
    seconds_left: float | None
    """By the median of the last ten steps."""

    def line(self) -> str:
        """`12/40 steps done  reward 0.410  rollout 1.2 s  train 0.8 s  ETA 1 h 55 min`."""
        parts = [logline.of_step(self.done, self.steps, self.metrics, self.phase_seconds)]
        if self.restarts:
            parts.append(f"engine restarts {self.restarts}")
        if self.micro_batch_tokens:
            parts.append(f"out of memory: micro-batches of {self.micro_batch_tokens} tokens")
        if self.seconds_left is not None and self.done < self.steps:
            parts.append(f"ETA {duration(self.seconds_left)}")
        return "  ".join(parts)


def progress_of(folder: Path, steps: int) -> Progress:
    """Read a run's events; `steps` is the number it is to have."""
    past = history.read(RunPaths(folder))
    done = list(past.steps.values())
    last = done[-1] if done else {}
    return Progress(
        done=len(done),
        steps=steps,
        metrics=last.get("metrics", {}),
        restarts=sum(e.get("event") == "engine_restart" for e in past.events),
        micro_batch_tokens=min((e["tokens"] for e in past.events if e.get("event") == "micro_batch_tokens"), default=0),
        phase_seconds=last.get("phase_seconds", {}),
        seconds_left=_seconds_left([e["time"] for e in done[-11:]], steps - len(done)),
    )


def _seconds_left(times: list[float], steps_left: int) -> float | None:
    gaps = [b - a for a, b in pairwise(times)]
    return max(0.0, median(gaps)) * steps_left if gaps else None  # clocks of nodes differ, or are set back


def duration(seconds: float) -> str:
    """`1 h 55 min`, `1 min 12 s` or `45 s`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
