"""Edges of every kind: native and foreign signatures, call checks before the start, the table of the launcher."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from miles_hpc import attach, calls, foreign, protocols
from miles_hpc.config import Config
from miles_hpc.errors import EdgeError
from miles_hpc.launchers import checks, cli
from miles_hpc.records import Row
from miles_hpc.rollout.judge import Judge
from miles_hpc.rollout.reward import Reward
from miles_hpc.sample import Sample
from miles_hpc.sections import AdvantageName
from miles_hpc.train.advantage import advantage_of
from miles_hpc.train.hooks import Hooks
from miles_hpc.train.optimizer import AdamW

NATIVE = """
import torch

def score(prompt, answer, label, metadata, bonus=0.0):
    return {"reward": float(answer == label) + bonus, "tokens": metadata["tokens"]}

async def later(prompt, answer, label, metadata):
    return 0.25

def counted(function):
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper

@counted
def decorated(prompt, answer, label, metadata):
    return 0.75

def best(samples):
    top = max(s.reward for s in samples)
    return [float(s.reward == top) for s in samples]

def few(samples, least=1):
    return "" if sum(s.value > 0 for s in samples) >= least else "few"

def signs(samples, group_size):
    import numpy
    return numpy.sign(samples.rewards - 0.5)

def loss(tokens, train):
    return -tokens.advantages * tokens.log_probs

def hook(event, step, facts):
    print(event, step, sorted(facts))

def decay(step, values):
    return values._replace(lr=values.lr / (step + 1))

def figures(samples, advantages, group_size):
    return {"mine/groups": len(samples) / group_size}

def only_mine(step, figures):
    return {name: value for name, value in figures.items() if name.startswith("mine/")}

def patient(situation, default):
    print("asked about", situation.history[-1].kind)
    return "restart" if situation.history[-1].kind == "user_error" and len(situation.history) < 3 else default
"""

# As in the documentation of Miles and slime: customisation of reward, dynamic filter and reward post-processing.
FOREIGN = """
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.utils.types import Sample
import torch

async def custom_rm(args, sample: Sample, **kwargs) -> float:
    assert sample.status == Sample.Status.COMPLETED and args.n_samples_per_prompt == 4
    return 1.0 if sample.response == sample.label else 0.0

def plain_rm(args, sample):
    return {"score": len(sample.response) / args.scale, "pred": sample.response}

def numpy_rm(args, sample):
    import numpy
    return {"score": numpy.float32(0.5), "length": numpy.int64(3), "pred": sample.response}

def group_rm(args, samples):
    return [sample.index * 1.0 for sample in samples]

async def async_group_rm(args, samples):
    return [{"score": 2.0} for sample in samples]

def check_reward_nonzero_std(args, samples: list[Sample], **kwargs):
    rewards = [sample.get_reward_value(args) for sample in samples]
    keep = torch.tensor(rewards, dtype=torch.float).std() > 0.0
    return DynamicFilterOutput(keep=keep.item(), reason=None if keep else f"zero_std_{round(rewards[0], 1)}")

def old_filter(args, samples, **kwargs):
    return any(sample.reward for sample in samples)

def post_process(args, samples):
    raw = [sample.reward for sample in samples]
    return raw, [reward - sum(raw) / len(raw) for reward in raw]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    before = list(sys.path), list(sys.meta_path), set(sys.modules)
    (tmp_path / "native_edges.py").write_text(NATIVE)
    (tmp_path / "foreign_edges.py").write_text(FOREIGN)
    yield tmp_path
    sys.path[:], sys.meta_path[:] = before[0], before[1]
    for name in set(sys.modules) - before[2]:
        if name.startswith(("native_edges", "foreign_edges", "bad_", "slime", "miles.")) or name == "miles":
            del sys.modules[name]


def config(folder: Path, rollout: dict[str, Any] | None = None, slurm: dict[str, Any] | None = None, **train: Any) -> Config:
    fields = {"prompts_per_step": 2, "samples_per_prompt": 4, "max_new_tokens": 4} | (
        rollout or {"reward": "native_edges:score"}
    )
    return Config.model_validate(
        {
            "run": {"name": "t", "steps": 1, "edges_folder": str(folder)},
            "model": {"path": "m"},
            "data": {"prompts": "p.jsonl"},
            "rollout": fields,
            "train": {"lr": 0.1} | train,
            "slurm": slurm or {},
        }
    )


