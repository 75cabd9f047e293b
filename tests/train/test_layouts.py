"""Data, tensor and expert parallelism give what one process gives."""

import numpy as np
import pytest
import torch
from train_parts import config, in_ranks, run_steps, samples, step_counters, trainer

LAYOUTS = {
    "data": ("qwen3", {}),
    "tensor": ("qwen3", {"tensor_parallel": 2}),
    "tensor_tied": ("llama", {"tensor_parallel": 2}),
    "moe_data": ("moe", {}),
    "expert": ("moe", {"expert_parallel": 2}),
    "expert_tensor": ("moe", {"expert_parallel": 2, "tensor_parallel": 2}),
    "critic": ("moe", {"expert_parallel": 2, "advantage": "gae", "critic_lr": 1e-3, "value_clip": 9.0}),
    "critic_tensor": ("llama", {"tensor_parallel": 2, "advantage": "gae", "critic_lr": 1e-3, "teacher": "moe"}),
    "replay": ("moe", {"expert_parallel": 2, "tensor_parallel": 2, "routing_replay": True}),
    "replay_data": ("moe", {"routing_replay": True}),
    "sequence_mean": ("qwen3", {"loss_mean": "sequence", "kl_coef": 0.1, "mini_batches": 1}),
}
FOUR = ("data", "critic")
STEPS = 3


