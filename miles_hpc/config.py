"""The configuration of a run: one TOML file, one frozen model per section.

`load` reads a user's file and `--set section.key=value` overrides; `read` reads the resolved file in a run folder, the only
one that ranks see. Unknown keys are refused with the nearest valid names. Nothing here imports torch.
"""

import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError, model_validator

from miles_hpc import complaints
from miles_hpc.errors import ConfigError
from miles_hpc.sections import (
    Checkpoint,
    Component,
    Data,
    Eval,
    Model,
    Rollout,
    Run,
    Section,
    Slurm,
    Train,
    WarmStart,
    is_edge,
)

__all__ = ["Component", "Config", "Data", "Train", "changed", "dump", "expanded", "is_edge", "load", "read", "toml"]

WITHIN_GROUP = ("group_std", "group_mean", "rloo", "reinforce_pp_baseline")
"""Values of `train.advantage` that are relative to the other samples of a prompt: 0 where there are none."""


class Config(Section):
    """A whole run. Sections in the order of the data."""

    run: Run
    model: Model
    data: Data
    rollout: Rollout
    train: Train
    warm_start: WarmStart | None = None
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    slurm: Slurm = Slurm()

    @model_validator(mode="after")
    def _arithmetic(self):
        for problem in _problems(self):
            raise ValueError(problem)
        return self

    @property
    def data_parallel(self) -> int:
        """Number of model replicas in training."""
        return self.slurm.train.ranks // self.train.tensor_parallel

    @property
    def patience_seconds(self) -> float:
        """Longest wait for the other role: a trainer may be in its warm start, an engine in a long generation."""
        return 4 * self.rollout.timeout_seconds

    @property
    def hang_seconds(self) -> float:
        """Longest standstill of a rank in a phase not seen before. Less than `patience_seconds`: the rank that hangs is to be
        named, not the one whose patience ends."""
        return 3 * self.rollout.timeout_seconds

    @property
    def colocated(self) -> bool:
        """Trainer and engines take turns on the same GPUs."""
        return self.run.placement == "colocate"

    @property
    def rollout_component(self) -> Component:
        """Where the engines are: colocated, one beside each `rollout.tensor_parallel` training ranks of a node."""
        train, rollout = self.slurm.train, self.slurm.rollout
        if not self.colocated:
            return rollout
        engines = train.ranks_per_node // self.rollout.tensor_parallel
        return train.model_copy(update={"ranks_per_node": engines, "cpus_per_rank": rollout.cpus_per_rank})

    @property
    def engines(self) -> int:
        """Rollout ranks, each with one engine."""
        return self.rollout_component.ranks

    @property
    def samples_per_step(self) -> int:
        """Answers that a step trains on."""
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt


def _problems(c: Config) -> Iterable[str]:
    """What does not fit together, each with what would."""
    yield from _reward_problems(c.rollout)
    yield from _placement_problems(c)
    yield from _layout_problems(c)
    yield from _length_problems(c)
    yield from _advantage_problems(c)
    if c.train.routing_replay and c.rollout.function:
        yield "train.routing_replay needs the engine's record of every answer, which a rollout.function does not hand on"
    if c.run.numerics == "exact":
        for key, value, wanted in _not_exact(c):
            yield f'run.numerics = "exact" needs {key} = {wanted}, not {value}; or set run.numerics = "native"'


def _advantage_problems(c: Config) -> Iterable[str]:
    """Advantages that would be 0 for every sample."""
    advantage = c.train.advantage
    if advantage == "none" and not c.train.teacher:
        yield 'train.advantage = "none" leaves nothing to learn from but train.teacher, which is empty'
    if c.rollout.samples_per_prompt == 1 and advantage in WITHIN_GROUP:
        others = '"gae", "reinforce_pp", "reward"' + (', or "none" (the teacher alone)' if c.train.teacher else "")
        yield (
            f'rollout.samples_per_prompt = 1 with train.advantage = "{advantage}", which compares the samples of a prompt: '
            f"every advantage would be 0; use 2 or more samples, or one of {others}"
        )


