"""What gets installed: the launcher without torch on every Python, all data files, and pins that resolve."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from miles_hpc import versions
from miles_hpc.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / "requirements"


@functools.cache
def interpreter(minor: int) -> str | None:
    """A working Python 3.<minor> with venv: this one, from PATH, or pyenv's."""
    names = [sys._base_executable, shutil.which(f"python3.{minor}"), f"/usr/bin/python3.{minor}"]
    names += [str(p) for p in sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"))]
    code = f"import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, {minor}))"
    for name in filter(None, names):
        try:
            if subprocess.run([name, "-c", code], capture_output=True).returncode == 0:
                return name
        except OSError:
            continue
    return None


def needed(minor: int) -> str:
    return interpreter(minor) or pytest.skip(f"no Python 3.{minor} here")


def command(*words: str | Path, **options) -> str:
    """Standard output of a command that must succeed."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    result = subprocess.run([str(w) for w in words], capture_output=True, text=True, env=environment, **options)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """The project's files without build leftovers, so that builds do not touch the checkout."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("miles_hpc", "launchers", "kernels", "slurm"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source)
    return next(folder.glob("miles_hpc-*.whl"))


def test_wheel_holds_all_data_and_no_other_top_level_name(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {"miles_hpc", wheel.name.split("-py3")[0] + ".dist-info"}
    wanted = {f"miles_hpc/slurm/{f.relative_to(ROOT / 'slurm')}" for f in (ROOT / "slurm").rglob("*") if f.is_file()}
    wanted = {name for name in wanted if "__pycache__" not in name and not name.endswith(".md")}
    assert {"miles_hpc/slurm/job.sbatch", "miles_hpc/slurm/sites/generic.toml"} <= wanted
    assert wanted <= set(names)
    modules = {p for folder in ("miles_hpc", "launchers", "kernels") for p in (ROOT / folder).rglob("*.py")}
    inside = {str(p.relative_to(ROOT)) for p in modules}
    inside = {name if name.startswith("miles_hpc/") else f"miles_hpc/{name}" for name in inside}
    assert inside | {"miles_hpc/py.typed"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.parametrize("minor", [11, 12, 13])
def test_launcher_alone_without_torch(minor, wheel, tmp_path):
    python, home = needed(minor), tmp_path / "with a space"
    command(python, "-m", "venv", "--without-pip", home)
    pip = (sys.executable, "-m", "pip", "--python", home / "bin/python")
    command(*pip, "install", "--no-compile", "-c", PINS / "constraints-cpu.txt", wheel)
    assert "usage: miles-submit" in command(home / "bin/miles-submit", "--help", cwd=tmp_path)
    code = "import importlib.util as u, miles_hpc.launchers.cli; print([n for n in ('torch', 'mpi4py') if u.find_spec(n)])"
    assert command(home / "bin/python", "-c", code, cwd=tmp_path).strip() == "[]"


def resolve(python: str, build: str, folder: Path) -> dict[str, str]:
    """Version by normalised name that pip would install for the run part."""
    command(python, "-m", "venv", folder / "venv")
    pip, report = folder / "venv/bin/pip", folder / "report.json"
    command(
        pip, "install", "--dry-run", "--quiet", "--report", report, "-c", PINS / f"constraints-{build}.txt", f"{ROOT}[run,dev]"
    )
    found = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {normal(item["metadata"]["name"]): item["metadata"]["version"] for item in found}


def pins(build: str) -> dict[str, str]:
    lines = (PINS / f"constraints-{build}.txt").read_text(encoding="utf-8").splitlines()
    return {normal(name): version for name, _, version in (line.partition("==") for line in lines if "==" in line)}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.long
@pytest.mark.parametrize(("minor", "build", "torch"), [(11, "cpu", "2.13.0"), (11, "cuda", "2.11.0"), (12, "cuda", "2.11.0")])
def test_the_run_part_resolves_to_the_pins(minor, build, torch, tmp_path):
    if build == "cpu" and not versions.installed()["torch"].endswith("+cpu"):
        pytest.skip("the package index has no CPU build of torch")
    found = resolve(needed(minor), build, tmp_path)
    assert found["torch"].partition("+")[0] == torch
    loose = {"miles-hpc"} | ({"triton"} if build == "cuda" else set())
    assert found.keys() - pins(build).keys() <= loose
    assert ("+cpu" in found["torch"]) == (build == "cpu")


def test_constraints_pin_everything_once():
    for build in ("cpu", "cuda"):
        lines = [line for line in (PINS / f"constraints-{build}.txt").read_text().splitlines() if line and line[0] != "#"]
        assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", line) for line in lines)
        assert len(pins(build)) == len(lines)
    assert "triton" in pins("cpu") and "triton" not in pins("cuda")
    shared = pins("cpu").keys() & pins("cuda").keys()
    assert {n for n in shared if pins("cpu")[n] != pins("cuda")[n]} == {"torch", "torchvision"}


def test_the_environment_has_the_pinned_versions():
    from importlib.metadata import distributions

    build = "cpu" if versions.installed()["torch"].endswith("+cpu") else "cuda"
    found = [(normal(d.metadata["Name"]), d.version.partition("+")[0]) for d in distributions()]
    installed = dict(reversed(found))  # the first on the path counts: setuptools brings old copies of others along
    wrong = {n: (installed[n], v) for n, v in pins(build).items() if n in installed and installed[n] != v}
    assert not wrong


def test_versions_that_matter(monkeypatch):
    assert versions.check()["sglang"] == "0.5.16"
    monkeypatch.setattr(versions, "_version", lambda name: {"sglang": "0.5.17", "torch": "2.13.0+cpu"}.get(name, ""))
    with pytest.raises(UserError) as raised:
        versions.check()
    assert "sglang 0.5.17, wanted 0.5.16" in str(raised.value) and "mpi4py is missing, wanted 4.1.2" in str(raised.value)
    assert "torch" not in raised.value.what and raised.value.exit_code == 2


def test_make_help_names_every_target():
    text = command("make", "-C", ROOT, "help")
    for target in ["help", "install", "demo", "test", "test-long", "check", "bench", "clean", "cluster-up", "cluster-down"]:
        assert f"make {target} " in text


def test_no_python_is_said_plainly(tmp_path):
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": "python3.99"}
    result = subprocess.run([PINS / "install.sh", tmp_path / "venv"], env=environment, capture_output=True, text=True)
    assert result.returncode == 3 and "no Python 3.11 or 3.12" in result.stderr and "next:" in result.stderr
    assert not (tmp_path / "venv").exists()
