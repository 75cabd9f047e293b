"""`miles-submit samples`: what the policy was asked, what it said, what that was worth."""

from pathlib import Path

import numpy as np

from miles_hpc.errors import SampleError, UserError
from miles_hpc.paths import RunPaths
from miles_hpc.samples import store
from miles_hpc.samples.schema import TRUNCATED, Samples


def samples(folder: Path, step: int | None) -> int:
    """Print the samples of `step` (default: the newest that has any), group by group; exit code 0, 1 if a shard is damaged.

    Raises:
        UserError: no samples of that step; says which there are.
    """
    paths = RunPaths(folder)
    steps = steps_on_disk(paths)
    step = (steps[-1] if steps else None) if step is None else step
    if step is None or step not in steps:
        there = f"there are steps {steps[0]} to {steps[-1]}" if steps else "there are none yet"
        raise UserError(f"no samples{'' if step is None else f' of step {step}'}", where=str(paths.samples), next_step=there)
    found, damaged = _read(paths, step)
    print(f"step {step}: {len(np.unique(found.prompt_ids))} prompts, {len(found)} samples, mean reward {_mean(found.rewards)}")
    for prompt_id in np.unique(found.prompt_ids):
        _show(found.take(np.flatnonzero(found.prompt_ids == prompt_id)))
    for error in damaged:
        print(f"\nleft out: {error}")
    return 1 if damaged else 0


def steps_on_disk(paths: RunPaths) -> list[int]:
    """Steps with at least one complete rollout shard, ascending."""
    return [step for step in paths.sampled_steps() if store.on_disk(paths, step)]


def _read(paths: RunPaths, step: int) -> tuple[Samples, list[SampleError]]:
    parts, damaged = [], []
    for shard in store.on_disk(paths, step):
        try:
            parts.append(store.read(shard, deadline=0))
        except SampleError as error:
            damaged.append(error)
    return Samples.concat(parts).sorted(), damaged


def _show(group: Samples) -> None:
    print(f"\nprompt {group.prompt_ids[0]}  label {group.labels[0]}  mean reward {_mean(group.rewards)}")
    print(_indented(group.prompts[0], "  > "))
    for i in range(len(group)):
        parts = "".join(f"  {name} {values[i]:.3g}" for name, values in group.reward_parts.items())
        cut = "  (cut at max_new_tokens)" if group.status[i] == TRUNCATED else ""
        removed = "" if group.answer_lengths[i] else "  (kept out of the loss)"
        print(f"  [{group.sample_index[i]}] reward {group.rewards[i]:.3g}{parts}  {group.generated[i]} tokens{cut}{removed}")
        print(_indented(group.answers[i], "      "))


def _indented(text: str, margin: str) -> str:
    return "\n".join(margin + line for line in text.splitlines() or [""])


def _mean(rewards: np.ndarray) -> str:
    return f"{rewards.mean():.3f}" if len(rewards) else "-"
