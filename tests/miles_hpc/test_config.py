"""What a user may write, and what the answer is to anything else."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from miles_hpc import config
from miles_hpc.errors import ConfigError
from miles_hpc.train.advantage import ADVANTAGES

MINIMAL = """
run = { name = "sums", steps = 4 }
model = { path = "model" }
data = { prompts = "train.jsonl" }
rollout = { prompts_per_step = 8, samples_per_prompt = 4, max_new_tokens = 16, reward = "rewards:exact" }
train = { lr = 1e-6 }
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(MINIMAL, encoding="utf-8")
    return path


def refused(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        config.load(file, overrides)
    assert raised.value.exit_code == 2
    return str(raised.value)


def test_minimal(file):
    found = config.load(file)
    assert found.samples_per_step == 32 and found.engines == 1 and found.data_parallel == 1
    assert found.model.path == str(file.parent / "model") and found.data.prompts == str(file.parent / "train.jsonl")


def test_written_and_read_again(file, tmp_path):
    found = config.load(file, ["warm_start.data=m:f", "warm_start.steps=3", 'slurm.setup=["module load x"]'])
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(config.dump(found), encoding="utf-8")
    assert config.read(resolved) == found


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.leaning_rate=1", "train.leaning_rate: unknown key; did you mean"),
        ("train.lrr=1", "train.lrr: unknown key; did you mean train.lr"),
        ("rollout.prompt_per_step=8", "did you mean rollout.prompts_per_step"),
        ("slurm.train.gpu_per_node=1", "did you mean slurm.train.gpus_per_node"),
        ("warm_start.stepz=1", "did you mean warm_start.steps"),
        ("trian.lr=1", "trian: unknown key; did you mean train"),
    ],
)
def test_unknown_key_names_the_nearest(file, override, expected):
    assert expected in refused(file, override)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("run.steps=many", "run.steps"),
        ("run.steps=2.5", "run.steps"),
        ("run.steps=0", "run.steps"),
        ('rollout.prompts_per_step="8"', "rollout.prompts_per_step"),
        ("train.lr=-1.0", "train.lr"),
        ("train.beta1=1.0", "train.beta1"),
        ("data.chat=1", "data.chat"),
        ("run.name=a/b", "run.name"),
        ("run.numerics=fast", "run.numerics"),
        ("rollout.reward=no-edge", "rollout.reward"),
        ("rollout.staleness=2", "rollout.staleness"),
        ("slurm.train=3", "slurm.train: this is a section"),
        ("slurm.train.nodes.x=3", "slurm.train.nodes: "),
        ("data.prompts=", "data.prompts"),
        ("run.steps=1000000", "run.steps"),
        ("run.seed=4294967296", "run.seed"),
        ("rollout.reward=beside", "rollout.reward: module:function is needed"),
        ("model.source=beside", "model.source: module:function is needed"),
        ("run.name=a b", "run.name: only letters, digits"),
        (f"run.steps={'9' * 5000}", "run.steps: "),
        (f"run.steps={'[' * 5000}", "run.steps: "),
    ],
)
def test_wrong_type_or_value_names_the_key(file, override, key):
    message = refused(file, override)
    assert key in message and str(file) in message


LAST = MINIMAL[MINIMAL.index("rollout") :]
FILTERS = """train.lr = 1e-6
[rollout]
prompts_per_step = 8
samples_per_prompt = 4
max_new_tokens = 16
reward = "rewards:exact"
[[rollout.filters]]
function = "a:b"
[[rollout.filters]]
"""


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ('name = "sums", steps = 4', 'name = "sums", stpes = 4', 2),
        ("lr = 1e-6", "lrr = 1e-6", 6),
        ("train = { lr = 1e-6 }", "[train]\n# lr = 1\nlr = 'fast'", 8),
        ("train = { lr = 1e-6 }", "train.lr = 1e-6\n[trian]\nlr = 1", 7),
        ("train = { lr = 1e-6 }", "[train]\nlr = 1e-6\nmini_batches = 3", 5),  # the first key that the message names
        ("train = { lr = 1e-6 }", "train.lr = 1e-6\n[slurm.train]\nnodes = 1\ngpus = 1", 9),
        (LAST, f"{FILTERS}function = 'c'", 14),
        (LAST, f"{FILTERS}function = 'c:d'\nfunctoin = 1", 15),
    ],
)
def test_the_line_that_is_to_blame(file, old, new, line):
    file.write_text(MINIMAL.replace(old, new), encoding="utf-8")
    said = refused(file)
    assert f"where: {file}, line {line}\n" in said and "  next:  " in said


