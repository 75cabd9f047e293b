"""Every edge called once before an engine starts, with values as it will get them: what is wrong shows in a second.

Import errors, signatures, exceptions and return values become EdgeErrors that name key, file and line.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from miles_hpc.attach import attach
from miles_hpc.config import Config, is_edge
from miles_hpc.errors import EdgeError
from miles_hpc.records import Row
from miles_hpc.rollout.conversation import SampleClient, converse
from miles_hpc.rollout.groups import GroupClient, perform
from miles_hpc.rollout.judge import Judge
from miles_hpc.rollout.request import Output, Request
from miles_hpc.rollout.reward import Reward
from miles_hpc.sample import Sample
from miles_hpc.samples.schema import Samples

LENGTHS = (2, 3)
"""Tokens of the prompt and of the answer of a made-up sample."""


def check(config: Config) -> None:
    """Call group rewards, filters, advantage, loss, hooks and failure policy.

    Raises:
        EdgeError: one of them cannot be used.
    """
    Reward.of(config)
    for key, name in {"rollout.generate": config.rollout.generate, "rollout.function": config.rollout.function}.items():
        if name:
            attach(config, key, name)
    Judge.of(config)(_group(config))
    if any(map(is_edge, (config.train.advantage, config.train.loss))) or _hooks(config):
        _check_training(config)
    if config.slurm.failure_policy:
        _check_failure_policy(config)


def check_reward(config: Config, row: Row, text: str) -> None:
    """Score an empty answer to the first prompt, as a model may give one.

    Raises:
        EdgeError: it raised or returned no number; not with `rollout.reward_error = "drop"`, if it only raised.
    """
    facts = {"finished": True, "tokens": 1, "max_new_tokens": config.rollout.max_new_tokens}
    try:
        label, metadata = row.copies()
        Reward.of(config)(text, "", label, metadata | facts, "an empty answer to the first prompt")
    except EdgeError as error:
        if config.rollout.reward_error == "fail" or "must return" in error.what:
            raise


def check_generate(config: Config, row: Row, text: str, tokenizer: Any) -> None:
    """Let the generate or rollout function answer the first prompt with an engine that says its first token twice, and stops.

    Raises:
        EdgeError: it raised, or returned a sample that does not fit.
    """
    rollout, longest = config.rollout, config.model.context_length
    if not rollout.generate and not rollout.function:
        return
    tokens = tokenizer(text, add_special_tokens=not config.data.chat)["input_ids"]  # as `Prompts.tokens`

    async def echo(asked: Request) -> Output:
        return Output([tokens[0]] * min(2, asked.max_new_tokens), [-1.0] * min(2, asked.max_new_tokens), True)

    rows = [row.copies() for _ in range(rollout.samples_per_prompt)]
    samples = [
        Sample(group_index=0, index=i, prompt=text, tokens=list(tokens), label=label, metadata=metadata)
        for i, (label, metadata) in enumerate(rows)
    ]
    requests = {(0, i): Request(tokens, 0, i, rollout.max_new_tokens) for i in range(len(samples))}
    clients = {name: SampleClient(echo, request, tokenizer, longest) for name, request in requests.items()}
    if rollout.generate:
        function = attach(config, "rollout.generate", rollout.generate)
        asyncio.run(converse(function, samples[0], clients[0, 0]))
    else:
        function = attach(config, "rollout.function", rollout.function)
        asyncio.run(_exhaust(perform(function, samples, GroupClient(clients))))


async def _exhaust(answers: AsyncIterator[Any]) -> None:
    async for _ in answers:
        pass


def _hooks(config: Config) -> bool:
    train = config.train
    return any((train.step_hook, train.optimizer_hook, train.metrics, train.metric_reducer))


def _check_training(config: Config) -> None:
    from miles_hpc.train.advantage import advantage_of
    from miles_hpc.train.hooks import Hooks
    from miles_hpc.train.optimizer import AdamW

    samples, size = _samples(config), config.rollout.samples_per_prompt
    advantages = advantage_of(config)(samples, size)
    hooks = Hooks.of(config)
    hooks.hyperparameters(0, AdamW(config.train.lr))
    hooks.shown(0, {"reward/mean": 0.5} | hooks.metrics(samples, advantages, size))
    hooks.step("check", 0, {})
    _check_loss(config)


def _check_failure_policy(config: Config) -> None:
    """With a run whose first attempt lost a rank after ten steps."""
    from miles_hpc.launchers import policy
    from miles_hpc.launchers.verdict import Attempt, Situation

    policy.ask(Situation((Attempt(1, "rank_died", -1, 10),), config.slurm.max_restarts), "restart", config)


def _check_loss(config: Config) -> None:
    import torch

    from miles_hpc.train.loss import Tokens
    from miles_hpc.train.objective import loss_of

    log_probs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    old = torch.tensor([-1.5, -2.0, -2.5])
    sample = torch.tensor([0, 0, 1])
    tokens = Tokens(log_probs, old, torch.tensor([1.0, 1.0, -1.0]), sample, 2, old, None, -log_probs)
    values = loss_of(config)(tokens, config.train).values
    if not values.requires_grad or not torch.isfinite(values).all():
        raise EdgeError(
            f"train.loss = {config.train.loss!r} gave {values.tolist()}; finite numbers with a gradient are needed",
            where="called with tokens.log_probs = [-1, -2, -3]",
        )


def _group(config: Config) -> list[Sample]:
    """Answers of three tokens; every second one is worth 1."""
    prompt, answer = LENGTHS
    return [
        Sample(
            group_index=0,
            index=i,
            prompt="prompt",
            tokens=list(range(prompt + answer)),
            response="answer",
            response_length=answer,
            reward=float(i % 2),
            loss_mask=[1] * answer,
            rollout_log_probs=[-1.0] * answer,
            status=Sample.Status.COMPLETED,
        )
        for i in range(config.rollout.samples_per_prompt)
    ]


def _samples(config: Config) -> Samples:
    """Two groups of such samples."""
    size = config.rollout.samples_per_prompt
    n, (prompt, answer) = 2 * size, LENGTHS
    mask = np.tile(np.repeat([0, 1], LENGTHS), n).astype(np.uint8)
    return Samples(
        prompt_ids=np.repeat(np.arange(2), size),
        sample_index=np.tile(np.arange(size), 2).astype(np.int32),
        offsets=np.arange(n + 1) * (prompt + answer),
        tokens=np.tile(np.arange(prompt + answer), n).astype(np.int32),
        loss_mask=mask,
        rollout_log_probs=-mask.astype(np.float32),
        weight_versions=np.where(mask, 0, -1).astype(np.int32),
        rewards=(np.arange(n) % 2).astype(np.float32),
        status=np.zeros(n, np.uint8),
        prompts=["prompt"] * n,
        answers=["answer"] * n,
        labels=["null"] * n,
    )