def _layout_problems(c: Config) -> Iterable[str]:
    """Ranks that do not divide what they are to share."""
    ranks, tp, ep = c.slurm.train.ranks, c.train.tensor_parallel, c.train.expert_parallel
    if ranks % tp:
        yield f"slurm.train has {ranks} ranks, not divisible by train.tensor_parallel = {tp}; {_divisors(ranks)} would fit"
    elif ranks % ep:
        yield f"slurm.train has {ranks} ranks, not divisible by train.expert_parallel = {ep}; {_divisors(ranks)} would fit"
    dp = max(1, ranks // tp)
    unit, samples = dp * c.train.mini_batches, c.samples_per_step
    if samples % unit:
        fits = f"{_nearest(samples, unit)} samples per step" if samples % dp else f"{_divisors(samples // dp)} mini-batches"
        yield (
            f"rollout.prompts_per_step x rollout.samples_per_prompt = {c.rollout.prompts_per_step} x "
            f"{c.rollout.samples_per_prompt} = {samples}, not divisible by {dp} data-parallel ranks of slurm.train x "
            f"train.mini_batches = {c.train.mini_batches}; {fits} would fit"
        )
    if c.rollout.prompts_per_step < c.engines:
        yield (
            f"rollout.prompts_per_step = {c.rollout.prompts_per_step} leaves some of {c.engines} engines idle; "
            f"use at least {c.engines} prompts or fewer rollout ranks"
        )


def _length_problems(c: Config) -> Iterable[str]:
    if c.rollout.max_new_tokens >= c.model.context_length:
        yield (
            f"rollout.max_new_tokens = {c.rollout.max_new_tokens} leaves no room for a prompt in "
            f"model.context_length = {c.model.context_length}"
        )
    if c.rollout.kv_cache_tokens < c.model.context_length:
        yield (
            f"rollout.kv_cache_tokens = {c.rollout.kv_cache_tokens} does not hold one sequence of "
            f"model.context_length = {c.model.context_length}"
        )


def _placement_problems(c: Config) -> Iterable[str]:
    if c.colocated and c.rollout.weight_transport:
        yield 'run.placement = "colocate" hands weights over in memory; rollout.weight_transport has no place in it'
    if c.colocated:
        yield from _colocation_problems(c)
        return
    gpus = c.slurm.rollout.gpus_per_node
    if gpus and gpus % (c.slurm.rollout.ranks_per_node * c.rollout.tensor_parallel):
        yield (
            f"slurm.rollout.gpus_per_node = {gpus} is not divisible by {c.slurm.rollout.ranks_per_node} ranks x "
            f"rollout.tensor_parallel = {c.rollout.tensor_parallel}"
        )
    if c.train.offload:
        yield 'train.offload has no meaning with run.placement = "split": nobody else is on the GPUs of training'


def _colocation_problems(c: Config) -> Iterable[str]:
    colocate, train, tp = 'run.placement = "colocate"', c.slurm.train, c.rollout.tensor_parallel
    if c.rollout.staleness:
        yield f"{colocate} needs rollout.staleness = 0, not {c.rollout.staleness}: training and generation take turns"
    if train.ranks_per_node % tp:
        yield (
            f"slurm.train.ranks_per_node = {train.ranks_per_node} is not divisible by rollout.tensor_parallel = {tp}: "
            f"{colocate} puts one engine beside each {tp} training ranks of a node"
        )
    if train.gpus_per_node and train.gpus_per_node != train.ranks_per_node:
        yield f"{colocate} needs a training rank for each of slurm.train.gpus_per_node = {train.gpus_per_node} GPUs"
    for key, default in Component().model_dump(exclude={"cpus_per_rank"}).items():
        if getattr(c.slurm.rollout, key) != default:
            yield f"slurm.rollout.{key} has no meaning with {colocate}: engines are on the nodes of slurm.train"


def _reward_problems(rollout: Rollout) -> Iterable[str]:
    if bool(rollout.reward) == bool(rollout.rewards) and not (rollout.group_reward and not rollout.reward):
        yield "one of rollout.reward, rollout.rewards and rollout.group_reward is needed, and not both of the first two"
    if rollout.generate and rollout.function:
        yield "rollout.generate and rollout.function both say how answers are made; only one can be"
    if rollout.unfinished == "continue" and (rollout.generate or rollout.function):
        key = "generate" if rollout.generate else "function"
        yield f'rollout.unfinished = "continue" cannot go on in the middle of a rollout.{key}; "redo" asks it again'
    names = [part.name for part in rollout.rewards]
    if len(set(names)) < len(names):
        yield f"rollout.rewards has a name twice: {', '.join(names)}"


def _not_exact(c: Config) -> Iterable[tuple[str, int, int]]:
    """Settings that exact numerics do not cover: key, value, what it must be."""
    settings = {
        "train.tensor_parallel": (c.train.tensor_parallel, 1),
        "train.expert_parallel": (c.train.expert_parallel, 1),
        "rollout.tensor_parallel": (c.rollout.tensor_parallel, 1),
        "rollout.staleness": (c.rollout.staleness, 0),
    }
    return ((key, value, wanted) for key, (value, wanted) in settings.items() if value != wanted)


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


def _nearest(n: int, unit: int) -> str:
    below = n - n % unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def load(file: Path, overrides: Sequence[str] = ()) -> Config:
    """A user's TOML file with `--set` overrides; file names in it become absolute.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type, numbers that do not fit together.
    """
    text = _text(file)
    raw = _toml(file, text)
    _override_all(raw, overrides)
    _absolute(raw, file.resolve().parent)
    return _validate(raw, str(file), text, overrides)


def read(file: Path) -> Config:
    """The resolved configuration of a run folder.

    Raises:
        ConfigError: missing or damaged.
    """
    text = _text(file)
    return _validate(_toml(file, text), str(file), text)


def toml(file: Path) -> dict[str, Any]:
    """Any TOML file. Raises: ConfigError: it cannot be read."""
    return _toml(file, _text(file))


def changed(before: Config, overrides: Sequence[str], file: Path) -> Config:
    """A resolved configuration with `--set` overrides; file names in them are relative to the run's TOML file, as at first.

    Args:
        file: where the configuration lies, for messages.

    Raises:
        ConfigError: as `load`.
    """
    raw = before.model_dump(exclude_none=True)
    _override_all(raw, overrides)
    _absolute(raw, Path(before.run.edges_folder))
    return _validate(raw, str(file), overrides=overrides)


def dump(config: Config) -> str:
    """The resolved configuration as TOML text, every value spelled out."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")  # editors of Windows put a byte order mark first
    except FileNotFoundError:
        hint = "name an existing TOML file, for example docs/examples/arithmetic-moe.toml"
        raise ConfigError("no such file", where=str(file), next_step=hint) from None
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
        raise ConfigError(what, where=str(file), next_step="name a TOML file that you may read") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 (byte {error.start})", where=str(file), next_step="save it as UTF-8") from None


def _toml(file: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        hint = "correct that line; docs/examples has files to compare with"
        raise ConfigError(f"not valid TOML: {error}", where=str(file), next_step=hint) from None


def _override_all(raw: dict[str, Any], overrides: Iterable[str]) -> None:
    for text in overrides:
        _override(raw, text)


def _override(raw: dict[str, Any], text: str) -> None:
    key, sign, value = text.partition("=")
    parts = key.strip().split(".")
    if not sign or len(parts) < 2 or not all(parts):
        raise ConfigError(f"--set {text!r} is not section.key=value", next_step="for example --set train.lr=1e-6")
    table = raw
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {text!r}: {part} is a value, not a section", next_step="for example --set train.lr=1e-6")
    table[parts[-1]] = _value(value.strip())


def _value(text: str) -> Any:
    """A TOML value, or the text itself (so that strings need no quotes)."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except (ValueError, RecursionError):
        return text


def _absolute(raw: dict[str, Any], folder: Path) -> None:
    """File names relative to the TOML file become absolute; the folder itself is kept for edges beside the file."""
    run, model, data, train = (raw.get(section) for section in ("run", "model", "data", "train"))
    if isinstance(run, dict):
        run.setdefault("edges_folder", str(folder))
    for section, key in ((model, "path"), (train, "teacher")):
        if isinstance(section, dict) and isinstance(section.get(key), str) and section[key]:
            section[key] = str(folder / expanded(section[key]))
    for key in ("prompts", "eval"):
        value = data.get(key) if isinstance(data, dict) else None
        if isinstance(data, dict) and isinstance(value, str) and value and not is_edge(value):
            data[key] = str(folder / expanded(value))


def expanded(name: str) -> Path:
    """The file with the home folder for `~`; as it is written where there is no such user."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def _validate(raw: dict[str, Any], file: str, text: str = "", overrides: Sequence[str] = ()) -> Config:
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise complaints.of(error, Config, file, text, overrides) from None
