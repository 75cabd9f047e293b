"""Routing replay with a real engine: bfloat16 there, float32 in the trainer."""

import json
import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine
BENCH = runpy.run_path(str(Path(__file__).parents[1] / "bench" / "bench_routing_replay.py"))


def test_replay_halves_the_distance_of_a_bfloat16_engine():
    sizes = BENCH["CPU"] | {"num_hidden_layers": 3, "moe_intermediate_size": 64}
    (found,) = BENCH["measure"](sizes, pairs=1)
    print(found)
    assert 0 < found["pairs without"] < 0.2 and found["pairs with"] == 0.0
    assert 0 < found["there tokens"] < found["context tokens"] < 1
    assert found["there gain"] > 2 and found["context gain"] > 1.5 and found["gain"] > 1.3
    assert found["KL k3 with"] < found["KL k3 without"] / 2
    kept = json.loads((Path(__file__).parents[2] / "docs/benchmarks/routing-replay.json").read_text())
    assert [row["figure"] for row in BENCH["figures"]([found])] == [row["figure"] for row in kept["rows"]]
    assert found["bytes/token"] == 3 * 4 and found["inside %"] > 0
