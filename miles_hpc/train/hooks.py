"""Users' functions around a training step: `train.step_hook`, `metrics`, `metric_reducer`, `optimizer_hook`."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from miles_hpc import attach, edges
from miles_hpc.config import Config
from miles_hpc.samples.schema import Samples
from miles_hpc.train.optimizer import AdamW


@dataclass(frozen=True)
class Hooks:
    """Those that are named; None does nothing."""

    step_hook: Callable[..., Any] | None = None
    metric_function: Callable[..., Any] | None = None
    optimizer_hook: Callable[..., Any] | None = None
    metric_reducer: Callable[..., Any] | None = None

    @classmethod
    def of(cls, config: Config) -> "Hooks":
        """Those that the configuration names. Raises: EdgeError if one cannot be loaded."""
        train = config.train
        names = {
            "train.step_hook": train.step_hook,
            "train.metrics": train.metrics,
            "train.optimizer_hook": train.optimizer_hook,
            "train.metric_reducer": train.metric_reducer,
        }
        return cls(*(attach.attach(config, key, name) if name else None for key, name in names.items()))

    def step(self, event: str, step: int, facts: Mapping[str, float]) -> None:
        """Call the step hook. Raises: EdgeError if it raised."""
        if self.step_hook:
            edges.call(self.step_hook, event, step, dict(facts), key="train.step_hook")

    def metrics(self, samples: Samples, advantages: np.ndarray, group_size: int) -> dict[str, float]:
        """The user's figures of a step. Raises: EdgeError if they are no finite numbers by name."""
        if not self.metric_function:
            return {}
        found = edges.call(self.metric_function, samples.read_only(), advantages.copy(), group_size, key="train.metrics")
        return _figures(found, "train.metrics", self.metric_function)

    def shown(self, step: int, figures: Mapping[str, float]) -> dict[str, float]:
        """What TensorBoard gets of a step. Raises: EdgeError if they are no finite numbers by name."""
        if not self.metric_reducer:
            return dict(figures)
        found = edges.call(self.metric_reducer, step, dict(figures), key="train.metric_reducer")
        return _figures(found, "train.metric_reducer", self.metric_reducer)

    def hyperparameters(self, step: int, values: AdamW) -> AdamW:
        """What the optimizer uses in a step. Raises: EdgeError if the hook returned something else."""
        if not self.optimizer_hook:
            return values
        found = edges.call(self.optimizer_hook, step, values, key="train.optimizer_hook")
        if not isinstance(found, AdamW) or not all(isinstance(value, int | float) and math.isfinite(value) for value in found):
            raise edges.wrong("train.optimizer_hook", self.optimizer_hook, "an AdamW of finite numbers", found)
        return found


def _figures(found: Any, key: str, function: Callable[..., Any]) -> dict[str, float]:
    """Raises: EdgeError."""
    try:
        figures = {str(name): float(value) for name, value in found.items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        figures = {"": math.nan}
    if not all(map(math.isfinite, figures.values())):
        raise edges.wrong(key, function, "a mapping of names to finite numbers", found)
    return figures
