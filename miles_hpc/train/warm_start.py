"""A short supervised phase before the first rollout, so that a randomly initialised model has something to improve."""

import random

from miles_hpc import edges
from miles_hpc.config import Config
from miles_hpc.paths import RunPaths
from miles_hpc.train.trainer import Trainer

WARM_UP_STEPS = 20


def warm_start(trainer: Trainer, config: Config, paths: RunPaths) -> list[float]:
    """Train on demonstrations; returns the loss of every step. The optimizer starts afresh afterwards.

    The loss is the cross entropy of the answer and the end-of-sequence token; the learning rate rises linearly over 20 steps.
    """
    from transformers import AutoTokenizer

    plan = config.warm_start
    assert plan
    tokenizer = AutoTokenizer.from_pretrained(paths.model_of(config), local_files_only=True)
    demonstrations = _demonstrations(config, plan.data, plan.steps * plan.batch_size)
    losses = []
    for step in range(plan.steps):
        batch = demonstrations[step * plan.batch_size : (step + 1) * plan.batch_size]
        tokens, masks = zip(*(_encode(tokenizer, prompt, answer) for prompt, answer in batch), strict=True)
        lr = plan.lr * min(1.0, (step + 1) / WARM_UP_STEPS)
        losses.append(trainer.supervised_step(list(tokens), list(masks), lr))
    return losses


def _demonstrations(config: Config, name: str, count: int) -> list[tuple[str, str]]:
    """Prompts and answers from the edge, in an order that depends on the seed only."""
    key = "warm_start.data"
    function = edges.load(name, config.run.edges_folder, key=key, arguments=("seed", "count"))
    rows = edges.call(function, config.run.seed, count, key=key)
    if len(rows) != count:
        raise edges.wrong(key, function, f"{count} pairs (prompt, answer)", rows)
    random.Random(config.run.seed).shuffle(rows)
    return rows


def _encode(tokenizer, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """Tokens of prompt, answer and end-of-sequence; the mask is 1 from the answer on."""
    question = tokenizer.encode(prompt)
    reply = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    return question + reply, [0] * len(question) + [1] * len(reply)
