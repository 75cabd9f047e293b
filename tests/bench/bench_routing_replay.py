"""Routing replay: experts and log-probs of a bfloat16 engine against the trainer, without and with it, and its cost.

Random Qwen3-MoE weights, the same on both sides, and random prompts; the trainer is in float32 on a CPU, in bfloat16 on a GPU.
`pairs` is the share of (token, layer) pairs that went to other experts than in the engine. `diff` is the mean absolute
log-prob difference of all answer tokens, `context diff` of those with such a pair at any token before them, `there diff` of
those with one at the very token that predicts them; `gain` is without / with. Steps with and without replay take turns; `cost`
is the median over pairs of steps, in seconds of the processor on a CPU. `inside` is the replay's own code and what it starts
on a GPU, each call waited for: it is what a step pays at most. Median and range are over models and sets of prompts.
"""

import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[1] / "train"))
from train_parts import hf_model, trainer

from miles_hpc.config import Config
from miles_hpc.rollout.engine import EngineHost
from miles_hpc.rollout.request import Request
from miles_hpc.samples.schema import Samples

CPU: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
}
CPU |= {"vocab_size": 512, "max_position_embeddings": 256, "head_dim": 64, "initializer_range": 0.05}
GPU: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
}
GPU |= {"vocab_size": 32000, "max_position_embeddings": 1024, "num_attention_heads": 16, "num_key_value_heads": 4}
GPU |= {"head_dim": 64, "initializer_range": 0.03}
ON_GPU = torch.cuda.is_available()
PROMPTS, GROUP, NEW = (32, 8, 128) if ON_GPU else (16, 4, 64)
MODELS, SEEDS = (1, 3) if ON_GPU else (3, 2)
"""Random models, and for each as many sets of prompts."""
PAIRS = 7


def run() -> list[dict[str, Any]]:
    """A row for each figure: median and range over all models and sets of prompts."""
    return figures([row for model in range(MODELS) for row in measure(GPU if ON_GPU else CPU, SEEDS, model_seed=model)])


