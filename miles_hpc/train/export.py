"""A Hugging Face checkpoint folder, written whole or not at all."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from miles_hpc.durable import fsync

COPIED = ("*.json", "*.jinja", "*.model", "*.txt")
NOT_COPIED = "model.safetensors.index.json"


def write(folder: Path, source: Path, tensors: Iterator[tuple[str, Tensor]], writes: bool) -> None:
    """Write `tensors` with the configuration and tokenizer of `source`.

    Args:
        folder: made; a folder there already is replaced.
        source: model folder that training started from.
        tensors: checkpoint names and whole tensors; exhausted on every rank.
        writes: True on one rank.
    """
    if not writes:
        for _ in tensors:
            pass
        return
    partial, old = (folder.with_name(f".{folder.name}.{kind}") for kind in ("partial", "old"))
    for left in (partial, old):  # by an attempt that ended while it wrote
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir(parents=True)
    for pattern in COPIED:
        for file in source.glob(pattern):
            if file.name != NOT_COPIED:
                shutil.copyfile(file, partial / file.name)
    _tensors(partial / "model.safetensors", tensors)
    _replace(partial, folder, old)


def _tensors(file: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    from safetensors.torch import save_file

    # Copies: parameters may be views of one buffer, which safetensors refuses.
    save_file({name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors}, file, metadata={"format": "pt"})


def _replace(partial: Path, folder: Path, old: Path) -> None:
    for file in partial.iterdir():
        fsync(file)
    fsync(partial)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    fsync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