RESHARDED = {
    "tensor": ("qwen3", {"tensor_parallel": 2}),
    "moe_data": ("moe", {}),
    "critic": ("llama", {"tensor_parallel": 2, "advantage": "gae"}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def two(models, saved_by_one, folder):
    """All that needs two ranks, in one pair of processes."""
    jobs = [
        {"name": name, "model": str(models[family]), "config": _settings(train, models), "steps": STEPS}
        for name, (family, train) in LAYOUTS.items()
    ]
    for name, (family, train) in RESHARDED.items():
        job = {"model": str(models[family]), "config": _settings(train), "steps": 1}
        jobs.append(job | {"name": f"save_{name}", "save": str(folder / f"two_{name}")})
        jobs.append(job | {"name": f"resume_{name}", "resume": str(folder / f"one_{name}")})
    lonely = {"prompts": 1, "group": 2, "expert_parallel": 2}
    for name, tokens in (("short", 96), ("small", 48)):
        settings = _settings({"micro_batch_tokens": tokens})
        jobs.append({"name": name, "model": str(models["moe"]), "config": settings, "steps": 2})
    jobs[-2]["short"] = {"rank": 1, "tokens": 48, "at": "backward"}
    jobs.append({"name": "lonely", "model": str(models["moe"]), "config": lonely, "steps": 1})
    return in_ranks(jobs, 2, folder / "two")


@pytest.fixture(scope="module")
def four(models, folder):
    """Four data-parallel ranks; the MoE's experts on two and two of them."""
    jobs = [
        {"name": name, "model": str(models[LAYOUTS[name][0]]), "config": _settings(LAYOUTS[name][1], models), "steps": STEPS}
        for name in FOUR
    ]
    return in_ranks(jobs, 4, folder / "four")


@pytest.fixture(scope="module")
def saved_by_one(models, folder):
    """Checkpoints of one process after a step, and what its next step gives."""
    results = {}
    for name, (family, train) in RESHARDED.items():
        (folder / f"one_{name}").mkdir()
        with trainer(config(**_alone(train)), models[family], folder / f"{name}.store") as made:
            run_steps(made, 1)
            made.save(folder / f"one_{name}", {})
            results[name] = run_steps(made, 1)
    return results


@pytest.fixture(scope="module")
def one(models, tmp_path_factory):
    """The same training in this process."""
    scratch = tmp_path_factory.mktemp("one")
    results = {}
    for name, (family, train) in LAYOUTS.items():
        with trainer(config(**_alone(train, models)), models[family], scratch / name) as made:
            results[name] = run_steps(made, STEPS)
    return results


def _settings(train, models=None):
    teacher = {"teacher": str(models[train["teacher"]])} if "teacher" in train else {}
    return {"mini_batches": 2, "micro_batch_tokens": 96, "lr": 1e-3} | train | teacher


def _alone(train, models=None):
    return {k: v for k, v in _settings(train, models).items() if not k.endswith("_parallel")}


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_give_the_losses_of_one(name, one, two):
    _same_losses(one[name], two[name])


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_give_the_losses_of_one(name, one, four):
    _same_losses(one[name], four[name])


def _same_losses(one, ranks):
    for rank in ranks:
        for expected, found in zip(one["metrics"], rank["metrics"], strict=True):
            assert found.keys() == expected.keys()
            for key in ("loss", "entropy", "kl", "logp_abs_diff_max", "logp_abs_diff_mean", "routing_mismatch"):
                assert found.get(f"train/{key}", 0) == pytest.approx(expected.get(f"train/{key}", 0), abs=1e-5), key
            assert found["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-4)
            for key in {"value_loss", "value_explained", "teacher_kl"} & {k.removeprefix("train/") for k in expected}:
                assert found[f"train/{key}"] == pytest.approx(expected[f"train/{key}"], rel=1e-3, abs=1e-5), key
            for key in ("tokens", "trained_tokens", "optimizer_steps", "lr"):
                assert found[f"train/{key}"] == expected[f"train/{key}"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_leave_in_the_same_order_on_every_rank(name, one, two):
    for rank in two[name]:
        assert list(rank["weights"]) == list(one[name]["weights"])
        for key, tensor in one[name]["weights"].items():
            torch.testing.assert_close(rank["weights"][key], tensor, atol=2e-4, rtol=0, msg=key)


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_sample_is_recorded_once_with_the_same_log_probs(name, one, two):
    for step in range(STEPS):
        s = samples(seed=step)
        own = [rank["own"][step] for rank in two[name]]
        assert sorted(np.concatenate(own)) == list(range(len(s)))
        expected = one[name]["log_probs"][step]
        for rank, indices in zip(two[name], own, strict=True):
            spans = [expected[s.offsets[i] : s.offsets[i + 1]] for i in indices]
            np.testing.assert_allclose(rank["log_probs"][step], np.concatenate([np.zeros(0), *spans]), atol=2e-4)


@pytest.mark.parametrize("name", RESHARDED)
def test_a_checkpoint_of_one_rank_resumes_in_two(name, saved_by_one, two):
    expected = saved_by_one[name]
    for rank in two[f"resume_{name}"]:
        assert rank["metrics"][0]["train/loss"] == pytest.approx(expected["metrics"][0]["train/loss"], abs=1e-5)
        for key, tensor in expected["weights"].items():
            torch.testing.assert_close(rank["weights"][key], tensor, atol=2e-4, rtol=0, msg=key)


@pytest.mark.parametrize("name", RESHARDED)
def test_a_checkpoint_of_two_ranks_resumes_in_one(name, models, two, folder, tmp_path):
    family, train = RESHARDED[name]
    with trainer(config(**_alone(train)), models[family], tmp_path / "store") as made:
        made.load(folder / f"two_{name}")
        for key, tensor in made.weights():
            assert torch.equal(tensor, two[f"save_{name}"][0]["weights"][key]), key
        assert len(set(step_counters(made))) == 1
        run_steps(made, 1)


def test_a_rank_without_samples_takes_part(two):
    """One sample with a gradient and two expert-parallel ranks: the other rank's experts are needed all the same."""
    for rank in two["lonely"]:
        assert np.isfinite(rank["metrics"][0]["train/loss"])


def test_all_ranks_follow_the_one_that_is_short_of_memory(two):
    """Bit for bit as if they had begun with smaller micro-batches (`test_passes.py`)."""
    for short, small in zip(two["short"], two["small"], strict=True):
        assert short["limit"] == small["limit"] == 48
        assert [m["train/grad_norm"] for m in short["metrics"]] == [m["train/grad_norm"] for m in small["metrics"]]
        assert all(torch.equal(tensor, small["weights"][name]) for name, tensor in short["weights"].items())
