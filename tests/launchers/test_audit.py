"""The audit passes a sound run and names file and value of everything that was changed afterwards."""

import dataclasses
import io
import json
import shutil
import sys
from itertools import product

import h5py
import numpy as np
import pytest

from miles_hpc import data, metrics
from miles_hpc.launchers import advantages, audit, recount, report
from miles_hpc.samples import store
from miles_hpc.samples.schema import Samples


def shard(run, step=1, role="rollout"):
    return sorted(run.paths.step_samples(step).glob(f"{role}-*.h5"))[0]


def change(file, name, index, value):
    image = io.BytesIO(file.read_bytes()[: -store.SEAL.size])
    with h5py.File(image, "r+") as opened:
        opened[name][index] = value
    file.write_bytes(image.getvalue() + store.seal(image.getvalue()))


def edit_lines(file, edit):
    lines = [edit(json.loads(line)) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines if line is not None))


def failing(run, capsys):
    """Exit code and the lines of the checks that failed."""
    code = audit.audit(run.folder)
    printed = capsys.readouterr().out
    assert (code == 1) == ("BAD" in printed)
    return code, printed


def test_a_sound_run(make_run, capsys):
    code, printed = failing(make_run(9), capsys)  # crosses into the second epoch
    assert code == 0, printed
    assert printed.count("ok ") == 13 and "not checked" not in printed
    assert "9 steps, 36 prompts, 72 samples counted" in printed


def test_a_group_is_weighed_as_often_in_a_large_step_as_in_a_small_one(make_run, monkeypatch, capsys):
    """Once for the ledger, once for the train shards."""
    weighed = []
    monkeypatch.setattr(
        advantages, "_of_group", lambda rewards, kind, of=advantages._of_group: weighed.append(1) or of(rewards, kind)
    )
    code, printed = failing(make_run(2), capsys)
    assert code == 0, printed
    assert len(weighed) == 2 * 2 * 4


def test_a_line_is_out_before_the_next_check_begins(make_run, monkeypatch):
    raw, seen = io.BytesIO(), []
    monkeypatch.setattr(audit.Audit, "order", lambda run: seen.append(raw.getvalue().decode()) or iter(()))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw))
    audit.audit(make_run(1).folder)
    assert "No prompt is in the ledger twice" in seen[0] and "The report's figures" not in seen[0]


def test_samples_that_retention_removed_are_said_not_missed(make_run, capsys):
    run = make_run(6)
    run.paths.removed_samples.write_text('{"before": 4}')
    for step in range(4):
        shutil.rmtree(run.paths.step_samples(step))
    code, printed = failing(run, capsys)
    assert code == 0, printed
    assert "not checked, samples of steps < 4 removed by retention" in printed
    assert "6 steps, 24 prompts, 48 samples counted" in printed
    shutil.rmtree(run.paths.step_samples(4))
    code, printed = failing(run, capsys)
    assert code == 1 and "step-000004" in printed and "step-000003" not in printed


def test_the_ledger_of_removed_samples_is_still_checked(make_run, capsys):
    run = make_run(4)
    run.paths.removed_samples.write_text('{"before": 2}')
    edit_lines(run.paths.ledger, lambda line: None if line["step"] == 1 and line["prompt_id"] == int(run.ids(1)[0]) else line)
    code, printed = failing(run, capsys)
    assert code == 1 and "step 1 has 3 prompts" in printed


def test_a_resumed_run(fresh_run, capsys):
    fresh_run.begin(0)
    for step in range(4):
        fresh_run.step(step)
    fresh_run.sample(4)  # shards of a step that was never trained
    fresh_run.begin(2)
    for step in range(2, 5):
        fresh_run.step(step)
    code, printed = failing(fresh_run, capsys)
    assert code == 0, printed
    assert "5 steps" in printed


def test_broken_off_within_a_step(fresh_run, capsys):
    fresh_run.begin(0)
    fresh_run.step(0)
    samples = fresh_run.sample(1)
    fresh_run.train(1, samples)
    fresh_run.finish(1, samples)
    edit_lines(fresh_run.paths.events, lambda e: None if e["event"] == "step" and e["step"] == 1 else e)
    code, printed = failing(fresh_run, capsys)
    assert code == 0, printed


def test_nothing_yet(fresh_run, capsys):
    assert failing(fresh_run, capsys)[0] == 0


@pytest.mark.parametrize(
    ("role", "name", "index", "value", "expected"),
    [
        ("rollout", "rewards", 0, 7.0, "reward = "),
        ("rollout", "rollout_log_probs", 4, -9.0, "rollout_log_probs of sample"),
        ("rollout", "weight_versions", 3, 0, "has weights 0 to 1 at step 1"),
        ("rollout", "sample_index", 0, 5, "has samples [1, 5], expected [0, 1]"),
        ("train", "advantages", 1, 3.5, "is 3.5, expected"),
        ("train", "train_log_probs", 3, -50.0, "train/logp_abs_diff_max"),
        ("train", "train_log_probs", 3, -50.0, "train/rollout_kl_k3"),
        ("train", "train_log_probs", 3, -50.0, "train/ratio_outside"),
        ("train", "loss_mask", 0, 1, "loss_mask of sample"),
    ],
)
def test_a_changed_value_is_named(make_run, capsys, role, name, index, value, expected):
    run = make_run(3)
    change(shard(run, role=role), name, index, value)
    code, printed = failing(run, capsys)
    assert code == 1 and expected in printed


