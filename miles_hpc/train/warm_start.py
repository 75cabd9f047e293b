"""A short supervised phase before the first rollout, so that a randomly initialised model has something to improve."""

import random
from typing import Any

from miles_hpc import data, demonstrations
from miles_hpc.config import Config
from miles_hpc.errors import EdgeError
from miles_hpc.paths import RunPaths
from miles_hpc.train.trainer import Trainer

WARM_UP_STEPS = 20


def warm_start(trainer: Trainer, config: Config, paths: RunPaths) -> list[float]:
    """Train on demonstrations; returns the loss of every step. The optimizer starts afresh afterwards.

    Prompts are rendered as a rollout's are (`data.chat`). The loss is the cross entropy of the answer and the end-of-sequence
    token; the learning rate rises linearly over 20 steps.

    Raises:
        EdgeError: `warm_start.data` raised, or gave something else than pairs of texts that fit into `model.context_length`.
        ModelError: the tokenizer has no end-of-sequence token.
    """
    plan = config.warm_start
    assert plan
    tokenizer = data.tokenizer_of(paths.model_of(config))
    demonstrations.check_end(tokenizer, paths.model_of(config))
    rows = list(demonstrations.load(config, plan.steps * plan.batch_size))
    random.Random(config.run.seed).shuffle(rows)  # an order that depends on the seed only
    losses = []
    for step in range(plan.steps):
        batch = rows[step * plan.batch_size : (step + 1) * plan.batch_size]
        tokens, masks = zip(*(_encode(tokenizer, config, *row) for row in batch), strict=True)
        lr = plan.lr * min(1.0, (step + 1) / WARM_UP_STEPS)
        losses.append(trainer.supervised_step(list(tokens), list(masks), lr))
    trainer.reset_optimizer()  # before anything is saved: a resume must not begin with these moments
    return losses


def _encode(tokenizer: Any, config: Config, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """Tokens of prompt, answer and end-of-sequence; the mask is 1 from the answer on. Raises: EdgeError: too many tokens."""
    longest = config.model.context_length
    question = data.tokens_of(prompt, tokenizer, config.data.chat)
    reply = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    if (count := len(question) + len(reply)) > longest:
        raise EdgeError(
            f"{demonstrations.KEY} gave a demonstration of {count} tokens; at most {longest} fit (model.context_length)",
            where=f"{prompt[:80]!r}, {answer[:80]!r}",
            next_step="raise model.context_length, or shorten the demonstration",
        )
    return question + reply, [0] * len(question) + [1] * len(reply)
