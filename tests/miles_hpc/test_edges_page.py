"""Every example of docs/edges.md, as a file beside a TOML file: parsed on the login node, then called as an attempt does."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from miles_hpc import calls, protocols, transport
from miles_hpc.archive import Archive
from miles_hpc.config import Config
from miles_hpc.launchers import checks
from miles_hpc.paths import RunPaths
from miles_hpc.records import Row

PAGE = (Path(__file__).parents[2] / "docs/edges.md").read_text()
NAMES = {
    "model.source": "miles_hpc.examples.arithmetic:model",
    "warm_start.data": "miles_hpc.examples.arithmetic:demonstrations",
    "data.prompts": "page_edges:prompts",
    "data.eval": "page_edges:prompts",
    "rollout.generate": "page_edges:ask_twice",
    "rollout.function": "page_edges:best_first",
    "rollout.reward": "page_edges:score",
    "rollout.group_reward": "page_edges:best_of_group",
    "rollout.filters": [{"function": "page_edges:enough_thought", "options": {"least": 2}}],
    "rollout.weight_transport": "page_edges:over_files",
    "train.advantage": "page_edges:signs",
    "train.loss": "page_edges:loss",
    "train.step_hook": "page_edges:hook",
    "train.optimizer_hook": "page_edges:cosine",
    "train.metrics": "page_edges:figures",
    "train.metric_reducer": "page_edges:few",
    "checkpoint.backend": "page_edges:archive",
    "slurm.failure_policy": "page_edges:patient",
}
"""By key, the function of the page or of the example that it refers to."""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    """A configuration that names them all."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "page_edges.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)))
    sections: dict[str, dict[str, Any]] = {
        "run": {"name": "t", "steps": 1, "edges_folder": str(tmp_path)},
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 4, "max_new_tokens": 8},
        "train": {"lr": 0.1},
        "warm_start": {"steps": 1},
    }
    for key, name in NAMES.items():
        if key == "rollout.function":  # excludes rollout.generate
            continue
        section, _, field = key.partition(".")
        sections.setdefault(section, {})[field] = name
    yield Config.model_validate(sections)
    sys.modules.pop("page_edges", None)


def test_the_page_has_every_edge() -> None:
    assert set(NAMES) == set(protocols.EDGES) - {"rollout.rewards"}
    for key in protocols.EDGES:
        assert f"`{key}`" in PAGE, key


def test_the_examples_of_the_page_work(made: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checks.check_files(made)
    calls.check(made)
    row = Row("3 - 1 =", 2.0, {"tokens": 1.0})
    calls.check_reward(made, row, row.prompt)
    calls.check_generate(made, row, row.prompt, Letters())
    rollout = {"generate": "", "function": NAMES["rollout.function"]}
    calls.check_generate(
        made.model_copy(update={"rollout": made.rollout.model_copy(update=rollout)}), row, row.prompt, Letters()
    )
    module: ModuleType = sys.modules["page_edges"]
    assert module.score("", "2.5", 2.0, {"tokens": 3}, tolerance=0.5) == {"reward": 1.0, "tokens": 3}
    assert len(module.prompts("train", 0)) == 1000
    assert module.few(0, {"reward/mean": 1.0, "train/loss": 2.0, "seconds/train": 3.0}) == {"reward/mean": 1.0, "seconds": 3.0}
    assert Archive.of(made, RunPaths(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    transport.check(made, RunPaths(tmp_path / "run"))
    assert not list((tmp_path / "run/weights").iterdir())


class Letters:
    """A tokenizer of one token per character."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}
