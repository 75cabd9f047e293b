import pytest

from miles_hpc import config as configuration
from miles_hpc import data, records
from miles_hpc.errors import DataError, EdgeError, ModelError, SiteError
from miles_hpc.launchers import checks, plan
from miles_hpc.launchers.controller import Kind, Partition

SMALL, LARGE = Kind(2, 8, 8000, 0), Kind(2, 64, 256_000, 4)
PARTITIONS = {
    "all": Partition("all", True, (SMALL, LARGE)),
    "train": Partition("train", False, (LARGE,)),
    "rollout": Partition("rollout", False, (SMALL,)),
}


def load(toml, *overrides):
    return configuration.load(toml, overrides)


def test_good_files_pass_without_importing_user_code(toml):
    checks.check_files(load(toml))


@pytest.mark.parametrize(
    ("override", "error", "said"),
    [
        ("rollout.reward=scoring:rewrd", EdgeError, "did you mean reward"),
        ("rollout.reward=scorin:reward", EdgeError, "neither installed nor beside"),
        ("data.prompts=nope.jsonl", DataError, "no such file"),
        ("data.eval=empty.jsonl", DataError, "empty"),
        ("data.prompts=.", DataError, "a folder, not a file"),
        ("model.path=nope", ModelError, "no Hugging Face checkpoint"),
        ("train.teacher=nope", ModelError, r"(?s)no Hugging Face checkpoint.*train\.teacher"),
    ],
)
def test_what_is_missing_is_named(toml, override, error, said):
    (toml.parent / "empty.jsonl").touch()
    with pytest.raises(error, match=said) as raised:
        checks.check_files(load(toml, override))
    assert raised.value.where and raised.value.next_step


@pytest.mark.parametrize(
    ("content", "override", "said"),
    [
        ('{"prompt": "a"}\n{"prompt": "b"\n', "data.chat=true", "not JSON: .* at column 15(.|\n)*line 2"),
        ('{"prompt": "a"}\n', "data.prompt_column=question", "no column 'question'; there are 'prompt'"),
        ('{"prompt": "a"}\n', "data.label_column=answer", "no column 'answer'"),
        ("\n\n", "data.chat=true", "there are no prompts"),
    ],
)
@pytest.mark.parametrize("key", ["prompts", "eval"])
def test_lines_are_read_before_the_queue_with_the_message_of_the_job(toml, key, content, override, said):
    (toml.parent / "rows.jsonl").write_text(content)
    config = load(toml, f"data.{key}=rows.jsonl", override)
    with pytest.raises(DataError, match=said) as before:
        checks.check_files(config)
    with pytest.raises(DataError) as within:
        data.load(config, "train" if key == "prompts" or "column" in override else "eval")
    assert str(before.value) == str(within.value)


def test_of_a_long_file_only_the_head_is_read(toml, monkeypatch):
    line = '{"prompt": "a"}\n'
    (toml.parent / "prompts.jsonl").write_text(line * records.HEAD_LINES + "broken\n")
    checks.check_files(load(toml))
    (toml.parent / "prompts.jsonl").write_text(line + "broken\n")
    monkeypatch.setattr(records, "HEAD_SECONDS", 0.0)
    checks.check_files(load(toml))


def test_a_model_with_a_source_may_be_missing(toml):
    (toml.parent / "making.py").write_text("def model(folder, seed): ...\n")
    checks.check_files(load(toml, "model.path=later", "model.source=making:model"))


def test_user_code_that_does_not_parse(toml):
    (toml.parent / "broken.py").write_text("def reward(:\n")
    with pytest.raises(EdgeError, match="cannot be parsed"):
        checks.check_files(load(toml, "rollout.reward=broken:reward"))


@pytest.mark.parametrize(
    "text",
    [
        b"\xef\xbb\xbfdef reward(prompt, answer, label, metadata): ...\n",
        b"# -*- coding: latin-1 -*-\n# caf\xe9\ndef reward(prompt, answer, label, metadata): ...\n",
        b"from typing import Any\nreward: Any = None\n",
        b"reward, other = 1, 2\n",
        b"with open('x') as f:\n    reward = 1\n",
        b"for i in range(3):\n    def reward(): ...\n",
        b"try:\n    pass\nfinally:\n    reward = 1\n",
        b"match 1:\n    case 1:\n        reward = 1\n",
        b"def __getattr__(name): ...\n",
        b"from elsewhere import *\n",
    ],
)
def test_every_way_to_define_a_function_is_seen(toml, text):
    (toml.parent / "ways.py").write_bytes(text)
    checks.check_files(load(toml, "rollout.reward=ways:reward"))


@pytest.mark.parametrize("text", [b"\0", b"# caf\xe9\n", b"def reward(:\n"])
def test_code_that_python_refuses(toml, text):
    (toml.parent / "ways.py").write_bytes(text)
    with pytest.raises(EdgeError, match="cannot be parsed"):
        checks.check_files(load(toml, "rollout.reward=ways:reward"))


def test_edges_of_installed_packages_are_found_without_importing_them(toml):
    (toml.parent / "json").mkdir()
    found = checks.find_module("json.decoder", toml.parent)
    assert found is not None and found.name == "decoder.py" and toml.parent not in found.parents


def job(toml, *overrides):
    config = load(toml, *overrides)
    return plan.job_spec(config, "miles", toml.parent / "run")


def test_enough_nodes(toml):
    checks.check_nodes(job(toml), PARTITIONS)


def test_too_few_nodes(toml):
    with pytest.raises(SiteError, match="3 nodes wanted, partition rollout has 2"):
        checks.check_nodes(job(toml, "slurm.rollout.nodes=3"), PARTITIONS)


def test_components_in_one_partition_are_added_up(toml):
    both = ["slurm.train.partition=train", "slurm.rollout.partition=train"]
    with pytest.raises(SiteError, match="4 nodes wanted, partition train has 2"):
        checks.check_nodes(job(toml, *both), PARTITIONS)


def test_unknown_partition_offers_the_nearest(toml):
    with pytest.raises(SiteError, match="did you mean rollout"):
        checks.check_nodes(job(toml, "slurm.rollout.partition=rolout"), PARTITIONS)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("slurm.rollout.gpus_per_node=4", "2 nodes with 4 GPUs each wanted; those of partition rollout have 0"),
        ("slurm.train.gpus_per_node=8", r"(?s)have 4\b.*where: slurm\.train\.gpus_per_node"),
        ("slurm.rollout.cpus_per_rank=9", r"9 cores \(ranks_per_node x cpus_per_rank\) each wanted.*have 8"),
        ("slurm.rollout.memory_gb=8", "8192 MB of memory each wanted.*have 8000"),
    ],
)
def test_nodes_that_are_too_small(toml, override, said):
    with pytest.raises(SiteError, match=said):
        checks.check_nodes(job(toml, override), PARTITIONS)


def test_some_nodes_of_a_partition_are_large_enough_and_not_all(toml):
    both = ["slurm.train.partition=all", "slurm.train.gpus_per_node=4"]
    checks.check_nodes(job(toml, *both), PARTITIONS)
    with pytest.raises(SiteError, match="3 nodes with 4 GPUs each wanted; those of partition all have 4, 0"):
        checks.check_nodes(job(toml, *both, "slurm.train.spares=1", "slurm.rollout.nodes=1"), PARTITIONS)