@pytest.mark.parametrize(
    "override",
    [
        "run.stpes=3",
        "run.steps=many",
        "trian.lr=1",
        "train.mini_batches=3",
        "slurm.train.nodes=3",
        "rollout.samples_per_prompt=1",
    ],
)
def test_the_command_line_is_to_blame(file, override):
    said = refused(file, "train.beta1=0.5", override)
    assert f"where: --set {override}, on top of {file}\n" in said and "  next:  " in said


def test_each_complaint_has_its_place(file):
    file.write_text(MINIMAL.replace("lr = 1e-6", "lrr = 1e-6"), encoding="utf-8")
    assert f"where: --set run.steps=many, on top of {file}; {file}, line 6\n" in refused(file, "run.steps=many")


COLOCATE = "run.placement=colocate slurm.train.ranks_per_node=4"


def keys_of(kind: type) -> list[str]:
    return [
        f"{section}.{key}"
        for section, model in config.Config.model_fields.items()
        for key, field in getattr(model.annotation, "model_fields", {}).items()
        if field.annotation is kind
    ]


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
@pytest.mark.parametrize("key", keys_of(float))
def test_no_number_may_be_infinite(file, key, value):
    assert key in refused(file, f"{key}={value}")


@pytest.mark.parametrize(
    ("kind", "value"), [(int, "99999999999999999999"), (str, '"a\\nb"'), (str, '"a\\u0000"'), (str, "a\udcff")]
)
def test_no_number_or_text_is_more_than_a_library_or_a_file_name_can_take(file, kind, value):
    assert all(key in refused(file, f"{key}={value}") for key in keys_of(kind))


def test_missing_key(file):
    file.write_text(MINIMAL.replace("steps = 4", "seed = 1"), encoding="utf-8")
    assert "run.steps: missing" in refused(file)


def test_neither_path_nor_source(file):
    file.write_text(MINIMAL.replace('path = "model"', ""), encoding="utf-8")
    assert "one of model.path and model.source is needed" in refused(file)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("train.mini_batches=3", "8 x 4 = 32, not divisible by 1 data-parallel ranks of slurm.train"),
        ("train.mini_batches=3", "train.mini_batches = 3; 1, 2, 4, 8, 16, 32 mini-batches would fit"),
        ("slurm.train.ranks_per_node=3 train.tensor_parallel=2", "3 ranks, not divisible by train.tensor_parallel = 2; 1, 3"),
        ("slurm.train.ranks_per_node=4 train.expert_parallel=3", "train.expert_parallel = 3; 1, 2, 4 would fit"),
        ("slurm.rollout.nodes=9", "leaves some of 9 engines idle; use at least 9 prompts"),
        ("rollout.max_new_tokens=1024", "leaves no room for a prompt in model.context_length = 1024"),
        ("train.routing_replay=true rollout.function=m:f", "a rollout.function does not hand on"),
        ("slurm.rollout.gpus_per_node=3 rollout.tensor_parallel=2", "slurm.rollout.gpus_per_node = 3 is not divisible by 1"),
        ("rollout.samples_per_prompt=1", 'every advantage would be 0; use 2 or more samples, or one of "gae"'),
        ("train.offload=true", 'train.offload has no meaning with run.placement = "split"'),
        (f"{COLOCATE} rollout.staleness=1", "needs rollout.staleness = 0, not 1"),
        (
            f"{COLOCATE} rollout.tensor_parallel=3",
            "slurm.train.ranks_per_node = 4 is not divisible by rollout.tensor_parallel = 3",
        ),
        (f"{COLOCATE} slurm.train.gpus_per_node=8", "a training rank for each of slurm.train.gpus_per_node = 8 GPUs"),
        (f"{COLOCATE} slurm.rollout.nodes=2", "slurm.rollout.nodes has no meaning"),
        (f"{COLOCATE} slurm.rollout.partition=gpu", "slurm.rollout.partition has no meaning"),
        (f"{COLOCATE} slurm.train.nodes=4", "leaves some of 16 engines idle"),
    ],
)
def test_numbers_that_do_not_fit_say_what_would(file, overrides, expected):
    assert expected in refused(file, *overrides.split())


def test_one_sample_per_prompt_is_refused_by_the_advantages_that_it_makes_0_and_by_no_other(file):
    """Which those are, is asked of the formulas themselves."""
    seen = {"rewards": np.array([0, 1, 1], np.float32), "answer_lengths": np.array([2, 1, 3])}
    for name, advantage in ADVANTAGES.items():
        overrides = ["rollout.samples_per_prompt=1", f"train.advantage={name}", *["train.teacher=t"] * (name == "none")]
        if name == "none" or advantage(SimpleNamespace(**seen), 1).any():
            assert config.load(file, overrides).train.advantage == name
        else:
            assert f'train.advantage = "{name}"' in refused(file, *overrides)
    assert 'or "none" (the teacher alone)' in refused(file, "rollout.samples_per_prompt=1", "train.teacher=t")


