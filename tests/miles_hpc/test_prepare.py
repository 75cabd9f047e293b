"""What a user can get wrong is found before any rank starts, with a verdict and without a traceback."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles_hpc import config, prepare
from miles_hpc.config import Config
from miles_hpc.errors import EdgeError, ModelError
from miles_hpc.examples import arithmetic
from miles_hpc.paths import RunPaths

HERE = "miles_hpc.examples.arithmetic:"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    arithmetic.model(folder, seed=0)
    return folder


def run(tmp_path: Path, **sections: dict[str, Any]) -> Config:
    defaults: dict[str, dict[str, Any]] = {
        "run": {"name": "t", "steps": 1, "edges_folder": str(tmp_path)},
        "model": {"source": HERE + "model", "context_length": 64},
        "data": {"prompts": HERE + "prompts"},
        "rollout": {"prompts_per_step": 1, "samples_per_prompt": 2, "max_new_tokens": 24, "reward": HERE + "reward"},
        "train": {"lr": 0.1},
    }
    return Config.model_validate(
        {key: value | sections.get(key, {}) for key, value in defaults.items()}
        | {key: value for key, value in sections.items() if key not in defaults}
    )


def command(folder: Path, attempt: int = 1) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-m", "miles_hpc.prepare", "--run", str(folder), "--attempt", str(attempt)]
    return subprocess.run(arguments, capture_output=True, text=True, check=False)


def test_a_good_run_gets_its_model_once(tmp_path: Path) -> None:
    paths, good = RunPaths(tmp_path / "a run"), run(tmp_path, warm_start={"data": HERE + "demonstrations", "steps": 1})
    prepare.prepare(good, paths)
    made = (paths.model / "model.safetensors").stat()
    prepare.prepare(good, paths)
    assert (paths.model / "model.safetensors").stat().st_mtime_ns == made.st_mtime_ns
    assert [path.name for path in paths.folder.iterdir()] == ["model"]


def test_a_user_error_ends_with_a_verdict_and_no_traceback(tmp_path: Path, model_folder: Path) -> None:
    folder = tmp_path / "run with spaces"
    folder.mkdir()
    (tmp_path / "mine.py").write_text("def reward(prompt, answer):\n    return 1.0\n")
    bad = run(tmp_path, model={"source": "", "path": str(model_folder)}, rollout={"reward": "mine:reward"})
    (folder / "config.toml").write_text(config.dump(bad))
    result = command(folder)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "mine:reward" in result.stderr and "mine.py:1" in result.stderr
    verdict = json.loads((folder / "attempts" / "001" / "verdict.json").read_text())
    assert (verdict["kind"], verdict["phase"], verdict["exit_code"]) == ("user_error", "prepare", 2)
    assert "mine:reward" in verdict["error"]


def test_a_restart_takes_the_input_as_good_until_the_user_says_something_new(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for attempt in (1, 2, 3):
        paths.attempt(attempt).mkdir(parents=True)
    paths.job.write_text(json.dumps({"first_attempt": 1}))
    paths.config.write_text(config.dump(run(tmp_path, data={"prompts": "nowhere.jsonl"})))
    paths.launcher_log(2).touch()
    assert [prepare.passed(paths, attempt) for attempt in (1, 2, 3)] == [False, False, True]
    assert command(tmp_path, 3).returncode == 0
    for said in (json.dumps({"first_attempt": 3}), "{", '{"first_attempt": "x"}'):  # damaged: looked at once more
        paths.job.write_text(said)
        assert not prepare.passed(paths, 3)
    assert command(tmp_path, 3).returncode == 2


def test_where_the_preparation_itself_breaks_the_next_step_is_the_log_of_the_batch_script(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "config.toml").write_text(config.dump(run(tmp_path)))
    monkeypatch.setattr(prepare, "prepare", lambda *told: {}["key"])
    with pytest.raises(KeyError):
        prepare.main(["--run", str(tmp_path), "--attempt", "1"])
    verdict = json.loads(RunPaths(tmp_path).verdict(1).read_text())
    assert (verdict["kind"], verdict["next"]) == ("bug", f"miles-submit logs {tmp_path} --role job")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("def make(folder, seed):\n    raise OSError('disk full')\n", "OSError: disk full"),
        ("def make(folder, seed):\n    (folder / 'x').write_text('x')\n", "wrote no config.json"),
    ],
)
def test_a_model_source_that_fails_leaves_nothing(tmp_path: Path, text: str, what: str) -> None:
    name = f"make_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text)
    paths = RunPaths(tmp_path / "run")
    with pytest.raises(EdgeError, match=what):
        prepare.make_model(run(tmp_path, model={"source": f"{name}:make"}), paths.model)
    assert list(paths.folder.iterdir()) == []


@pytest.mark.parametrize("there", [True, False])
def test_what_a_killed_attempt_left_of_its_model_goes_with_the_next(tmp_path: Path, model_folder: Path, there: bool) -> None:
    """Whether another run has made the model since or not; what a living run is writing at the same place stays."""
    folder = tmp_path / "models/small"
    text = "import os\n\ndef make(folder, seed):\n    (folder / 'half').touch()\n    os._exit(9)\n"
    (tmp_path / "dies_while_making.py").write_text(text)
    source = {"path": str(folder), "source": "dies_while_making:make"}
    for name in ("mine", "other"):
        plan = run(tmp_path, run={"folder": str(tmp_path / name)}, model=source)
        code = "import sys; from pathlib import Path; from miles_hpc import prepare; from miles_hpc.config import Config; "
        code += "prepare.make_model(Config.model_validate_json(sys.argv[1]), Path(sys.argv[2]))"
        made = plan.model_dump_json(exclude_none=True)
        assert subprocess.run([sys.executable, "-c", code, made, str(folder)], check=False).returncode == 9
    assert len(list(folder.parent.glob(".small.*/half"))) == 2
    if there:
        shutil.copytree(model_folder, folder)
    prepare.make_model(run(tmp_path, run={"folder": str(tmp_path / "mine")}, model={"path": str(folder)}), folder)
    assert len(list(folder.parent.glob(".small.*"))) == 1 and (folder / "config.json").exists()


def test_a_warm_start_needs_a_token_for_the_end(tmp_path: Path, model_folder: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "endless")
    facts = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(facts | {"eos_token": None}))
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    model, taught = {"path": str(folder), "source": ""}, {"data": HERE + "demonstrations", "steps": 1}
    prepare.prepare(run(tmp_path, model=model), RunPaths(tmp_path / "run"))
    with pytest.raises(ModelError, match="no end-of-sequence token, which warm_start teaches") as caught:
        prepare.prepare(run(tmp_path, model=model, warm_start=taught), RunPaths(tmp_path / "run"))
    assert str(folder) in caught.value.where


def test_bad_models(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(ModelError, match="no such model folder"):
        prepare.make_model(run(tmp_path, model={"source": "", "path": str(tmp_path / "none")}), tmp_path / "none")
    with pytest.raises(ModelError, match="context_length = 1024, but the model has 512 positions"):
        prepare.check_model(model_folder, 1024)
    facts = json.loads((model_folder / "config.json").read_text())
    for change, what in (({"architectures": ["BertModel"]}, "BertModel is not supported"), ({}, r"no \*.safetensors")):
        (tmp_path / "config.json").write_text(json.dumps(facts | change))
        with pytest.raises(ModelError, match=what):
            prepare.check_model(tmp_path, 64)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        prepare.check_model(tmp_path, 64)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _facts(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        facts = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(facts))

    return change


def _text(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


INDEX = "model.safetensors.index.json"
DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a list": (lambda f: (f / "config.json").write_text("[]"), "a JSON object is needed"),
    "no positions": (_facts(max_position_embeddings=None), "max_position_embeddings = None"),
    "positions in words": (_facts(max_position_embeddings="512"), "max_position_embeddings = '512'"),
    "no vocabulary": (_facts(vocab_size=None), "vocab_size = None"),
    "a size that none has": (_facts(hidden_size=-1), "hidden_size = -1, a whole number of at least 1"),
    "a vocabulary of a few": (_facts(vocab_size=10), "vocab_size = 10, but the tokenizer has ids up to"),
    "a vocabulary that ends before the end": (_text("generation_config.json", '{"eos_token_id": 160}'), "eos_token_id = 160"),
    "architecture in words": (_facts(architectures="Qwen3MoeForCausalLM"), "a list is needed"),
    "half a file": (lambda f: _cut(f / "model.safetensors"), "damaged checkpoint file"),
    "an empty file": (lambda f: (f / "model.safetensors").write_bytes(b""), "damaged checkpoint file"),
    "a pointer": (lambda f: (f / "model.safetensors").write_text("version https://git-lfs.example"), "damaged checkpoint file"),
    "a missing shard": (
        _text(INDEX, '{"weight_map": {"a": "gone.safetensors"}}'),
        "names gone.safetensors, which is not there",
    ),
    "an index without a map": (_text(INDEX, '{"weight_map": ["a"]}'), "weight_map = "),
    "an index of numbers": (_text(INDEX, '{"weight_map": {"a": 1}}'), "names 1,"),
    "an end in words": (_text("generation_config.json", '{"eos_token_id": "<eos>"}'), "eos_token_id = '<eos>'"),
    "half an end": (_text("generation_config.json", '{"eos_token_id": [1, 0.5]}'), "eos_token_id = [1, 0.5]"),
    "half a generation_config": (lambda f: (f / "generation_config.json").write_text("{"), "cannot be read"),
    "brackets": (_text("config.json", "[" * 100_000), "cannot be read"),
    "brackets as generation_config": (_text("generation_config.json", "[" * 100_000), "cannot be read"),
    "a list as generation_config": (lambda f: (f / "generation_config.json").write_text("[]"), "cannot be read"),
    "no tokenizer": (lambda f: [file.unlink() for file in f.glob("tokenizer*")], "no usable tokenizer"),
    "half a tokenizer": (lambda f: _cut(f / "tokenizer.json"), "no usable tokenizer"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_model_folder_is_the_users_error(tmp_path: Path, model_folder: Path, name: str) -> None:
    change, what = DAMAGED[name]
    folder = shutil.copytree(model_folder, tmp_path / "model")
    change(folder)
    with pytest.raises(ModelError) as caught:
        prepare.prepare(run(tmp_path, model={"source": "", "path": str(folder)}), RunPaths(tmp_path / "run"))
    assert what in caught.value.what and str(folder) in caught.value.where


def test_routing_replay_of_a_dense_model_is_refused(tmp_path: Path, model_folder: Path) -> None:
    settings = run(tmp_path, train={"routing_replay": True})
    prepare.prepare(settings, RunPaths(tmp_path / "moe"))
    dense = settings.model_copy(update={"model": settings.model.model_copy(update={"source": HERE + "dense_model"})})
    with pytest.raises(ModelError, match=r"train\.routing_replay = true, but the model has no experts"):
        prepare.prepare(dense, RunPaths(tmp_path / "dense"))


@pytest.mark.parametrize("returned", ["3", "[3]", "[('a',)]", "[('a', 1)]", "[]"])
def test_bad_demonstrations(tmp_path: Path, returned: str) -> None:
    name = f"teach_{abs(hash(returned))}"
    (tmp_path / f"{name}.py").write_text(f"def show(seed, count):\n    return {returned}\n")
    with pytest.raises(EdgeError, match=r"warm_start.data must return"):
        prepare.prepare(run(tmp_path, warm_start={"data": f"{name}:show", "steps": 1}), RunPaths(tmp_path / "run"))


def test_a_teacher_must_read_the_policys_tokens(tmp_path: Path, model_folder: Path) -> None:
    teacher = tmp_path / "teacher"
    plan = run(tmp_path, model={"path": str(model_folder)}, train={"lr": 0.1, "teacher": str(teacher), "advantage": "none"})
    with pytest.raises(ModelError, match="cannot be read") as caught:
        prepare.prepare(plan, RunPaths(tmp_path / "run"))
    assert str(teacher) in caught.value.where
    shutil.copytree(model_folder, teacher)
    prepare.prepare(plan, RunPaths(tmp_path / "run"))
    text = (teacher / "tokenizer.json").read_text()
    (teacher / "tokenizer.json").write_text(text.replace('"<unk>"', '"<unknown>"'))
    with pytest.raises(ModelError, match="the teacher's tokenizer is not the policy's"):
        prepare.prepare(plan, RunPaths(tmp_path / "run"))
