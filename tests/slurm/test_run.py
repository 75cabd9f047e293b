"""The whole product on real parts: miles-submit, Slurm, one MPI world, SGLang, Megatron-core, HDF5, TensorBoard.

One small run, one of whose ranks is killed once on the way; every test looks at what it left.
"""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from miles_hpc import device
from miles_hpc.launchers import audit, cli, history, node, progress, report, state
from miles_hpc.paths import RunPaths
from miles_hpc.samples import store

sys.path.append(str(Path(__file__).parents[1] / "bench"))
import all as bench
import bench_start
import bench_sync
import gpu_colocate
import gpu_learning

pytestmark = [pytest.mark.slurm, pytest.mark.engine]
STEPS = 4
TOML = """\
run = { name = "small", steps = 4, seed = 3 }
model = { source = "miles_hpc.examples.arithmetic:model", context_length = 64 }
data = { prompts = "miles_hpc.examples.arithmetic:prompts", eval = "miles_hpc.examples.arithmetic:prompts" }
warm_start = { data = "miles_hpc.examples.arithmetic:demonstrations", steps = 60 }
eval = { prompts = 16, every_steps = 1 }
checkpoint = { every_steps = 1, keep = 2 }
train = { lr = 1e-3, mini_batches = 2, micro_batch_tokens = 128, loss = "beside:loss" }
slurm = { time_minutes = 15 }

[rollout]
prompts_per_step = 8
samples_per_prompt = 4
max_new_tokens = 20
flush_groups = 4
staleness = 1
reward = "beside:reward"
"""
BY_HAND = {"what", "steps", "date", "commit"}
"""Columns of docs/benchmarks/gpu-colocate.json that `gpu_colocate.py` does not know."""
BESIDE = """\
import re
import time
from pathlib import Path

import torch

HERE = Path(__file__).parent
EVENTS = HERE / "runs/small-000/events.jsonl"

def steps():
    return len(re.findall('"event": "step"', EVENTS.read_text())) if EVENTS.exists() else 0

def reward(prompt, answer, label, metadata):
    return {"reward": float(answer.count("=") == 3), "length": float(len(answer))}

def loss(tokens, train):
    while steps() == 2 and not (HERE / "killed").exists():
        time.sleep(0.05)
    first = steps() == 1 and not (HERE / "full").exists()
    if len(tokens.log_probs) > 64 or first:
        (HERE / "full").touch()
        raise torch.OutOfMemoryError("CUDA out of memory")
    return -(tokens.log_probs - tokens.old_log_probs).exp() * tokens.advantages
"""


@pytest.fixture(scope="module")
def run(cluster, tmp_path_factory) -> Iterator[RunPaths]:
    """Submit; kill the training rank in step 2, in which it waits for that; wait for the end."""
    folder = tmp_path_factory.mktemp("a run")
    (folder / "job.toml").write_text(TOML)
    (folder / "beside.py").write_text(BESIDE)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.exports().items():
            patch.setenv(name, value)
        patch.chdir(folder)
        assert cli.main(["run", "job.toml"]) == 0
        paths = RunPaths(folder / "runs/small-000")
        wait(paths, lambda: any(e["event"] == "step" and e["step"] == 1 for e in events(paths)))
        os.kill(json.loads(paths.heartbeat(0).read_text())["pid"], signal.SIGKILL)
        (folder / "killed").touch()
        wait(paths, lambda: state.state_of(paths.folder).ended)
        yield paths


def wait(paths: RunPaths, reached, seconds: float = 420) -> None:
    end = time.monotonic() + seconds
    while not reached():
        now = state.state_of(paths.folder)
        assert time.monotonic() < end and not (now.ended and now.word != "done"), f"{now}\n{logs(paths)}"
        time.sleep(0.2)


def events(paths: RunPaths) -> list[dict]:
    return history.lines(paths.events)[0]


def logs(paths: RunPaths) -> str:
    return "\n".join(f"== {file}\n{file.read_text()[-3000:]}" for file in sorted(paths.attempts.glob("*/*.log")))


def test_the_run_survives_the_death_of_a_rank(run):
    now = state.state_of(run.folder)
    assert (now.word, now.exit_code, now.attempt) == ("done", 0, 2)
    first = json.loads(run.verdict(1).read_text())
    assert (first["kind"], first["role"], first["rank"], first["signal"]) == ("rank_died", "train", 0, signal.SIGKILL)


def test_the_second_attempt_goes_on_where_the_first_ended(run):
    starts = [(e["attempt"], e["step"]) for e in events(run) if e["event"] == "start"]
    assert starts == [(1, 0), (2, 2)]
    assert [e["event"] for e in events(run)].count("warm_start") == 1


def test_what_memory_taught_the_first_attempt_the_second_knows(run):
    lessons = [(e["attempt"], e["before"], e["tokens"]) for e in events(run) if e["event"] == "micro_batch_tokens"]
    assert [lesson[:2] for lesson in lessons] == [(1, 128)] and (tokens := lessons[0][2]) < 128, logs(run)
    assert f"out of memory: micro-batches of {tokens} tokens from now on, not 128" in run.log(1, "train", 0).read_text()
    assert f"out of memory: micro-batches of {tokens} tokens" in progress.progress_of(run.folder, STEPS).line()


