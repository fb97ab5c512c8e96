#!/usr/bin/env bash
# Trains task.py with Open MPI: ./mpi.sh DIRECTORY [PROCESSES] [OPTIONS OF mpirun …], such as --hostfile hosts
# DIRECTORY is on a disk that all machines share. If a process is lost, mpirun ends all of them, and this script starts them
# again: the run resumes.
directory=$1 processes=${2:-2}
shift $(($# < 2 ? $# : 2))

for restarts_left in 3 2 1 0; do
    mpirun -n "$processes" -x KERAS_BACKEND "$@" python task.py "$directory" && exit
    echo "mpi.sh: mpirun ended with code $?, $restarts_left restarts left" >&2
done
exit 1
