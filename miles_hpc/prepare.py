"""What can be wrong with a user's input, found before the ranks start: `python -m miles_hpc.prepare --run FOLDER --attempt N`.

Runs once on the batch host: imports the edges, makes the model folder if it is missing, reads the data. Exit code 0, or 2
with a verdict `user_error` and the message on stderr. A restart does not wait for it: what the ranks before have read is good.
"""

import argparse
import json
import os
import shutil
import socket
import sys
import zlib
from pathlib import Path
from typing import Any

from miles_hpc import archive, calls, config, data, demonstrations, edges, shape, statement, verdicts
from miles_hpc.config import Config
from miles_hpc.errors import EdgeError, ModelError, UserError
from miles_hpc.paths import RunPaths
from miles_hpc.rollout.arguments import stop_tokens
from miles_hpc.sections import ARCHITECTURES


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m miles_hpc.prepare", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run folder")
    parser.add_argument("--attempt", type=int, required=True, help="number of this attempt")
    arguments = parser.parse_args(argv)
    paths = RunPaths(arguments.run)
    try:
        if not passed(paths, arguments.attempt):
            prepare(config.read(paths.config), paths)
    except Exception as error:
        place = {"role": "prepare", "host": socket.gethostname(), "phase": "prepare"}
        code = error.exit_code if isinstance(error, UserError) else 1
        fields = verdicts.of_error(error, verdicts.logs(paths.folder, "job"))  # no rank has a log yet
        verdicts.write(paths, arguments.attempt, **(fields | place | {"exit_code": code}))
        if not isinstance(error, UserError):
            raise
        print(f"error: {error}", file=sys.stderr)
        return code
    return 0


def passed(paths: RunPaths, attempt: int) -> bool:
    """True if the attempt before got as far as its ranks and the user has said nothing since."""
    if not paths.launcher_log(attempt - 1).exists():
        return False
    first = statement.read(paths.job).get("first_attempt")  # in a damaged job.json none: to look once more is never wrong
    return isinstance(first, int) and attempt > first


def prepare(run: Config, paths: RunPaths) -> None:
    """Check edges, model and data of a run; make its model folder if it is missing.

    Raises:
        EdgeError, ModelError, DataError.
    """
    from miles_hpc import transport  # loads torch

    if run.warm_start:
        demonstrations.load(run, 1)
    calls.check(run)
    archive.check(run, paths)
    transport.check(run, paths)
    folder = paths.model_of(run)
    make_model(run, folder)
    facts = check_model(folder, run.model.context_length)
    if run.train.routing_replay and not facts.get("num_experts"):
        what, hint = "train.routing_replay = true, but the model has no experts", "set train.routing_replay = false"
        raise ModelError(what, where=str(folder / "config.json"), next_step=hint)
    tokenizer = data.tokenizer_of(folder)
    shape.check_tokens(facts, folder / "config.json", tokenizer.get_vocab(), stop_tokens(folder))
    if run.warm_start:
        demonstrations.check_end(tokenizer, folder)
    check_teacher(run, tokenizer)
    limit = run.model.context_length - run.rollout.max_new_tokens
    prompts = data.load(run, "train", tokenizer)
    prompts.check(limit)
    calls.check_reward(run, prompts.rows[0], prompts.text(0))
    calls.check_generate(run, prompts.rows[0], prompts.text(0), tokenizer)
    if run.data.eval:
        data.load(run, "eval", tokenizer).check(limit)


def check_teacher(run: Config, tokenizer: Any) -> None:
    """A teacher reads the policy's tokens.

    Raises:
        ModelError: it cannot be trained with, or has another tokenizer.
    """
    if not run.train.teacher:
        return
    folder = Path(run.train.teacher)
    check_model(folder, run.model.context_length)
    if data.tokenizer_of(folder).get_vocab() != tokenizer.get_vocab():
        raise ModelError(
            "the teacher's tokenizer is not the policy's",
            where=f"train.teacher = {folder}",
            next_step="distil from a model of the same family",
        )


