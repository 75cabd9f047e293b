"""The Triton kernels compute what their references compute (in Triton's interpreter, float32)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def differences() -> dict[str, float]:
    """By group of kernels, the largest difference from the references."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("interpreted.py"))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


GROUPS = [
    "rows",
    "gradients",
    "attention_heads",
    "log_probs",
    "digests",
    "experts",
    "sampling",
    "attention_in_segments",
    "entries",
]


@pytest.mark.parametrize("name", GROUPS)
def test_kernels_are_their_references(differences, name):
    assert differences[name] < 5e-5
