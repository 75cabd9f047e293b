"""The configuration of a run: one TOML file, one frozen model per section.

`load` reads a user's file and `--set section.key=value` overrides; `read` reads the resolved file in a run folder, the only
one that ranks see. Unknown keys are refused with the nearest valid names. Nothing here imports torch.
"""

import difflib
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from miles_hpc.errors import ConfigError

Edge = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
PositiveInt = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, strict=True)


class Run(Section):
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the run; letters, digits, `.`, `_`, `-`."""
    steps: PositiveInt
    """Number of rollout-and-train steps."""
    folder: str = ""
    """The run's own folder; empty: `runs/<name>-NNN` below the current folder."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of prompt order, sampling noise and initial weights."""
    numerics: Literal["native"] = "native"
    """`native`: each side uses its fastest operations."""
    placement: Literal["split"] = "split"
    """`split`: training nodes and rollout nodes are two components of one heterogeneous job."""
    edges_folder: str = ""
    """Folder of the TOML file, appended to the ranks' `sys.path`; filled in by the launcher."""


class Model(Section):
    path: str = ""
    """Folder of a Hugging Face checkpoint (Qwen3, Qwen3-MoE, Llama); relative to the TOML file."""
    source: Edge | Literal[""] = ""
    """Function `(folder: Path, seed: int) -> None` that writes the checkpoint if `path` (default `<run>/model`) is missing."""
    context_length: PositiveInt = 1024
    """Longest sequence, prompt and answer together, in tokens."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights and activations in both trainer and engine."""

    @model_validator(mode="after")
    def _somewhere(self):
        if not self.path and not self.source:
            raise ValueError("one of model.path and model.source is needed")
        return self


class Data(Section):
    prompts: str
    """Training prompts: a .jsonl or .parquet file (relative to the TOML file), or an edge `module:function`."""
    eval: str = ""
    """Held-out prompts, same forms; empty: no evaluation."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages (`role`, `content`)."""
    label_column: str = "label"
    """Column with what the reward compares with; may be absent from the file if the reward needs none."""
    metadata_column: str = "metadata"
    """Column with anything else the reward wants (a mapping); may be absent."""
    chat: bool = False
    """Render prompts with the tokenizer's chat template (a plain string becomes one user message)."""


class Rollout(Section):
    prompts_per_step: PositiveInt
    """Prompts (groups) per step."""
    samples_per_prompt: PositiveInt
    """Samples per prompt, the size of a group."""
    max_new_tokens: PositiveInt
    """Longest answer in tokens."""
    reward: Edge
    """Function `(prompt, answer, label, metadata) -> float` or `-> dict` with a key `reward`."""
    reward_error: Literal["fail", "drop"] = "fail"
    """A reward that raises or is not finite: end the run naming the sample, or drop its group and count it."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature."""
    staleness: Annotated[int, Field(ge=0, le=1)] = 0
    """Steps by which the sampler's weights may lag: 0 on policy, 1 generates the next step while training."""
    flush_groups: PositiveInt = 64
    """Finished groups per sample shard."""
    kv_cache_tokens: PositiveInt = 16384
    """Tokens of key-value cache per engine."""
    max_running_requests: PositiveInt = 128
    """Sequences decoded together per engine."""
    tensor_parallel: PositiveInt = 1
    """GPUs per engine."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Longest time between two answers of an engine, start-up included."""


class Train(Section):
    lr: Annotated[float, Field(ge=0)]
    """Peak learning rate; 0 freezes the policy."""
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up, counted in rollout steps."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's first-moment decay."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW's second-moment decay."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay."""
    clip_grad: Annotated[float, Field(gt=0)] = 1.0
    """Largest global gradient norm."""
    mini_batches: PositiveInt = 1
    """Optimizer steps per rollout step."""
    micro_batch_tokens: PositiveInt = 8192
    """Most tokens in one packed forward and backward per rank."""
    clip_low: Annotated[float, Field(gt=0)] = 0.2
    """PPO clip of the ratio below 1."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """PPO clip of the ratio above 1."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL penalty (k3) to the initial policy; 0: no reference model is kept."""
    advantage: Literal["group_std", "group_mean"] = "group_std"
    """`group_std`: (r - mean) / std within the group (GRPO); `group_mean`: r - mean (Dr.GRPO)."""
    loss_mean: Literal["token", "sequence"] = "token"
    """Mean over all tokens of the mini-batch, or over sequences of their token means."""
    tensor_parallel: PositiveInt = 1
    """Ranks that share each layer."""
    expert_parallel: PositiveInt = 1
    """Ranks that share the experts of an MoE layer."""


