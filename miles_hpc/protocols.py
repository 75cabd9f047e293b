"""Every edge: where users' functions attach, what they are called with, and what they must return.

`miles-submit edges` prints this table; docs/edges.md has an example of each. Values are checked at every call, and once before
an engine starts (`prepare.py`): what does not fit is a `user_error` that names file and line.
"""

import inspect
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from miles_hpc.config import Config, is_edge

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from miles_hpc.launchers.verdict import Situation
    from miles_hpc.rollout.conversation import SampleClient
    from miles_hpc.rollout.groups import GroupClient
    from miles_hpc.sample import Sample
    from miles_hpc.samples.schema import Samples
    from miles_hpc.sections import Train
    from miles_hpc.train.loss import TokenLoss, Tokens
    from miles_hpc.train.optimizer import AdamW


class ModelSource(Protocol):
    """Writes the initial checkpoint into an empty folder, in Hugging Face's format with its tokenizer. Called once per run."""

    def __call__(self, folder: Path, seed: int) -> None: ...


class DataSource(Protocol):
    """Gives all prompts of a split ("train", "eval") as mappings with `prompt`, and as far as wanted `label` and `metadata`.

    Called in every rollout rank and attempt: it must give the same list every time.
    """

    def __call__(self, split: str, seed: int) -> list[dict[str, Any]]: ...


class Demonstrations(Protocol):
    """Gives `count` pairs of prompt and answer for the supervised phase before the first rollout."""

    def __call__(self, seed: int, count: int) -> list[tuple[str, str]]: ...


class Generate(Protocol):
    """Makes one answer in as many turns as it likes, by `await engine.generate(tokens)`; many run at a time in one thread.

    It gets the sample with its prompt and returns it with `tokens`, `response_length`, `rollout_log_probs`, `status`, and
    `loss_mask` with 0 on tokens that are not the model's. `engine.tokenizer` and `engine.max_new_tokens` are at hand. If it
    sets `reward`, that is the reward and `rollout.reward` is not asked. `remove_sample` keeps the sample in its group and out
    of the loss; the statuses ABORTED and FAILED say that there is no answer, see `rollout.reward_error`.
    """

    async def __call__(self, sample: "Sample", engine: "SampleClient") -> "Sample": ...


class Rollout(Protocol):
    """An async generator that answers all groups given, in any order and in any way (a search, a game of several answers), by
    `await engine.generate(sample, tokens)`, and yields each group, as a list of its samples, when it is finished.

    Samples come and go as those of `rollout.generate`. It is called once for an engine's share of a step, again for every
    prompt that takes the place of a refused group, and for the evaluation with groups of one greedy sample.
    """

    def __call__(self, groups: "list[list[Sample]]", engine: "GroupClient") -> "AsyncIterator[list[Sample]]": ...


class Reward(Protocol):
    """Scores one answer. Runs in threads while others are generated; may be a coroutine function.

    `metadata` is the row's, and `finished` (the model ended the answer itself), `tokens` (of the answer) and `max_new_tokens`.
    A mapping must have `reward`; its other numbers are logged as `reward/<name>`.
    """

    def __call__(self, prompt: str, answer: str, label: Any, metadata: Mapping[str, Any]) -> float | dict[str, float]: ...


class GroupReward(Protocol):
    """Scores all answers to a prompt together; its numbers replace their rewards, which it finds in `sample.reward`."""

    def __call__(self, samples: "Sequence[Sample]") -> Sequence[float]: ...


class Filter(Protocol):
    """Says why a scored group is not to be trained on, or nothing to keep it. Reasons are counted (`filter/<reason>`).

    A refused group is kept on disk and replaced by another prompt, up to `rollout.max_tries` per place.
    """

    def __call__(self, samples: "Sequence[Sample]") -> str: ...


class Advantage(Protocol):
    """Gives one advantage per sample of a step. `samples` are sorted by prompt, groups lie together; the same on all ranks."""

    def __call__(self, samples: "Samples", group_size: int) -> "np.ndarray": ...


class Loss(Protocol):
    """Gives one loss per answer token, with gradient. Samples are whole; weights, penalties and denominators are added outside,
    so that it need not know how the mini-batch is split."""

    def __call__(self, tokens: "Tokens", train: "Train") -> "Tensor | TokenLoss": ...


class StepHook(Protocol):
    """Called on every training rank with `before` and `after` each step; `facts` has the step's figures after it, on rank 0.

    It may write files and print; what it raises ends the run. Called once with `check` before the run starts.
    """

    def __call__(self, event: str, step: int, facts: Mapping[str, float]) -> None: ...


class OptimizerHook(Protocol):
    """Gives the hyperparameters of a step from those of the configuration: schedules of learning rate or weight decay.

    Called on every training rank; it must be a function of its arguments, or ranks and attempts would differ.
    """

    def __call__(self, step: int, values: "AdamW") -> "AdamW": ...


class Metrics(Protocol):
    """Further figures of a step, shown in TensorBoard and written into events.jsonl. Called on the first training rank."""

    def __call__(self, samples: "Samples", advantages: "np.ndarray", group_size: int) -> Mapping[str, float]: ...


