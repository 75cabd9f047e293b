"""What may be loaded where, seen from the outside: in a fresh Python, by `sys.modules`."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RUN_PART = {"torch", "mpi4py", "sglang", "megatron", "transformers", "triton", "matplotlib", "tensorboard"}
LIGHT = ["config", "errors", "paths", "world", "signals", "heartbeat", "verdicts", "metrics", "versions", "evaluation"]
LIGHT += ["data", "edges"]
SAMPLES = ["samples.schema", "samples.store", "samples.exchange"]
LAUNCHERS = [f"launchers.{f.stem}" for f in sorted((ROOT / "launchers").glob("*.py")) if f.stem != "__init__"]


def loaded(*modules: str) -> set[str]:
    """Top-level names in `sys.modules` after importing these modules."""
    imports = ", ".join(f"miles_hpc.{module}" for module in modules)
    code = f"import json, sys, {imports}; print(json.dumps(sorted({{n.partition('.')[0] for n in sys.modules}})))"
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd="/")
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout))


@pytest.mark.parametrize("module", LIGHT + SAMPLES + LAUNCHERS)
def test_nothing_of_the_run_part_is_loaded(module):
    assert not loaded(module) & RUN_PART


@pytest.mark.parametrize("module", ["config", "errors", "paths"])
def test_the_base_needs_pydantic_only(module):
    assert not loaded(module) & {"numpy", "h5py", "submitit", "rich"}


def test_mpi_is_never_loaded_by_an_import():
    """Spawned children import the main module again; one that imports mpi4py would call MPI_Init."""
    assert "mpi4py" not in loaded("main", "loop", "sync", "train.role", "rollout.role", "rollout.engine", "rollout.sglang")


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["cluster", "up", "--help"]])
def test_help_answers_at_once(arguments):
    command = [str(Path(sys.executable).with_name("miles-submit")), *arguments]
    seconds = []
    for _ in range(5):
        before = used()
        result = subprocess.run(command, capture_output=True, text=True)
        seconds.append(used() - before)
        assert result.returncode == 0 and "usage: miles-submit" in result.stdout
    assert min(seconds) < 0.5


def used() -> float:
    """Seconds of processor time that this process's children took: of a busy machine they take no more."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_no_top_level_kernels():
    """SGLang and transformers import a PyPI package of that name."""
    code = "import importlib.util as u; print(u.find_spec('kernels'), u.find_spec('launchers'), u.find_spec('slurm'))"
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd="/")
    assert result.stdout.split() == ["None"] * 3