def submittable(made: Config, edge: str) -> Config:
    """With an edge as model source and prompts, so that no files are needed."""
    model = made.model.model_copy(update={"source": edge})
    return made.model_copy(update={"model": model, "data": made.data.model_copy(update={"prompts": edge})})


def score(made: Config, answer: str = "4") -> tuple[float, dict[str, float]]:
    found = Reward.of(made)("2+2", answer, "4", {"finished": True, "tokens": 1, "max_new_tokens": 4}, "a sample")
    return found.value, found.parts


def group(*rewards: float) -> list[Sample]:
    return [Sample(group_index=0, index=i, reward=reward) for i, reward in enumerate(rewards)]


def test_rewards_add_up_by_weight_and_are_kept_apart(folder: Path) -> None:
    parts = [
        {"name": "right", "function": "native_edges:score", "weight": 2.0, "options": {"bonus": 0.5}},
        {"name": "form", "function": "miles_hpc.rewards.form:length", "weight": 0.5, "options": {"scale": 2.0}},
        {"name": "seen", "function": "native_edges:later", "weight": 0.0},
    ]
    value, found = score(config(folder, {"rewards": parts}))
    assert found == {"right": 1.5, "right.tokens": 1.0, "form": -0.5, "seen": 0.25}
    assert value == 2 * 1.5 - 0.25


def test_a_function_of_any_arguments_is_native(folder: Path) -> None:
    """As a decorator often makes it; not one whose first argument is the `args` of Miles."""
    assert score(config(folder, {"reward": "native_edges:decorated"}))[0] == 0.75


