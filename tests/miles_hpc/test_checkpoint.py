"""Checkpoints appear whole or not at all, and only whole ones of this model are read."""

import json
import shutil
import subprocess
import threading

import pytest

from miles_hpc import checkpoint, disk
from miles_hpc.checkpoint import MANIFEST, Checkpoints
from miles_hpc.errors import CheckpointError, ModelError, ResumeError
from miles_hpc.paths import RunPaths
from miles_hpc.sections import Checkpoint


class Counter:
    """Stands for a trainer of one rank: its whole state is a number."""

    rank, size = 0, 1

    def __init__(self, value: int = 0, layers: int = 2) -> None:
        self.value, self.fingerprint, self.fail = value, {"model_type": "counter", "num_hidden_layers": layers}, False

    def gather(self, value):
        return [value]

    def save(self, folder, extra):
        (folder / "value").write_text(json.dumps({"value": self.value, **extra}))
        (folder / "sub").mkdir()
        (folder / "sub" / "large").write_bytes(b"x" * 5_000_000)
        if self.fail:
            raise OSError("no space left")

    def load(self, folder):
        state = json.loads((folder / "value").read_text())
        self.value = state["value"]
        return state


@pytest.fixture
def paths(tmp_path):
    (tmp_path / "a run").mkdir()
    return RunPaths(tmp_path / "a run")


@pytest.fixture
def checkpoints(paths):
    return Checkpoints(paths, Checkpoint(keep=2), lambda: None, True)


def test_nothing_to_resume(checkpoints):
    assert checkpoints.resume(Counter()) is None


def test_the_newest_is_resumed_and_only_the_newest_are_kept(checkpoints, paths):
    for version in (9, 10, 100):
        checkpoints.save(Counter(version * 7), version)
    state = Counter()
    assert checkpoints.resume(state) == 100
    assert state.value == 700
    assert sorted(p.name for p in paths.checkpoints.iterdir()) == ["step-000010", "step-000100"]


def test_the_same_version_may_be_saved_again(checkpoints, paths):
    checkpoints.save(Counter(1), 5)
    (paths.checkpoints / ".step-000005.old").mkdir()
    (paths.checkpoints / ".step-000005.old/left").touch()  # by an attempt that did the same and ended at once
    checkpoints.save(Counter(2), 5)
    state = Counter()
    assert (checkpoints.resume(state), state.value) == (5, 2)
    assert [p.name for p in paths.checkpoints.iterdir()] == ["step-000005"]


class Pair(Counter):
    """One of two ranks, each in a thread; the first writes."""

    size = 2

    def __init__(self, rank, board, meet):
        super().__init__()
        self.rank, self.board, self.meet = rank, board, meet

    def gather(self, value):
        self.board[self.rank] = value
        self.meet()
        found = list(self.board)
        self.meet()
        return found

    def save(self, folder, extra):
        super().save(folder, extra) if self.rank == 0 else None


def test_a_file_that_a_rank_does_not_see_yet_is_summed_too(paths, monkeypatch):
    board, meet, files = [None, None], threading.Barrier(2).wait, checkpoint._files
    seen = {"MainThread": slice(1, None), "other": slice(1)}
    monkeypatch.setattr(checkpoint, "_files", lambda folder: files(folder)[seen[threading.current_thread().name]])

    def save(rank):
        Checkpoints(paths, Checkpoint(), meet, rank == 0).save(Pair(rank, board, meet), 3)

    other = threading.Thread(target=save, args=(1,), name="other")
    other.start()
    save(0)
    other.join()
    assert set(json.loads((paths.checkpoint(3) / MANIFEST).read_text())["files"]) == {"value", "sub/large"}


def _flip(folder):
    file = folder / "sub" / "large"
    content = bytearray(file.read_bytes())
    content[2_500_000] ^= 1
    file.write_bytes(content)


def _without(key):
    return lambda folder: _manifest(folder, lambda values: values.pop(key))


def _manifest(folder, change):
    values = json.loads((folder / MANIFEST).read_text())
    change(values)
    (folder / MANIFEST).write_text(json.dumps(values))


