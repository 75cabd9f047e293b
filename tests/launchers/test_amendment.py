"""`miles-submit resume --set`: what may change between two attempts, and what is written when."""

import json

import pytest

from miles_hpc import config as configuration
from miles_hpc import durable, verdicts
from miles_hpc.errors import SiteError, UserError
from miles_hpc.launchers import amendment, batch, cli, local, submission
from miles_hpc.paths import RunPaths


@pytest.fixture
def ended(no_slurm, toml):
    """A run without Slurm whose only attempt ended with the user's error."""
    paths = RunPaths(no_slurm / "run")
    paths.attempt(1).mkdir(parents=True)
    paths.config.write_text(configuration.dump(configuration.load(toml)))
    paths.job.write_text(json.dumps({"scheduler": "local", "job_id": "", "first_attempt": 1, "steps": 3}))
    paths.verdict(1).write_text('{"kind": "user_error", "attempt": 1, "time": 1, "action": "stop"}')
    return paths


def amended(paths, *overrides):
    return amendment.amended(paths.folder, configuration.read(paths.config), overrides)


def test_a_key_is_changed_and_files_are_beside_the_toml_as_at_first(ended, toml):
    found = amended(ended, "train.lr=0.5", "data.prompts=others.jsonl")
    assert (found.train.lr, found.data.prompts) == (0.5, str(toml.parent / "others.jsonl"))
    assert found.model == configuration.load(toml).model


@pytest.mark.parametrize("key", amendment.OF_STEPS)
def test_what_checkpoints_and_samples_were_made_with_is_refused_by_name(ended, key):
    values = {"model.dtype": "bfloat16", "train.advantage": "rloo", "train.routing_replay": "true", "model.source": "a:b"}
    values |= {"model.path": "other", "data.prompts": "other.jsonl", "rollout.staleness": "1"}
    override = f"{key}={values.get(key, '8' if 'rollout' in key else '2')}"
    amended(ended, override)
    for folder in (ended.step_samples(0), ended.checkpoint(1)):
        folder.mkdir(parents=True)
        with pytest.raises(UserError, match=f"^{key} stays ") as raised:
            amended(ended, override)
        assert override.split("=")[0] in raised.value.next_step
    assert amended(ended, "train.lr=0.5", "model.context_length=2048").train.lr == 0.5


def test_the_model_that_a_run_has_made_is_not_that_of_another_seed(ended):
    ended.model.mkdir()
    with pytest.raises(UserError, match=r"run.seed stays 0"):
        amended(ended, "run.seed=2")
    assert amended(ended, "data.prompts=others.jsonl")


@pytest.mark.parametrize("override", ["run.folder=/elsewhere", "run.name=other", "train.lrr=1"])
def test_what_is_refused_leaves_the_file_as_it_was(ended, capsys, override):
    before = ended.config.read_text()
    assert cli.main(["resume", str(ended.folder), "--set", override]) == 2
    said = capsys.readouterr().err
    assert override.split("=")[0] in said and str(ended.config) in said
    assert ended.config.read_text() == before


def test_the_file_is_there_before_the_job_and_as_it_was_without_one(ended, monkeypatch):
    before, seen = ended.config.read_text(), []

    def fails(job):
        seen.append(configuration.read(ended.config).train.lr)
        raise SiteError("no mpiexec")

    monkeypatch.setattr(local, "start", fails)
    with pytest.raises(SiteError):
        submission.resume(ended.folder, ["train.lr=0.5"], without_slurm=True)
    assert (seen, ended.config.read_text()) == ([0.5], before)


def test_a_job_that_the_run_folder_cannot_name_is_ended(ended, monkeypatch):
    """A disk that is full just then: else the next resume would start a second one beside it."""
    before, replace, cancelled = ended.job.read_text(), durable.replace, []

    def full(file, text):
        if '"job_id": "4242"' in text:
            raise OSError(28, "No space left on device")
        replace(file, text)

    monkeypatch.setattr(durable, "replace", full)
    monkeypatch.setattr(local, "start", lambda job: 4242)
    monkeypatch.setattr(local, "cancel", lambda pid, folder: cancelled.append((pid, folder)))
    with pytest.raises(OSError, match="No space"):
        submission.resume(ended.folder, without_slurm=True)
    assert (cancelled, ended.job.read_text()) == ([(4242, ended.folder)], before)


def test_what_was_changed_is_on_record_and_shown(ended, capsys, monkeypatch):
    """By `--set`, or by hand; whether or not the job that was submitted with it came to an attempt."""
    ended.start(1).write_text("{}")
    ended.attempt_config(1).write_text(ended.config.read_text())
    monkeypatch.setattr(local, "start", lambda job: 999999999)
    submission.resume(
        ended.folder, ["train.lr=0.5", "warm_start.data=scoring:reward", "warm_start.steps=2"], without_slurm=True
    )
    submission.resume(ended.folder, ["slurm.setup=[]"], without_slurm=True)
    assert batch.begin(ended.folder) == "002"
    verdicts.write(ended, 2, kind="bug")
    said = 'train.lr 0.001 -> 0.5, slurm.setup ["module load cuda/13"] -> [], warm_start.data none -> "scoring:reward"'
    assert f"attempt 2 on localhost; changed: {said}" in capsys.readouterr().err
    for command in (["why"], ["status"], ["report"]):
        assert cli.main([*command, str(ended.folder)]) == 0
        shown = capsys.readouterr().out
        assert "train.lr 0.001 -> 0.5" in shown and 'warm_start.data none -> "scoring:reward"' in shown, shown
    assert cli.main(["report", "--json", str(ended.folder)]) == 0
    found = json.loads(capsys.readouterr().out)["changes"]
    assert list(found) == ["2"] and found["2"]["train.lr"] == [0.001, 0.5] and found["2"]["warm_start.steps"] == [None, 2]
    batch.begin(ended.folder)
    assert amendment.changes(ended, 3) == {}


@pytest.mark.parametrize("text", [None, "", "[train", "\udcff"])
def test_without_a_record_of_the_attempt_before_nothing_was_changed(ended, text):
    if text is not None:
        ended.attempt_config(1).write_text(text, errors="surrogateescape")
    ended.attempt(2).mkdir()
    assert amendment.noted(ended, 2) == {} and ended.attempt_config(2).read_text() == ended.config.read_text()


@pytest.mark.parametrize("command", ["why", "status"])
def test_where_a_key_may_be_mended_is_said(ended, capsys, command):
    cli.main([command, str(ended.folder)])
    said = capsys.readouterr().out
    assert f"miles-submit resume {ended.folder}" in said and "--set SECTION.KEY=VALUE" in said and str(ended.config) in said
