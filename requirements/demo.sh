#!/usr/bin/env bash
# `make demo`: requirements/demo.sh TOML. Uses the Slurm that is there, else a private one, else mpiexec.
# The watched run ends with its report; a picture follows.
set -euo pipefail

example=$1
name=$(basename "$example" .toml)
export PATH="$PWD/.venv/bin:$PATH"

number=0
while [ -e "$(printf 'runs/%s-%03d' "$name" "$number")" ]; do number=$((number + 1)); done
run=$PWD/$(printf 'runs/%s-%03d' "$name" "$number")

how=()
if [ -z "${SLURM_CONF:-}" ] && ! { command -v sinfo >/dev/null && sinfo >/dev/null 2>&1; }; then
    if ! miles-submit cluster up; then
        echo "no Slurm here and none can be started: the same ranks run under mpiexec (--local)"
        how=(--local)
    else
        trap 'echo "the private Slurm goes on; to stop it: make cluster-down"' EXIT
    fi
fi

outcome=0
miles-submit run "$example" --set run.folder="$run" --watch "${how[@]}" || outcome=$?
[ -e "$run/config.toml" ] || exit "$outcome"
# A run that failed before its first step has no picture; its own exit code is what counts.
python -m miles_hpc.launchers.plot "$run" || [ "$outcome" -ne 0 ]
exit "$outcome"