def test_colocated_engines_are_counted_by_the_training_ranks_beside_them(file, tmp_path):
    found = config.load(
        file, [*COLOCATE.split(), "slurm.train.nodes=2", "rollout.tensor_parallel=2", "slurm.rollout.cpus_per_rank=3"]
    )
    beside = found.rollout_component
    assert (found.engines, beside.nodes, beside.ranks_per_node, beside.cpus_per_rank) == (4, 2, 2, 3)
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(config.dump(found), encoding="utf-8")
    assert config.read(resolved) == found


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("train.lr=2e-5", 2e-5),
        ("train.lr = 2e-5", 2e-5),
        ("train.lr=0", 0.0),
    ],
)
def test_set_numbers(file, text, value):
    assert config.load(file, [text]).train.lr == value


def test_set_strings_lists_and_new_sections(file):
    texts = ["run.name=other", 'slurm.account="a b"', 'slurm.train.extra=["--mem=0"]', "eval.every_steps=2", "data.chat=true"]
    found = config.load(file, texts)
    assert found.run.name == "other" and found.slurm.account == "a b" and found.slurm.train.extra == ["--mem=0"]
    assert found.eval.every_steps == 2 and found.data.chat is True


def test_the_last_set_wins(file):
    assert config.load(file, ["run.steps=5", "run.steps=6"]).run.steps == 6


@pytest.mark.parametrize("text", ["train.lr", "lr=1", "=1", "train.=1", ".lr=1", ""])
def test_set_of_another_form(file, text):
    assert "is not section.key=value" in refused(file, text)


def test_set_below_a_value(file):
    assert "lr is a value, not a section" in refused(file, "train.lr.peak=1")


def test_files_that_cannot_be_read(tmp_path, file):
    assert "no such file" in refused(tmp_path / "absent.toml")
    assert "cannot be read" in refused(tmp_path)
    file.write_bytes(MINIMAL.encode() + b"# caf\xe9\n")
    assert "not UTF-8 (byte" in refused(file)
    file.write_text("run = {", encoding="utf-8")
    assert "not valid TOML" in refused(file)
    file.write_text("", encoding="utf-8")
    assert "run: missing" in refused(file)
    for part in ("train", "rollout"):
        key = f"slurm.{part}.extra"
        assert f"{key}: " in refused(file, f'{key}=["--nice=1", "--comment=a\\n--exclusive"]')
    for text in ("[" * 5000, "9" * 5000):
        file.write_text(f"run = {text}", encoding="utf-8")
        assert "not valid TOML" in refused(file)
    assert "Not a directory" in refused(file / "below")
    assert "name too long" in refused(tmp_path / ("x" * 300))


@pytest.mark.parametrize("change", [lambda text: b"\xef\xbb\xbf" + text, lambda text: text.replace(b"\n", b"\r\n")])
def test_what_editors_of_windows_write(file, change):
    expected = config.load(file)
    file.write_bytes(change(MINIMAL.encode()))
    assert config.load(file) == expected


def test_a_home_that_is_nobodys_is_a_name_like_any_other(file):
    assert config.load(file, ["data.prompts=~no-such-user/x"]).data.prompts.endswith("~no-such-user/x")


def test_a_path_with_spaces(tmp_path):
    folder = tmp_path / "with a space"
    folder.mkdir()
    (folder / "job.toml").write_text(MINIMAL, encoding="utf-8")
    assert config.load(folder / "job.toml").data.prompts == str(folder / "train.jsonl")


def test_every_field_has_a_meaning():
    for section in (config.Run, config.Model, config.Data, config.Rollout, config.Train, config.WarmStart, config.Eval,
                    config.Checkpoint, config.Component, config.Slurm):  # fmt: skip
        for name, field in section.model_fields.items():
            if name not in ("train", "rollout"):
                assert field.description, f"{section.__name__}.{name}"


def test_frozen(file):
    with pytest.raises(ValueError, match="frozen"):
        config.load(file).train.lr = 1.0


@pytest.mark.parametrize("text", ["run = 1", "run = []", "train = [[1], 2]", 'x = "y"', "[run.name]\na = 1"])
def test_toml_of_another_shape(file, text):
    file.write_text(text, encoding="utf-8")
    assert str(file) in refused(file)
