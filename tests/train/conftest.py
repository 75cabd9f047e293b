"""Tiny random models for the tests of training."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# The machine may be loaded: a slow example is no failure.
settings.register_profile("train", deadline=None)
settings.load_profile("train")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Appended, so that tests and their rank processes can import `train_parts`.
sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folder of one Hugging Face checkpoint per family: qwen3, moe, llama."""
    import torch
    from train_parts import FAMILIES, write_model

    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    return {family: write_model(family, root / family) for family in FAMILIES}
