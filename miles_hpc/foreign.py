"""Functions written for Miles and slime, run unchanged: their signatures, their `args`, and the modules they import types from.

Signatures: `custom_rm(args, sample) -> float | dict` (also a coroutine function), with a group `custom_rm(args, samples)`,
`custom_generate(args, sample, sampling_params) -> Sample`,
`dynamic_filter(args, samples) -> DynamicFilterOutput | bool`, `reward_post_process(args, samples) -> (raw_rewards, rewards)`.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from miles_hpc.config import Config
from miles_hpc.paths import RunPaths
from miles_hpc.sample import Sample, refuse_removal
from miles_hpc.samples.schema import TRUNCATED, Samples

PACKAGES = ("miles", "slime")


@dataclass
class DynamicFilterOutput:
    """What a dynamic sampling filter of Miles returns."""

    keep: bool
    reason: str | None = None


ENGINE: ContextVar[Any] = ContextVar("engine")
"""Of the conversation that is running."""


class GenerateState:
    """What generate functions take the tokenizer from."""

    def __init__(self, args: Any) -> None:
        self.args, self.tokenizer = args, ENGINE.get().tokenizer


async def post(url: str, payload: Mapping[str, Any], **unused: Any) -> dict[str, Any]:
    """A request to SGLang's `/generate`, answered by the engine of the conversation; other addresses are refused.

    Raises:
        ValueError: another address.
    """
    engine = ENGINE.get()
    if not url.endswith("/generate"):
        raise ValueError(f"{url}: only the engine's /generate can be reached by post; use an HTTP client of your own")
    tokens = payload.get("input_ids") or engine.tokenizer(payload["text"], add_special_tokens=False)["input_ids"]
    output = await engine.generate(tokens, (payload.get("sampling_params") or {}).get("max_new_tokens"))
    pairs = [(value, token, None) for value, token in zip(output.log_probs, output.tokens, strict=True)]
    reason = {"type": "stop" if output.stopped else "length"}
    facts = {"finish_reason": reason, "output_token_logprobs": pairs, "completion_tokens": len(pairs)}
    text = engine.tokenizer.decode(output.tokens, skip_special_tokens=True)
    return {"text": text, "output_ids": output.tokens, "meta_info": facts | {"prompt_tokens": len(tokens)}}


MODULES: dict[str, dict[str, Any]] = {
    "": {},
    ".utils": {},
    ".utils.types": {"Sample": Sample},
    ".utils.http_utils": {"post": post},
    ".rollout": {},
    ".rollout.sglang_rollout": {"GenerateState": GenerateState},
    ".rollout.filter_hub": {},
    ".rollout.filter_hub.base_types": {"DynamicFilterOutput": DynamicFilterOutput},
}
"""Stand-ins for modules that such files import types from, below `miles` and `slime`."""


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Offers the stand-ins; last in line, so that an installed Miles or slime is used instead."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        package, dot, rest = name.partition(".")
        if package not in PACKAGES or dot + rest not in MODULES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        _, dot, rest = module.__name__.partition(".")
        module.__dict__.update(MODULES[dot + rest])


def offer_modules() -> None:
    """Make `from slime.utils.types import Sample` and the like work where neither package is installed."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


ESTIMATORS = {
    "group_std": "grpo",
    "group_mean": "grpo",
    "reinforce_pp": "reinforce_plus_plus",
    "reinforce_pp_baseline": "reinforce_plus_plus_baseline",
    "gae": "ppo",
}
"""Miles' names of `train.advantage`; others have none there and keep their own."""


def arguments(config: Config, options: Mapping[str, Any]) -> SimpleNamespace:
    """What such functions find in `args`: the options of Miles that have a counterpart here, and the function's own options."""
    rollout, train = config.rollout, config.train
    known = {
        "hf_checkpoint": str(RunPaths(Path(config.run.folder)).model_of(config)),
        "rollout_batch_size": rollout.prompts_per_step,
        "n_samples_per_prompt": rollout.samples_per_prompt,
        "rollout_max_response_len": rollout.max_new_tokens,
        "rollout_max_context_len": config.model.context_length,
        "rollout_temperature": rollout.temperature,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "rollout_seed": config.run.seed,
        "num_rollout": config.run.steps,
        "input_key": config.data.prompt_column,
        "label_key": config.data.label_column,
        "metadata_key": config.data.metadata_column,
        "apply_chat_template": config.data.chat,
        "advantage_estimator": "gspo" if train.loss == "gspo" else ESTIMATORS.get(train.advantage, train.advantage),
        "rewards_normalization": True,
        "grpo_std_normalization": train.advantage == "group_std",
        "eps_clip": train.clip_low,
        "eps_clip_high": train.clip_high,
        "kl_loss_coef": train.kl_coef,
        "entropy_coef": train.entropy_coef,
        "lr": train.lr,
        "sglang_router_ip": "engine",
        "sglang_router_port": 0,
        "partial_rollout": False,
        "reward_key": None,
        "eval_reward_key": None,
        "rm_type": None,
    }
    return SimpleNamespace(**known | dict(options))


