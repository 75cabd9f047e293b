"""SGLang only warns when a module of an external model package does not import, and takes its own class of that name."""

import os
from pathlib import Path

import pytest

from miles_hpc.config import Config
from miles_hpc.errors import Fault
from miles_hpc.examples import arithmetic
from miles_hpc.rollout.engine import EngineHost

pytestmark = pytest.mark.engine

# Runs in each of the engine's processes: a package whose module does not import, and SGLang's own module not switched off.
CUSTOMIZE = """
import os, pathlib
if os.environ.get("MILES_HPC_ENGINE"):
    from miles_hpc.rollout import plugin
    plugin.EXACT_MODELS = "broken_models"
    glob = pathlib.Path.glob
    pathlib.Path.glob = lambda self, pattern: (f for f in glob(self, pattern) if f.name not in ("qwen2_moe.py", "qwen3_moe.py"))
"""


def test_the_loaded_class_is_asserted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(CUSTOMIZE)
    (tmp_path / "broken_models").mkdir()
    (tmp_path / "broken_models" / "__init__.py").touch()
    (tmp_path / "broken_models" / "exact.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    model = tmp_path / "model"
    model.mkdir()
    arithmetic.model(model, seed=0)
    config = Config.model_validate(
        {
            "run": {"name": "t", "steps": 1, "numerics": "exact"},
            "model": {"path": str(model), "context_length": 96},
            "data": {"prompts": "a:b"},
            "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, "max_new_tokens": 8, "reward": "a:b"},
            "train": {"lr": 1e-4},
        }
    )
    host = EngineHost(config, model, log=tmp_path / "log")
    host.start()
    try:
        with pytest.raises(Fault, match="the engine loaded Qwen3MoeForCausalLM in place of the exact model"):
            host.wait_ready(300)
    finally:
        host.shutdown()
    assert "a_module_that_is_not_there" in (tmp_path / "log").read_text()
