#!/bin/bash
# One rank: rank.sh ROLE RUN WORLD PROGRAM...    (and MILES_ATTEMPT)
# Opens its own log and becomes the program, or under mpiexec its parent. Not left to `srun --output`: in the second component of a heterogeneous step
# its %j is another job's id and its %t another task's rank (Slurm 22.05).
role=$1 run=$2 world=$3
shift 3
rank=${SLURM_PROCID:-${PMI_RANK:?neither srun nor mpiexec started this rank}}
trap '' USR1 USR2  # until the program listens; their default would kill it
exec >> "$run/attempts/$MILES_ATTEMPT/$role-$(printf %04d "$rank").log" 2>&1
# what a rank starts is known by it to the health check of the next attempt
export MILES_RANK_OF=$run
set -- "$@" --role "$role" --run "$run" --attempt "$MILES_ATTEMPT" --world-size "$world"
[ -z "${SLURM_PROCID:-}" ] || exec "$@"
# mpiexec kills the others once a rank has died, and then names any of them: which was the first is written down here, while this
# shell still holds the connection by whose end mpiexec notices.
trap : TERM  # the program's to obey
"$@"
code=$?
echo "$rank $code" >> "$run/attempts/$MILES_ATTEMPT/ends"
trap - TERM
[ $code -le 128 ] || kill -s $((code - 128)) $$
exit $code