def _reward(function: Callable[..., Any], args: SimpleNamespace) -> Callable[..., Any]:
    def reward(prompt: str, answer: str, label: Any, metadata: Mapping[str, Any]) -> Any:
        status = Sample.Status.COMPLETED if metadata.get("finished", True) else Sample.Status.TRUNCATED
        length = metadata.get("tokens", 0)
        sample = Sample(
            prompt=prompt, response=answer, label=label, metadata=dict(metadata), status=status, response_length=length
        )

        def read(returned: Any, args: Any) -> Any:
            refuse_removal("the reward", [sample])
            return _numbers(returned, args)

        return _read(function(args, sample), read, args)

    return reward


def _read(returned: Any, read: Callable[..., Any], args: SimpleNamespace) -> Any:
    """`read(returned, args)`, as a coroutine if the function was one."""
    return _awaited(returned, read, args) if hasattr(returned, "__await__") else read(returned, args)


async def _awaited(returned: Any, read: Callable[..., Any], args: SimpleNamespace) -> Any:
    return read(await returned, args)


def _numbers(returned: Any, args: SimpleNamespace) -> Any:
    """A mapping may hold texts too; its reward is under `args.reward_key`, else `reward`, else `score`."""
    if not isinstance(returned, Mapping):
        return returned
    numbers = {key: value for key, value in returned.items() if isinstance(value, Real)}  # numpy's too
    key = args.reward_key or ("reward" if "reward" in numbers else "score")
    return numbers | {"reward": numbers[key]} if key in numbers else returned


def _group_reward(function: Callable[..., Any], args: SimpleNamespace) -> Callable[..., Any]:
    def rewards(samples: list[Sample]) -> Any:
        return _read(function(args, samples), _values, args)

    return rewards


def _values(returned: Any, args: SimpleNamespace) -> Any:
    numbers = [_numbers(value, args) for value in returned]
    return [number["reward"] if isinstance(number, Mapping) else number for number in numbers]


def _filter(function: Callable[..., Any], args: SimpleNamespace) -> Callable[..., Any]:
    def refusal(samples: list[Sample]) -> Any:
        returned = function(args, samples)
        keep = returned.keep if hasattr(returned, "keep") else returned
        if not isinstance(keep, bool | np.bool_):
            return returned
        return "" if keep else str(getattr(returned, "reason", None) or function.__name__)

    return refusal


def _advantage(function: Callable[..., Any], args: SimpleNamespace) -> Callable[..., Any]:
    def advantages(samples: Samples, group_size: int) -> Any:
        seen = as_samples(samples)
        before = [sample.remove_sample for sample in seen]
        returned = function(args, seen)
        refuse_removal("reward post-processing", seen, before)
        return np.asarray(returned[1], np.float32) if isinstance(returned, tuple) and len(returned) == 2 else returned

    return advantages


def _generate(function: Callable[..., Any], args: SimpleNamespace) -> Callable[..., Any]:
    async def generate(sample: Sample, engine: Any) -> Any:
        ENGINE.set(engine)
        settings = {"temperature": args.rollout_temperature, "max_new_tokens": engine.max_new_tokens}
        answered = await function(args, sample, settings | {"top_p": 1.0, "top_k": -1})
        if getattr(answered, "reward", None) is not None:
            answered.reward = _numbers(answered.reward, args)
        return answered

    return generate


ADAPTERS: dict[str, Callable[[Callable[..., Any], SimpleNamespace], Callable[..., Any]]] = {
    "rollout.generate": _generate,
    "rollout.reward": _reward,
    "rollout.rewards": _reward,
    "rollout.group_reward": _group_reward,
    "rollout.filters": _filter,
    "train.advantage": _advantage,
}
"""By key of `protocols.EDGES`."""


def as_samples(samples: Samples) -> list[Sample]:
    """The samples of a step, one object each; labels are JSON texts here."""
    found = []
    carrying = samples.answer_lengths
    for i, length in enumerate(samples.generated.tolist()):
        tokens = slice(samples.offsets[i], samples.offsets[i + 1])
        status = Sample.Status.TRUNCATED if samples.status[i] == TRUNCATED else Sample.Status.COMPLETED
        found.append(
            Sample(
                group_index=int(samples.prompt_ids[i]),
                index=int(samples.sample_index[i]),
                prompt=samples.prompts[i],
                tokens=samples.tokens[tokens].tolist(),
                response=samples.answers[i],
                response_length=length,
                label=samples.labels[i],
                reward=float(samples.rewards[i]),
                status=status,
                remove_sample=not carrying[i],
            )
        )
    return found
