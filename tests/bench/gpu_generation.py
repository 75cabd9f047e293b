"""Sampled tokens per second of engines that share a GPU and take turns: native, exact, and SGLang's own deterministic modes."""

import json
import math
import os
import random
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import gpu_host

from miles_hpc.config import Config
from miles_hpc.rollout.engine import EngineHost
from miles_hpc.rollout.request import Output, Request

HERE = Path(__file__).resolve().parent
BATCHES = (1, 16, 64, 256)
NEW, LONG = 256, ((1, 16384), (4, 16384), (16, 4000))
"""New tokens; sequences and their tokens before these."""
ROUNDS, SLOW_ROUNDS = 15, 5
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "native": ("native", {}),
    "exact": ("exact", {}),
    "sglang deterministic": ("native", {"enable_deterministic_inference": True}),
    "sglang on-policy": ("native", {"rl_on_policy_target": "fsdp"}),
}
"""`run.numerics`, and more of SGLang's arguments."""
Pair = tuple[Request, Output]


def config(folder: Path, numerics: str) -> Config:
    """Of a run on the checkpoint in `folder`."""
    return Config.model_validate(
        {
            "run": {"name": "bench", "steps": 1, "seed": 5, "numerics": numerics},
            "model": {"path": str(folder), "context_length": max(tokens for _, tokens in LONG) + NEW + 8, "dtype": "bfloat16"},
            "data": {"prompts": "unused:unused"},
            "rollout": {
                "prompts_per_step": 64,
                "samples_per_prompt": 4,
                "max_new_tokens": NEW,
                "reward": "unused:unused",
                "kv_cache_tokens": 131072,
                "max_running_requests": max(BATCHES),
                "timeout_seconds": 240.0,
            },
            "train": {"lr": 1e-5, "micro_batch_tokens": 8192},
        }
    )


class Host(EngineHost):
    """With one of MODES."""

    program = ("-m", "gpu_host")

    def __init__(self, folder: Path, mode: str, log: Path) -> None:
        numerics, self.more = MODES[mode]
        super().__init__(config(folder, numerics), folder, log=log)

    def start(self) -> None:
        os.environ["PYTHONPATH"] = f"{HERE}:{os.environ.get('PYTHONPATH', '')}"
        os.environ[gpu_host.MORE] = json.dumps(self.more)
        super().start()


def start(folder: Path, modes: list[str], logs: Path) -> tuple[dict[str, Host], float]:
    """Engines started together, and the seconds that it took; SGLang's own modes are left out if they cannot."""
    hosts = {mode: Host(folder, mode, logs / f"{mode.replace(' ', '-')}.log") for mode in modes}
    started = time.monotonic()
    for host in hosts.values():
        host.start()
    for mode, host in list(hosts.items()):
        try:
            host.wait_ready()
        except Exception as error:
            if mode in ("native", "exact"):
                raise
            print(f"{mode} did not start: {str(error)[-1500:]}", flush=True)
            del hosts[mode]
    return hosts, time.monotonic() - started


def measure(hosts: dict[str, Host], rounds: int) -> tuple[list[dict[str, Any]], dict[str, list[Pair]]]:
    """Rows of the table, and every mode's samples."""
    rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    pairs: dict[str, list[Pair]] = defaultdict(list)
    for turn in range(-1, rounds):  # the first is not counted
        for batch in BATCHES:
            requests = _requests(batch, 100_000 * (turn + 1) + 1000 * batch)
            for mode in _order(hosts, turn):
                rate, found = _generate(hosts[mode], requests)
                pairs[mode] += found
                rates[mode, batch] += [rate] if turn >= 0 else []
    return [_row(mode, str(batch), rates[mode, batch], rates["native", batch]) for mode, batch in rates], pairs


def measure_long(hosts: dict[str, Host], rounds: int) -> tuple[list[dict[str, Any]], dict[str, list[Pair]]]:
    """Long prompts that are in the cache: decoding alone counts. Samples are those of the first turn and of a cached one."""
    rows: list[dict[str, Any]] = []
    pairs: dict[str, list[Pair]] = defaultdict(list)
    for batch, tokens in LONG:
        rates: dict[str, list[float]] = defaultdict(list)
        prompts = [random.Random(i).choices(range(3, 31000), k=tokens) for i in range(batch)]
        for turn in range(-1, rounds):
            requests = [Request(p, 7_000_000 + 1000 * turn + batch, i, NEW) for i, p in enumerate(prompts)]
            for mode in _order(hosts, turn):
                rate, found = _generate(hosts[mode], requests)
                rates[mode] += [rate] if turn >= 0 else []
                pairs[mode] += found if turn <= 0 else []
        rows += [_row(mode, f"{batch} x {tokens}", rates[mode], rates["native"]) for mode in hosts]
    return rows, pairs


def _order(hosts: dict[str, Host], turn: int) -> list[str]:
    """Modes of a turn: the other way round in every other one, and SGLang's own in the first ones only."""
    modes = [mode for mode in hosts if mode in ("native", "exact") or turn < SLOW_ROUNDS]
    return modes[:: 1 if turn % 2 else -1]


def _requests(count: int, first: int) -> list[Request]:
    rng = random.Random(first)
    return [Request(rng.choices(range(3, 31000), k=rng.randint(8, 200)), first + i, 0, NEW) for i in range(count)]


def _generate(host: Host, requests: list[Request]) -> tuple[float, list[Pair]]:
    started = time.monotonic()
    outputs = dict(host.generate(requests))
    seconds = time.monotonic() - started
    pairs = [(request, outputs[i]) for i, request in enumerate(requests)]
    return sum(len(output.tokens) for _, output in pairs) / seconds, pairs


def _row(mode: str, batch: str, rates: list[float], native: list[float]) -> dict[str, Any]:
    """Medians; the cost is of pairs of one turn, between order statistics that hold its median with 95 % (of 15: 4th, 12th)."""
    costs = sorted(100 * (1 - rate / base) for rate, base in zip(rates, native, strict=False))
    edge = _edge(len(costs))
    return {
        "mode": mode,
        "batch": batch,
        "tokens/s": statistics.median(rates),
        "cost %": statistics.median(costs),
        "from %": costs[edge],
        "to %": costs[-1 - edge],
        "pairs": len(costs),
    }


def _edge(pairs: int) -> int:
    """How many of the sorted pairs lie outside on either side; with few pairs none, and then it is less than 95 %.

    The number of pairs below the true median is binomial (https://en.wikipedia.org/wiki/Order_statistic, sign test).
    """
    below = [sum(math.comb(pairs, i) for i in range(n + 1)) / 2**pairs for n in range(pairs // 2)]
    return max(0, sum(share <= 0.025 for share in below) - 1)
