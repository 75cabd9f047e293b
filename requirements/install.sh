#!/usr/bin/env bash
# Make the environment: requirements/install.sh FOLDER. Reads PYTHON, BUILD and TORCH_INDEX; see the Makefile.
set -euo pipefail

venv=$1
here=$(dirname "$0")

usable() { # a Python of 3.11 or 3.12 that can make environments
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 /usr/bin/python3.11 ~/.pyenv/versions/3.11*/bin/python python3.12 /usr/bin/python3.12 \
        ~/.pyenv/versions/3.12*/bin/python python3}; do
        if usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python 3.11 or 3.12 with the venv module was found${PYTHON:+ (PYTHON=$PYTHON)}" >&2
    echo "  next:  apt-get install python3.11 python3.11-venv python3.11-dev, or pyenv install 3.11, or make PYTHON=/path/to/python3.11" >&2
    exit 3
}

offers_cpu_torch() {
    "$venv/bin/pip" install --quiet --dry-run --no-deps "${index[@]}" "torch==$1+cpu" >/dev/null 2>&1
}

pick_build() {
    local torch
    torch=$(sed -n 's/^torch==//p' "$here/constraints-cpu.txt")
    if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
        echo cuda
    elif "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
        echo cuda
    elif offers_cpu_torch "$torch"; then
        echo cpu
    else
        echo "note: the package index has no torch $torch+cpu, so the larger CUDA build is installed (it runs on a CPU too);" >&2
        echo "      make install TORCH_INDEX=URL names an index with PyTorch's CPU wheels" >&2
        echo cuda
    fi
}

if [ ! -x "$venv/bin/python" ] || ! usable "$venv/bin/python"; then
    python=$(find_python)
    echo "making $venv with $("$python" --version) ($python)"
    "$python" -m venv --clear "$venv"
fi
if ! command -v "${CC:-cc}" >/dev/null; then
    echo "error: no C compiler; reasoning-gym needs pycosat, which comes as C source" >&2
    echo "  next:  apt-get install gcc" >&2
    exit 3
fi

index=()
[ -z "${TORCH_INDEX:-}" ] || index=(--extra-index-url "$TORCH_INDEX")
build=${BUILD:-$(pick_build)}
constraints=$here/constraints-$build.txt
echo "installing with $constraints"
"$venv/bin/pip" install "${index[@]}" -c "$constraints" -e ".[run,dev]"

# megatron-core asks for Python 3.12 and runs on 3.11.
older=()
"$venv/bin/python" -c 'import sys; sys.exit(sys.version_info >= (3, 12))' && older=(--ignore-requires-python)
lists=(-r "$here/no-deps.txt")
[ "$build" = cpu ] || lists+=(-r "$here/no-deps-cuda.txt")
"$venv/bin/pip" install "${index[@]}" --no-deps "${older[@]}" -c "$constraints" "${lists[@]}"
"$venv/bin/python" -m miles_hpc.versions
