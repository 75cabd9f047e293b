"""Exact numerics through the real loop: no log-prob differs between trainer and sampler, and runs repeat bit for bit."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from runs import STEPS, digest, logs, metrics, run

from miles_hpc.launchers import audit

pytestmark = pytest.mark.engine
TOKENS = 4096


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("exact")


@pytest.fixture(scope="module")
def moe(folder):
    return run(folder / "moe", "train.routing_replay=true")


@pytest.fixture(scope="module")
def dense(folder):
    return run(folder / "dense", "model.source=miles_hpc.examples.arithmetic:dense_model")


@pytest.mark.parametrize("name", ["moe", "dense"])
def test_trainer_and_sampler_agree_bit_for_bit(name, request):
    paths = request.getfixturevalue(name)
    steps = metrics(paths)
    assert len(steps) == STEPS, logs(paths)
    assert all(step["train/logp_abs_diff_max"] == 0.0 for step in steps)
    assert all(step["train/kl"] == 0.0 for step in steps)
    for figure in ("rollout_kl_k1", "rollout_kl_k3", "ratio_outside", "routing_mismatch"):
        assert all(step.get(f"train/{figure}", 0.0) == 0.0 for step in steps), figure
    assert ("train/routing_mismatch" in steps[0]) == (name == "moe")
    assert all(step["train/grad_norm"] > 0 for step in steps)
    assert sum(step["response/length_mean"] * 64 for step in steps) >= TOKENS


def test_two_engines_give_the_same_weights(moe, folder):
    """Also a second run: nothing depends on timing, on batches, or on which engine answers. Nor do an importance correction
    and the record of the experts change anything."""
    again = run(folder / "two", "slurm.rollout.ranks_per_node=2", "train.correction=icepop")
    assert [step["train/logp_abs_diff_max"] for step in metrics(again)] == [0.0] * STEPS, logs(again)
    assert digest(again) == digest(moe)


def test_trainer_and_engine_in_turns_give_the_same_weights(moe, folder):
    """The optimizer's state leaves and returns, weights are shared in place of broadcast: no bit changes."""
    again = run(folder / "turns", "run.placement=colocate", "train.offload=true")
    assert [step["train/logp_abs_diff_max"] for step in metrics(again)] == [0.0] * STEPS, logs(again)
    assert digest(again) == digest(moe)


def test_native_numerics_differ_and_so_the_comparison_can_fail(folder):
    native = run(folder / "native", "run.numerics=native", "run.steps=1", "train.routing_replay=true")
    assert all(0 < step["train/logp_abs_diff_max"] < 1e-3 for step in metrics(native)) and metrics(native), logs(native)
    assert metrics(native)[0]["train/routing_mismatch"] < 1e-3 and metrics(native)[0]["train/rollout_kl_k3"] > 0
    assert audit.audit(native.folder) == 0