DAMAGE = {
    **{f"without {key}": (_without(key), "does not state") for key in ("version", "model", "files")},
    "a list for a model": (lambda f: _manifest(f, lambda m: m.update(model=[1])), "does not state"),
    "a list of files": (lambda f: _manifest(f, lambda m: m.update(files=["value"])), "does not state"),
    "a sum too few": (lambda f: _manifest(f, lambda m: m["files"].update(value=[1])), "does not state"),
    "a name that is none": (lambda f: _manifest(f, lambda m: m["files"].update({"\0": [1, 1]})), "unreadable"),
    "flipped bit": (_flip, "large is damaged"),
    "cut": (lambda f: (f / "sub" / "large").write_bytes(b"x" * 4_999_999), "large is damaged"),
    "lost file": (lambda f: (f / "value").unlink(), "value is missing"),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), f"{MANIFEST} is missing"),
    "half a manifest": (lambda f: (f / MANIFEST).write_text('{"version": 2'), "does not state"),
    "another manifest": (lambda f: (f / MANIFEST).write_text("[]"), "does not state"),
    "another version": (lambda f: _manifest(f, lambda m: m.update(version=7)), f"{MANIFEST} is of version 7"),
    "no file at all": (lambda f: (shutil.rmtree(f), f.mkdir()), f"{MANIFEST} is missing"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_one_is_passed_over_by_name(name, checkpoints, paths, capsys):
    damage, message = DAMAGE[name]
    checkpoints.save(Counter(1), 1)
    checkpoints.save(Counter(2), 2)
    damage(paths.checkpoint(2))
    state = Counter()
    assert checkpoints.resume(state) == 1
    assert state.value == 1
    said = capsys.readouterr().out
    assert str(paths.checkpoint(2)) in said and message in said


@pytest.mark.parametrize("name", DAMAGE)
def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(name, checkpoints, paths):
    """Until the user has moved them away, as the error says."""
    damage, message = DAMAGE[name]
    for version in (1, 2):
        checkpoints.save(Counter(version), version)
        damage(paths.checkpoint(version))
    with pytest.raises(ResumeError) as caught:
        checkpoints.resume(Counter())
    assert caught.value.kind == "user_error" and str(paths.checkpoints) in caught.value.where
    assert caught.value.what.count(message) == 2 and "step-000001" in caught.value.what and "step-000002" in caught.value.what
    subprocess.run(caught.value.next_step.split("begin again: ")[1].split(";")[0], shell=True, check=True)
    assert checkpoints.resume(Counter()) is None


def test_an_unfinished_save_leaves_the_previous_one(checkpoints, paths):
    checkpoints.save(Counter(1), 1)
    broken = Counter(2)
    broken.fail = True
    with pytest.raises(CheckpointError, match="no space left"):
        checkpoints.save(broken, 2)
    state = Counter()
    assert checkpoints.resume(state) == 1
    (paths.checkpoints / ".step-000009.partial").mkdir()  # left by an attempt that was killed
    checkpoints.save(Counter(3), 2)
    assert not list(paths.checkpoints.glob(".*"))
    assert checkpoints.resume(state) == 2
    assert state.value == 3


def test_a_checkpoint_of_another_model_is_refused_by_name(checkpoints):
    checkpoints.save(Counter(), 1)
    with pytest.raises(ModelError, match=r"num_hidden_layers = 2 \(this model: 3\)"):
        checkpoints.resume(Counter(layers=3))


def test_a_run_folder_that_is_gone_is_said_and_not_made_anew(checkpoints, paths):
    paths.folder.rename(paths.folder.with_name("gone"))
    with pytest.raises(CheckpointError, match="cannot be written"):
        checkpoints.save(Counter(1), 1)
    assert not paths.folder.exists()


def test_all_ranks_meet_around_the_write(paths):
    events = []
    state = Counter()
    original = state.save
    state.save = lambda *a: (events.append("write"), original(*a))
    Checkpoints(paths, Checkpoint(keep=1), lambda: events.append("barrier"), True).save(state, 1)
    assert events == ["barrier", "write", "barrier", "barrier"]


class CheckpointException(BaseException):
    """As torch's, which is no Exception."""


@pytest.mark.parametrize(
    "raised", [OSError(28, "No space left on device"), CheckpointException("Worker failure"), RuntimeError("x")]
)
def test_a_save_that_fails_gives_its_space_back(checkpoints, paths, monkeypatch, raised):
    state = Counter(1)
    checkpoints.save(state, 1)
    monkeypatch.setattr("miles_hpc.checkpoint._sum", lambda file: (_ for _ in ()).throw(raised))
    with pytest.raises(RuntimeError if isinstance(raised, RuntimeError) else CheckpointError):
        checkpoints.save(state, 2)
    assert [p.name for p in paths.checkpoints.iterdir()] == ["step-000001"]


def versions(paths):
    return [int(p.name.removeprefix("step-")) for p in sorted(paths.checkpoints.iterdir())]


def test_every_nth_is_kept_for_good(paths):
    some = Checkpoints(paths, Checkpoint(keep=2, keep_every=20), lambda: None, True)
    for version in range(5, 60, 5):
        some.save(Counter(), version)
    assert versions(paths) == [20, 40, 50, 55]


@pytest.mark.parametrize(
    ("keep", "keep_samples", "left"),
    [
        (1, 1, [19, 20, 21]),
        (1, 4, [16, 17, 18, 19, 20, 21]),
        # resume from step 10 generates nothing twice
        (2, 1, list(range(10, 22))),
        (2, 15, list(range(5, 22))),
        (1, 0, list(range(22))),
    ],
)
def test_samples_go_but_those_that_a_resume_may_need(paths, keep, keep_samples, left):
    for step in range(22):  # two steps further than the newest checkpoint
        paths.step_samples(step).mkdir(parents=True)
        (paths.step_samples(step) / "rollout-0001-000.h5").touch()
    some = Checkpoints(paths, Checkpoint(keep=keep, keep_samples=keep_samples), lambda: None, True)
    for version in (10, 20):
        some.save(Counter(), version)
    assert sorted(int(p.name.removeprefix("step-")) for p in paths.samples.glob("step-*")) == left
    assert not left[0] or json.loads(paths.removed_samples.read_text()) == {"before": left[0]}


def test_what_cannot_be_removed_fails_no_save_and_is_tried_again(paths, monkeypatch, capsys):
    """As on NFS, where a file that somebody holds open comes back as `.nfs...` in the folder that should go."""
    for step in range(3):
        paths.step_samples(step).mkdir(parents=True)
    some = Checkpoints(paths, Checkpoint(keep=1, keep_samples=1), lambda: None, True)
    some.save(Counter(), 1)
    remove = shutil.rmtree

    def busy(folder, ignore_errors=False):
        if not ignore_errors:
            raise OSError(39, "Directory not empty", str(folder))

    monkeypatch.setattr(checkpoint.shutil, "rmtree", busy)
    some.save(Counter(2), 2)  # leaves step 1
    some.save(Counter(3), 2)  # and the first of step 2
    said = capsys.readouterr().out
    assert f"{paths.checkpoint(1)} cannot be removed, the next save tries again: " in said
    assert f"{paths.step_samples(0)} cannot be removed" in said and ".old cannot be removed" in said
    monkeypatch.setattr(checkpoint.durable, "replace", full)
    some.save(Counter(4), 3)
    assert f"{paths.removed_samples} cannot be written" in capsys.readouterr().out
    state = Counter()
    assert (some.resume(state), state.value) == (3, 4)
    monkeypatch.undo()
    monkeypatch.setattr(checkpoint.shutil, "rmtree", remove)
    some.save(Counter(), 4)
    assert [p.name for p in paths.checkpoints.iterdir()] == ["step-000004"]
    assert paths.sampled_steps() == []
    assert "cannot be" not in capsys.readouterr().out


def full(file, text):
    raise OSError(28, "No space left on device", str(file))


def test_a_disk_that_will_soon_be_full_is_said_before_the_save(checkpoints, paths, monkeypatch, capsys):
    checkpoints.save(Counter(), 1)
    assert "warning" not in capsys.readouterr().out
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 9_000_000}))
    checkpoints.save(Counter(), 2)
    said = capsys.readouterr().out
    assert "9.0 MB are free" in said and "a checkpoint takes 5.0 MB" in said
