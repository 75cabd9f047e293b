"""`checkpoint.backend`: checkpoints in a store of the user's own, beside the run folder."""

import shutil
import sys
from pathlib import Path

import pytest

from miles_hpc.archive import Archive, check
from miles_hpc.checkpoint import Checkpoints
from miles_hpc.config import Config
from miles_hpc.errors import EdgeError
from miles_hpc.paths import RunPaths
from miles_hpc.sections import Checkpoint

STORE = """
import shutil
from pathlib import Path

class Folder:
    def __init__(self, root):
        self.root = Path(root)

    def versions(self):
        return [int(p.name) for p in self.root.glob("[0-9]*")]

    def put(self, version, folder):
        shutil.rmtree(self.root / ".new", ignore_errors=True)
        shutil.copytree(folder, self.root / ".new")
        shutil.rmtree(self.root / str(version), ignore_errors=True)
        (self.root / ".new").rename(self.root / str(version))

    def get(self, version, folder):
        shutil.copytree(self.root / str(version), folder, dirs_exist_ok=True)

    def remove(self, version):
        shutil.rmtree(self.root / str(version))

def beside(run):
    return Folder(run.parent / "archive")

class Full(Folder):
    def put(self, version, folder):
        raise OSError("no space left in the bucket")

def full(run):
    return Full(run.parent / "archive")

def nothing(run):
    return run

class Short(Folder):
    def put(self, folder):
        pass

def short(run):
    return Short(run)

class Vague(Folder):
    def versions(self):
        return ["newest"]

def vague(run):
    return Vague(run)
"""


class State:
    """One number, as a trainer of one rank."""

    rank, size, fingerprint = 0, 1, {"hidden_size": 1}

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def save(self, folder: Path, extra: dict) -> None:
        (folder / "value").write_text(str(self.value))
        (folder / "extra").write_text(str(extra["version"]))

    def load(self, folder: Path) -> dict:
        self.value = int((folder / "value").read_text())
        return {"version": int((folder / "extra").read_text())}

    def gather(self, value: object) -> list:
        return [value]


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_store", raising=False)
    (tmp_path / "own_store.py").write_text(STORE)

    def named(function: str, **rules: int) -> Config:
        sections = {
            "run": {"name": "t", "steps": 1, "edges_folder": str(tmp_path)},
            "model": {"path": "m"},
            "data": {"prompts": "p.jsonl"},
            "rollout": {"prompts_per_step": 1, "samples_per_prompt": 2, "max_new_tokens": 4, "reward": "a:b"},
            "train": {"lr": 0.1},
            "checkpoint": {"backend": f"own_store:{function}", **rules},
        }
        return Config.model_validate(sections)

    return named


@pytest.fixture
def archive(settings, tmp_path):
    (tmp_path / "run").mkdir()
    return lambda function: Archive.of(settings(function), RunPaths(tmp_path / "run"))


def checkpoints(archive) -> Checkpoints:
    return Checkpoints(archive.paths, Checkpoint(keep=2), lambda: None, True, archive)


def test_checkpoints_are_kept_in_the_store_and_fetched_when_the_run_folder_has_lost_them(archive, tmp_path):
    kept = checkpoints(archive("beside"))
    for version in (1, 2, 3):
        kept.save(State(10 * version), version)
    assert sorted(p.name for p in (tmp_path / "archive").iterdir()) == ["2", "3"]
    shutil.rmtree(tmp_path / "run/checkpoints")
    (tmp_path / "run/checkpoints/step-000009.damaged").mkdir(parents=True)  # somebody put it aside
    again, state = checkpoints(archive("beside")), State()
    assert again.resume(state) == 3 and state.value == 30
    (tmp_path / "archive" / "3" / "value").write_text("31")  # what lies in the run folder is newer than nothing
    assert checkpoints(archive("beside")).resume(state) == 3 and state.value == 30


def test_the_store_keeps_what_the_run_folder_keeps(settings, tmp_path):
    paths, made = RunPaths(tmp_path / "run"), settings("beside", keep=2, keep_every=2)
    paths.folder.mkdir()
    archive = Archive.of(made, paths)
    kept = Checkpoints(paths, made.checkpoint, lambda: None, True, archive)
    for version in range(1, 7):
        kept.save(State(version), version)
    assert archive.versions() == paths.saved_steps() == [2, 4, 5, 6]


def test_a_damaged_copy_is_passed_over(archive, tmp_path):
    kept = checkpoints(archive("beside"))
    kept.save(State(10), 1)
    kept.save(State(20), 2)
    shutil.rmtree(tmp_path / "run/checkpoints/step-000002")
    (tmp_path / "archive/2/value").write_text("21")
    state = State()
    assert checkpoints(archive("beside")).resume(state) == 1 and state.value == 10


def test_a_damaged_checkpoint_is_fetched_again(archive, tmp_path, capsys):
    """Whichever it is: the newest, or all that the run folder has, of which only an older one is whole in the store."""
    kept = checkpoints(archive("beside"))
    for version in (1, 2):
        kept.save(State(10 * version), version)
    local, stored = tmp_path / "run/checkpoints", tmp_path / "archive"
    (local / "step-000002/value").write_text("21")
    state = State()
    assert checkpoints(archive("beside")).resume(state) == 2 and state.value == 20
    assert f"{local / 'step-000002'} taken from checkpoint.backend, since here value is damaged" in capsys.readouterr().out
    for folder in (local / "step-000002", local / "step-000001", stored / "2"):
        (folder / "value").write_text("21")
    assert checkpoints(archive("beside")).resume(state) == 1 and state.value == 10
    kept.save(State(30), 3)
    assert not list(local.glob(".*"))  # what was damaged goes with the next save


def test_a_store_that_refuses_is_named(archive):
    with pytest.raises(EdgeError, match=r"checkpoint\.backend put\(\) raised OSError: no space left in the bucket") as caught:
        checkpoints(archive("full")).save(State(1), 1)
    assert "own_store.py:" in caught.value.where


@pytest.mark.parametrize(("function", "what"), [("nothing", "an object with the methods"), ("short", "called with")])
def test_what_is_no_store_is_named_at_once(archive, function, what):
    with pytest.raises(EdgeError, match=what):
        archive(function)


def test_versions_that_are_no_numbers_are_named(archive, settings, tmp_path):
    with pytest.raises(EdgeError, match="a list of whole numbers"):
        checkpoints(archive("vague")).resume(State())
    with pytest.raises(EdgeError, match="a list of whole numbers"):
        check(settings("vague"), RunPaths(tmp_path / "run"))
    check(settings("beside"), RunPaths(tmp_path / "run"))
