"""Weight sync over NCCL of a real run, trainer and engine on a GPU each, beside a raw NCCL broadcast of as many bytes.

The sync is the whole of it: weights gathered, names checked, sent, loaded, digests of all engine tensors compared. The
broadcast is torch.distributed's between two processes, in buckets of the same size. MPIEXEC is the launcher (default: mpiexec).
"""

import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_models
import psutil

STEPS, REPEATS, LIMIT = 8, 5, 110
JOB = """
run = {{ name = "bench", steps = {steps} }}
model = {{ path = "model", context_length = 512, dtype = "bfloat16" }}
data = {{ prompts = "prompts.jsonl" }}
checkpoint = {{ every_steps = 1000 }}
train = {{ lr = 1e-6, micro_batch_tokens = 8192 }}

[rollout]
prompts_per_step = 4
samples_per_prompt = 4
max_new_tokens = 16
kv_cache_tokens = 65536
reward = "length:reward"
"""
REWARD = """
def reward(prompt, answer, label, metadata):
    return float(len(answer) % 3)
"""


def measure(folder: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The table so far after each model, one row for it: medians over the syncs after the first two."""
    rows, preparing = [], {name: _prepare(name, folder / name) for name in gpu_models.MODELS}
    for name, prepare in preparing.items():
        if prepare.wait(LIMIT):
            raise RuntimeError(f"{name}: miles_hpc.prepare ended with {prepare.returncode}")
    _say("prepared")
    for name in gpu_models.MODELS:
        syncs = _syncs(folder / name)
        rows.append(row(name, syncs, _broadcast(syncs[0]["bytes"], folder / name)))
        yield "sync", rows


def row(name: str, syncs: list[dict[str, Any]], plain: float) -> dict[str, Any]:
    """Of the `sync` events of a run and the seconds of a raw broadcast."""
    size, later = syncs[0]["bytes"], [sync["seconds"] for sync in syncs[2:]]
    seconds = statistics.median(later)
    _say(f"{name}: broadcast of {size} bytes {plain:.4f} s, sync {seconds:.4f} s")
    return {
        "model": name,
        "MB": size / 1e6,
        "first s": syncs[0]["seconds"],
        "sync s": seconds,
        "slowest s": max(later),
        "GB/s": size / seconds / 1e9,
        "broadcast s": plain,
        "broadcast GB/s": size / plain / 1e9,
        "% of broadcast": 100 * plain / seconds,
        "syncs": len(later),
        "engine tensors compared": syncs[0]["digests"],
    }


def _prepare(name: str, folder: Path) -> subprocess.Popen[bytes]:
    """Model, prompts, reward and run of one model; its preparation is under way."""
    from miles_hpc import config

    folder.mkdir()
    gpu_models.write(gpu_models.MODELS[name], folder / "model")
    _tokenizer(folder / "model")
    prompts = [json.dumps({"prompt": f"{i} + {i + 1}", "label": str(2 * i + 1)}) for i in range(200)]
    (folder / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    (folder / "length.py").write_text(REWARD)
    (folder / "job.toml").write_text(JOB.format(steps=STEPS + 2))
    run = folder / "run"
    (run / "attempts" / "001").mkdir(parents=True)
    (run / "config.toml").write_text(config.dump(config.load(folder / "job.toml")))
    _say(f"{name}: written")
    return subprocess.Popen([sys.executable, "-m", "miles_hpc.prepare", "--run", run, "--attempt", "1"])


def _syncs(folder: Path) -> list[dict[str, Any]]:
    """The `sync` events of a short run."""
    run = folder / "run"
    launch = shlex.split(os.environ.get("MPIEXEC", "mpiexec"))
    with (folder / "log").open("w+") as log:
        command = [*launch, *_rank("train", run, 0), ":", *_rank("rollout", run, 1)]
        ranks = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            return _wait(run / "events.jsonl", ranks)
        except RuntimeError as error:
            raise RuntimeError(f"{error}:\n{(folder / 'log').read_text()[-6000:]}") from None
        finally:  # not to its end: its last checkpoint is 14 bytes per parameter
            tree = psutil.Process(ranks.pid).children(recursive=True) if ranks.poll() is None else []
            for process in [*tree, ranks]:
                process.kill()
            ranks.wait()


def _wait(events: Path, ranks: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
    """The first STEPS syncs of a run under way. Raises: RuntimeError if it ends or takes too long before."""
    deadline, syncs = time.monotonic() + LIMIT, list[dict[str, Any]]()
    while ranks.poll() is None and time.monotonic() < deadline:
        lines = events.read_text(encoding="utf-8").splitlines()[:-1] if events.exists() else []
        known, syncs = len(syncs), [event for event in map(json.loads, lines) if event["event"] == "sync"]
        for sync in syncs[known:]:
            _say(f"sync {sync['version']}: {sync['seconds']:.4f} s")
        if len(syncs) >= STEPS:
            return syncs[:STEPS]
        time.sleep(0.5)
    raise RuntimeError(f"{len(syncs)} instead of {STEPS} syncs within {LIMIT} s, exit code {ranks.poll()}")


def _say(what: str) -> None:
    """Progress, with the time of day."""
    print(time.strftime("%H:%M:%S"), what, flush=True)


def _rank(role: str, run: Path, number: int) -> list[str]:
    """One rank on the GPU of its number. PMI_RANK: Open MPI does not set it."""
    environment = ["env", f"CUDA_VISIBLE_DEVICES={number}", f"PMI_RANK={number}"]
    program = [sys.executable, "-m", "miles_hpc.main", "--role", role, "--run", str(run), "--attempt", "1", "--world-size", "2"]
    return ["-np", "1", *environment, *program]


def _tokenizer(folder: Path) -> None:
    """Digits and signs."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<unk>", "<eos>", *"0123456789+ "]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | special))


def _broadcast(size: int, folder: Path) -> float:
    """Median seconds of a broadcast of `size` bytes in buckets, until the receiver has them."""
    from miles_hpc.buckets import BUCKET_MIB

    code = f"""
import sys, time, torch, torch.distributed as dist
rank = int(sys.argv[1]); torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method="file://{folder}/group", rank=rank, world_size=2)
bucket, answer = torch.zeros({BUCKET_MIB["cuda"] << 20}, dtype=torch.uint8, device="cuda"), torch.zeros(1, device="cuda")
for _ in range({REPEATS + 2}):
    torch.cuda.synchronize()
    started, left = time.monotonic(), {size}
    while left:
        part = min(left, len(bucket))
        dist.broadcast(bucket[:part], 0)
        left -= part
    dist.broadcast(answer, 1)
    torch.cuda.synchronize()
    if rank == 0: print(time.monotonic() - started, flush=True)
dist.destroy_process_group()
"""
    ranks = [subprocess.Popen([sys.executable, "-c", code, str(r)], stdout=subprocess.PIPE, text=True) for r in (0, 1)]
    printed = ranks[0].communicate(timeout=60)[0]
    ranks[1].communicate(timeout=60)
    return statistics.median(float(line) for line in printed.split()[2:])
