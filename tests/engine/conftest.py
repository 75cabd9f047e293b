"""A tiny Qwen3-MoE and real SGLang engines on it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_hpc.config import Config
from miles_hpc.examples import arithmetic
from miles_hpc.rollout.engine import EngineHost

TEMPERATURE = 0.8


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model; a larger initial range than the example's makes its distributions uneven."""
    folder = tmp_path_factory.mktemp("a model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(arithmetic.CONFIG, "initializer_range", 0.2)
        arithmetic.model(folder, seed=1)
    return folder


@pytest.fixture(scope="session")
def config(model_folder: Path) -> Config:
    here = "miles_hpc.examples.arithmetic:"
    return Config.model_validate(
        {
            "run": {"name": "t", "steps": 1, "seed": 5},
            "model": {"path": str(model_folder), "context_length": 96},
            "data": {"prompts": here + "prompts", "eval": here + "prompts"},
            "rollout": {
                "prompts_per_step": 8,
                "samples_per_prompt": 4,
                "max_new_tokens": 32,
                "temperature": TEMPERATURE,
                "reward": here + "reward",
                "timeout_seconds": 240.0,
            },
            "train": {"lr": 1e-4},
        }
    )


@pytest.fixture(scope="module")
def engine(config: Config, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHost]:
    """One engine per module, ready."""
    host = EngineHost(config, model_folder, log=tmp_path_factory.mktemp("log") / "engine.log")
    host.start()
    host.wait_ready()
    yield host
    host.shutdown()
