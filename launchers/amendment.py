"""`miles-submit resume --set`: which keys of a run may change between two attempts."""

from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path

from miles_hpc import config as configuration
from miles_hpc.config import Config
from miles_hpc.errors import ConfigError
from miles_hpc.paths import RunPaths

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
            what = f"{key} stays {was!r}: {reason}"
            raise ConfigError(
                what, where=str(paths.config), next_step=f"begin a new run: miles-submit run FILE --set {key}={now}"
            )
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