def test_the_log_of_every_rank_says_what_it_did(run):
    said = {role: [run.log(n, role, rank).read_text() for n in (1, 2)] for rank, role in enumerate(("train", "rollout"))}
    for role, (first, second) in said.items():
        assert f"{role} rank " in first and ", attempt 1: torch 2." in first and "MPI world of 2 ranks" in first
        assert first.count(" step 0: ") == second.count(" step 3: ") == 1, said
        assert second.splitlines()[-1].endswith("end: done") and "end: " not in first
    train, rollout = said["train"][1], said["rollout"][1]
    assert "trainer ready on cpu" in train and f"step 3: {STEPS}/{STEPS} steps done  reward " in train
    assert "evaluation of weights 4: reward " in train and "checkpoint after 4 steps: " in train and "export: " in train
    assert "warm start: steps 60, loss " in said["train"][0] and "begin at step " in train
    assert "engine ready" in rollout and "step 3: samples " in rollout
    assert re.search(r"step 0: samples 32, [0-9.]+ s, [1-9]\d* tokens/s$", said["rollout"][0], re.MULTILINE)


def test_nothing_is_lost_or_generated_twice(run):
    for step in range(STEPS):
        shards = [store.read(shard) for shard in store.on_disk(run, step)]
        ids = np.concatenate([shard.prompt_ids for shard in shards])
        assert sorted(np.unique(ids, return_counts=True)[1]) == [4] * 8
    assert audit.audit(run.folder) == 0


def test_the_report_counts_what_is_on_disk(run, capsys):
    assert report.report(run.folder, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["steps"], told["attempts"]) == ("done", STEPS, 2)
    assert (told["samples"], told["prompts_lost"], told["prompts_duplicated"]) == (STEPS * 32, 0, 0)
    assert told["weight_sync_gb_per_s"] > 0 and told["rollout_tokens_per_s"] > 0 and told["train_tokens_per_s"] > 0


def test_the_sampler_is_one_update_behind_the_trainer(run):
    """Also in the step that the first attempt had generated and not trained on. In step 0 both have the same, and agree."""
    steps = [e for e in events(run) if e["event"] == "step"]
    distances = [e["metrics"]["train/logp_abs_diff_max"] for e in steps]
    assert 0 < distances[0] < 1e-3 and all(distance > 1e-3 for distance in distances[1:]), distances
    assert all(e["metrics"]["train/grad_norm"] > 0 for e in steps if e["metrics"]["groups/zero_variance"] < 1)
    for step in range(STEPS):
        versions = {int(v) for shard in store.on_disk(run, step) for v in store.read(shard).weight_versions} - {-1}
        assert versions == {max(0, step - 1)}, step


def test_engine_digests_were_compared_at_every_sync(run):
    syncs = [e for e in events(run) if e["event"] == "sync"]
    assert {e["version"] for e in syncs} == set(range(STEPS + 1))
    assert all(e["digests"] > 20 and e["bytes"] > 2_000_000 for e in syncs)


def test_tensorboard_holds_every_step_of_both_roles(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for role, tag in (("train", "reward/mean"), ("train", "reward/length"), ("rollout", "engine/tokens_per_s")):
        board = EventAccumulator(str(run.tensorboard(role)))
        board.Reload()
        assert [point.step for point in board.Scalars(tag)] == list(range(STEPS)), (role, tag)
        assert "eval/reward" in board.Tags()["scalars"] or role == "rollout"


def test_every_version_was_scored_by_held_out_prompts(run):
    """The second attempt scores the one that it begins with again."""
    scored = [e for e in events(run) if e["event"] == "eval"]
    assert [e["step"] for e in scored] == [0, 1, 2, 2, 3, 4] and all(e["prompts"] == 16 for e in scored)


def test_old_checkpoints_are_gone_and_the_export_loads(run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device.define_torchvision_operators()  # a CUDA build of torchvision beside a CPU build of torch
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["step-000003", "step-000004"]
    model = AutoModelForCausalLM.from_pretrained(run.export, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(run.export, local_files_only=True)
    assert model.config.num_experts == 8 and tokenizer.decode(tokenizer.encode("1 + 2 =")) == "1 + 2 ="


def test_benchmarks_read_it(run):
    """Their columns are those of the results in docs/benchmarks."""
    syncs = [e for e in events(run) if e["event"] == "sync"]
    assert list(bench_sync.row(syncs, 0.5)) == columns("sync")
    marks = bench_start.row(run, 2.0, 20.0)
    assert list(marks) == columns("start") and list(marks.values())[2:] == sorted(list(marks.values())[2:])
    assert list(gpu_learning.measure(run.folder)) == columns("gpu-learning")
    turns = gpu_colocate.measure(run.folder)
    assert turns["outside rollout, train, sync %"] > 0
    assert {c for c in columns("gpu-colocate") if not c.startswith(("engine/", "asleep"))} - set(turns) == BY_HAND


def columns(name: str) -> list[str]:
    return list(json.loads((bench.RESULTS / f"{name}.json").read_text())["rows"][0])


def test_no_process_is_left(run):
    """Neither by its command line nor by the mark that rank.sh gives to all that a rank starts: engines, their children."""
    marked, name = {pid for pid, _ in node.stale(run.folder)}, str(run.folder)
    left = [p for p in psutil.process_iter(["cmdline"]) if p.pid in marked or name in " ".join(p.info["cmdline"] or ())]
    assert psutil.wait_procs(left, timeout=60)[1] == []


def test_why_names_the_killed_rank_and_what_all_ranks_last_did(run, capsys):
    assert cli.main(["why", str(run.folder), "--attempt", "1"]) == 0
    said = capsys.readouterr().out
    assert "train rank 0 on node t0" in said and "signal 9 SIGKILL" in said and "another attempt in the same" in said
    beats = json.loads(run.verdict(1).read_text())["heartbeats"]
    assert [(b["rank"], b["role"]) for b in beats] == [(0, "train"), (1, "rollout")]
    assert all(b["peak_memory_mib"] > 100 for b in beats)
