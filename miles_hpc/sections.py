"""The sections of the configuration, one frozen model each; every key has a unit and a one-line meaning.

Nothing here imports torch.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator
from pydantic_core import PydanticCustomError

EDGE = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
"""What ends a path or a line of the job script, and halves of surrogate pairs, which no file takes."""
Edge = Annotated[str, StringConstraints(pattern=EDGE)]
PositiveInt = Annotated[int, Field(ge=1)]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")]
ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "LlamaForCausalLM")
"""Of models that can be trained and served, as their config.json names them."""
Scalar = bool | int | float | str | list[bool | int | float | str]


def _line(value: str) -> str:
    if CONTROL.search(value):
        raise PydanticCustomError("control", "Input should be one line of text without control characters")
    return value


class Section(BaseModel):
    """A section: frozen, of strict types, without keys that nobody knows."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, strict=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _usable(cls, value: Any) -> Any:
        """What names, paths and C libraries can do with."""
        if isinstance(value, int) and value >= 1 << 32:
            raise PydanticCustomError("too_large", "Input should be less than 2^32")
        return _line(value) if isinstance(value, str) else value


class Run(Section):
    """The run as a whole."""

    name: Annotated[str, StringConstraints(pattern=RUN_NAME, max_length=100)]
    """Name of the run; letters, digits, `.`, `_`, `-`."""
    steps: Annotated[int, Field(ge=1, le=999_999)]
    """Number of rollout-and-train steps."""
    folder: str = ""
    """The run's own folder; empty: `runs/<name>-NNN` below the current folder."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of prompt order, sampling noise and initial weights."""
    numerics: Literal["native", "exact"] = "native"
    """`native`: each side uses its fastest operations; `exact`: both use the same, log-probs are equal bit for bit."""
    placement: Literal["split", "colocate"] = "split"
    """`split`: training nodes and rollout nodes; `colocate`: on the nodes of `slurm.train`, training and engines in turns."""
    edges_folder: str = ""
    """Folder of the TOML file, appended to the ranks' `sys.path`; filled in by the launcher."""


class Model(Section):
    """The policy."""

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
    """Prompts and their columns."""

    prompts: Annotated[str, StringConstraints(min_length=1)]
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


class RewardPart(Section):
    """One of several rewards."""

    name: Name
    """Name in logs and sample files."""
    function: Edge
    """Function `(prompt, answer, label, metadata, **options) -> float` or `-> dict` with a key `reward`."""
    weight: float = 1.0
    """Factor in the sum; 0: logged only."""
    options: dict[str, Scalar] = {}
    """Keyword arguments of the function."""


class Filter(Section):
    """One filter of groups."""

    function: Edge
    """Function `(samples: list[Sample], **options) -> str`: empty to keep the group, else the reason, which is counted."""
    options: dict[str, Scalar] = {}
    """Keyword arguments of the function."""


