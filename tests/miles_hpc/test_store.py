"""Shards: whole or absent, whatever happens to the writer, the disk or the file."""

import io
import os
import resource
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.errors import SampleError
from miles_hpc.paths import RunPaths
from miles_hpc.rollout.role import leftovers
from miles_hpc.samples import store
from miles_hpc.samples.schema import PER_SAMPLE, PER_TOKEN, Samples

LENGTHS = st.lists(st.integers(1, 6), max_size=6)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)


def test_texts_that_are_not_utf8_or_hold_nul(tmp_path):
    """A policy may say anything, a JSON label may hold half a surrogate pair: both are kept as U+FFFD and `?`."""
    found = store.read(store.write(RunPaths(tmp_path), 0, 1, 1, make([2], texts=["a\0b \ud800 c"])))
    assert found.answers == ["a\ufffdb ? c"]


def test_components_of_any_name(tmp_path):
    names = ["acc/format", "a%2Fb", "%", "", ".", "..", "größe", "a b", "\0", "offsets", "s", "100%/x"]
    parts = {name: np.array([i], np.float32) for i, name in enumerate(names)}
    written = replace(make([2]), reward_parts=parts)
    found = store.read(store.write(RunPaths(tmp_path), 0, 1, 1, written))
    assert {name: value.tolist() for name, value in found.reward_parts.items()} == {n: [i] for i, n in enumerate(names)}


def make(lengths: list[int], seed: int = 0, texts: list[str] | None = None) -> Samples:
    """Samples of `lengths` tokens with random content."""
    rng, n, total = np.random.default_rng(seed), len(lengths), sum(lengths)
    texts = texts or [f"text {i}" for i in range(n)]
    numbers = {name: rng.integers(0, 200, n).astype(kind) for name, kind in PER_SAMPLE.items()}
    numbers |= {name: rng.integers(0, 2, total).astype(kind) for name, kind in PER_TOKEN.items()}
    numbers["rollout_log_probs"] = rng.normal(size=total).astype(np.float32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    parts = {"form": rng.normal(size=n).astype(np.float32)}
    routing = rng.integers(0, 8, (total, 3, 2)).astype(np.uint16 if seed % 2 else np.uint8)
    flat = {**numbers, "offsets": offsets, "routing": routing}
    return Samples(**flat, prompts=texts, answers=texts[::-1], labels=texts, reward_parts=parts)


def same(a: Samples, b: Samples) -> bool:
    """Equal to the bit, types included."""
    for field in fields(Samples):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, np.ndarray):
            if x.dtype != y.dtype or x.tobytes() != y.tobytes():
                return False
        elif field.name == "reward_parts":
            if {k: v.tobytes() for k, v in x.items()} != {k: v.tobytes() for k, v in y.items()}:
                return False
        elif x != y:
            return False
    return True


@given(LENGTHS, st.integers(0, 1000), st.data())
def test_round_trip(tmp_path_factory, lengths, seed, data):
    texts = data.draw(st.lists(TEXT, min_size=len(lengths), max_size=len(lengths)))
    paths = RunPaths(tmp_path_factory.mktemp("run"))
    samples = make(lengths, seed, texts)
    assert same(store.read(store.write(paths, 3, 1, 1, samples)), samples)


@given(st.lists(LENGTHS, max_size=4), st.integers(0, 1000))
def test_concat_take_and_sort(parts, seed):
    whole = Samples.concat([make(lengths, seed + i) for i, lengths in enumerate(parts)])
    assert whole.lengths.tolist() == [length for lengths in parts for length in lengths]
    ordered = whole.sorted()
    assert sorted(zip(whole.prompt_ids, whole.sample_index, strict=True)) == list(
        zip(ordered.prompt_ids, ordered.sample_index, strict=True)
    )
    shuffled = np.random.default_rng(seed).permutation(len(whole))
    assert same(whole.take(shuffled).take(np.argsort(shuffled)), whole)
    assert whole.answer_lengths.tolist() == [
        whole.loss_mask[a:b].sum() for a, b in zip(whole.offsets, whole.offsets[1:], strict=False)
    ]


def test_names_count_up_and_attributes(tmp_path):
    paths = RunPaths(tmp_path)
    written = [store.write(paths, 3, 1, attempt, make([2, 3])) for attempt in (1, 1, 2)]
    assert written == [paths.rollout_shard(3, 1, i) for i in range(3)] == store.on_disk(paths, 3)
    with h5py.File(written[2], locking=False) as file:
        assert dict(file.attrs) == {"step": 3, "rank": 1, "attempt": 2}


