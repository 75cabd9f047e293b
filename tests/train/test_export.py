"""An export appears whole or not at all, whatever an attempt that ended before has left."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from miles_hpc.train import export


def test_an_export_replaces_another_and_what_is_left_of_one(tmp_path: Path) -> None:
    source, folder = tmp_path / "model", tmp_path / "run/export"
    for left in (source, tmp_path / "run/.export.partial", tmp_path / "run/.export.old"):
        left.mkdir(parents=True)
        (left / "config.json").write_text("{}")
        (left / "model.safetensors.index.json").write_text("{}")
    for number in range(2):
        export.write(folder, source, iter([("a.weight", torch.full((2,), float(number)))]), writes=True)
        assert [path.name for path in folder.parent.iterdir()] == ["export"]
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    export.write(folder, source, iter([("a.weight", torch.zeros(2))]), writes=False)
    assert load_file(folder / "model.safetensors")["a.weight"].tolist() == [1.0, 1.0]
