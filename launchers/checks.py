"""What can be known before the queue: partitions and nodes, files, edges. User code is parsed, never run."""

import ast
import difflib
import importlib.util
from collections import Counter
from pathlib import Path

from miles_hpc import config as configuration
from miles_hpc import protocols, records
from miles_hpc.config import Config, Data
from miles_hpc.errors import DataError, EdgeError, ModelError, SiteError
from miles_hpc.launchers.controller import Partition
from miles_hpc.launchers.spec import JobSpec


def check_nodes(job: JobSpec, partitions: dict[str, Partition]) -> None:
    """Partitions exist and have as many nodes as the components want together.

    Raises:
        SiteError: they do not.
    """
    default = next((p.name for p in partitions.values() if p.default), "")
    wanted: Counter[str] = Counter()
    for component in job.components if job.single is None else (job.single,):
        for name in (component.partition or default).split(","):
            if name and name not in partitions:
                near = difflib.get_close_matches(name, partitions) or sorted(partitions)
                raise SiteError(
                    f"no partition {name!r} here; did you mean {', '.join(near)}?", where=f"slurm.{component.role}.partition"
                )
        wanted[component.partition or default] += component.nodes + component.spares
    for names, nodes in wanted.items():
        there = sum(partitions[n].nodes for n in names.split(",") if n in partitions)
        if names and nodes > there:
            raise SiteError(
                f"{nodes} nodes wanted, partition {names} has {there}",
                where="slurm.train.nodes, slurm.rollout.nodes",
                next_step="ask for fewer nodes, or name another partition",
            )


def check_files(config: Config) -> None:
    """Model, data and edge files exist; edges define their function. User code is read, never run.

    Raises:
        ModelError, DataError, EdgeError: one of them does not.
    """
    folder = Path(config.run.edges_folder)
    model = Path(config.model.path)
    if config.model.path and not config.model.source and not (model / "config.json").is_file():
        raise ModelError("no Hugging Face checkpoint there (config.json is missing)", where=f"model.path = {model}")
    if config.train.teacher and not (Path(config.train.teacher) / "config.json").is_file():
        what = "no Hugging Face checkpoint there (config.json is missing)"
        raise ModelError(what, where=f"train.teacher = {config.train.teacher}")
    for key in ("prompts", "eval"):
        _check_data(f"data.{key}", getattr(config.data, key), config.data)
    for key, edge, _ in protocols.named(config):
        _check_edge(key, edge, folder)


def _check_data(key: str, value: str, columns: Data) -> None:
    """Lines of JSONL are read; a Parquet file, which takes libraries that are slow to load, is looked into by the job."""
    if not value or configuration.is_edge(value):
        return
    file = Path(value)
    if file.is_dir():
        raise DataError("a folder, not a file", where=f"{key} = {file}", next_step="name a .jsonl or .parquet file in it")
    if not file.is_file():
        raise DataError("no such file", where=f"{key} = {file}")
    if not file.stat().st_size:
        raise DataError("the file is empty", where=f"{key} = {file}")
    if not records.is_parquet(file):
        records.check_head(file, columns)


def _check_edge(key: str, edge: str, folder: Path) -> None:
    module, _, function = edge.partition(":")
    if (file := find_module(module, folder)) is None:
        raise EdgeError(f"module {module!r} is neither installed nor beside the TOML file", where=f"{key} = {edge}, {folder}")
    if file.suffix != ".py":
        return
    try:
        # as Python does it, with byte order marks and encodings that the file declares
        names = _names(ast.parse(importlib.util.decode_source(file.read_bytes()), str(file)).body)
    except (SyntaxError, ValueError) as error:
        raise EdgeError(f"cannot be parsed: {error}", where=f"{key} = {edge}, {file}") from None
    if not names & {function, "*", "__getattr__"}:
        near = difflib.get_close_matches(function, names) or sorted(names)
        hint = f"did you mean {', '.join(near[:5])}?" if near else "it defines nothing"
        raise EdgeError(f"no function {function!r} in it; {hint}", where=f"{key} = {edge}, {file}")


def find_module(module: str, folder: Path) -> Path | None:
    """File of a module without importing it or its parents: installed ones first, then beside the TOML file."""
    top, *rest = module.split(".")
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        found = None
    roots = [Path(p).parent for p in (found.submodule_search_locations or ())] if found else []
    if found and not rest and found.origin and not roots:
        return Path(found.origin)
    for root in [*roots, folder]:
        base = root.joinpath(top, *rest)
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                return file
    return None


def _names(body: list[ast.stmt]) -> set[str]:
    """Names that a module defines at its top level, also within `if`, `try`, `with` and loops."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names.update(n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
        else:
            inner = [getattr(node, part, []) for part in ("body", "orelse", "finalbody")]
            inner += [part.body for part in (*getattr(node, "handlers", []), *getattr(node, "cases", []))]
            names |= _names([statement for part in inner for statement in part])
    return names
