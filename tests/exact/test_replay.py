"""Routing replay with a real engine: bfloat16 there, float32 in the trainer."""

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine
BENCH = runpy.run_path(str(Path(__file__).parents[1] / "bench" / "bench_routing_replay.py"))


def test_replay_halves_the_distance_of_a_bfloat16_engine():
    sizes = BENCH["CPU"] | {"num_hidden_layers": 3, "moe_intermediate_size": 64}
    found = BENCH["measure"](sizes, pairs=1)
    print(found)
    assert 0 < found["mismatch without"] < 0.2 and found["mismatch with"] == 0.0
    assert found["diff there with"] < found["diff there without"] / 2 and found["diff mean with"] < found["diff mean without"]
    assert found["KL k3 with"] < found["KL k3 without"] / 2
    assert found["bytes/token"] == 3 * 4
