"""What the tests of generation share: prompts, and a stand-in at the border to the engine's process."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from miles_hpc.config import Config
from miles_hpc.data import Prompts
from miles_hpc.errors import EngineError
from miles_hpc.records import Row
from miles_hpc.rollout.generate import Generator
from miles_hpc.rollout.request import Output, Request
from miles_hpc.rollout.reward import Reward


class Letters:
    """A tokenizer of one token per character."""

    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(token) for token in tokens if token)


class Flight:
    """Requests under way: what is added before the next answer comes out of order with the rest."""

    def __init__(self, engine: "Engine") -> None:
        self.engine = engine
        self.open: dict[int, Request] = {}
        self.sent = 0

    def __enter__(self) -> "Flight":
        return self

    def __exit__(self, *error: object) -> None:
        self.open.clear()

    def add(self, requests: Sequence[Request]) -> list[int]:
        keys = [self.sent + i for i in range(len(requests))]
        self.open |= dict(zip(keys, requests, strict=True))
        self.sent += len(requests)
        self.engine.requests += requests
        return keys

    def interrupt(self) -> dict[int, Output]:
        return {}

    def next(self) -> tuple[int, Output | EngineError]:
        key = self.engine.random.choice(sorted(self.open))
        return key, self.engine.answer(self.open.pop(key))

    def look(self, seconds: float) -> tuple[int, Output | EngineError]:
        return self.next()


class Engine:
    """Answers out of order: the sample index as text, ended (token 0) for even indices."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.refused: set[int] = set()
        """Prompt ids whose requests are refused."""
        self.random = random.Random(0)
        self.records = False
        """Whether answers carry experts: of each token but the last its own id, twice in three layers."""

    def poll_hook(self) -> None:
        pass

    def flight(self) -> Flight:
        self.requests = []
        return Flight(self)

    def answer(self, request: Request) -> Output | EngineError:
        if request.prompt_id in self.refused:
            return EngineError("the engine refused to generate: out of memory", where=f"prompt {request.prompt_id}")
        index = request.sample_index
        tokens = [ord(letter) for letter in f"{index}"] + [0] * (index % 2 == 0)
        routing = self.routing([*request.tokens, *tokens]) if self.records else None
        return Output(tokens, [-0.5] * len(tokens), index % 2 == 0, routing=routing)

    def routing(self, tokens: list[int]) -> np.ndarray:
        return np.tile(np.array([*tokens[:-1], 0], np.uint8)[:, None, None], (1, 3, 2))


def config(**rollout: Any) -> Config:
    fields = {"prompts_per_step": 4, "samples_per_prompt": 3, "max_new_tokens": 4, "reward": "a:b", "timeout_seconds": 60.0}
    sections = {"run": {"name": "t", "steps": 1}, "model": {"path": "m"}, "data": {"prompts": "a:b"}, "train": {"lr": 0.1}}
    return Config.model_validate(sections | {"rollout": fields | rollout, "eval": {"prompts": 3}})


def generator(reward: Callable[..., Any], **rollout: Any) -> Generator:
    rows = [Row(f"p{i}", {"n": i}, {"k": i}) for i in range(5)]
    prompts = Prompts(rows, Letters(), chat=False, seed=0, source="rows")
    engine: Any = Engine()
    return Generator(config(**rollout), engine, prompts, Reward(reward), prompts)


def by_index(prompt: str, answer: str, label: Any, metadata: dict[str, Any]) -> float:
    return float(answer)
