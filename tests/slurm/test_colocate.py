"""The whole product with trainer and engines on the same nodes, in a real Slurm: two training ranks, an engine beside each."""

import json
import time
from pathlib import Path

import pytest

from miles_hpc.launchers import audit, cli, state
from miles_hpc.paths import RunPaths

pytestmark = [pytest.mark.slurm, pytest.mark.engine, pytest.mark.long]
TOML = """\
run = { name = "turns", steps = 3, placement = "colocate" }
model = { source = "miles_hpc.examples.arithmetic:model", context_length = 64 }
data = { prompts = "miles_hpc.examples.arithmetic:prompts", eval = "miles_hpc.examples.arithmetic:prompts" }
eval = { prompts = 16 }
checkpoint = { every_steps = 2 }
train = { lr = 1e-3, offload = true }
rollout = { prompts_per_step = 8, samples_per_prompt = 4, max_new_tokens = 20, reward = "beside:reward" }
slurm = { time_minutes = 10, train = { nodes = 2 } }
"""
REWARD = "def reward(prompt, answer, label, metadata):\n    return float(len(answer) % 3)\n"


def test_trainer_and_engines_take_turns(cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.toml").write_text(TOML)
    (tmp_path / "beside.py").write_text(REWARD)
    for name, value in cluster.exports().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "job.toml"]) == 0
    run = RunPaths(tmp_path / "runs/turns-000")
    end = time.monotonic() + 400
    while not state.state_of(run.folder).ended:
        assert time.monotonic() < end
        time.sleep(0.2)
    logs = "\n".join(f"== {file}\n{file.read_text()[-3000:]}" for file in sorted(run.attempts.glob("*/*.log")))
    assert state.state_of(run.folder).word == "done", logs
    assert run.hosts(1).read_text().split() == ["t0", "t1"] * 2

    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    steps = [e for e in events if e["event"] == "step"]
    assert [e["step"] for e in steps] == [0, 1, 2]
    assert all(e["phase_seconds"]["swap"] > 0 and e["metrics"]["train/logp_abs_diff_max"] < 1e-3 for e in steps)
    syncs = [e for e in events if e["event"] == "sync"]
    assert [e["version"] for e in syncs] == [0, 1, 2, 3] and all(e["digests"] > 40 for e in syncs)
    # What is saved is on the device only until an engine comes.
    named = [(e["event"], e.get("version", e.get("step"))) for e in events if e["event"] in ("sync", "checkpoint")]
    assert named.index(("checkpoint", 2)) < named.index(("sync", 2)) and named.index(("checkpoint", 3)) < named.index(
        ("sync", 3)
    )
    assert audit.audit(run.folder) == 0
