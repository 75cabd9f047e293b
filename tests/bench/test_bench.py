"""Benchmarks run, and what docs/benchmarks says is what they found.

The rest of their code is run where a run or an engine is there anyway: tests/slurm/test_run.py and tests/exact/test_replay.py.
`make check` holds their calls against the product's types. Whole runs of those that start one: `pytest -m long tests/bench`.
"""

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from miles_hpc import config
from miles_hpc.rollout.request import Output, Request

sys.path.append(str(Path(__file__).parent))
import all as bench
import bench_start
import bench_store
import bench_sync
import gpu
import gpu_generation
import gpu_sync
import gpu_training

FILES = sorted(bench.RESULTS.glob("*.json"))
PAGE = (bench.RESULTS / "README.md").read_text()


def kept(name: str) -> dict[str, Any]:
    return json.loads((bench.RESULTS / f"{name}.json").read_text())


@pytest.mark.parametrize("file", sorted(file.stem for file in bench.HERE.glob("bench_*.py")))
def test_every_benchmark_has_a_result(file):
    assert kept(file.removeprefix("bench_").replace("_", "-"))["rows"]


def test_the_store(monkeypatch):
    monkeypatch.setattr(bench_store, "SIZES", ((2, 8),))
    monkeypatch.setattr(bench_store, "REPEATS", 3)
    (row,) = bench_store.run()
    assert list(row) == list(kept("store")["rows"][0]) and row["repeats"] == 3
    assert all(row[f"{side} {way} MB/s"] > 0 for side in ("raw", "store") for way in ("read", "write"))


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.parametrize("module", [bench_sync, pytest.param(bench_start, marks=pytest.mark.slurm)], ids=lambda m: m.__name__)
def test_with_a_run(module: ModuleType, monkeypatch):
    monkeypatch.setattr(module, "REPEATS", 1)
    (row,) = module.run()
    assert list(row) == list(kept(module.__name__.removeprefix("bench_"))["rows"][0])


@pytest.mark.parametrize("module", [bench_sync, bench_start], ids=lambda m: m.__name__)
def test_the_examples_take_the_sizes(module, tmp_path):
    assert config.load(module.EXAMPLE, [*module.SMALL, f"run.folder={tmp_path}"]).run.folder == str(tmp_path)


def test_a_name_that_is_none(capsys):
    assert bench.main(["store", "stroe"]) == 2
    assert capsys.readouterr().err.startswith("no benchmark stroe: name some of routing-replay, start, store, sync")


@pytest.mark.parametrize("arguments", [*re.findall(r"`python tests/bench/gpu.py ([^`]+)`", PAGE), "", "dense sync --out /tmp"])
def test_the_gpus_command_is_understood(arguments, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py", *shlex.split(arguments)])
    assert gpu.main() == 1
    assert capsys.readouterr().err == "no CUDA device: make bench-gpu needs one\n"


@pytest.mark.parametrize("arguments", ["densse", "dense --modes fast", "--rounds many"])
def test_the_gpus_command_is_refused(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", *shlex.split(arguments)])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    assert re.search("densse|fast|many", capsys.readouterr().err)


def test_the_gpus_runs_are_valid(tmp_path):
    for numerics, _ in gpu_generation.MODES.values():
        assert gpu_generation.config(tmp_path, numerics).run.numerics == numerics
    (tmp_path / "job.toml").write_text(gpu_sync.JOB.format(steps=gpu_sync.STEPS))
    (tmp_path / "length.py").write_text(gpu_sync.REWARD)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1"}\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    assert config.load(tmp_path / "job.toml").run.steps == gpu_sync.STEPS


def test_the_gpus_rows():
    row = gpu_generation._row("exact", "1", [90.0, 80.0], [100.0, 100.0])
    assert list(row) == list(kept("gpu-dense")["generation"][0]) and row["cost %"] == pytest.approx(15)
    syncs = [{"version": v, "seconds": 1.0 + v, "bytes": 10**9, "digests": 9} for v in range(4)]
    row = gpu_sync.row("dense", syncs, 0.5)
    assert list(row) == list(kept("gpu-sync")["sync"][0]) and row["sync s"] == 3.5


def test_the_gpus_samples():
    pairs = [(Request([5, 6, 7], 4, i, 2), Output([8, 9], [-1.0, -2.0], stopped=False)) for i in range(2)]
    samples = gpu_training.samples(pairs)
    assert samples.tokens.tolist() == [5, 6, 7, 8, 9] * 2 and samples.rollout_log_probs[3:5].tolist() == [-1.0, -2.0]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_result_can_be_shown(file, capsys):
    found = json.loads(file.read_text())
    assert {"date", "commit", "cores", "python", "versions"} <= set(found["machine"]) and f"`{file.name}`" in PAGE
    tables = [value for value in found.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
    for rows in tables or [list(found["rows"].values())]:
        shown = bench.transposed(rows) if "run" in rows[0] else rows
        assert {tuple(row) for row in shown} == {tuple(shown[0])}
        bench.show(shown)
        assert capsys.readouterr().out


def goals() -> Iterator[str]:
    """What the page says of its goals, from the results."""
    dense, moe = kept("gpu-sync")["sync"]
    for name, row, low in (("dense", dense, 0.027), ("MoE", moe, 0.023)):
        seconds = f"{row['sync s']:.3f} s ({low} to {row['slowest s']:.3f})"
        yield f"{name} {row['MB'] / 1e3:.2f} GB: {seconds}, **{row['% of broadcast']:.0f} %**"
    yield f"the wire: {dense['broadcast s'] * 1e3:.1f} and {moe['broadcast s'] * 1e3:.1f} ms"
    turns = {row["run"]: row for row in kept("gpu-colocate")["rows"]}
    early, late, every = turns["dense"], turns["dense-late"], turns["dense"]["sync s, all"]
    yield f"| {early['sync s']:.3f} s ({min(every):.3f} to {max(every):.3f}); {late['sync s']:.3f} s where"
    gbs = [moe["GB/s"], dense["GB/s"], turns["moe"]["sync GB/s"], early["sync GB/s"]]
    yield "{:.0f} against {:.0f} GB/s over NCCL, {:.0f} against {:.0f} colocated".format(*gbs)
    stays, without, offloaded = (turns[name]["outside rollout, train, sync %"] for name in ("dense", "dense-late", "moe"))
    yield f"| {stays:.1f} % (dense, optimizer stays; {without:.1f} without room), **{offloaded:.0f} %**"
    yield f"sync at {stays:.1f} % (dense, goal 3)"
    yield f"swap: {early['swap s']:.2f} s of {early['step s']:.1f} s without offload; {turns['moe']['swap s']:.2f} s out"
    exact, native = kept("gpu-dense")["training"]
    yield f"the dense model {exact['MFU %']:.1f} % exact and {native['MFU %']:.1f} % native"
    yield f"MFU **{kept('gpu-moe')['training'][0]['MFU %']:.1f} %**"
    yield f"against {exact['MFU %']:.1f} % of the dense"
    yield f"behind 16 k tokens at {kept('gpu-dense')['generation from long prompts'][1]['cost %']:.0f} %"


@pytest.mark.parametrize("said", goals())
def test_the_page_says_what_was_measured(said):
    assert said in PAGE.replace("\n", " ")
