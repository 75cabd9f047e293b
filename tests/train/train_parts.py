"""What the tests of training share: configurations, random samples, tiny models, trainers, and ranks as processes."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from miles_hpc.config import Config
from miles_hpc.device import define_torchvision_operators
from miles_hpc.samples.schema import Samples

VOCAB = 155
FAMILIES = ("qwen3", "moe", "llama")
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 1,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}


def hf_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A random transformers model. Norm weights differ from one, and Llama's embeddings are tied."""
    define_torchvision_operators()
    import transformers as hf

    torch.manual_seed(seed)
    model: Any
    if family == "qwen3":
        model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES | changes))
    elif family == "moe":
        model = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SIZES | EXPERTS | {"norm_topk_prob": True} | changes))
    else:
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES | {"tie_word_embeddings": True} | changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model.float().eval()


def write_model(family: str, folder: Path, **changes: Any) -> Path:
    hf_model(family, **changes).save_pretrained(folder)
    return folder


def config(prompts: int = 8, group: int = 4, ranks: int = 1, dtype: str = "float32", seed: int = 0, **train: Any) -> Config:
    rollout = {"prompts_per_step": prompts, "samples_per_prompt": group, "max_new_tokens": 16, "reward": "a:b"}
    return Config.model_validate(
        {
            "run": {"name": "test", "steps": 3, "seed": seed},
            "model": {"path": "unused", "context_length": 128, "dtype": dtype},
            "data": {"prompts": "a:b"},
            "rollout": rollout,
            "train": {"lr": 1e-2, "micro_batch_tokens": 256} | train,
            "slurm": {"train": {"ranks_per_node": ranks}},
        }
    )


def samples(prompts: int = 8, group: int = 4, seed: int = 0, shortest: int = 3, longest: int = 14) -> Samples:
    """Random sorted samples; every fourth group has equal rewards."""
    n, random = prompts * group, np.random.default_rng(seed)
    prompt, answer = random.integers(3, 9, n), random.integers(shortest, longest, n)
    mask = np.concatenate([np.repeat([0, 1], [p, a]) for p, a in zip(prompt, answer, strict=True)]).astype(np.uint8)
    rewards = random.integers(0, 2, n).astype(np.float32)
    rewards[np.arange(n) // group % 4 == 3] = 1.0
    rewards[::group] = np.where(np.arange(prompts) % 4 == 3, 1.0, 1.0 - rewards[1::group])
    total = len(mask)
    return Samples(
        prompt_ids=np.repeat(np.arange(prompts), group),
        sample_index=np.tile(np.arange(group), prompts).astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum(prompt + answer)]),
        tokens=random.integers(0, VOCAB, total).astype(np.int32),
        loss_mask=mask,
        rollout_log_probs=(mask * random.uniform(-6.0, -4.0, total)).astype(np.float32),
        weight_versions=np.where(mask, 0, -1).astype(np.int32),
        rewards=rewards,
        status=np.zeros(n, np.uint8),
        prompts=[""] * n,
        answers=[""] * n,
        labels=["null"] * n,
    )


def routing(s: Samples, seed: int = 0) -> np.ndarray:
    """[total, layers, top_k] uint8, random experts; zeros for the last token of each sample."""
    random, layers = np.random.default_rng(seed), SIZES["num_hidden_layers"]
    ranks = random.random((len(s.tokens), layers, EXPERTS["num_experts"])).argsort(-1)
    chosen = np.sort(ranks[..., : EXPERTS["num_experts_per_tok"]], -1).astype(np.uint8)
    chosen[s.offsets[1:] - 1] = 0
    return chosen


@contextmanager
def trainer(settings: Config, folder: Path, scratch: Path, rank: int = 0, size: int = 1) -> Iterator[Any]:
    """A trainer in this process; `scratch` is a file that does not exist yet."""
    from miles_hpc.train.trainer import Trainer

    made = Trainer(settings, folder, rank, size, f"file://{scratch}")
    try:
        yield made
    finally:
        made.close()


