"""The demo's gain is real: three seeds with the example's learning rate and, from the same warm starts, with none."""

import json
import runpy
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.mpi, pytest.mark.engine, pytest.mark.timeout(3600)]
SEEDS = (0, 1, 2)
ROOT = Path(__file__).parents[2]
RESULT = ROOT / "docs/benchmarks/learning.json"


@pytest.fixture(scope="module")
def runs(series) -> dict[str, dict]:
    learning = {f"seed-{seed}": [f"run.seed={seed}"] for seed in SEEDS}
    frozen = {f"seed-{seed}-frozen": [f"run.seed={seed}", "train.lr=0", "run.steps=10"] for seed in SEEDS}
    found = series(learning | frozen, {f"seed-{seed}-frozen": f"seed-{seed}" for seed in SEEDS})
    _write(found)
    return found


def _write(found: dict[str, dict]) -> None:
    """The newest result, kept beside the other figures."""
    machine = runpy.run_path(str(ROOT / "tests/bench/all.py"))["machine"]
    keys = ("reward_first", "reward_last", "eval_first", "eval_last", "logp_abs_diff_max", "samples")
    rows = {name: {key: run[key] for key in keys} for name, run in found.items()}
    RESULT.write_text(json.dumps({"machine": machine(), "what": __doc__, "rows": rows}, indent=1) + "\n")


@pytest.mark.parametrize("seed", SEEDS)
def test_the_policy_gains(runs, seed):
    run = runs[f"seed-{seed}"]
    assert 0.1 <= run["reward_first"] <= 0.6
    assert run["reward_last"] - run["reward_first"] >= 0.2
    assert run["eval_last"] - run["eval_first"] >= 0.1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_frozen_policy_gains_nothing(runs, seed):
    run = runs[f"seed-{seed}-frozen"]
    assert run["eval_last"] == run["eval_first"]
    assert abs(run["reward_last"] - run["reward_first"]) <= 0.06
    assert run["eval_first"] == runs[f"seed-{seed}"]["eval_first"]