class Rollout(Section):
    """Generation, rewards and engines."""

    prompts_per_step: PositiveInt
    """Prompts (groups) per step."""
    samples_per_prompt: PositiveInt
    """Samples per prompt, the size of a group."""
    max_new_tokens: PositiveInt
    """Longest answer in tokens."""
    generate: Edge | Literal[""] = ""
    """Coroutine function `(sample: Sample, engine: SampleClient) -> Sample` for several turns and tools; empty: one answer."""
    function: Edge | Literal[""] = ""
    """Instead: async generator function `(groups: list[list[Sample]], engine: GroupClient)` for an engine's whole share."""
    reward: Edge | Literal[""] = ""
    """Function `(prompt, answer, label, metadata) -> float` or `-> dict` with a key `reward`."""
    rewards: list[RewardPart] = []
    """Instead of `reward`: several, added up with weights and logged as `reward/<name>`."""
    group_reward: Edge | Literal[""] = ""
    """Function `(samples: list[Sample]) -> list[float]` that sees a whole group; its numbers replace the rewards."""
    reward_error: Literal["fail", "drop"] = "fail"
    """A reward that raises or is not finite, or no answer: end the run naming the sample, or drop its group and count it."""
    filters: list[Filter] = []
    """Groups that one of them refuses are not trained on and are replaced by other prompts, see `max_tries`."""
    max_tries: PositiveInt = 4
    """Prompts tried for one place in the step before it stays empty; counts only with `filters`."""
    reward_threads: PositiveInt = 4
    """Rewards computed at a time per rollout rank, beside the generation."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature."""
    staleness: Annotated[int, Field(ge=0, le=1)] = 0
    """Steps by which the sampler's weights may lag: 0 on policy, 1 generates the next step while training."""
    flush_groups: PositiveInt = 64
    """Finished groups per sample shard."""
    unfinished: Literal["redo", "continue"] = "redo"
    """Answers of groups that a signal interrupts: the next attempt generates them again, or goes on behind their last token."""
    kv_cache_tokens: PositiveInt = 16384
    """Tokens of key-value cache per engine."""
    max_running_requests: PositiveInt = 128
    """Sequences decoded together per engine."""
    weight_transport: Edge | Literal[""] = ""
    """Function `(run: Path) -> Transport` that carries weights to the engines; empty: broadcast over NCCL or gloo."""
    tensor_parallel: PositiveInt = 1
    """GPUs per engine."""
    timeout_seconds: Annotated[float, Field(gt=0, le=1e6)] = 600.0
    """Longest time between two answers of an engine, start-up included."""


LossName = Literal["ppo", "gspo", "cispo", "reinforce", "supervised"]
AdvantageName = Literal["group_std", "group_mean", "rloo", "reinforce_pp", "reinforce_pp_baseline", "reward", "gae", "none"]


class Train(Section):
    """Objective, optimizer and how the model is split over ranks."""

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
    """Most tokens in one packed forward and backward per rank; less where memory is short."""
    loss: LossName | Edge = "ppo"
    """Policy loss (docs/algorithms.md), or a function `(tokens: Tokens, train: Train) -> Tensor` with one loss per token."""
    loss_mean: Literal["token", "sequence", "constant"] = "token"
    """Mean over all tokens of the mini-batch, over sequences of their token means, or sum / (samples x max_new_tokens)."""
    advantage: AdvantageName | Edge = "group_std"
    """Advantage (docs/algorithms.md), or a function `(samples: Samples, group_size: int) -> numpy array [samples]`."""
    clip_low: Annotated[float, Field(gt=0)] = 0.2
    """Clip of the ratio below 1."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """Clip of the ratio above 1."""
    dual_clip: Annotated[float, Field(ge=0)] = 0.0
    """Largest loss of a token with negative advantage, in units of it (3 is usual); 0: none."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus, per nat."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL penalty to the initial policy; 0: no reference model is kept."""
    kl: Literal["k1", "k2", "k3", "k3_k2", "k3_unbiased"] = "k3"
    """Estimator of that KL."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount of a reward per token; with `advantage = "gae"`."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Lambda of GAE: 1 trusts the rewards alone, 0 the critic."""
    critic_lr: Annotated[float, Field(ge=0)] = 1e-5
    """The critic's peak learning rate; it follows the schedule of `lr`."""
    value_clip: Annotated[float, Field(gt=0)] = 0.2
    """Largest change of a value within a step that counts in the critic's loss, in units of the reward."""
    teacher: str = ""
    """Folder of a Hugging Face checkpoint with the policy's tokenizer to distil from; relative to the TOML file."""
    teacher_coef: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the KL to the teacher in the advantage of each token."""
    correction: Literal["none", "tis", "icepop", "sequence_tis", "sequence_mis", "geometric_mis"] = "none"
    """Importance weights for a sampler that computes other probabilities than the trainer; costs no forward pass."""
    correction_low: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Smallest importance weight that counts."""
    correction_high: Annotated[float, Field(ge=1)] = 2.0
    """Largest importance weight that counts."""
    step_hook: Edge | Literal[""] = ""
    """Function `(event: str, step: int, facts: dict) -> None`, called on every training rank before and after each step."""
    optimizer_hook: Edge | Literal[""] = ""
    """Function `(step: int, values: AdamW) -> AdamW`: hyperparameters of the step, such as a schedule of `lr`."""
    metrics: Edge | Literal[""] = ""
    """Function `(samples: Samples, advantages, group_size: int) -> dict[str, float]`, added to the step's figures."""
    metric_reducer: Edge | Literal[""] = ""
    """Function `(step: int, figures: dict[str, float]) -> dict[str, float]`: what TensorBoard shows of a step's figures."""
    routing_replay: bool = False
    """MoE: the engine records every token's experts and the trainer uses the same; in exact numerics they are only compared."""
    tensor_parallel: PositiveInt = 1
    """Ranks that share each layer."""
    expert_parallel: PositiveInt = 1
    """Ranks that share the experts of an MoE layer."""
    offload: bool = False
    """Colocated: keep the optimizer's state in the host's memory while engines generate."""