class WarmStart(Section):
    data: Edge
    """Function `(seed: int, count: int) -> list[tuple[str, str]]`: prompts and demonstrated answers."""
    steps: PositiveInt
    """Supervised optimizer steps before the first rollout."""
    lr: Annotated[float, Field(gt=0)] = 2e-3
    """Peak learning rate of AdamW (20 steps of linear warm-up, weight decay 0.01)."""
    batch_size: PositiveInt = 64
    """Demonstrations per step."""


class Eval(Section):
    every_steps: Annotated[int, Field(ge=0)] = 0
    """Evaluate every n steps besides before the first and after the last; 0: only these two."""
    prompts: PositiveInt = 256
    """Held-out prompts used, from the start of `data.eval`."""


class Checkpoint(Section):
    every_steps: PositiveInt = 10
    """Save every n steps, and after the last."""
    keep: PositiveInt = 2
    """Newest checkpoints kept."""


class Component(Section):
    nodes: PositiveInt = 1
    """Nodes."""
    ranks_per_node: PositiveInt = 1
    """MPI ranks per node: one per GPU in training, one per engine in rollout."""
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    """GPUs per node; 0: CPU only."""
    cpus_per_rank: PositiveInt = 1
    """CPU cores per rank."""
    memory_gb: Annotated[int, Field(ge=0)] = 0
    """Memory per node in GB; 0: the partition's default."""
    partition: str = ""
    """Slurm partition; empty: the site profile's, then Slurm's default."""
    constraint: str = ""
    """Slurm node feature."""
    extra: list[str] = []
    """Further sbatch options, each written as `--key=value`."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


class Slurm(Section):
    site: str = ""
    """Site profile (a name from `slurm/sites` or a TOML file); empty: found by cluster name."""
    time_minutes: PositiveInt = 60
    """Time limit of the job, the same for both components."""
    account: str = ""
    """Account to charge."""
    qos: str = ""
    """Quality of service."""
    mpi: str = ""
    """Kind of `srun --mpi` (pmi2, pmix); empty: the site profile's."""
    warning_seconds: PositiveInt = 120
    """Seconds before the time limit at which every rank gets USR2, saves and ends; Slurm may send it a minute early."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Attempts after the first before the run stops."""
    setup: list[str] = []
    """Shell lines run before the ranks start, such as module loads."""
    train: Component = Component()
    rollout: Component = Component()


class Config(Section):
    """A whole run. Sections in the order of the data."""

    run: Run
    model: Model
    data: Data
    rollout: Rollout
    train: Train
    warm_start: WarmStart | None = None
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    slurm: Slurm = Slurm()

    @model_validator(mode="after")
    def _arithmetic(self):
        for problem in _problems(self):
            raise ValueError(problem)
        return self

    @property
    def data_parallel(self) -> int:
        """Number of model replicas in training."""
        return self.slurm.train.ranks // self.train.tensor_parallel

    @property
    def patience_seconds(self) -> float:
        """Longest wait for the other role: a trainer may be in its warm start, an engine in a long generation."""
        return 4 * self.rollout.timeout_seconds

    @property
    def engines(self) -> int:
        return self.slurm.rollout.ranks

    @property
    def samples_per_step(self) -> int:
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt


