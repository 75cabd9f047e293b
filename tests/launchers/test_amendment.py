"""`miles-submit resume --set`: what may change between two attempts, and what is written when."""

import json

import pytest

from miles_hpc import config as configuration
from miles_hpc.errors import SiteError, UserError
from miles_hpc.launchers import amendment, cli, local, submission
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


@pytest.mark.parametrize("command", ["why", "status"])
def test_where_a_key_may_be_mended_is_said(ended, capsys, command):
    cli.main([command, str(ended.folder)])
    said = capsys.readouterr().out
    assert f"miles-submit resume {ended.folder}" in said and "--set SECTION.KEY=VALUE" in said and str(ended.config) in said