def figures(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Median, least and most of each."""
    values = {name: [row[name] for row in found] for name in found[0]}
    return [{"figure": name, "median": statistics.median(v), "least": min(v), "most": max(v)} for name, v in values.items()]


def measure(sizes: dict[str, Any], seeds: int = 1, pairs: int = PAIRS, model_seed: int = 0) -> list[dict[str, Any]]:
    """Sample with one engine, score with one trainer: a row for each set of prompts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = hf_model("moe", model_seed, **sizes).bfloat16()  # weights that both sides hold exactly
        model.save_pretrained(folder / "model")
        parameters = sum(p.numel() for p in model.parameters())
        sets = generate(folder / "model", sizes, seeds)
        with trainer(config("bfloat16" if ON_GPU else "float32"), folder / "model", folder / "store") as made:
            return [{"parameters": parameters} | score(made, samples, pairs) for samples in sets]


def config(dtype: str) -> Config:
    rollout = {"prompts_per_step": PROMPTS, "samples_per_prompt": GROUP, "max_new_tokens": NEW, "reward": "a:b"}
    return Config.model_validate(
        {
            "run": {"name": "t", "steps": 1},
            "model": {"path": "unused", "context_length": 2 * NEW + 64, "dtype": dtype},
            "data": {"prompts": "a:b"},
            "rollout": rollout | {"kv_cache_tokens": 65536, "timeout_seconds": 500.0},
            "train": {"lr": 0.0, "micro_batch_tokens": 4096, "routing_replay": True},
        }
    )


def generate(folder: Path, sizes: dict[str, Any], seeds: int) -> list[Samples]:
    """Random prompts of 8 to 40 tokens and their answers, with the experts of every token; a set for each seed."""
    host = EngineHost(config("bfloat16"), folder)
    host.start()
    try:
        host.wait_ready()
        return [_answers(host, sizes, seed) for seed in range(seeds)]
    finally:
        host.shutdown()


def _answers(host: EngineHost, sizes: dict[str, Any], seed: int) -> Samples:
    rng, first = np.random.default_rng(seed), seed * PROMPTS
    prompts = [rng.integers(3, sizes["vocab_size"], rng.integers(8, 40)).tolist() for _ in range(PROMPTS)]
    requests = [Request(prompt, first + i, k, NEW) for i, prompt in enumerate(prompts) for k in range(GROUP)]
    outputs = dict(host.generate(requests))
    return Samples.concat([_sample(request, outputs[i]) for i, request in enumerate(requests)])


def _sample(request: Request, output: Any) -> Samples:
    prompt, answer = len(request.tokens), len(output.tokens)
    mask = np.repeat([0, 1], [prompt, answer]).astype(np.uint8)
    return Samples(
        prompt_ids=np.array([request.prompt_id]),
        sample_index=np.array([request.sample_index], np.int32),
        offsets=np.array([0, prompt + answer]),
        tokens=np.array([*request.tokens, *output.tokens], np.int32),
        loss_mask=mask,
        rollout_log_probs=np.array([0.0] * prompt + output.log_probs, np.float32),
        weight_versions=np.where(mask, 0, -1).astype(np.int32),
        rewards=np.array([request.sample_index % 2], np.float32),
        status=np.zeros(1, np.uint8),
        prompts=[""],
        answers=[""],
        labels=["null"],
        routing=output.routing,
    )


def score(made: Any, samples: Samples, pairs: int) -> dict[str, Any]:
    """Steps of learning rate 0 without and with replay."""
    advantages = np.where(samples.rewards > 0, 1.0, -1.0).astype(np.float32)
    assert samples.routing is not None
    results, seconds = in_turns(made, samples, advantages, pairs)
    before, after = (routed(made, samples, advantages, on) for on in (False, True))
    distance = {mode: np.abs(r.train_log_probs - samples.rollout_log_probs) for mode, r in results.items()}
    ratios = [b / a - 1 for a, b in zip(seconds["without"], seconds["with"], strict=True)]
    return {
        "tokens": len(samples.tokens),
        "pairs without": before.pairs,
        "pairs with": after.pairs,
        **compared("", distance, samples.loss_mask == 1),
        "context tokens": before.context.sum() / samples.loss_mask.sum(),
        **compared("context ", distance, before.context),
        "there tokens": before.there.sum() / samples.loss_mask.sum(),
        **compared("there ", distance, before.there),
        **{f"KL k3 {mode}": r.metrics["train/rollout_kl_k3"] for mode, r in results.items()},
        "bytes/token": samples.routing.nbytes / len(samples.tokens),
        "step s": statistics.median(seconds["without"]),
        "cost %": statistics.median(ratios) * 100,
        "inside %": inside(made, samples, advantages) / statistics.median(seconds["without"]) * 100,
    }


def compared(name: str, distance: dict[str, np.ndarray], where: np.ndarray) -> dict[str, float]:
    """Mean distances of some tokens, and how many times replay makes them smaller."""
    means = {mode: float(values[where].mean()) for mode, values in distance.items()}
    return {f"{name}diff {mode}": mean for mode, mean in means.items()} | {f"{name}gain": means["without"] / means["with"]}


def in_turns(made: Any, samples: Samples, advantages: np.ndarray, pairs: int) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Results and seconds of steps without and with replay, each first in every other pair."""
    clock = time.perf_counter if ON_GPU else time.process_time
    data = {"without": dataclasses.replace(samples, routing=None), "with": samples}
    results, seconds = {}, {mode: list[float]() for mode in data}
    for turn in range(pairs):
        for mode in list(data)[:: 1 if turn % 2 else -1]:
            with replaying(made, mode == "with"):
                started = clock()
                results[mode] = made.step(data[mode], advantages, 0)
                seconds[mode].append(clock() - started)
    return {mode: results[mode] for mode in data}, seconds


def inside(made: Any, samples: Samples, advantages: np.ndarray) -> float:
    """Seconds of a step in the code of the replay, without the router's own choice of experts."""
    from miles_hpc.train import packing, replay

    watch = Watch()
    asked = watch.timed(replay.Replay.get_replay_topk)

    def choose(router: Any, *arguments: Any) -> Any:
        *scores, compute = arguments
        return asked(router, *scores, watch.timed(compute, -1))

    timed = [(replay.Replays, "begin"), (replay.Replays, "load"), (replay.Replays, "mismatch"), (packing, "_routing")]
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(replay.Replay, "get_replay_topk", choose))
        for owner, name in timed:
            patches.enter_context(mock.patch.object(owner, name, watch.timed(getattr(owner, name))))
        made.step(samples, advantages, 0)
    return watch.seconds


