"""Who tells whom that samples are there: shards are announced over MPI, their bytes go through the filesystem."""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from miles_hpc.errors import EdgeError, SampleError
from miles_hpc.paths import RunPaths
from miles_hpc.samples import store
from miles_hpc.samples.schema import Samples
from miles_hpc.world import World

SAMPLES, FIRST_STEP = 21, 22


@dataclass(frozen=True)
class Shard:
    """A complete shard of `step`."""

    step: int
    file: str
    prompt_ids: list[int]
    refused: list[int] = field(default_factory=list)
    """Those of them whose group a filter refused."""

    @classmethod
    def of(cls, step: int, file: Path, samples: Samples) -> "Shard":
        """The announcement of a written file."""
        refused = {int(i) for i in samples.refused.prompt_ids}
        return cls(step, str(file), [int(i) for i in np.unique(samples.prompt_ids)], sorted(refused))


@dataclass(frozen=True)
class Finished:
    """One engine has no more samples for `step`."""

    step: int
    seconds: dict[str, float] = field(default_factory=dict)
    """Of generation, of reward and of leaving the GPU."""
    generated_tokens: int = 0
    dropped: list[int] = field(default_factory=list)
    """Prompt ids whose reward failed and whose group was dropped."""
    error: str = ""
    """Of the first of them."""


@dataclass(frozen=True)
class Collected:
    """All samples of a step, as the trainer uses them."""

    samples: Samples
    """Of accepted groups."""
    refused: Samples
    """Of groups that a filter refused."""
    seconds: dict[str, float]
    """Of generation, of reward and of leaving the GPU, the slowest engine's."""
    generated_tokens: int
    dropped: list[int]
    size: int
    """Bytes of the shards."""


class Outbox:
    """The rollout side: write a shard, then announce it."""

    def __init__(self, world: World, paths: RunPaths, attempt: int, seconds: float) -> None:
        self.world, self.paths, self.attempt, self.seconds = world, paths, attempt, seconds

    def put(self, step: int, samples: Samples) -> None:
        """Write whole groups as one shard and announce it."""
        self.announce(Shard.of(step, self.keep(step, samples), samples))

    def keep(self, step: int, samples: Samples, drafts: bool = False) -> Path:
        """Write whole groups as one shard, or drafts; the next attempt finds it."""
        return store.write(self.paths, step, self.world.rank, self.attempt, samples, drafts)

    def announce(self, message: Shard | Finished) -> None:
        """Tell the first training rank."""
        self.world.send(message, self.world.train[0], SAMPLES, self.seconds, "the trainer to hear of samples")


class Inbox:
    """The training side: announcements of shards are taken one by one, then the shards are read."""

    def __init__(self, world: World, seconds: float) -> None:
        self.world, self.seconds = world, seconds
        self.step = 0
        """The one that is being collected."""
        self._messages: dict[int, list[Shard | Finished]] = defaultdict(list)
        """By step: with rollout.staleness = 1, some come early."""

    @property
    def complete(self) -> bool:
        """Every engine has said that it is finished with the step."""
        return sum(isinstance(m, Finished) for m in self._messages[self.step]) == len(self.world.rollout)

    def take(self) -> bool:
        """Take an announcement that has arrived; False if there is none."""
        message = self.world.take(SAMPLES)
        if message:
            self._messages[message.step].append(message)
        return message is not None

    def collect(self, oldest_version: int) -> Collected:
        """All samples of a complete `step`, sorted by prompt id and sample index, the same on every training rank.

        Raises:
            EdgeError: every group was dropped. SampleError: a damaged shard, a group that came twice, tokens of weights older
                than `oldest_version`.
        """
        step = self.step
        messages = self.world.share(self._messages.pop(step) if self.world.leads else None, self.seconds, "the list of shards")
        shards = [Path(m.file) for m in messages if isinstance(m, Shard)]
        finished = [m for m in messages if isinstance(m, Finished)]
        samples = Samples.concat([store.read(shard) for shard in shards]).sorted()
        if not len(samples):
            # The user's error, not a fault: a reward that fails for all of a step will fail again after a restart.
            first = next((m.error for m in finished if m.error), "no engine says why")
            hint = "repair the function, then miles-submit resume"
            raise EdgeError(f"step {step} has no samples: every group lacks an answer or a reward", where=first, next_step=hint)
        _check(samples, step, oldest_version)
        return Collected(
            samples=_accepted(samples, step),
            refused=samples.refused,
            seconds={key: max(m.seconds.get(key, 0.0) for m in finished) for key in ("rollout", "reward", "swap")},
            generated_tokens=sum(m.generated_tokens for m in finished),
            dropped=sorted(i for m in finished for i in m.dropped),
            size=sum(shard.stat().st_size for shard in shards),
        )


def _accepted(samples: Samples, step: int) -> Samples:
    """What is trained on. Raises: EdgeError if that is nothing."""
    accepted = samples.accepted
    if not len(accepted):
        raise EdgeError(
            f"rollout.filters refused every group of step {step}",
            where=", ".join(sorted(set(samples.refusals))),
            next_step="loosen rollout.filters, raise rollout.max_tries, or choose easier or harder prompts",
        )
    return accepted


def _check(samples: Samples, step: int, oldest_version: int) -> None:
    keys = np.stack([samples.prompt_ids, samples.sample_index], 1)
    if len(np.unique(keys, axis=0)) != len(samples):
        raise SampleError(f"step {step} holds the same sample twice")
    versions = samples.weight_versions[samples.loss_mask > 0]
    if versions.size and versions.min() < oldest_version:
        raise SampleError(f"step {step} holds tokens of weights {versions.min()}, older than {oldest_version}")