def test_recorded_experts_cost_a_byte_each(tmp_path):
    """layers x top_k bytes per token in the file; a shard without a record has none, and joins none to others."""
    samples = make([500, 500])
    plain = replace(samples, routing=None)
    paths = RunPaths(tmp_path)
    sizes = [store.write(paths, step, 1, 1, s).stat().st_size for step, s in enumerate((samples, plain))]
    assert 0 <= sizes[0] - sizes[1] - 1000 * 3 * 2 < 2048  # HDF5's own bytes, once per shard
    assert store.read(paths.rollout_shard(1, 1, 0)).routing is None
    assert Samples.concat([samples, plain]).routing is None


def test_train_shard(tmp_path):
    paths, samples = RunPaths(tmp_path), make([2, 3])
    file = store.write_train(paths, 0, 2, samples, np.arange(5.0), np.array([0.5, -0.5]))
    with h5py.File(file, locking=False) as found:
        assert found["train_log_probs"].dtype == found["advantages"].dtype == np.float32
        assert found["train_log_probs"][()].tolist() == [0, 1, 2, 3, 4] and found["advantages"][()].tolist() == [0.5, -0.5]
        assert (found["rollout_log_probs"][()] == samples.rollout_log_probs).all()
    assert store.on_disk(paths, 0) == []


def python(code: str, **options) -> subprocess.Popen:
    """A Python process with `make` and a run's paths at hand."""
    head = f"""
        import importlib.util, sys
        from pathlib import Path
        spec = importlib.util.spec_from_file_location("shards", {str(Path(__file__))!r})
        shards = importlib.util.module_from_spec(spec); spec.loader.exec_module(shards)
        paths, store = shards.RunPaths(Path(sys.argv[1])), shards.store
    """
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(code), *options.pop("arguments")],
                            text=True, **options)  # fmt: skip


def test_killed_before_the_rename_leaves_no_final_name(tmp_path):
    code = """
        import os, signal, stat
        os.fsync = lambda file: stat.S_ISREG(os.fstat(file).st_mode) and os.kill(os.getpid(), signal.SIGKILL)
        write = {"rollout": store.write, "drafts": lambda *all: store.write(*all, drafts=True), "train": shards.train}
        write[sys.argv[2]](paths, 0, 1, 1, shards.make([3, 4]))
    """
    for kind in ("rollout", "drafts", "train"):
        assert python(code, arguments=[str(tmp_path), kind]).wait(60) == -signal.SIGKILL
    paths = RunPaths(tmp_path)
    left = [file.name for file in paths.step_samples(0).iterdir()]
    assert len(left) == 3 and all(name.endswith(".tmp") for name in left)
    assert store.on_disk(paths, 0) == store.on_disk(paths, 0, drafts=True) == []
    aside = store.set_aside(store.write(paths, 0, 1, 1, make([3])))
    whole = [store.write(paths, 0, 1, 1, make([3])), train(paths, 0, 1, 1, make([3])), aside]
    assert [shard.file for shard in leftovers(paths, 0, 2)[0]] == [str(whole[0])]
    assert sorted(paths.step_samples(0).iterdir()) == sorted(whole)


def train(paths: RunPaths, step: int, rank: int, attempt: int, samples: Samples) -> Path:
    tokens, count = len(samples.tokens), len(samples)
    return store.write_train(paths, step, rank, samples, np.zeros(tokens), np.zeros(count))


@pytest.mark.parametrize("write", [store.write, train])
def test_the_folders_of_a_shard_are_durable_before_it_is_told_of(tmp_path, monkeypatch, write):
    synced: list[Path] = []
    monkeypatch.setattr(store, "fsync", synced.append)
    paths = RunPaths(tmp_path)
    write(paths, 3, 1, 1, make([3]))
    assert synced == [paths.folder, paths.samples, paths.step_samples(3)]


def test_killed_at_any_time_leaves_only_whole_shards(tmp_path):
    code = """
        print("ready", flush=True)
        while True:
            store.write(paths, 0, 1, 1, shards.make([50] * 200))
    """
    writer = python(code, arguments=[str(tmp_path)], stdout=subprocess.PIPE)
    writer.stdout.readline()
    paths = RunPaths(tmp_path)
    while len(store.on_disk(paths, 0)) < 5:
        assert writer.poll() is None
    writer.kill()
    writer.wait()
    for shard in store.on_disk(paths, 0):
        assert same(store.read(shard, deadline=0), make([50] * 200))


