#!/bin/bash
# Run demo: one MPI world of 6 ranks, 4 train on 2 nodes, 2 rollout on 2 nodes.
# Written by miles-submit; config.toml beside it is what the ranks read.

# Without Slurm: bash runs this file.

RUN='/scratch/my runs/demo-000'
PYTHON=/opt/miles/bin/python
RANK=/opt/miles/slurm/rank.sh

# Environment of all ranks
export PYTHONSAFEPATH=1
export PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=1
export TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1
export HDF5_USE_FILE_LOCKING=FALSE
export MPIR_CVAR_CH4_NETMOD=ofi
export SGLANG_USE_CPU_ENGINE=1
export NCCL_SOCKET_IFNAME=hsn

# Setup of the site (local) and of the run; the first line that fails ends the run and is named
# (not what fails within a file that it sources: such files may look whether something is there)
line=0
trap 'code=$? line=$LINENO; if [ ${#BASH_SOURCE[@]} = 1 ]; then
    "$PYTHON" -m miles_hpc.launchers.batch setup-failed "$RUN" "$code" "$(sed -n "${line}p" "$0")"; exit 1
fi' ERR
module load cuda/13
trap - ERR

# TERM: a time limit, a preemption, a requeue or scancel. The ranks get it too; wait for them, then ask what to do.
# USR2 is their early warning: they save and end. Some sites send it to this shell as well, which must outlive it.
signal=none
trap 'signal=TERM' TERM
trap : USR2

# One step, one MPI world. A rank that dies takes the step with it, so that nobody waits for the dead.
ranks() {
    exec /opt/miles/bin/mpiexec -launcher fork -hosts localhost \
        -n 4 "$RANK" train "$RUN" 6 "$PYTHON" -m miles_hpc.main : \
        -n 2 "$RANK" rollout "$RUN" 6 "$PYTHON" -m miles_hpc.main
}

export MILES_ATTEMPT
while MILES_ATTEMPT=$("$PYTHON" -m miles_hpc.launchers.batch begin "$RUN"); do
    "$PYTHON" -m miles_hpc.launchers.health "$RUN" "$MILES_ATTEMPT"  &&
        "$PYTHON" -m miles_hpc.prepare --run "$RUN" --attempt "$MILES_ATTEMPT"
    code=$?
    if [ $code = 0 ] && [ $signal = none ]; then
        ranks >> "$RUN/attempts/$MILES_ATTEMPT/launcher.log" 2>&1 &
        step=$!
        wait $step
        code=$?
        # a trapped signal ends `wait` before the step has ended
        while kill -0 $step 2> /dev/null; do
            wait $step
            code=$?
        done
    fi
    case $("$PYTHON" -m miles_hpc.launchers.batch end "$RUN" "$MILES_ATTEMPT" $code $signal) in
        done) exit 0 ;;
        restart) ;;
        # requeue: nothing after it, since Slurm ends this shell, and waits for it before it starts the next
        *) exit 1 ;;
    esac
done
exit 1
