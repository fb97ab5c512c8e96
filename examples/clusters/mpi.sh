#!/usr/bin/env bash
# Trains task.py with Open MPI: ./mpi.sh DIRECTORY [PROCESSES] [OPTIONS OF mpirun …], such as --hostfile hosts
# DIRECTORY is on a disk that all machines share. If a process is lost, mpirun ends all of them, and this script starts them
# again: the run resumes.
directory=${1:?usage: ./mpi.sh DIRECTORY [PROCESSES] [OPTIONS OF mpirun]} processes=${2:-2}
shift $(($# < 2 ? $# : 2))

trap 'exit 130' INT # Ctrl-C ends mpirun too
for restarts_left in 3 2 1 0; do
    mpirun -n "$processes" -x KERAS_BACKEND "$@" python task.py "$directory" && exit
    code=$?
    echo "mpi.sh: mpirun ended with code $code, $restarts_left restarts left" >&2
done
exit "$code"