class Watch:
    """Adds up the seconds of calls and of what they start on a GPU."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Any, sign: int = 1) -> Any:
        """The function, whose time is added, or taken off."""

        def call(*args: Any, **more: Any) -> Any:
            started = self._now()
            try:
                return function(*args, **more)
            finally:
                self.seconds += sign * (self._now() - started)

        return call

    @staticmethod
    def _now() -> float:
        if ON_GPU:
            torch.cuda.synchronize()
        return time.perf_counter() if ON_GPU else time.process_time()


@contextmanager
def replaying(made: Any, on: bool) -> Iterator[None]:
    """The trainer with its replay, or as if it had none."""
    replays, routers = made.policy.replays, made.policy.load.routers
    if not on:
        made.policy.replays = None
        for router in routers:
            router.router_replay = None
    try:
        yield
    finally:
        made.policy.replays = replays
        for router, layer in zip(routers, replays.layers, strict=True):
            router.router_replay = layer


@dataclasses.dataclass(frozen=True)
class Routed:
    """How the trainer routed beside the engine."""

    pairs: float
    """Share of (token, layer) pairs that went to other experts."""
    there: np.ndarray
    """[total] bool, answer tokens predicted at a token with such a pair."""
    context: np.ndarray
    """[total] bool, answer tokens with such a pair at any token before them."""


def routed(made: Any, samples: Samples, advantages: np.ndarray, on: bool) -> Routed:
    """Of a step with replay, or of one in which the trainer chooses by itself."""
    from miles_hpc.train.replay import Replay

    policy, replays, routers = made.policy, made.policy.replays, made.policy.load.routers
    same: list[torch.Tensor] = [torch.empty(0)] * len(routers)
    pairs: list[torch.Tensor] = []
    there, context = np.zeros(len(samples.tokens), bool), np.zeros(len(samples.tokens), bool)
    log_probs = policy.log_probs

    def look(n: int, chosen: torch.Tensor) -> None:
        same[n] = chosen.gather(1, replays.layers[n].ids).all(-1)

    def scored(pack: Any, temperature: float = 1.0) -> Any:
        result = log_probs(pack, temperature)
        known = replays.layers[0].known[:, 0]
        other = torch.stack([known & ~s for s in same])
        pairs.append(other[:, known].flatten().cpu())
        here = other.any(0)
        there[pack.flat] = here[pack.before].cpu().numpy()
        context[pack.flat] = _so_far(here, pack.positions)[pack.before].cpu().numpy()
        return result

    def chosen_anew(router: Any, *arguments: Any) -> Any:
        *scores, compute = arguments
        return compute(*scores)

    hooks = [r.register_forward_hook(lambda m, i, out, n=n: look(n, out[1])) for n, r in enumerate(routers)]
    try:
        with ExitStack() as patches:
            patches.enter_context(mock.patch.object(policy, "log_probs", scored))
            if not on:
                patches.enter_context(mock.patch.object(Replay, "get_replay_topk", chosen_anew))
            made.step(samples, advantages, 0)
    finally:
        for hook in hooks:
            hook.remove()
    return Routed(torch.cat(pairs).float().mean().item(), there, context)


def _so_far(here: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[t] bool, whether `here` is true at a token or at one before it in its sequence."""
    count = here.long().cumsum(0)
    first = torch.arange(len(here), device=here.device) - positions
    return count - (count - here.long())[first] > 0