def test_damaged_shards(make_run, capsys):
    run = make_run(3)
    damaged = shard(run)
    damaged.write_bytes(damaged.read_bytes()[:500])
    code, printed = failing(run, capsys)
    assert code == 1 and f"{damaged}: cannot be read" in printed and "is in the ledger but in no rollout shard" in printed


@pytest.mark.parametrize("role", ["rollout", "train"])
def test_arrays_that_do_not_fit(make_run, role):
    file = shard(make_run(2), role=role)
    sound = file.read_bytes()[: -store.SEAL.size]
    names = {*recount.ROLLOUT, "rewards"} if role == "rollout" else {*recount.TRAIN, "advantages"}
    for name, shape in product((*names, "offsets", "prompt_ids", "sample_index"), ((3,), (0,), (), None)):
        image = io.BytesIO(sound)
        with h5py.File(image, "r+") as opened:
            del opened[name]
            opened.create_group(name) if shape is None else opened.create_dataset(name, shape, "f4")
        file.write_bytes(image.getvalue() + store.seal(image.getvalue()))
        assert any(f"{file}: cannot be read" in problem for problem in recount.read(file.parent).problems), (name, shape)


def test_missing_shard(make_run, capsys):
    run = make_run(3)
    shard(run).unlink()
    code, printed = failing(run, capsys)
    assert code == 1 and "is in the ledger but in no rollout shard" in printed


def test_a_group_in_two_shards(make_run, capsys):
    run = make_run(3)
    store.write(run.paths, 1, 1, 1, store.read(shard(run)))
    code, printed = failing(run, capsys)
    assert code == 1 and "is also in rollout-0001-000.h5" in printed


def test_a_shard_without_ledger_lines(make_run, capsys):
    run = make_run(3)
    store.write(run.paths, 1, 1, 1, run.groups(1, np.array([29])))
    code, printed = failing(run, capsys)
    assert code == 1 and "has a rollout shard but no line in the ledger" in printed


def test_a_prompt_trained_twice_and_one_lost(make_run, capsys):
    run = make_run(3)
    first, second = run.ids(0)[0], run.ids(1)[0]
    edit_lines(run.paths.ledger, lambda line: line | {"prompt_id": int(first)} if line["prompt_id"] == second else line)
    code, printed = failing(run, capsys)
    assert code == 1 and f"prompt {first} is in steps 0 and 1" in printed and f"prompt {second} is missing" in printed


def test_recorded_experts(make_run, fresh_run, capsys):
    """Each token that an answer's token follows has as many experts as its layers choose; a last token has none."""
    settings = fresh_run.paths.config.read_text()
    fresh_run.paths.config.write_text(settings.replace("routing_replay = false", "routing_replay = true"))
    plain = fresh_run.groups

    def groups(step, ids):
        s = plain(step, ids)
        routing = np.tile(np.array([[1, 3], [0, 2]], np.uint8), (len(s.tokens), 1, 1))
        routing[s.offsets[1:] - 1] = 0
        return dataclasses.replace(s, routing=routing)

    fresh_run.groups = groups
    run = make_run(3)
    code, printed = failing(run, capsys)
    assert code == 0, printed
    change(shard(run), "routing", 3, 0)  # of the first answer's token, or of the last before it
    found = failing(run, capsys)
    assert found[0] == 1 and "has a token without experts of its own" in found[1]


def test_a_missing_step(make_run, capsys):
    run = make_run(3)
    edit_lines(run.paths.ledger, lambda line: None if line["step"] == 1 else line)
    code, printed = failing(run, capsys)
    assert code == 1 and "step 1 has 0 prompts, expected 4" in printed


def test_events_that_flatter(make_run, capsys):
    run = make_run(3)
    edit_lines(run.paths.events, lambda e: e | {"metrics": e["metrics"] | {"reward/mean": 1.0}} if "metrics" in e else e)
    code, printed = failing(run, capsys)
    assert code == 1 and "says reward/mean = 1.0, its shards" in printed and "report says reward_first = 1.0" in printed


def test_prompts_that_cannot_be_read_here(make_run, capsys):
    run = make_run(2)
    (run.folder.parent.parent / "prompts.jsonl").unlink()
    code, printed = failing(run, capsys)
    assert code == 0 and "not checked, the prompts cannot be read here" in printed


