"""Edges: users' functions, named in the configuration as `module:function`.

The folder of the TOML file is appended to `sys.path`, never put first: a user's `kernels.py` must not hide an installed
package.
"""

import asyncio
import importlib
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from miles_hpc.errors import EdgeError

EXCERPT = 80
"""Characters of a wrong value that a message shows."""
_searched = [""]
"""The run's folder that `search` has put into `sys.path`; empty: none."""


def load(name: str, folder: str, *, key: str, arguments: tuple[str, ...]) -> Callable[..., Any]:
    """The function `name` ("module:function"), importable and callable with the positional `arguments`.

    Args:
        folder: the folder of the TOML file, searched last; empty: none.
        key: the configuration key that names the function, for messages.
        arguments: names of the positional arguments it will be called with.

    Raises:
        EdgeError: not importable (with file and line), no such function, not callable like that.
    """
    function = find(name, folder, key=key)
    check_signature(function, name, key, arguments)
    return function


def find(name: str, folder: str, *, key: str) -> Callable[..., Any]:
    """As `load`, whatever the signature."""
    search(folder)
    module_name, _, attribute = name.partition(":")
    function = getattr(_module(module_name, name, key, folder), attribute, None)
    if not callable(function):
        raise EdgeError(
            f"module {module_name} has no function {attribute}", where=f"{key} = {name!r}", next_step=_fix(module_name)
        )
    return function


def call(function: Callable[..., Any], *arguments: Any, key: str) -> Any:
    """`function(*arguments)`, a coroutine run to its end; whatever it raises becomes an EdgeError with file and line.

    Raises:
        EdgeError: the function raised.
    """
    process = os.getpid()
    try:
        value = function(*arguments)
        return asyncio.run(value) if inspect.iscoroutine(value) else value
    except EdgeError as error:  # of a function within the function
        raise EdgeError(f"{key}: {error.what}", where=error.where) from error
    except BaseException as error:  # also what is no Exception, such as an exit or a cancelled task
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # the user's own, at the keyboard
        raise EdgeError(f"{key} raised {describe(error)}", where=location(error)) from error
    finally:
        if os.getpid() != process:
            # The function forked and its child came back: as a second rank it would call it again, and fork again.
            os._exit(1)


def wrong(key: str, function: Callable[..., Any], expected: str, got: Any) -> EdgeError:
    """The error for a return value of the wrong kind."""
    what = f"{key} must return {expected}, got {type(got).__name__}: {_excerpt(got)}"
    return EdgeError(what, where=place(function))


def place(function: Callable[..., Any]) -> str:
    """'file:line' where a function begins."""
    code = inspect.unwrap(function)
    try:
        return f"{inspect.getsourcefile(code)}:{inspect.getsourcelines(code)[1]}"
    except (OSError, TypeError):
        return repr(function)


def describe(error: BaseException) -> str:
    """'ValueError: text' in one line."""
    return f"{type(error).__name__}: {error}".replace("\n", " ")


def location(error: BaseException) -> str:
    """'file:line' of the innermost frame of `error`; of the text itself for a syntax error."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def search(folder: str) -> None:
    """Search `folder` last from now on, and no other run's: one process may look at several that name their modules alike."""
    before = _searched[0]
    if before and before != folder:
        sys.path[:] = [path for path in sys.path if path != before]
        for name, module in list(sys.modules.items()):
            if (getattr(module, "__file__", None) or "").startswith(f"{before}/"):
                del sys.modules[name]
        _searched[0] = ""
    if folder and folder not in sys.path:  # what is there already is not ours to remove
        sys.path.append(folder)
        _searched[0] = folder


def _module(module_name: str, name: str, key: str, folder: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name and not module_name.startswith(f"{error.name}."):
            raise EdgeError(f"{key} = {name!r} needs {error.name}, which is not installed", where=location(error)) from error
        expected = Path(folder or ".") / f"{module_name.replace('.', '/')}.py"
        raise EdgeError(
            f"{key} = {name!r}: there is no module {module_name}", where=str(expected), next_step=_fix(module_name)
        ) from None
    except (Exception, SystemExit) as error:
        raise EdgeError(f"{key} = {name!r} cannot be imported: {describe(error)}", where=location(error)) from error


def _fix(module_name: str) -> str:
    return f"put the function into {module_name}.py beside the TOML file, or correct the name"


def check_signature(
    function: Callable[..., Any], name: str, key: str, arguments: tuple[str, ...], options: Mapping[str, Any] | None = None
) -> None:
    """Look whether `function` can be called with these positional arguments, and options by keyword. Raises: EdgeError."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return  # a builtin without a signature
    try:
        signature.bind(*arguments, **(options or {}))
    except TypeError as error:
        code = getattr(inspect.unwrap(function), "__code__", None)
        named = [f"{option}=..." for option in options or {}]
        raise EdgeError(
            f"{key} = {name!r} has the signature {signature}; it is called with ({', '.join([*arguments, *named])}): {error}",
            where=f"{code.co_filename}:{code.co_firstlineno}" if code else name,
        ) from None


def _excerpt(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= EXCERPT else text[: EXCERPT - 3] + "..."
