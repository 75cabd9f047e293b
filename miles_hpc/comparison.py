"""Where trainer and engine part: `miles-submit compare-numerics RUN`.

The engine answers some prompts of the run with every layer recorded (`rollout/trace.py`), the trainer's forward of the same
tokens is recorded too, and each operation is compared token by token.
"""

import dataclasses
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from miles_hpc import data, device
from miles_hpc.config import Config
from miles_hpc.paths import RunPaths
from miles_hpc.rollout.engine import EngineHost
from miles_hpc.rollout.request import Output, Request
from miles_hpc.train import architecture, weights
from miles_hpc.train.megatron import Groups, Policy, join, leave
from miles_hpc.train.packing import Demonstrations, pack

OPS = (
    "input_layernorm",
    "qkv_proj",
    "q_norm_rope",
    "k_norm_rope",
    "attention",
    "o_proj",
    "post_attention_layernorm",
    "router",
    "mlp",
)
"""Of a layer, in the order of computation; `qkv_proj` is seen in the values, which neither norm nor rotation changes."""
PROMPTS, NEW_TOKENS = 16, 32

Point = tuple[int, str]
"""Layer and op; layer -1: behind the last layer."""


class Served(NamedTuple):
    """What an engine was asked, what it answered, and each op's result [n] by (request, position)."""

    requests: list[Request]
    outputs: list[Output]
    values: dict[Point, dict[Any, Tensor]]


class Difference(NamedTuple):
    """Of one op, over all tokens that both sides computed."""

    layer: int
    op: str
    tokens: int
    differing: int
    """Tokens of which any element differs."""
    largest: float
    """Largest absolute difference."""
    ulps: int
    """Largest number of representable numbers between two elements."""

    @property
    def name(self) -> str:
        """Such as `layer 3 attention`."""
        return self.op if self.layer < 0 else f"layer {self.layer} {self.op}"


def compare(config: Config, trained: Path, served: Path) -> list[Difference]:
    """Every op in the order of computation, the log-probs of the answers at last.

    Args:
        config: of a run.
        trained: model folder of the trainer.
        served: model folder of the engine.

    Raises:
        ModelError, DataError; EngineError, EngineDied, DeadlineExceeded.
    """
    return against(config, trained, serve(config, served, requests(config, trained)))


def against(config: Config, trained: Path, served: Served) -> list[Difference]:
    """`compare` with what an engine did."""
    engine = served.values
    ours, log_probs = train(config, trained, served.requests, served.outputs)
    found = []
    for point in sorted(ours, key=_order):
        pairs = [(value, ours[point][key]) for key, value in engine.get(point, {}).items()]
        if pairs:
            found.append(difference(*point, *(torch.stack(side) for side in zip(*pairs, strict=True))))
    sampled = torch.tensor([value for output in served.outputs for value in output.log_probs])
    return [*found, difference(-1, "log_probs", sampled[:, None], log_probs[:, None])]


def difference(layer: int, op: str, engine: Tensor, trainer: Tensor) -> Difference:
    """Of an op, [tokens, n] on both sides; the wider type is rounded to the narrower."""
    kind = min(engine.dtype, trainer.dtype, key=lambda dtype: dtype.itemsize)
    a, b = engine.to(kind), trainer.to(kind)
    differing = (a != b).any(-1)
    gap = (a.double() - b.double()).abs()
    return Difference(layer, op, len(a), int(differing.sum()), gap.max().item(), int((_rank(a) - _rank(b)).abs().max()))


def _rank(x: Tensor) -> Tensor:
    """Number of each float among all of its type, int64, so that neighbours differ by one."""
    bits = x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]).long()
    return torch.where(bits < 0, -(bits & (1 << (8 * x.element_size() - 1)) - 1), bits)


def _order(point: Point) -> tuple[float, int]:
    layer, op = point
    return (layer, OPS.index(op)) if layer >= 0 else (float("inf"), 0)


def requests(config: Config, model: Path) -> list[Request]:
    """Of the first prompts of the run, some of them twice: they share what the radix cache holds."""
    prompts = data.load(config, "train", data.tokenizer_of(model))
    ids = prompts.ids_of_step(0, min(PROMPTS, config.rollout.prompts_per_step))
    longest = min(NEW_TOKENS, config.rollout.max_new_tokens)
    return [Request(prompts.tokens(int(i) % len(prompts)), int(i), k, longest) for i in ids for k in range(2)]


def serve(config: Config, model: Path, asked: list[Request]) -> Served:
    """Start an engine, have it answer, stop it."""
    with tempfile.TemporaryDirectory() as name:
        host = EngineHost(config, model)
        host.arguments = dataclasses.replace(host.arguments, trace=name, tensor_parallel=1, colocated=False)
        host.start()
        try:
            host.wait_ready()
            outputs = dict(host.generate(asked))
        finally:
            host.shutdown()
        return Served(asked, [outputs[i] for i in range(len(asked))], _read(Path(name)))