@pytest.fixture
def refusing(fresh_run):
    """A run of two steps with filters; in step 1 the first place's prompt was refused and replaced."""
    from miles_hpc import config

    plan = config.read(fresh_run.paths.config)
    part = {"function": "miles_hpc.filters:zero_variance", "options": {}}
    raw = plan.model_dump(exclude_none=True) | {"rollout": plan.rollout.model_dump() | {"filters": [part], "max_tries": 2}}
    fresh_run.paths.config.write_text(config.dump(config.Config.model_validate(raw)))
    fresh_run.begin(0)
    fresh_run.step(0)
    first, *others = fresh_run.ids(1)
    spare = data.load(plan, "train").spare_ids(1, 4, 1)[0, 0]
    store.write(fresh_run.paths, 1, 1, 1, fresh_run.groups(1, np.array([spare, *others])))
    refused = dataclasses.replace(fresh_run.groups(1, np.array([first])), refusals=["zero_variance_0"] * 2)
    store.write(fresh_run.paths, 1, 1, 1, refused)
    samples = Samples.concat([store.read(file) for file in store.on_disk(fresh_run.paths, 1)]).sorted()
    fresh_run.train(1, samples.accepted)
    fresh_run.finish(1, samples.accepted)
    trained = np.zeros(len(samples.accepted), bool)
    lines = metrics.fates(samples.accepted, [], trained, 2, 1, 1, samples.refused)
    metrics.journals(fresh_run.paths)[1].append(*(line for line in lines if line["fate"] == "refused"))
    return fresh_run


def test_a_refused_group_counts_and_was_replaced_by_the_right_one(refusing, capsys):
    code, printed = failing(refusing, capsys)
    assert code == 0, printed
    assert "2 steps, 9 prompts, 18 samples counted" in printed


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda line: line | {"reason": "dull"}, "reason = 'dull', the shards say 'zero_variance_0'"),
        (lambda line: line | {"fate": "trained"}, "fate = trained, the shards say refused"),
        (lambda line: None, "has a rollout shard but no line in the ledger"),
    ],
)
def test_a_refusal_that_is_told_otherwise(refusing, capsys, change, expected):
    edit_lines(refusing.paths.ledger, lambda line: change(line) if line["fate"] == "refused" else line)
    code, printed = failing(refusing, capsys)
    assert code == 1 and expected in printed


@pytest.fixture
def indifferent(fresh_run):
    """A step of four groups: two with an advantage, one without, one kept out of the loss; with a KL penalty."""
    text = fresh_run.paths.config.read_text()
    fresh_run.paths.config.write_text(text.replace("kl_coef = 0.0", "kl_coef = 0.1", 1))
    groups = fresh_run.groups(0, fresh_run.ids(0))
    rewards, mask = np.array([0, 1, 1, 1, 1, 0, 0, 1], np.float32), groups.loss_mask.copy()
    mask[groups.tokens_of(np.array([4, 5]))] = 0
    store.write(fresh_run.paths, 0, 1, 1, dataclasses.replace(groups, rewards=rewards, loss_mask=mask))
    fresh_run.begin(0)
    samples = fresh_run.sample(0)
    fresh_run.train(0, samples)
    fresh_run.finish(0, samples, samples.answer_lengths > 0)
    return fresh_run, int(fresh_run.ids(0)[1]), int(fresh_run.ids(0)[2])


def test_groups_without_an_advantage_and_without_a_loss_have_their_fates(indifferent, capsys):
    run, _, removed = indifferent
    code, printed = failing(run, capsys)
    assert code == 0, printed
    fates = {line["prompt_id"]: line["fate"] for line in map(json.loads, run.paths.ledger.read_text().splitlines())}
    assert fates.pop(removed) == "removed" and set(fates.values()) == {"trained"}


@pytest.mark.parametrize("fate", ["zero_variance", "of a later version"])
def test_a_ledger_with_other_fates_is_read_and_named(indifferent, capsys, fate):
    """Older versions called a group without advantages zero_variance where it was trained."""
    run, equal, _ = indifferent
    edit_lines(run.paths.ledger, lambda line: line | {"fate": fate} if line["prompt_id"] == equal else line)
    code, printed = failing(run, capsys)
    assert code == 1 and f"prompt {equal}: fate = {fate}, the shards say trained" in printed and printed.count("BAD") == 1
    assert report.compute(run.folder).samples == 8


@pytest.mark.parametrize("kind", ["group_mean", "rloo", "reinforce_pp", "reinforce_pp_baseline", "reward"])
def test_the_formulas_of_the_audit_are_those_of_the_trainer(fresh_run, kind):
    """Written twice, so that a mistake in one shows."""
    from miles_hpc.launchers import advantages, recount
    from miles_hpc.train.advantage import ADVANTAGES

    samples = fresh_run.sample(1)
    found = advantages.recount(recount.read(fresh_run.paths.step_samples(1)), kind)
    np.testing.assert_allclose(list(found.values()), ADVANTAGES[kind](samples, 2), atol=1e-5)


@pytest.mark.parametrize(("again", "code"), [(True, 0), (False, 1)])
def test_a_line_cut_by_a_death_is_excused_if_the_next_attempt_did_the_step_again(fresh_run, capsys, again, code):
    fresh_run.begin(0)
    fresh_run.step(0)
    with fresh_run.paths.events.open("a") as file:
        file.write('{"event": "step", "step": 1, "att\n')
    if again:
        fresh_run.begin(1)
        fresh_run.step(1)
    fresh_run.end("done")
    assert failing(fresh_run, capsys)[0] == code