def test_native_edges_of_every_kind(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rollout = {
        "reward": "native_edges:later",
        "group_reward": "native_edges:best",
        "filters": [{"function": "native_edges:few", "options": {"least": 2}}],
    }
    edges = {"advantage": "signs", "loss": "loss", "step_hook": "hook", "optimizer_hook": "decay", "metrics": "figures"}
    edges |= {"metric_reducer": "only_mine"}
    slurm = {"failure_policy": "native_edges:patient"}
    made = config(folder, rollout, slurm, **{key: f"native_edges:{name}" for key, name in edges.items()})
    assert {key for key, _, _ in protocols.named(made)} == {
        "rollout.reward", "rollout.group_reward", "rollout.filters", *(f"train.{key}" for key in edges), "slurm.failure_policy"
    }  # fmt: skip
    checks.check_files(submittable(made, "native_edges:loss"))
    calls.check(made)
    assert capsys.readouterr().out == "check 0 []\n"
    assert Judge.of(made)(group(1, 3, 2, 0)).refusal == "few"
    assert Judge.of(made)(group(1, 3, 3, 0)).rewards == [0, 1, 1, 0]
    assert Hooks.of(made).hyperparameters(1, AdamW(0.5)).lr == 0.25
    assert Hooks.of(made).shown(0, {"mine/groups": 2.0, "reward/mean": 0.5}) == {"mine/groups": 2.0}


def test_foreign_rewards(folder: Path) -> None:
    assert score(config(folder, {"reward": "foreign_edges:custom_rm"})) == (1.0, {})
    parts = [{"name": "n", "function": "foreign_edges:plain_rm", "options": {"scale": 2.0}}]
    assert score(config(folder, {"rewards": parts}), "abc") == (1.5, {"n": 1.5, "n.score": 1.5})
    assert score(config(folder, {"reward": "foreign_edges:numpy_rm"})) == (0.5, {"score": 0.5, "length": 3.0})


def test_the_arguments_say_what_the_run_does(folder: Path) -> None:
    """Also which model, where the run makes its own."""
    made = config(folder)
    assert foreign.arguments(made, {}).hf_checkpoint == "m"
    own = made.model.model_copy(update={"path": "", "source": "a:b"})
    ran = made.run.model_copy(update={"folder": "/runs/mine"})
    args = foreign.arguments(made.model_copy(update={"run": ran, "model": own}), {"advantage_estimator": "mine"})
    assert (args.hf_checkpoint, args.advantage_estimator) == ("/runs/mine/model", "mine")
    known = {
        name: foreign.arguments(config(folder, advantage=name), {}).advantage_estimator
        for name in get_args(AdvantageName)
        if name not in ("gae", "none")
    }  # which need a critic, a teacher
    assert known == {
        "group_std": "grpo", "group_mean": "grpo", "rloo": "rloo", "reward": "reward",
        "reinforce_pp": "reinforce_plus_plus", "reinforce_pp_baseline": "reinforce_plus_plus_baseline",
    }  # fmt: skip
    assert foreign.arguments(config(folder, advantage="gae", critic_lr=0.1), {}).advantage_estimator == "ppo"
    assert foreign.arguments(config(folder, loss="gspo"), {}).advantage_estimator == "gspo"


def test_the_reward_file_of_the_documentation_runs(folder: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/coming-from-miles.md").read_text()
    (folder / "bad_my_rm.py").write_text(page.split("```python")[1].split("```")[0])
    made = config(folder, {"reward": "bad_my_rm:custom_rm"})
    assert [score(made, answer)[0] for answer in ("it is 4", "5")] == [1, 0]


def test_foreign_functions_of_groups(folder: Path) -> None:
    for name, expected in (("group_rm", [0, 1, 2]), ("async_group_rm", [2, 2, 2])):
        assert Judge.of(config(folder, {"group_reward": f"foreign_edges:{name}"}))(group(0, 0, 0)).rewards == expected
    for name, reason in (("check_reward_nonzero_std", "zero_std_0"), ("old_filter", "old_filter")):
        judge = Judge.of(config(folder, {"reward": "native_edges:score", "filters": [{"function": f"foreign_edges:{name}"}]}))
        assert (judge(group(0, 1)).refusal, judge(group(0, 0)).refusal) == ("", reason)


def test_foreign_post_processing_is_an_advantage(folder: Path) -> None:
    made = config(folder, advantage="foreign_edges:post_process")
    calls.check(made)
    samples = calls._samples(made)
    np.testing.assert_allclose(advantage_of(made)(samples, 4), samples.rewards - 0.5)


BAD = [
    ("rollout.reward", "def f(prompt, answer): return 1.0", "called with"),
    ("rollout.reward", "def f(args): return 1.0", "called with"),
    ("rollout.reward", "def f(prompt, answer, label, metadata): return 'good'", "must return a finite number"),
    ("rollout.reward", "def f(prompt, answer, label, metadata): return answer[0]", "IndexError"),
    ("rollout.group_reward", "def f(samples): return [1.0]", "4 finite numbers"),
    ("rollout.filters", "def f(samples): return None", "a reason as text"),
    ("rollout.filters", "def f(samples): return samples[9]", "IndexError"),
    ("rollout.filters", "def f(args, samples): return 3", "a reason as text"),
    ("train.advantage", "def f(samples, group_size): return [0.0]", "finite numbers as a numpy array"),
    ("train.advantage", "def f(samples, group_size): return samples.rewards * float('nan')", "finite numbers"),
    ("train.advantage", "def f(samples, group_size): samples.rewards -= 1; return samples.rewards", "read-only"),
    ("train.metrics", "def f(samples, advantages, group_size): samples.tokens[0] = 1; return {}", "read-only"),
    ("rollout.reward", "def f(args, sample): sample.remove_sample = True; return 1.0", "sets remove_sample"),
    ("rollout.filters", "def f(samples): samples[0].remove_sample = True; return ''", "sets remove_sample"),
    ("train.advantage", "def f(args, samples): samples[0].remove_sample = True; return 0, [0] * 8", "sets remove_sample"),
    ("train.loss", "def f(tokens, train): return tokens.log_probs.sum()", "one"),
    ("train.loss", "def f(tokens, train): return tokens.log_probs.detach()", "with a gradient"),
    ("train.loss", "import nowhere_at_all\ndef f(tokens, train): pass", "needs nowhere_at_all"),
    ("train.step_hook", "def f(event, step, facts): raise ValueError('no')", "ValueError: no"),
    ("train.optimizer_hook", "def f(step, values): return 0.1", "an AdamW"),
    ("train.metrics", "def f(samples, advantages, group_size): return 3", "a mapping of names"),
    ("train.metric_reducer", "def f(step, figures): return [1.0]", "a mapping of names"),
    ("slurm.failure_policy", "def f(situation, default): return 'again'", "one of restart, requeue, stop"),
    ("slurm.failure_policy", "def f(situation): return 'stop'", "called with"),
    ("slurm.failure_policy", "def f(situation, default): raise OSError('quota')", "OSError: quota"),
]


@pytest.mark.parametrize(("key", "text", "what"), BAD)
def test_what_is_wrong_with_an_edge_shows_before_the_start(folder: Path, key: str, text: str, what: str) -> None:
    name = f"bad_{abs(hash(text))}"
    (folder / f"{name}.py").write_text(text)
    section, _, field = key.partition(".")
    value: Any = [{"function": f"{name}:f"}] if field == "filters" else f"{name}:f"
    rollout = {"reward": "native_edges:score"} | ({field: value} if section == "rollout" else {})
    slurm = {field: value} if section == "slurm" else {}
    made = config(folder, rollout, slurm, **({field: value} if section == "train" else {}))
    with pytest.raises(EdgeError) as caught:
        calls.check(made)
        calls.check_reward(made, Row("p", "4"), "p")
    assert key in str(caught.value) and (what in str(caught.value) or key == "train.loss"), caught.value


@pytest.mark.parametrize("key", ["rollout.filters", "rollout.rewards", "train.loss", "slurm.failure_policy"])
def test_the_login_node_finds_misspelt_names_without_importing(folder: Path, key: str) -> None:
    (folder / "native_edges.py").write_text("raise RuntimeError('imported')\ndef score(): ...")
    section, _, field = key.partition(".")
    part = {"function": "native_edges:scor"} | ({"name": "a"} if field == "rewards" else {})
    value: Any = [part] if field in ("filters", "rewards") else "native_edges:scor"
    rollout = {} if field == "rewards" else {"reward": "native_edges:score"}
    sections = {name: {field: value} if section == name else {} for name in ("rollout", "slurm", "train")}
    made = config(folder, rollout | sections["rollout"], sections["slurm"], **sections["train"])
    with pytest.raises(EdgeError, match="did you mean score") as caught:
        checks.check_files(submittable(made, "native_edges:score"))
    assert key in str(caught.value)


@pytest.mark.parametrize(("body", "what"), [("return sample", "0 answer tokens"), ("raise KeyError('x')", "KeyError")])
def test_generate_functions_are_called_before_the_start(folder: Path, body: str, what: str) -> None:
    name = f"bad_{abs(hash(body))}"
    (folder / f"{name}.py").write_text(f"async def f(sample, engine):\n    await engine.generate(sample.tokens)\n    {body}\n")
    made = config(folder, {"reward": "native_edges:score", "generate": f"{name}:f"})
    with pytest.raises(EdgeError, match=what):
        calls.check_generate(made, Row("p", "4"), "p", lambda text, add_special_tokens: {"input_ids": [1, 2]})


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("yield groups[0]", "0 answer tokens"),
        ("raise KeyError('x')\n    yield", "KeyError"),
        ("return\n    yield", "ended without"),
    ],
)
def test_rollout_functions_are_called_before_the_start(folder: Path, body: str, what: str) -> None:
    name = f"bad_{abs(hash(body))}"
    (folder / f"{name}.py").write_text(f"async def f(groups, engine):\n    {body}\n")
    made = config(folder, {"reward": "native_edges:score", "function": f"{name}:f"})
    with pytest.raises(EdgeError, match=what):
        calls.check_generate(made, Row("p", "4"), "p", lambda text, add_special_tokens: {"input_ids": [1, 2]})


def test_the_table_of_edges(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["edges"]) == 0
    printed = capsys.readouterr().out
    for key, edge in protocols.EDGES.items():
        assert key in printed and edge.signature in printed and attach.EDGES[key] is edge
    assert "(prompt: str, answer: str, label: Any, metadata: Mapping[str, Any]) -> float | dict[str, float]" in printed