def make_model(run: Config, folder: Path) -> None:
    """Let `model.source` write the checkpoint if `folder` has none; a half-written one never appears under its name.

    Raises:
        ModelError: there is none and no source. EdgeError: the source raised or wrote no config.json.
    """
    temporary = _temporary(run, folder)
    shutil.rmtree(temporary, ignore_errors=True)  # of an attempt that was killed while the source wrote
    if (folder / "config.json").exists():
        return
    if not run.model.source:
        raise ModelError("no such model folder (config.json is missing)", where=str(folder), next_step="correct model.path")
    key = "model.source"
    source = edges.load(run.model.source, run.run.edges_folder, key=key, arguments=("folder", "seed"))
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise ModelError(f"cannot be written: {error.strerror}", where=str(folder)) from None
    try:
        edges.call(source, temporary, run.run.seed, key=f"{key} = {run.model.source!r}")
        if not (temporary / "config.json").exists():
            raise EdgeError(f"{key} = {run.model.source!r} wrote no config.json", where=str(folder))
        _publish(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _temporary(run: Config, folder: Path) -> Path:
    """Of this run alone, which has one attempt at a time: several may make the same model at once."""
    return folder.with_name(f".{folder.name}.{zlib.crc32(run.run.folder.encode()):08x}")


def _publish(temporary: Path, folder: Path) -> None:
    try:
        temporary.rename(folder)
    except OSError as error:
        if not (folder / "config.json").exists():  # else another run made the same model meanwhile
            raise ModelError(f"cannot be written: {os.strerror(error.errno or 0)}", where=str(folder)) from None


def check_model(folder: Path, context_length: int) -> dict[str, Any]:
    """The model's config.json, if this project can train and serve it.

    Raises:
        ModelError: unreadable, another architecture, sizes that no model has, no safetensors, or a shorter context than asked
            for.
    """
    file = folder / "config.json"
    facts = _facts(file)
    architecture = next(iter(facts.get("architectures") or ["none"]), "none")
    if architecture not in ARCHITECTURES:
        raise ModelError(f"architecture {architecture} is not supported; {', '.join(ARCHITECTURES)} are", where=str(file))
    if not list(folder.glob("*.safetensors")):
        raise ModelError("there are no *.safetensors files", where=str(folder), next_step="save the model with safetensors")
    shape.check(facts, file)
    _check_tensors(folder)
    longest = facts["max_position_embeddings"]
    if context_length > longest:
        raise ModelError(
            f"model.context_length = {context_length}, but the model has {longest} positions",
            where=str(file),
            next_step=f"--set model.context_length={longest}",
        )
    return facts


def _facts(file: Path) -> dict[str, Any]:
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot be read: {edges.describe(error)}", where=str(file)) from None
    if not isinstance(facts, dict):
        raise ModelError("not a model's config.json: a JSON object is needed", where=str(file))
    if not isinstance(facts.get("architectures"), list | None):
        raise ModelError(f"architectures = {facts['architectures']!r}, a list is needed", where=str(file))
    return facts


def _check_tensors(folder: Path) -> None:
    """Files are whole (their headers are read, not their tensors): a download that was cut, a Git LFS pointer."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "np"):
                pass
        except (SafetensorError, OSError) as error:
            hint = "download or save the model again"
            raise ModelError(f"damaged checkpoint file: {error}", where=str(file), next_step=hint) from None
    index = folder / "model.safetensors.index.json"
    shards = _facts(index).get("weight_map") if index.exists() else {}
    if not isinstance(shards, dict):
        raise ModelError(f"weight_map = {shards!r:.80}, an object is needed", where=str(index))
    for name in sorted(set(map(str, shards.values()))):
        if not (folder / name).is_file():
            raise ModelError(f"{index.name} names {name}, which is not there", where=str(folder))


if __name__ == "__main__":
    sys.exit(main())
