"""Users' functions made callable: loaded, checked against their protocol, options bound, Miles' signatures adapted."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial, update_wrapper
from typing import Any

from miles_hpc import edges, foreign
from miles_hpc.config import Config
from miles_hpc.protocols import EDGES


def attach(config: Config, key: str, name: str, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """The function `name` for the edge `key` of `protocols.EDGES`.

    A function whose first parameter is called `args` has a signature of Miles and slime and is adapted (`foreign.py`).

    Args:
        options: keyword arguments from the configuration.

    Raises:
        EdgeError: not importable, or not callable like that.
    """
    foreign.offer_modules()
    kind, options = EDGES[key], options or {}
    function = edges.find(name, config.run.edges_folder, key=key)
    if kind.foreign and _first_parameter(function) == "args":
        edges.check_signature(function, name, key, kind.foreign)
        adapter = foreign.ADAPTERS[key](function, foreign.arguments(config, options))
        return update_wrapper(adapter, function)
    edges.check_signature(function, name, key, kind.arguments, options)
    return update_wrapper(partial(function, **options), function) if options else function


def _first_parameter(function: Callable[..., Any]) -> str:
    try:
        return next(iter(inspect.signature(function).parameters), "")
    except (ValueError, TypeError):
        return ""