def _read(folder: Path) -> dict[Point, dict[Any, Tensor]]:
    found: dict[Point, dict[Any, Tensor]] = {}
    for file in folder.glob("*.pt"):
        step = torch.load(file)
        keys = list(zip(step["rids"], step["positions"], strict=True))
        for point, value in step["values"].items():
            found.setdefault(point, {}).update(zip(keys, value, strict=True))
    return found


def train(
    config: Config, model: Path, asked: list[Request], outputs: list[Output]
) -> tuple[dict[Point, dict[Any, Tensor]], Tensor]:
    """The trainer's results in the form of `serve`, and its log-probs of the answer tokens."""
    rows = [[*request.tokens, *output.tokens] for request, output in zip(asked, outputs, strict=True)]
    masks = [[0] * len(r.tokens) + [1] * len(o.tokens) for r, o in zip(asked, outputs, strict=True)]
    batch = Demonstrations.of(rows, masks)
    keys = [(request.name, position) for request, row in zip(asked, rows, strict=True) for position in range(len(row))]
    with policy(config, model) as made, torch.no_grad():
        recorder = Recorder(made.module)
        packed = pack(batch, np.arange(len(rows)), 1, device.device())
        log_probs = made.log_probs(packed, config.rollout.temperature)[0].cpu()
        values = {point: dict(zip(keys, value, strict=True)) for point, value in recorder.values.items()}
    return values, log_probs


@contextmanager
def policy(config: Config, model: Path) -> Iterator[Policy]:
    """The run's policy on one rank of its own."""
    exact = config.run.numerics == "exact"
    if exact:
        device.without_workspace()
    facts = architecture.read(model)
    weights.check(facts, model)
    with tempfile.TemporaryDirectory() as meeting:
        join(0, 1, f"file://{meeting}/store", 1, 1)
        try:
            groups = Groups()
            made = Policy(facts, architecture.DTYPES[config.model.dtype], groups, config.model.context_length, exact)
            weights.read(made.module, facts, model, groups)
            yield made
        finally:
            leave()


class Recorder:
    """Results of megatron's modules, [tokens, n] by point, under the engine's names."""

    def __init__(self, module: Any) -> None:
        self.values: dict[Point, Tensor] = {}
        for i, layer in enumerate(module.decoder.layers):
            self._watch(i, layer)
        module.decoder.final_layernorm.register_forward_hook(lambda m, a, out: self._keep(-1, "norm", out))

    def _watch(self, i: int, layer: Any) -> None:
        attention, mlp = layer.self_attention, layer.mlp
        attention.register_forward_pre_hook(lambda m, a: self._keep(i, "input_layernorm", a[0]))
        attention.core_attention.register_forward_pre_hook(lambda m, a, k: self._heads(i, a, k), with_kwargs=True)
        attention.core_attention.register_forward_hook(lambda m, a, out: self._keep(i, "attention", out, 1))
        attention.register_forward_hook(lambda m, a, out: self._keep(i, "o_proj", out[0]))
        mlp.register_forward_pre_hook(lambda m, a: self._keep(i, "post_attention_layernorm", a[0]))
        mlp.register_forward_hook(lambda m, a, out: self._keep(i, "mlp", out[0]))
        if hasattr(mlp, "router"):
            mlp.router.register_forward_hook(lambda m, a, out: self._routed(i, *out))

    def _heads(self, i: int, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """The rotation is part of the core attention here."""
        from miles_hpc.kernels.rope import rotate

        query, key, value = arguments[:3]
        where = named["packed_seq_params"]
        self._keep(i, "qkv_proj", value, 1)
        self._keep(i, "q_norm_rope", rotate(query, where.cos, where.sin), 1)
        self._keep(i, "k_norm_rope", rotate(key, where.cos, where.sin), 1)

    def _routed(self, i: int, probs: Tensor, chosen: Tensor, ids: Tensor | None = None) -> None:
        dense = probs if ids is None else torch.zeros(chosen.shape, device=probs.device).scatter(1, ids, probs)
        self._keep(i, "router", dense.float(), 1)

    def _keep(self, i: int, op: str, value: Tensor, rows: int = 2) -> None:
        """A result whose first `rows` dimensions are tokens (megatron has a batch of one behind them)."""
        self.values[i, op] = value.detach().flatten(0, rows - 1).flatten(1).cpu()


def show(paths: RunPaths, config: Config) -> int:
    """Print the comparison for a run: with the exported policy if there is one, else the model it starts from.

    Returns:
        1 if numerics are exact and anything differs.
    """
    model = paths.export if (paths.export / "config.json").exists() else paths.model_of(config)
    found = compare(config, model, model)
    width = max(len(d.name) for d in found)
    print(f'model {model}, run.numerics = "{config.run.numerics}", {found[0].tokens} tokens')
    print(f"{'op':{width}}  tokens that differ  largest difference        ulp")
    for d in found:
        print(f"{d.name:{width}}  {d.differing:8} of {d.tokens:6}  {d.largest:18.3g}  {d.ulps:9}")
    first = next((d for d in found if d.differing), None)
    print(f"the first that differs: {first.name}" if first else "no op differs")
    return int(first is not None and config.run.numerics == "exact")
