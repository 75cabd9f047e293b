"""Lines of a rank's log: for people, never parsed. What programs need is in `events.jsonl` and in the heartbeats."""

import time
from collections.abc import Mapping
from typing import Any


def say(text: str) -> None:
    """Print a line with its time, at once: a rank that is killed has said it."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}", flush=True)


def of_step(done: int, steps: int, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> str:
    """`12/40 steps done  reward 0.410  rollout 1.2 s  train 0.8 s`, of the newest step; `--watch` and `status` show the same.

    Args:
        done: steps that are complete; the newest one has the number before, since steps count from 0.
        metrics: of its `step` event.
        seconds: its `phase_seconds`.
    """
    parts = [f"{done}/{steps} steps done"]
    if "reward/mean" in metrics:
        parts.append(f"reward {metrics['reward/mean']:.3f}")
    if metrics.get("groups/refused"):
        parts.append(f"refused {metrics['groups/refused']:.0f}")
    return "  ".join(parts + [f"{phase} {value:.1f} s" for phase, value in seconds.items() if value >= 0.05])


def of_event(event: Mapping[str, Any], steps: int) -> str:
    """What a line of `events.jsonl` says to people; empty where it is no news."""
    match event:
        case {"event": "start", "step": step, "ranks": ranks, "engines": engines}:
            return f"begin at step {step}, training ranks {ranks}, engines {engines}"
        case {"event": "warm_start", "steps": count, "loss_first": first, "loss_last": last}:
            return f"warm start: steps {count}, loss {first:.3f} to {last:.3f}"
        case {"event": "sync", "version": version, "given_up": count, "seconds": seconds} if count:
            return f"weights {version} sent again: rounds given up {count}, {seconds:.1f} s in all"
        case {"event": "step", "step": step, "metrics": metrics, "phase_seconds": seconds}:
            return f"step {step}: {of_step(step + 1, steps, metrics, seconds)}"
        case {"event": "eval", "step": version, "accuracy": mean, "prompts": prompts, "seconds": seconds}:
            return f"evaluation of weights {version}: reward {mean:.3f}, prompts {prompts}, {seconds:.1f} s"
        case {"event": "checkpoint", "step": version, "seconds": seconds}:
            return f"checkpoint after {version} steps: {seconds:.1f} s"
        case {"event": "engine_restart", "rank": rank, "error": error, "seconds": seconds}:
            return f"the engine of rollout rank {rank} was started again in {seconds:.0f} s: {error}"
        case {"event": "export", "path": path}:
            return f"export: {path}"
    return ""