class WarmStart(Section):
    """The supervised phase before the first rollout."""

    data: Edge
    """Function `(seed: int, count: int) -> list[tuple[str, str]]`: prompts and demonstrated answers."""
    steps: PositiveInt
    """Supervised optimizer steps before the first rollout."""
    lr: Annotated[float, Field(gt=0)] = 2e-3
    """Peak learning rate of AdamW (20 steps of linear warm-up, weight decay 0.01)."""
    batch_size: PositiveInt = 64
    """Demonstrations per step."""


class Eval(Section):
    """Held-out evaluations; greedy answers."""

    every_steps: Annotated[int, Field(ge=0)] = 0
    """Evaluate every n steps besides before the first and after the last; 0: only these two."""
    prompts: PositiveInt = 256
    """Held-out prompts used, from the start of `data.eval`."""


class Checkpoint(Section):
    """When the run is saved, and what is kept."""

    every_steps: PositiveInt = 10
    """Save every n steps, and after the last."""
    keep: PositiveInt = 2
    """Newest checkpoints kept."""
    backend: Edge | Literal[""] = ""
    """Function `(run: Path) -> CheckpointStore`: a store of your own where checkpoints are kept beside the run folder."""
    keep_every: Annotated[int, Field(ge=0)] = 0
    """Checkpoints of every n-th step are kept for good; 0: of none."""
    keep_samples: Annotated[int, Field(ge=0)] = 0
    """Samples of the newest n steps are kept, and those that a resume may need; 0: of all steps."""

    def outdated(self, versions: list[int]) -> list[int]:
        """Of the `versions` that are there, ascending, those that are no longer kept."""
        return [version for version in versions[: -self.keep] if not self.keep_every or version % self.keep_every]


class Component(Section):
    """Nodes of one role."""

    nodes: PositiveInt = 1
    """Nodes."""
    spares: Annotated[int, Field(ge=0)] = 0
    """Further nodes that stand by: the next attempt uses one in place of a bad node."""
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

    @field_validator("extra")
    @classmethod
    def _directives(cls, options: list[str]) -> list[str]:
        """Each is the rest of a line of the job script."""
        return [_line(option) for option in options]

    @property
    def ranks(self) -> int:
        """MPI ranks of all nodes, spare ones aside."""
        return self.nodes * self.ranks_per_node


class Slurm(Section):
    """The job."""

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
    """Seconds before the time limit at which ranks get USR2, save and end, if need be within a step; up to a minute early."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Faults that are followed by another attempt; a time limit, a preemption or a lost node is none."""
    failure_policy: Edge | Literal[""] = ""
    """Function `(situation: Situation, default: str) -> str`: what follows a failed attempt: restart, requeue or stop."""
    setup: list[str] = []
    """Shell lines run before the ranks start, such as module loads."""
    train: Component = Component()
    rollout: Component = Component()


def is_edge(text: str) -> bool:
    """True for `module:function`."""
    return re.fullmatch(EDGE, text) is not None
