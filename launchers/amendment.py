"""`miles-submit resume --set`: which keys of a run may change between two attempts, and which did."""

import json
import shlex
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from miles_hpc import config as configuration
from miles_hpc.config import Config
from miles_hpc.errors import ConfigError
from miles_hpc.launchers import autopsy
from miles_hpc.paths import RunPaths

Changes = Mapping[str, list[Any]]
"""By key: the value of the attempt before, and that of this one; None where there was none."""

OWN = ("run.name", "run.folder", "run.edges_folder")
OF_MODEL = ("model.path", "model.source", "run.seed")
"""What the run made its model folder from."""
OF_STEPS = (
    *OF_MODEL,
    "model.dtype",
    "data.prompts",
    "rollout.prompts_per_step",
    "rollout.samples_per_prompt",
    "rollout.staleness",
    "train.advantage",
    "train.expert_parallel",
    "train.routing_replay",
)
"""What checkpoints and samples of earlier steps depend on, and what `audit` counts them by."""


def amended(folder: Path, before: Config, overrides: Sequence[str]) -> Config:
    """The run's configuration with `--set` overrides, checked as at its submission; writes nothing.

    Raises:
        ConfigError: what a submission would refuse, or a key that has to stay as it is.
    """
    paths = RunPaths(folder)
    after = configuration.changed(before, overrides, paths.config)
    for key, reason in _fixed(paths):
        was, now = _value(before, key), _value(after, key)
        if was != now:
            override = shlex.quote(f"{key}={now if isinstance(now, str) else json.dumps(now)}")
            what, hint = f"{key} stays {was!r}: {reason}", f"begin a new run: miles-submit run FILE --set {override}"
            raise ConfigError(what, where=str(paths.config), next_step=hint)
    return after


def _fixed(paths: RunPaths) -> Iterator[tuple[str, str]]:
    """Keys that may not change, each with the reason."""
    yield from ((key, "it tells runs apart") for key in OWN)
    if paths.saved_steps():
        yield from ((key, f"the checkpoints in {paths.checkpoints} were made with it") for key in OF_STEPS)
    elif paths.sampled_steps():
        yield from ((key, f"the samples in {paths.samples} were made with it") for key in OF_STEPS)
    elif paths.model.exists():
        yield from ((key, f"{paths.model} was made with it") for key in OF_MODEL)


def _value(config: Config, key: str) -> object:
    return reduce(getattr, key.split("."), config)


def noted(paths: RunPaths, attempt: int) -> Changes:
    """What `--set`, or a hand, has changed since the attempt before; keeps the configuration for the attempt after."""
    shutil.copyfile(paths.config, paths.attempt_config(attempt))
    before, after = _values(paths.attempt_config(attempt - 1)), _values(paths.attempt_config(attempt))
    keys = (before | after).keys() if before else ()
    return {key: [before.get(key), after.get(key)] for key in keys if before.get(key) != after.get(key)}


def _values(file: Path) -> dict[str, Any]:
    """Values by key, none where the file is not there: of an attempt before there was such a file, or on a full disk."""
    try:
        return dict(_flat(tomllib.loads(file.read_text(encoding="utf-8-sig"))))
    except (OSError, ValueError):
        return {}


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def changes(paths: RunPaths, attempt: int) -> Changes:
    """What was changed before an attempt, as its start.json says."""
    return autopsy.started(paths, attempt).changed


def sentence(changed: Changes) -> str:
    """`train.lr 0.001 -> 1e-06, run.steps 40 -> 80`; empty where nothing was changed."""
    return ", ".join(f"{key} {' -> '.join(map(_text, pair))}" for key, pair in changed.items())


def _text(value: Any) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
