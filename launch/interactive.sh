#!/bin/sh
# One run on the nodes of an interactive Slurm job, with torchrun in sight. Inside `salloc --nodes=2 ...`:
#
#     sh launch/interactive.sh CONFIG [key=value ...]
#
# For:     trying things out on nodes that you hold. Each has 8 NVIDIA GPUs as written here (RANKS=4 for four each;
#          launch.ranks does not count) and sees CONFIG, out_dir and this environment. RANKS=2 and a demo run on CPUs.
# Expect:  what one node would print, in the terminal. Ranks meet on the first node of the job, at a port of its number.
# Stop:    Ctrl-C twice ends the step; `touch OUT_DIR/NAME/STOP` saves first. The same line again resumes.
#
# `srun --ntasks-per-node=1 mpdist launch CONFIG` runs the same line, and plans and checks before, and explains the end.
set -eu
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}" # a node's cores divided by its ranks
export RANKS="${RANKS:-8}" PORT="${PORT:-$((20000 + SLURM_JOB_ID % 10000))}"
ADDRESS=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export ADDRESS

# shellcheck disable=SC2016 # each task fills in its own number
exec srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 \
    --cpu-bind=none sh -c 'exec torchrun --nproc-per-node "$RANKS" --nnodes "$SLURM_JOB_NUM_NODES" --max-restarts 0 \
    --node-rank "$SLURM_NODEID" --master-addr "$ADDRESS" --master-port "$PORT" \
    --rdzv-conf timeout=600 \
    --shutdown-timeout 600 --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    -m mpdist "$@"' sh "$@"
