"""The report of runs that are done, going on, resumed, or broken off."""

import json
import shutil

import numpy as np
import pytest

from miles_hpc.errors import UserError
from miles_hpc.launchers import plot, report
from miles_hpc.launchers.progress import progress_of
from miles_hpc.samples import store

KEYS = [
    "state",
    "steps",
    "attempts",
    "engine_restarts",
    "reward_first",
    "reward_last",
    "eval_first",
    "eval_last",
    "samples",
    "prompts_lost",
    "prompts_duplicated",
    "logp_abs_diff_max",
    "logp_abs_diff_mean",
    "rollout_kl_k1",
    "rollout_kl_k3",
    "ratio_outside",
    "routing_mismatch",
    "weight_sync_seconds_median",
    "weight_sync_gb_per_s",
    "rollout_tokens_per_s",
    "train_tokens_per_s",
    "wall_seconds",
    "phase_seconds",
    "export_path",
    "changes",
]


def test_keys_and_figures_of_a_done_run(make_run, capsys):
    run = make_run(12)
    run.paths.export.mkdir()
    (run.paths.export / "config.json").write_text("{}")
    assert report.report(run.folder, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == KEYS
    assert set(found["phase_seconds"]) == set(report.PHASES)
    rewards = [store_rewards(run, step) for step in range(12)]
    assert found["reward_first"] == pytest.approx(np.mean(rewards[:5]))
    assert found["reward_last"] == pytest.approx(np.mean(rewards[-5:]))
    assert found["state"] == "done" and found["steps"] == 12 and found["attempts"] == 1
    assert found["engine_restarts"] == 0
    assert found["samples"] == 12 * 8 and found["prompts_lost"] == 0 and found["prompts_duplicated"] == 0
    assert (found["eval_first"], found["eval_last"]) == (0.2, 0.7)
    assert 0 < found["logp_abs_diff_mean"] < found["logp_abs_diff_max"] < 1e-5
    assert abs(found["rollout_kl_k1"]) < 1e-6 and 0 < found["rollout_kl_k3"] < 1e-11
    assert found["ratio_outside"] == 0.0 and found["routing_mismatch"] is None
    assert found["weight_sync_seconds_median"] == 0.5 and found["weight_sync_gb_per_s"] == 2.0
    assert found["rollout_tokens_per_s"] == pytest.approx(100) and found["train_tokens_per_s"] == pytest.approx(300)
    assert found["phase_seconds"]["rollout"] == pytest.approx(24.0)
    assert found["export_path"] == str(run.paths.export)


def store_rewards(run, step):
    shards = [store.read(shard) for shard in store.on_disk(run.paths, step)]
    return np.concatenate([shard.rewards for shard in shards]).mean()


def test_table_says_where_things_are(make_run, capsys):
    run = make_run(2)
    report.report(run.folder, as_json=False)
    printed = capsys.readouterr().out
    assert f"tensorboard --logdir '{run.paths.tensorboard('train').parent}'" in printed  # the folder has a space
    assert str(run.paths.attempt(1)) in printed and str(run.paths.checkpoints) in printed


def test_a_folder_that_is_named_like_markup(fresh_run, tmp_path, capsys):
    shutil.copytree(fresh_run.folder, tmp_path / "one[bold]")
    assert report.report(tmp_path / "one[bold]", as_json=False) == 0
    assert "run one[bold]" in capsys.readouterr().out


@pytest.mark.parametrize("columns", ["0", "20"])
def test_nothing_is_cut_on_a_narrow_terminal(make_run, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    report.report(make_run(2).folder, as_json=False)
    cells = [
        line.split("\N{BOX DRAWINGS LIGHT VERTICAL}")[1].strip()
        for line in capsys.readouterr().out.splitlines()
        if "\N{BOX DRAWINGS LIGHT VERTICAL}" in line
    ]
    assert "".join(cells).startswith("".join(KEYS[:8]))


def test_before_the_start(fresh_run, capsys):
    report.report(fresh_run.folder, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["state"] == "queued" and found["steps"] == 0 and found["attempts"] == 0
    assert found["reward_first"] is None and found["wall_seconds"] is None and found["logp_abs_diff_max"] is None
    assert report.report(fresh_run.folder, as_json=False) == 0


def test_going_on_and_lost_without_a_trace(fresh_run, monkeypatch):
    fresh_run.begin(0)
    fresh_run.step(0)
    assert report.compute(fresh_run.folder).state == "running"
    monkeypatch.setattr(report, "SILENT_SECONDS", -1.0)
    assert report.compute(fresh_run.folder).state == "lost"


def test_a_resume_undoes_later_steps(fresh_run):
    fresh_run.begin(0)
    for step in range(5):
        fresh_run.step(step)
    fresh_run.end("node_failure")
    fresh_run.begin(3)  # the checkpoint of step 3; steps 3 and 4 are done again
    fresh_run.step(3)
    found = report.compute(fresh_run.folder)
    assert found.steps == 4 and found.attempts == 2
    assert found.samples == 4 * 8 and found.prompts_lost == 0 and found.prompts_duplicated == 0
    assert found.phase_seconds["train"] == pytest.approx(4.0)


def test_a_step_repeated_in_the_ledger_only_counts_once(fresh_run):
    fresh_run.begin(0)
    samples = fresh_run.sample(0)
    fresh_run.train(0, samples)
    fresh_run.finish(0, samples)
    fresh_run.end("rank_died")
    fresh_run.begin(0)
    fresh_run.step(0)
    assert report.compute(fresh_run.folder).samples == 8


def test_a_missing_step_counts_as_lost_prompts(fresh_run):
    fresh_run.begin(0)
    for step in (0, 1, 3):
        fresh_run.step(step)
    assert report.compute(fresh_run.folder).prompts_lost == 4


def test_duplicated_prompts(make_run):
    run = make_run(3)
    first = run.paths.ledger.read_text().splitlines()[0]
    again = json.loads(first) | {"step": 2}
    with run.paths.ledger.open("a") as ledger:
        ledger.write(json.dumps(again) + "\n")
    assert report.compute(run.folder).prompts_duplicated == 1


def test_a_line_cut_by_a_crash_is_left_out(make_run):
    run = make_run(3)
    text = run.paths.events.read_text()
    run.paths.events.write_text(text[:-40])
    assert report.compute(run.folder).steps == 3
    lines = text.splitlines()
    last_step = max(i for i, line in enumerate(lines) if '"event": "step"' in line)
    run.paths.events.write_text("\n".join(lines[:last_step]) + "\n" + lines[last_step][:30])
    assert report.compute(run.folder).steps == 2


@pytest.mark.parametrize("line", ["{}", '{"event": "step"}', '{"event": "start"}', '{"event": "eval", "step": 1}', "[]", "3"])
def test_a_line_without_its_keys_is_left_out(make_run, line):
    run = make_run(3)
    for file in (run.paths.events, run.paths.ledger):
        file.write_text(f"{line}\n{file.read_text()}{line}\n")
    assert report.compute(run.folder).steps == 3
    assert progress_of(run.folder, 3).done == 3


def test_nan_is_null_in_json(fresh_run, capsys):
    fresh_run.begin(0)
    samples = fresh_run.sample(0)
    fresh_run.train(0, samples)
    fresh_run.distances = {"train/logp_abs_diff_max": float("nan")}
    fresh_run.finish(0, samples)
    report.report(fresh_run.folder, as_json=True)
    assert json.loads(capsys.readouterr().out)["logp_abs_diff_max"] is None


def test_picture(make_run, capsys):
    run = make_run(6)
    assert plot.main([str(run.folder)]) == 0
    file = run.folder / "report.png"
    assert capsys.readouterr().out.strip() == str(file)
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 10_000


def test_picture_without_steps_or_matplotlib(fresh_run, monkeypatch):
    with pytest.raises(UserError, match="no step is complete"):
        plot.plot(fresh_run.folder)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match="matplotlib is not installed"):
        plot.plot(fresh_run.folder)
