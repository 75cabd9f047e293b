"""A bundle of a few real packages is made, and unpacked by a Python without a network; damage and other targets are named."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from miles_hpc.errors import SiteError, UserError
from miles_hpc.launchers import bundle

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
SMALL = ["orjson==3.13.0", "partial-json-parser==0.2.1.1.post7"]
"""A compiled and a pure one."""
TARGET = "python_version={}\ntorch_version={}\ncuda_version=13\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The folder in an archive for this Python that asks for no torch."""
    folder = tmp_path_factory.mktemp("made")
    target = bundle.Target(HERE, "", "")
    bundle.fetch(target, bundle.hashes(target, SMALL), folder / "in")
    bundle.pack(target, folder / "in", folder / "out.tar")
    with tarfile.open(folder / "out.tar") as archive:
        archive.extractall(folder, filter="data")
    return folder / "bundle"


def unpack(made: Path, into: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    offline = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_CONFIG_FILE": os.devnull, "PYTHON": sys.executable}
    return subprocess.run(
        [made / "unpack.sh", into], capture_output=True, text=True, env=os.environ | offline | environment, timeout=120
    )


def test_the_environment_works(made, tmp_path):
    result = unpack(made, tmp_path / "with a space")
    assert result.returncode == 0, result.stderr
    code = "import orjson, partial_json_parser as p; print(orjson.__file__, p.__file__)"
    python = tmp_path / "with a space" / "bin" / "python"
    files = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, check=True).stdout
    assert files.count("with a space") == 2


def test_the_same_bytes_again(made, tmp_path):
    bundle.fetch(bundle.Target(HERE, "", ""), (made / "pins.txt").read_text().splitlines(), tmp_path / "again")
    wheels = sorted((made / "wheels").iterdir())
    assert len(wheels) == 2
    assert all((tmp_path / "again" / "wheels" / w.name).read_bytes() == w.read_bytes() for w in wheels)


def test_another_sha256_is_refused(made, tmp_path):
    pins = (made / "pins.txt").read_text()
    wrong = [line[:-4] + ("0000" if line[-4:] != "0000" else "1111") for line in pins.splitlines()]
    with pytest.raises(SiteError, match=r"(?s)pip download failed.*(DO NOT MATCH|Expected sha256)"):
        bundle.fetch(bundle.Target(HERE, "", ""), wrong, tmp_path / "wrong")


def test_wheels_are_those_of_the_target_not_of_this_machine(tmp_path):
    other = "3.12" if HERE != "3.12" else "3.11"
    target = bundle.Target(other, "", "")
    bundle.fetch(target, bundle.hashes(target, SMALL[:1]), tmp_path / "in")
    (wheel,) = (tmp_path / "in" / "wheels").iterdir()
    assert f"cp{other.replace('.', '')}" in wheel.name and "x86_64" in wheel.name
    assert zipfile.ZipFile(wheel).testzip() is None


def resum(made: Path) -> None:
    """Checksums of a changed bundle."""
    files = [str(f.relative_to(made)) for f in made.rglob("*") if f.is_file() and f.name != "SHA256SUMS"]
    sums = subprocess.run(["sha256sum", *files], cwd=made, capture_output=True, text=True, check=True).stdout
    (made / "SHA256SUMS").write_text(sums)


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("wheels", lambda f: max(f.iterdir()).write_bytes(b"x"), "the bundle is damaged"),
        ("target", lambda f: f.write_text(TARGET.format("3.9", "")), "the bundle is for 3.9"),
        (
            "target",
            lambda f: f.write_text(f"python_version={HERE}\ntorch_version=9.9\ncuda_version=13\n"),
            "torch 9.9 with CUDA 13",
        ),
    ],
)
def test_what_does_not_fit_is_refused(made, tmp_path, file, change, said):
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", made, copy], check=True)
    change(copy / file)
    if file == "target":
        resum(copy)
    result = unpack(copy, tmp_path / "env")
    assert result.returncode == 3 and said in result.stderr and "next:" in result.stderr
    assert not (tmp_path / "env" / "bin").exists()


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (bundle.Target("3.10", "2.11", "13"), "--python 3.10"),
        (bundle.Target("3.12", "2.1", "13"), "--torch 2.1: the pins are for 2.11.0"),
        (bundle.Target("3.12", "2.11", "12"), "--cuda 12: the pins are for 13"),
    ],
)
def test_a_target_without_pins_is_refused(target, said, tmp_path):
    with pytest.raises(UserError, match=said):
        bundle.bundle(target, tmp_path / "out.tar")


def test_torch_and_tools_of_development_are_left_out():
    pins = bundle.read_pins(bundle.ROOT / "requirements")
    assert {"sglang", "megatron-core", "sglang-kernel", "torchvision", "h5py"} <= {n for n in pins if bundle._wanted(n, False)}
    assert not {n for n in pins if bundle._wanted(n, False)} & {"torch", "nvidia-nccl-cu13", "cuda-bindings", "pytest", "ruff"}
    assert {"torch", "nvidia-nccl-cu13"} <= {n for n in pins if bundle._wanted(n, True)}
    assert pins.keys() >= bundle.DEVELOPMENT
