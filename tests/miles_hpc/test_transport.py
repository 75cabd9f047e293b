"""A transport that cannot be used is named before an engine starts."""

import sys
from pathlib import Path

import numpy as np
import pytest

from miles_hpc import transport
from miles_hpc.config import Config
from miles_hpc.errors import ConfigError, EdgeError
from miles_hpc.paths import RunPaths

OWN = """
class Memory:
    def __init__(self, run):
        self.held = {}

    def put(self, key, data):
        self.held[key] = bytes(data)

    def get(self, key):
        return self.held[key]

    def drop(self, key):
        del self.held[key]

class Short(Memory):
    def get(self, key):
        return super().get(key)[1:]

class Mixed(Memory):
    def get(self, key):
        return super().get(key)[::-1]

class Text(Memory):
    def get(self, key):
        return "weights"

class Down(Memory):
    def put(self, key, data):
        raise ConnectionError("no route to host")

class Half:
    def __init__(self, run):
        self.put = self.get = lambda *a: None
"""


@pytest.fixture
def made(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_transport", raising=False)
    (tmp_path / "own_transport.py").write_text(OWN)

    def named(name: str, **run: str) -> Config:
        sections = {
            "run": {"name": "t", "steps": 1, "edges_folder": str(tmp_path)} | run,
            "model": {"path": "m"},
            "data": {"prompts": "p.jsonl"},
            "rollout": {"prompts_per_step": 1, "samples_per_prompt": 2, "max_new_tokens": 4, "reward": "a:b"},
            "train": {"lr": 0.1},
        }
        sections["rollout"]["weight_transport"] = f"own_transport:{name}"
        return Config.model_validate(sections)

    return named


@pytest.mark.parametrize(
    ("name", "what"),
    [("Short", "256 bytes, not 255"), ("Mixed", "the bytes that were put"), ("Text", "256 bytes"),
     ("Down", "ConnectionError: no route to host"), ("Half", "an object with the methods put, get, drop"),
     ("Nothing", "has no function Nothing")],
)  # fmt: skip
def test_bad_transports_are_named(made, tmp_path: Path, name: str, what: str) -> None:
    with pytest.raises(EdgeError, match=what) as caught:
        transport.check(made(name), RunPaths(tmp_path))
    assert "rollout.weight_transport" in str(caught.value)


def test_a_good_one_holds_nothing_afterwards(made, tmp_path: Path) -> None:
    transport.check(made("Memory"), RunPaths(tmp_path))
    carrier = transport.Carrier.of(made("Memory"), RunPaths(tmp_path))
    carrier.put("a", np.arange(3, dtype=np.uint8))
    assert carrier.get("a", 3).tolist() == [0, 1, 2]


def test_colocated_runs_have_no_use_for_one(made) -> None:
    with pytest.raises((ConfigError, ValueError), match=r"rollout\.weight_transport has no place"):
        made("Memory", placement="colocate")
