"""A whole run, engine and trainer real, in which every part that can be a user's own is one of docs/edges.md."""

import json
import re
import time
from pathlib import Path

import pytest

from miles_hpc.launchers import cli, state
from miles_hpc.paths import RunPaths

pytestmark = [pytest.mark.mpi, pytest.mark.engine, pytest.mark.long]
PAGE = (Path(__file__).parents[2] / "docs/edges.md").read_text()
TOML = """\
run = { name = "own", steps = 2 }
model = { source = "miles_hpc.examples.arithmetic:model", context_length = 64 }
data = { prompts = "miles_hpc.examples.arithmetic:prompts", eval = "miles_hpc.examples.arithmetic:prompts" }
eval = { prompts = 4 }
checkpoint = { every_steps = 1, backend = "own:archive" }
slurm = { failure_policy = "own:patient" }

[rollout]
prompts_per_step = 4
samples_per_prompt = 4
max_new_tokens = 8
reward = "own:score"
function = "own:best_first"
weight_transport = "own:over_files"
filters = [{ function = "own:enough_thought", options = { least = 1 } }]

[train]
lr = 1e-3
advantage = "gae"
critic_lr = 1e-3
loss = "own:loss"
step_hook = "own:hook"
optimizer_hook = "own:cosine"
metrics = "own:figures"
metric_reducer = "own:few"
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)))
    (folder / "own.toml").write_text(TOML)
    assert cli.main(["run", str(folder / "own.toml"), "--local", "--set", f"run.folder={folder / 'run'}"]) == 0
    paths, deadline = RunPaths(folder / "run"), time.monotonic() + 400
    while not state.state_of(paths.folder).ended:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    logs = "\n".join(file.read_text()[-2000:] for file in [paths.job_log, *paths.attempts.glob("*/*.log")])
    assert state.state_of(paths.folder).word == "done", logs
    return paths


def events(paths: RunPaths, kind: str) -> list[dict]:
    return [event for line in paths.events.read_text().splitlines() if (event := json.loads(line))["event"] == kind]


def test_the_books_of_such_a_run_are_right(finished: RunPaths) -> None:
    assert cli.main(["audit", str(finished.folder)]) == 0
    assert len(events(finished, "eval")) == 2


def test_weights_went_the_users_way_and_every_tensor_was_compared(finished: RunPaths) -> None:
    assert [event["digests"] > 20 for event in events(finished, "sync")] == [True] * 3
    assert not list((finished.folder / "weights").iterdir())


def test_the_store_has_every_checkpoint_and_the_critic(finished: RunPaths) -> None:
    store = finished.folder.parent / "archive" / finished.folder.name
    assert sorted(path.name for path in store.iterdir()) == ["1", "2"]
    metrics = [event["metrics"] for event in events(finished, "step")]
    assert all(m["train/value_loss"] > 0 and "mine/long_answers" in m for m in metrics)
    assert metrics[1]["train/lr"] < metrics[0]["train/lr"] == 1e-3


def test_the_board_shows_what_the_reducer_left(finished: RunPaths) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(finished.tensorboard("train")))
    shown.Reload()
    assert {"reward/mean", "mine/long_answers", "seconds", "eval/reward"} <= set(shown.Tags()["scalars"])
    assert not [tag for tag in shown.Tags()["scalars"] if tag.startswith("train/")]
