#!/usr/bin/env bash
# Trains task.py with torchrun: ./torchrun.sh DIRECTORY [MACHINES] [ADDRESS OF THE FIRST MACHINE]
# Start it on each machine. MACHINES may be a range, such as 1:4: torchrun then continues with the machines that are left, if
# the first one is among them. PROCESSES=8 starts eight on each machine, as for eight GPUs.
# DIRECTORY is on a disk that all machines share. If a process is lost, torchrun starts all of them again: the run resumes.
directory=${1:?usage: ./torchrun.sh DIRECTORY [MACHINES] [ADDRESS]}
export KERAS_BACKEND=${KERAS_BACKEND:-torch}

exec python -m torch.distributed.run --nnodes "${2:-1}" --nproc-per-node "${PROCESSES:-2}" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "${3:-localhost:0}" --rdzv-id "$(basename "$directory")" task.py "$directory"
