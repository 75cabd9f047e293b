"""Users' functions made callable: loaded, checked against their protocol, options bound, Miles' signatures adapted."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial, update_wrapper
from pathlib import Path
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


def attach_object(config: Config, key: str, name: str, folder: Path, methods: Mapping[str, tuple[str, ...]]) -> Any:
    """What the function `name` for the edge `key` returns for a run folder.

    Args:
        methods: those that it must have, with their positional arguments.

    Raises:
        EdgeError: the function cannot be loaded, raised, or returned something without these methods.
    """
    function = attach(config, key, name)
    made = edges.call(function, folder, key=key)
    for method, arguments in methods.items():
        if not callable(getattr(made, method, None)):
            raise edges.wrong(key, function, f"an object with the methods {', '.join(methods)}", made)
        edges.check_signature(getattr(made, method), f"{name}.{method}", key, arguments)
    return made


def _first_parameter(function: Callable[..., Any]) -> str:
    """Its name; empty where there is none, or any number of them as in `*args`."""
    try:
        first = next(iter(inspect.signature(function).parameters.values()), None)
    except (ValueError, TypeError):
        return ""
    return first.name if first and first.kind is not first.VAR_POSITIONAL else ""