class MetricReducer(Protocol):
    """Says what TensorBoard shows of a step: drops, renames, sums up or smooths. Called on the first training rank.

    It gets all figures of the step, those of `train.metrics` and `seconds/<phase>` among them. events.jsonl keeps the original
    ones, since `report` and `audit` count on them.
    """

    def __call__(self, step: int, figures: Mapping[str, float]) -> Mapping[str, float]: ...


class Transport(Protocol):
    """Carries bytes from the first training rank to all rollout ranks. A key is used once."""

    def put(self, key: str, data: "np.ndarray") -> None:
        """Make data, [bytes] uint8, available; every `get` of the key comes after this has returned."""

    def get(self, key: str) -> "bytes | bytearray | memoryview | np.ndarray":
        """The bytes that were put."""

    def drop(self, key: str) -> None:
        """Forget them: every engine has them."""


class WeightTransport(Protocol):
    """Gives an object with the methods `put(key, data)`, `get(key)` and `drop(key)` that carries weights from the first
    training rank to the rollout ranks.

    Called once on each of these ranks in every attempt. A version of the weights goes in several buckets; names, shapes and
    digests are checked as always, and when a bucket may be fetched or dropped is agreed on over MPI.
    """

    def __call__(self, run: Path) -> Transport: ...


class CheckpointStore(Protocol):
    """Where checkpoints are kept beside the run folder. A version appears whole or not at all."""

    def versions(self) -> Sequence[int]:
        """Those that are there, in any order."""

    def put(self, version: int, folder: Path) -> None:
        """Copy a finished checkpoint; one of the same version is replaced."""

    def get(self, version: int, folder: Path) -> None:
        """Copy a checkpoint back into an empty folder."""

    def remove(self, version: int) -> None:
        """Forget one that `checkpoint.keep` and `checkpoint.keep_every` no longer keep."""


class CheckpointBackend(Protocol):
    """Gives a store with the methods `versions()`, `put(version, folder)`, `get(version, folder)`, `remove(version)`.

    Called on the first training rank of every attempt. A checkpoint is put there after it is complete in the run folder, and
    fetched from there if the run folder's own is gone or damaged; its sums are checked as always.
    """

    def __call__(self, run: Path) -> CheckpointStore: ...


class FailurePolicy(Protocol):
    """Says what follows a failed attempt: `restart` (in the same allocation), `requeue` or `stop`; `default` is what would.

    Called on the batch host, also before the first attempt of a requeued job: it must depend on its arguments alone, and must
    say `stop` at some point. `situation.history` has number, kind, first_step and last_step of every attempt; the last one
    counts. It is not asked about a run that is done or was cancelled. If it fails, that is in job.log and the default applies.
    """

    def __call__(self, situation: "Situation", default: str) -> str: ...


@dataclass(frozen=True)
class Edge:
    """One row of the table."""

    protocol: type
    default: str
    foreign: tuple[str, ...] = ()
    """Arguments in Miles and slime, if a function of theirs can be used."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the arguments that a function gets."""
        return tuple(inspect.signature(self.protocol.__call__).parameters)[1:]

    @property
    def signature(self) -> str:
        """Such as `(prompt: str, answer: str, label: Any, metadata: Mapping[str, Any]) -> float | dict[str, float]`."""
        whole = inspect.signature(self.protocol.__call__)
        plain = whole.replace(parameters=list(whole.parameters.values())[1:])
        return re.sub(rf"'|{re.escape(__name__)}\.|typing\.|collections\.abc\.|pathlib\.", "", str(plain))


EDGES: dict[str, Edge] = {
    "model.source": Edge(ModelSource, "the checkpoint in model.path"),
    "data.prompts": Edge(DataSource, "a .jsonl or .parquet file"),
    "data.eval": Edge(DataSource, "no evaluation"),
    "warm_start.data": Edge(Demonstrations, "no warm start"),
    "rollout.generate": Edge(Generate, "one answer by the engine", ("args", "sample", "sampling_params")),
    "rollout.function": Edge(Rollout, "one answer by the engine"),
    "rollout.reward": Edge(Reward, "none: one of reward, rewards, group_reward", ("args", "sample")),
    "rollout.rewards": Edge(Reward, "none: one of reward, rewards, group_reward", ("args", "sample")),
    "rollout.group_reward": Edge(GroupReward, "none", ("args", "samples")),
    "rollout.filters": Edge(Filter, "none: every group is trained on", ("args", "samples")),
    "rollout.weight_transport": Edge(WeightTransport, "broadcast by NCCL or gloo"),
    "train.advantage": Edge(Advantage, "group_std", ("args", "samples")),
    "train.loss": Edge(Loss, "ppo"),
    "train.step_hook": Edge(StepHook, "none"),
    "train.optimizer_hook": Edge(OptimizerHook, "none"),
    "train.metrics": Edge(Metrics, "none"),
    "train.metric_reducer": Edge(MetricReducer, "every figure is shown"),
    "checkpoint.backend": Edge(CheckpointBackend, "the run folder alone"),
    "slurm.failure_policy": Edge(FailurePolicy, "restart faults, requeue lost allocations, stop at user errors"),
}
"""By configuration key."""


def named(config: Config) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Key, `module:function` and options of every edge that the configuration names."""
    for key in EDGES:
        section, _, field = key.partition(".")
        value = getattr(getattr(config, section), field, "")
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, str) and is_edge(part):
                yield key, part, {}
            elif not isinstance(part, str) and part is not None:
                yield key, part.function, part.options