def _problems(c: Config) -> Iterable[str]:
    """Numbers that do not fit together, each with what would."""
    ranks, tp, ep = c.slurm.train.ranks, c.train.tensor_parallel, c.train.expert_parallel
    if ranks % tp:
        yield f"slurm.train has {ranks} ranks, not divisible by train.tensor_parallel = {tp}; {_divisors(ranks)} would fit"
    elif (ranks // tp) % ep and ranks % ep:
        yield f"slurm.train has {ranks} ranks, not divisible by train.expert_parallel = {ep}; {_divisors(ranks)} would fit"
    dp = max(1, ranks // tp)
    unit = dp * c.train.mini_batches
    if c.samples_per_step % unit:
        yield (
            f"{c.rollout.prompts_per_step} prompts x {c.rollout.samples_per_prompt} samples = {c.samples_per_step} per step, "
            f"not divisible by {dp} data-parallel ranks x {c.train.mini_batches} mini-batches = {unit}; "
            f"{_nearest(c.samples_per_step, unit)} samples per step would fit"
        )
    if c.rollout.prompts_per_step < c.engines:
        yield (
            f"rollout.prompts_per_step = {c.rollout.prompts_per_step} leaves some of {c.engines} engines idle; "
            f"use at least {c.engines} prompts or fewer rollout ranks"
        )
    if c.rollout.max_new_tokens >= c.model.context_length:
        yield (
            f"rollout.max_new_tokens = {c.rollout.max_new_tokens} leaves no room for a prompt in "
            f"model.context_length = {c.model.context_length}"
        )
    gpus = c.slurm.rollout.gpus_per_node
    if gpus and gpus % (c.slurm.rollout.ranks_per_node * c.rollout.tensor_parallel):
        yield (
            f"slurm.rollout.gpus_per_node = {gpus} is not divisible by {c.slurm.rollout.ranks_per_node} ranks x "
            f"rollout.tensor_parallel = {c.rollout.tensor_parallel}"
        )


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


def _nearest(n: int, unit: int) -> str:
    below = n - n % unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def load(file: Path, overrides: Iterable[str] = ()) -> Config:
    """A user's TOML file with `--set` overrides; file names in it become absolute.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type, numbers that do not fit together.
    """
    raw = _toml(file)
    for text in overrides:
        _override(raw, text)
    _absolute(raw, file.resolve().parent)
    return _validate(raw, str(file))


def read(file: Path) -> Config:
    """The resolved configuration of a run folder.

    Raises:
        ConfigError: missing or damaged.
    """
    return _validate(_toml(file), str(file))


def dump(config: Config) -> str:
    """The resolved configuration as TOML text, every value spelled out."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def _toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = "name an existing TOML file, for example docs/examples/arithmetic-moe.toml"
        raise ConfigError("no such file", where=str(file), next_step=hint) from None
    except (IsADirectoryError, PermissionError) as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(file)) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 (byte {error.start})", where=str(file)) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not valid TOML: {error}", where=str(file)) from None


def _override(raw: dict[str, Any], text: str) -> None:
    key, sign, value = text.partition("=")
    parts = key.strip().split(".")
    if not sign or len(parts) < 2 or not all(parts):
        raise ConfigError(f"--set {text!r} is not section.key=value", next_step="for example --set train.lr=1e-6")
    table = raw
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {text!r}: {part} is a value, not a section")
    table[parts[-1]] = _value(value.strip())


def _value(text: str) -> Any:
    """A TOML value, or the text itself (so that strings need no quotes)."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def _absolute(raw: dict[str, Any], folder: Path) -> None:
    """File names relative to the TOML file become absolute; the folder itself is kept for edges beside the file."""
    run, model, data = (raw.get(section) for section in ("run", "model", "data"))
    if isinstance(run, dict):
        run.setdefault("edges_folder", str(folder))
    if isinstance(model, dict) and isinstance(model.get("path"), str) and model["path"]:
        model["path"] = str(folder / Path(model["path"]).expanduser())
    for key in ("prompts", "eval"):
        value = data.get(key) if isinstance(data, dict) else None
        if isinstance(data, dict) and isinstance(value, str) and value and not is_edge(value):
            data[key] = str(folder / Path(value).expanduser())


def is_edge(text: str) -> bool:
    """True for `module:function`."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", text) is not None


def _validate(raw: dict[str, Any], file: str) -> Config:
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(_say(e) for e in error.errors()), where=file) from None


def _say(error: Any) -> str:
    """One line for one pydantic error: key, what is wrong, the nearest valid names."""
    path = [str(p) for p in error["loc"]]
    key = ".".join(path)
    if error["type"] == "extra_forbidden":
        names = _names(path[:-1])
        near = difflib.get_close_matches(path[-1], names, n=3) or names
        return f"{key}: unknown key; did you mean {', '.join('.'.join([*path[:-1], n]) for n in near)}?"
    if error["type"] == "missing":
        return f"{key}: missing"
    message = error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return f"{key}: {message} (got {error['input']!r})" if key and not isinstance(error["input"], dict) else message


def _names(path: list[str]) -> list[str]:
    """Valid keys of the section at `path`."""
    model: Any = Config
    for part in path:
        annotation = model.model_fields[part].annotation
        choices = getattr(annotation, "__args__", (annotation,))
        model = next(a for a in choices if isinstance(a, type) and issubclass(a, BaseModel))
    return list(model.model_fields)
