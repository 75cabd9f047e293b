"""The trainer's log-probs in exact numerics depend on the sample alone, and its gradients repeat bit for bit."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path += [str(Path(__file__).parents[1] / "train"), str(Path(__file__).parent)]
from layouts import LAYOUTS
from train_parts import samples, write_model

from miles_hpc.errors import NumericsError
from miles_hpc.train.exact import prove


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> Path:
    """What each rank got, both families one after the other in the same processes."""
    folder = tmp_path_factory.mktemp("families")
    log = tmp_path_factory.mktemp("log") / "log"
    for family in ("qwen3", "moe"):
        write_model(family, folder / family / "model")
    for size in (1, 2):
        _ranks(folder, log, size)
    return folder


@pytest.fixture(params=["qwen3", "moe"])
def results(request, families) -> dict[str, list[dict]]:
    """By layout, what each rank got."""
    return {
        name: [torch.load(families / request.param / f"{name}-{rank}.pt", weights_only=False) for rank in range(size)]
        for name, (size, _, _) in LAYOUTS.items()
    }


def _ranks(folder: Path, file: Path, size: int) -> None:
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("layouts.py")), str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    log = file.open("w")
    ranks = [subprocess.Popen([*command, str(r), str(size)], env=environment, stdout=log, stderr=log) for r in range(size)]
    try:
        codes = [rank.wait(240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * size, file.read_text()[-3000:]


def test_log_probs_do_not_depend_on_the_layout(results):
    wanted = results["pack"][0]["log_probs"]
    assert np.isfinite(wanted).all() and len(np.unique(wanted)) > 100
    for name, parts in results.items():
        found = np.nansum([part["log_probs"] for part in parts], 0, dtype=np.float32)
        assert (np.sum([np.isfinite(part["log_probs"]) for part in parts], 0) == 1).all(), name
        assert (found == wanted).all(), name


def test_gradients_repeat(results):
    first, again = results["pack"][0]["weights"], results["again"][0]["weights"]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(torch.equal(results["two"][0]["weights"][n], results["two"][1]["weights"][n]) for n in first)


def test_the_proof_names_the_first_token_that_differs():
    s = samples()
    everything = np.arange(len(s))
    log_probs = s.rollout_log_probs.copy()
    prove(s, everything, log_probs)
    token = int(s.offsets[6]) - 1  # the last of prompt 1, sample 1
    log_probs[token] = np.nextafter(log_probs[token], np.float32(0))
    with pytest.raises(NumericsError, match=r"1 of \d+ sampled tokens") as caught:
        prove(s, everything, log_probs)
    assert f"prompt 1, sample 1, position {s.lengths[5] - 1}" in str(caught.value)
    assert repr(log_probs[token]) in str(caught.value) and repr(s.rollout_log_probs[token]) in str(caught.value)