@contextmanager
def full_disk():
    """No file may grow beyond 20 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_no_space_is_said_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "FULL_SECONDS", 0.3)
    monkeypatch.setattr(store, "RETRY_SECONDS", 0.05)
    paths = RunPaths(tmp_path)
    with full_disk(), pytest.raises(SampleError) as raised:
        store.write(paths, 0, 1, 1, make([5000] * 20))
    assert "rollout-0001-000.h5" in raised.value.where and "quota" in raised.value.next_step
    assert list(paths.step_samples(0).iterdir()) == []
    assert same(store.read(store.write(paths, 0, 1, 1, make([5]))), make([5]))


def test_a_disk_that_is_full_for_a_moment_costs_a_moment(tmp_path, capsys, monkeypatch):
    paths, samples = RunPaths(tmp_path), make([5000] * 20)
    with full_disk() as make_room:
        monkeypatch.setattr(store.time, "sleep", lambda seconds: make_room())
        shard = store.write(paths, 0, 1, 1, samples)
    assert same(store.read(shard), samples) and list(paths.step_samples(0).iterdir()) == [shard]
    assert capsys.readouterr().out.count("cannot be written, trying again") == 1


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_read_only_folder(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(SampleError, match="cannot be written"):
        store.write(RunPaths(tmp_path), 0, 1, 1, make([2]))


def test_a_file_where_a_folder_should_be(tmp_path):
    (tmp_path / "samples").write_text("")
    with pytest.raises(SampleError, match="cannot be written"):
        store.write(RunPaths(tmp_path), 0, 1, 1, make([2]))


def test_a_run_folder_that_is_gone_is_said_and_not_made_anew(tmp_path):
    paths = RunPaths(tmp_path / "gone")
    with pytest.raises(SampleError, match="cannot be written"):
        store.write(paths, 0, 1, 1, make([2]))
    with pytest.raises(SampleError, match="cannot be written"):
        store.write_train(paths, 0, 0, make([2]), np.zeros(2), np.zeros(1))
    assert not paths.folder.exists()


@pytest.mark.parametrize("keep", [0, 7, 100, 0.5, 0.9])
def test_truncated_shard(tmp_path, keep):
    shard = store.write(RunPaths(tmp_path), 0, 1, 1, make([30, 40]))
    data = shard.read_bytes()
    shard.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(SampleError) as raised:
        store.read(shard, deadline=0)
    assert raised.value.where == str(shard)


def test_any_flipped_bit_is_named(tmp_path):
    """Structure, sizes, payload and checksum. HDF5 never sees them: one such bit in the structure ends the process."""
    shard = store.write(RunPaths(tmp_path), 0, 1, 1, make([3, 4]))
    data = shard.read_bytes()
    rng = np.random.default_rng(0)
    for position in [*rng.choice(len(data), 300, replace=False), *range(len(data) - store.SEAL.size, len(data))]:
        bad = bytearray(data)
        bad[position] ^= 1 << int(rng.integers(8))
        shard.write_bytes(bad)
        with pytest.raises(SampleError, match="damaged") as raised:
            store.read(shard, deadline=0)
        assert raised.value.where == str(shard)


@pytest.mark.parametrize("length", [1, 3, None, "scalar", "group"])
def test_arrays_that_do_not_fit(tmp_path, length):
    shard = store.write(RunPaths(tmp_path), 0, 1, 1, make([3, 4]))
    sound = shard.read_bytes()[: -store.SEAL.size]
    with store.opened(shard) as file:
        names = [name for name in file if not name.startswith(("reward_", "routing", "refusals")) or length in (1, 3)]
    for name in names:
        image = io.BytesIO(sound)
        with h5py.File(image, "r+") as file:
            kind = file[name].dtype
            del file[name]
            if length == "group":
                file.create_group(name)
            elif length is not None:
                file.create_dataset(name, () if length == "scalar" else (length,), kind)
        shard.write_bytes(image.getvalue() + store.seal(image.getvalue()))
        with pytest.raises(SampleError, match="damaged"):
            store.read(shard, deadline=0)


def test_waits_for_a_late_file_but_not_for_ever(tmp_path, monkeypatch):
    paths = RunPaths(tmp_path)
    shard = store.write(paths, 0, 1, 1, make([3]))
    hidden = shard.rename(shard.with_suffix(".hidden"))
    with pytest.raises(SampleError, match="cannot be read"):
        store.read(shard, deadline=0.1)
    monkeypatch.setattr(store.time, "sleep", lambda seconds: hidden.rename(shard))
    assert same(store.read(shard, deadline=600), make([3]))


def test_concurrent_writers_of_many_ranks(tmp_path):
    paths = RunPaths(tmp_path)

    def write(rank: int) -> list[Path]:
        return [store.write(paths, 0, rank, 1, make([rank + 1, 2], seed=i)) for i in range(5)]

    with ThreadPoolExecutor(6) as pool:
        written = [shard for shards in pool.map(write, range(6)) for shard in shards]
    assert sorted(written) == store.on_disk(paths, 0) and len(written) == 30
    assert all(same(store.read(paths.rollout_shard(0, r, i)), make([r + 1, 2], seed=i)) for r in range(6) for i in range(5))


def test_damaged_shards_are_set_aside(tmp_path):
    paths = RunPaths(tmp_path)
    shard = store.write(paths, 0, 1, 1, make([3]))
    aside = store.set_aside(shard)
    assert aside.exists() and store.on_disk(paths, 0) == []
    assert store.write(paths, 0, 1, 1, make([3])) == shard
