"""Settings for all tests."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A machine shared with an engine may be slow: slowness alone is no failure.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=60)
settings.load_profile("shared")


SLOW = ("slurm", "mpi", "engine")


@pytest.hookimpl(trylast=True)  # behind the choice by -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start something come first: files are handed out whole and in this order, and the last one runs alone."""
    slow = {item.path for item in items if any(map(item.get_closest_marker, SLOW))}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture
def users_file(tmp_path: Path) -> Callable[[str, str], Path]:
    """A user's folder with a space in its name: model, prompts, `scoring.py`, and the TOML file, which is returned."""

    def made(toml: str, scoring: str) -> Path:
        folder = tmp_path / "my files"
        (folder / "model").mkdir(parents=True)
        (folder / "model/config.json").write_text("{}")
        (folder / "prompts.jsonl").write_text('{"prompt": "1+1"}\n')
        (folder / "scoring.py").write_text(scoring)
        (folder / "run.toml").write_text(toml)
        return folder / "run.toml"

    return made
