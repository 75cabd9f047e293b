#!/usr/bin/env bash
# Make an environment from a bundle on a node without a network: ./unpack.sh FOLDER. It lies in the bundle, beside wheels/.
#   PYTHON=/path/to/python   of the version that the bundle is for (default: python3)
# The environment sees the packages of that Python; torch is taken from there unless the bundle has it.
set -euo pipefail

[ $# -eq 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
venv=$(cd "$1" && pwd)
python=${PYTHON:-python3}
python_version='' torch_version='' cuda_version=''
# shellcheck source=/dev/null
. "$here/target"

refuse() {
    echo "error: $1" >&2
    echo "  next:  $2" >&2
    exit 3
}

found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[ "$found" = "$python_version" ] || refuse "$python is Python $found, the bundle is for $python_version" "PYTHON=/path/to/python$python_version $0 $1"
(cd "$here" && sha256sum --quiet --check SHA256SUMS) || refuse "the bundle is damaged" "copy it again"

if [ -n "$torch_version" ] && ! compgen -G "$here/wheels/torch-*.whl" >/dev/null; then
    found=$("$python" -c 'import torch; print(torch.__version__, torch.version.cuda)' 2>/dev/null) || found=none
    case $found in
        "$torch_version"[.+]*" $cuda_version"*) ;;
        *) refuse "the bundle is for torch $torch_version with CUDA $cuda_version; found: $found" "another PYTHON, or a bundle made --with-torch" ;;
    esac
fi

"$python" -m venv --system-site-packages "$venv"
unset PYTHONPATH
pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-index --no-deps)
"${pip[@]}" "$here"/wheels/*.whl
sources=("$here"/wheels/*.tar.gz)
if [ -e "${sources[0]}" ]; then
    "${pip[@]}" --no-build-isolation "${sources[@]}" ||
        refuse "a package that comes as source was not built: ${sources[*]##*/}" "a C compiler and Python's headers, such as: module load gcc"
fi

echo "unpacked into $venv: $venv/bin/miles-submit"
