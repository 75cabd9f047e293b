"""The versions this project depends on to the letter, compared with what is installed. Reads metadata only, imports nothing.

`python -m miles_hpc.versions` prints the table.
"""

import sys
from importlib.metadata import PackageNotFoundError, version

from miles_hpc.errors import UserError

# Releases whose private parts are used (plugins, spawn arguments, weight names), or whose formats must agree.
WANTED: dict[str, tuple[str, ...]] = {
    "torch": ("2.13.0", "2.11.0"),
    "sglang": ("0.5.16",),
    "megatron-core": ("0.19.2",),
    "transformers": ("5.12.1",),
    "tokenizers": ("0.22.2",),
    "mpi4py": ("4.1.2",),
}


def installed() -> dict[str, str]:
    """Installed version by package, "" where absent."""
    return {name: _version(name) for name in WANTED}


def check() -> dict[str, str]:
    """Compare what is installed with what is wanted; a local part such as `+cpu` does not count.

    Returns:
        Installed version by package.

    Raises:
        UserError: a package is missing or of another version; names every one of them.
    """
    found = installed()
    wrong = [
        f"{name} {found[name] or 'is missing'}, wanted {' or '.join(wanted)}"
        for name, wanted in WANTED.items()
        if found[name].partition("+")[0] not in wanted
    ]
    if wrong:
        raise UserError(
            "; ".join(wrong), where=sys.executable, next_step="make install, or name its Python in the site profile's setup"
        )
    return found


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def main() -> int:
    """Print the table; exit code 2 if something is wrong."""
    try:
        check()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for name, found in installed().items():
        print(f"{name:15} {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