def kept_gradients(made: Any) -> dict[str, torch.Tensor]:
    """Filled, in each optimizer step of a trainer from now on, with the gradients before the clip by Megatron's names."""
    found: dict[str, torch.Tensor] = {}
    step = made.optimizer.step

    def keep() -> Any:
        found.update({name: p.main_grad.clone() for name, p in made.policy.module.named_parameters()})
        return step()

    made.optimizer.step = keep
    return found


def step_counters(made: Any) -> list[float]:
    """AdamW's step counter of every parameter that a trainer's rank holds."""
    from miles_hpc.train.optimizer import parts

    return [float(v["step"]) for part in parts(made.optimizer) for v in part.optimizer.state.values()]


@contextmanager
def short_of_memory(tokens: int, at: str = "forward") -> Iterator[list[int]]:
    """Forwards, or backwards, of more than `tokens` run out of memory, as torch says it. Yields the size of every forward."""
    from miles_hpc.train.megatron import Policy

    sizes: list[int] = []
    log_probs = Policy.log_probs

    def fail(gradient: Any = None) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def limited(self: Policy, pack: Any, *rest: Any) -> Any:
        found = log_probs(self, pack, *rest)
        sizes.append(pack.tokens.numel())
        if pack.tokens.numel() > tokens:
            fail() if at == "forward" else found[0].requires_grad and found[0].register_hook(fail)
        return found

    Policy.log_probs = limited  # type: ignore[method-assign, assignment]
    try:
        yield sizes
    finally:
        Policy.log_probs = log_probs  # type: ignore[method-assign]


def run_steps(made: Any, steps: int = 3, data: Samples | None = None, **shape: Any) -> dict[str, Any]:
    """Train some steps on random samples; everything that other layouts should give too."""
    from miles_hpc.train.advantage import group_advantages

    results = []
    for step in range(steps):
        s = data or samples(seed=step, **shape)
        if made.config.routing_replay:
            s = dataclasses.replace(s, routing=routing(s))
        results.append(made.step(s, group_advantages(s.rewards, int((s.prompt_ids == s.prompt_ids[0]).sum())), step))
    return {
        "metrics": [r.metrics for r in results],
        "own": [r.own for r in results],
        "log_probs": [r.train_log_probs for r in results],
        "weights": {name: tensor.to("cpu", copy=True) for name, tensor in made.weights()},
    }


def in_ranks(jobs: list[dict[str, Any]], size: int, folder: Path, timeout: float = 240.0) -> dict[str, list[Any]]:
    """Run jobs one after the other in `size` processes of their own. Returns what each rank got, by job name.

    A job: name, model (folder), config (arguments of `config`), steps; optional resume and save (folders), and short (rank, and
    arguments of `short_of_memory`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    path = [*filter(None, [os.environ.get("PYTHONPATH")]), str(Path(__file__).parent)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path), "GLOO_SOCKET_IFNAME": "lo"}
    logs = [(folder / f"rank-{rank}.log").open("w+") for rank in range(size)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, str(folder), str(rank), str(size)],
            env=environment,
            stdout=log,
            stderr=log,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [rank.wait(timeout) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for log in logs:
        log.seek(0)
    assert codes == [0] * size, "\n".join(log.read()[-3000:] for log in logs)
    return {job["name"]: [_read(folder / f"{job['name']}-{rank}.pt") for rank in range(size)] for job in jobs}


def _read(file: Path) -> Any:
    return torch.load(file, weights_only=False)


def _rank(folder: Path, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    for job in json.loads((folder / "jobs.json").read_text()):
        settings = config(ranks=size, **job["config"])
        short = dict(job.get("short", {"rank": -1}))
        memory = short_of_memory(**short) if short.pop("rank") == rank else nullcontext()
        with memory, trainer(settings, Path(job["model"]), folder / f"{job['name']}.store", rank, size) as made:
            if job.get("resume"):
                made.load(Path(job["resume"]))
            shape = {k: job["config"][k] for k in ("prompts", "group") if k in job["config"]}
            result = run_steps(made, job["steps"], **shape) | {"limit": made.passes.limit}
            if job.get("save"):
                Path(job["save"]).mkdir(exist_ok=True)
                made.gather(None)
                made.save(Path(job["save"]), {"version": job["steps"]})
        torch.save(result, folder / f"{job['name']}-{rank}.pt")


if __name__ == "__main__":
    _rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
