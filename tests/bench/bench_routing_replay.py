"""Routing replay: experts and log-probs of a bfloat16 engine against the trainer, without and with it, and its cost.

The trainer is in float32 on a CPU and in bfloat16 on a GPU; both sides hold the same weights. `mismatch` is the share of
(token, layer) pairs that went to other experts than in the engine, `tokens` that of tokens with any such layer, and
`diff there` the mean log-prob difference at them (`diff mean`: of all). Steps with and without replay take turns; `cost` is the
median over pairs.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[1] / "train"))
from train_parts import hf_model, trainer

from miles_hpc.config import Config
from miles_hpc.rollout.engine import EngineHost
from miles_hpc.rollout.request import Request
from miles_hpc.samples.schema import Samples

CPU = {"hidden_size": 128, "num_hidden_layers": 4, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
CPU |= {"vocab_size": 512, "max_position_embeddings": 256, "head_dim": 64, "initializer_range": 0.05}
GPU = {"hidden_size": 1024, "num_hidden_layers": 12, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
GPU |= {"vocab_size": 32000, "max_position_embeddings": 1024, "num_attention_heads": 16, "num_key_value_heads": 4}
GPU |= {"head_dim": 64, "initializer_range": 0.03}
PROMPTS, GROUP, NEW = (16, 4, 64) if not torch.cuda.is_available() else (64, 8, 256)
PAIRS = 7


def run() -> list[dict[str, Any]]:
    """One row."""
    return [measure(GPU if torch.cuda.is_available() else CPU)]


def measure(sizes: dict[str, Any], pairs: int = PAIRS) -> dict[str, Any]:
    """Sample with one engine, score with one trainer."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = hf_model("moe", **sizes).bfloat16()  # weights that both sides hold exactly
        model.save_pretrained(folder / "model")
        samples = generate(folder / "model", sizes)
        dtype = "bfloat16" if torch.cuda.is_available() else "float32"
        with trainer(config(dtype), folder / "model", folder / "store") as made:
            return {"model": f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f} M"} | score(made, samples, pairs)


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


def generate(folder: Path, sizes: dict[str, Any]) -> Samples:
    """Random prompts of 8 to 40 tokens and their answers, with the experts of every token."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, sizes["vocab_size"], rng.integers(8, 40)).tolist() for _ in range(PROMPTS)]
    requests = [Request(prompt, i, k, NEW) for i, prompt in enumerate(prompts) for k in range(GROUP)]
    host = EngineHost(config("bfloat16"), folder)
    host.start()
    try:
        host.wait_ready()
        outputs = dict(host.generate(requests))
    finally:
        host.shutdown()
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
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    results: dict[str, Any] = {}
    for _ in range(pairs):
        for mode in seconds:
            with replaying(made, mode == "with"):
                started = time.perf_counter()
                results[mode] = made.step(samples, advantages, 0)
                seconds[mode].append(time.perf_counter() - started)
    before, after = (routed(made, samples, advantages, on) for on in (False, True))
    plain, replayed = results["without"].metrics, results["with"].metrics
    moved = {mode: np.abs(r.train_log_probs - samples.rollout_log_probs)[before[2]].mean() for mode, r in results.items()}
    ratios = [b / a - 1 for a, b in zip(seconds["without"], seconds["with"], strict=True)]
    return {
        "tokens": len(samples.tokens),
        "mismatch without": before[0],
        "tokens without": before[1],
        "mismatch with": after[0],
        "diff there without": float(moved["without"]),
        "diff there with": float(moved["with"]),
        "diff mean without": plain["train/logp_abs_diff_mean"],
        "diff mean with": replayed["train/logp_abs_diff_mean"],
        "diff max without": plain["train/logp_abs_diff_max"],
        "diff max with": replayed["train/logp_abs_diff_max"],
        "KL k3 without": plain["train/rollout_kl_k3"],
        "KL k3 with": replayed["train/rollout_kl_k3"],
        "bytes/token": samples.routing.nbytes / len(samples.tokens),
        "step s": statistics.median(seconds["without"]),
        "cost %": statistics.median(ratios) * 100,
    }


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


def routed(made: Any, samples: Samples, advantages: np.ndarray, on: bool) -> tuple[float, float, np.ndarray]:
    """How the trainer routed beside the engine: shares of (token, layer) pairs and of tokens that went to other experts, and
    [total] bool, the answer tokens predicted at such a token."""
    from miles_hpc.train.replay import Replay

    policy, replays, routers = made.policy, made.policy.replays, made.policy.load.routers
    same: list[torch.Tensor] = [torch.empty(0)] * len(routers)
    pairs, hit, flags = [], [], np.zeros(len(samples.tokens), bool)

    def look(n: int, chosen: torch.Tensor) -> None:
        same[n] = chosen.gather(1, replays.layers[n].ids).all(-1)

    def scored(pack: Any, temperature: float = 1.0) -> Any:
        result = log_probs(pack, temperature)
        other = torch.stack([replays.layers[n].known[:, 0] & ~s for n, s in enumerate(same)])
        known = replays.layers[0].known[:, 0]
        pairs.append(other[:, known].flatten().cpu())
        hit.append(other.any(0)[known].cpu())
        flags[pack.flat] = other.any(0)[pack.before].cpu().numpy()
        return result

    hooks = [r.register_forward_hook(lambda m, i, out, n=n: look(n, out[1])) for n, r in enumerate(routers)]
    log_probs, policy.log_probs, replay = policy.log_probs, scored, Replay.get_replay_topk
    try:
        if not on:
            Replay.get_replay_topk = lambda self, s, k, a=None, b=None, compute=None: compute(s, k, a, b)
        made.step(samples, advantages, 0)
    finally:
        Replay.get_replay_topk, policy.log_probs = replay, log_probs
        for hook in hooks:
            hook.remove()
    return torch.cat(pairs).float().mean().item(), torch.cat(hit).float().mean().item(), flags
