"""What can be known before the queue: partitions and nodes, files, edges. User code is parsed, never run."""

import ast
import difflib
import importlib.util
from collections import Counter
from pathlib import Path

from miles_hpc import config as configuration
from miles_hpc import edges, protocols, records
from miles_hpc.config import Config, Data
from miles_hpc.errors import DataError, EdgeError, ModelError, SiteError
from miles_hpc.launchers.controller import Kind, Partition
from miles_hpc.launchers.spec import Component, JobSpec

NO_CHECKPOINT = "no Hugging Face checkpoint there (config.json is missing)"


def check_nodes(job: JobSpec, partitions: dict[str, Partition]) -> None:
    """Partitions exist and have as many nodes as the components want together, with the cores, GPUs and memory that each wants.

    Raises:
        SiteError: they do not.
    """
    default = next((p.name for p in partitions.values() if p.default), "")
    components = {c: (c.partition or default).split(",") for c in (job.components if job.single is None else (job.single,))}
    wanted: Counter[str] = Counter()
    for component, names in components.items():
        _check_names(component, names, partitions)
        wanted[",".join(names)] += component.nodes + component.spares
    for text, nodes in wanted.items():
        there = sum(partitions[n].nodes for n in text.split(",") if n in partitions)
        if text and nodes > there:
            raise SiteError(
                f"{nodes} nodes wanted, partition {text} has {there}",
                where="slurm.train.nodes, slurm.rollout.nodes",
                next_step="ask for fewer nodes, or name another partition",
            )
    for component, names in components.items():
        if any(names):
            _check_kinds(component, ",".join(names), [kind for name in names for kind in partitions[name].kinds])


def _check_names(component: Component, names: list[str], partitions: dict[str, Partition]) -> None:
    for name in names:
        if name and name not in partitions:
            near = difflib.get_close_matches(name, partitions) or sorted(partitions)
            what = f"no partition {name!r} here; did you mean {', '.join(near)}?"
            raise SiteError(what, where=_keys(component, "partition"), next_step="name one that `sinfo -s` shows")


def _check_kinds(component: Component, partition: str, kinds: list[Kind]) -> None:
    """Enough of the nodes are large enough, whatever else runs on them now."""
    nodes, cores = component.nodes + component.spares, component.ranks_per_node * component.cpus_per_rank
    sizes = (
        ("gpus_per_node", component.gpus_per_node, "GPUs", [kind.gpus for kind in kinds]),
        ("cpus_per_rank", cores, "cores (ranks_per_node x cpus_per_rank)", [kind.cpus for kind in kinds]),
        ("memory_gb", component.memory_gb * 1024, "MB of memory", [kind.memory_mb for kind in kinds]),
    )
    for key, wanted, noun, there in sizes:
        if sum(kind.nodes for kind, size in zip(kinds, there, strict=True) if size >= wanted) < nodes:
            noun = f"{wanted} {noun}{' each' * (nodes > 1)}"
            raise SiteError(
                f"{nodes} node{'s' * (nodes > 1)} with {noun} wanted; those of partition {partition} have {_few(there)}",
                where=_keys(component, key),
                next_step="ask for less, or name another partition; all nodes: sinfo -N -o '%N %P %c %m %G'",
            )


def _few(sizes: list[int]) -> str:
    """The different numbers, largest first."""
    return ", ".join(str(size) for size in sorted(set(sizes), reverse=True))


def _keys(component: Component, key: str) -> str:
    """The configuration's name of `key`; nodes of a homogeneous job have that of both roles."""
    roles = ("train", "rollout") if component.role == "all" else (component.role,)
    return ", ".join(f"slurm.{role}.{key}" for role in roles)


def check_files(config: Config) -> None:
    """Model, data and edge files exist; edges define their function. User code is read, never run.

    Raises:
        ModelError, DataError, EdgeError: one of them does not.
    """
    folder = Path(config.run.edges_folder)
    edges.search(config.run.edges_folder)
    model = Path(config.model.path)
    if config.model.path and not config.model.source and not (model / "config.json").is_file():
        hint = "name the folder of a checkpoint, or a function that makes one: model.source"
        raise ModelError(NO_CHECKPOINT, where=f"model.path = {model}", next_step=hint)
    if config.train.teacher and not (Path(config.train.teacher) / "config.json").is_file():
        hint = "name the folder of a checkpoint; a relative one is beside the TOML file"
        raise ModelError(NO_CHECKPOINT, where=f"train.teacher = {config.train.teacher}", next_step=hint)
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
        hint = "name a .jsonl or .parquet file; a relative one is beside the TOML file"
        raise DataError("no such file", where=f"{key} = {file}", next_step=hint)
    if not file.stat().st_size:
        raise DataError("the file is empty", where=f"{key} = {file}", next_step="name one with a prompt per line")
    if not records.is_parquet(file):
        records.check_head(file, columns)


def _check_edge(key: str, edge: str, folder: Path) -> None:
    module, _, function = edge.partition(":")
    if (file := find_module(module, folder)) is None:
        what, hint = (
            f"module {module!r} is neither installed nor beside the TOML file",
            f"put {module}.py there, or correct the name",
        )
        raise EdgeError(what, where=f"{key} = {edge}, {folder}", next_step=hint)
    if file.suffix != ".py":
        return
    try:
        # as Python does it, with byte order marks and encodings that the file declares
        names = _names(ast.parse(importlib.util.decode_source(file.read_bytes()), str(file)).body)
    except (SyntaxError, ValueError) as error:
        hint = "correct the file; python FILE shows the same"
        raise EdgeError(f"cannot be parsed: {error}", where=f"{key} = {edge}, {file}", next_step=hint) from None
    if not names & {function, "*", "__getattr__"}:
        near = difflib.get_close_matches(function, names) or sorted(names)
        hint = f"did you mean {', '.join(near[:5])}?" if near else "it defines nothing"
        what = f"no function {function!r} in it; {hint}"
        raise EdgeError(what, where=f"{key} = {edge}, {file}", next_step="correct the name, or define the function there")


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
