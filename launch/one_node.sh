#!/bin/sh
# One run on every GPU of one node, with torchrun in sight:  sh launch/one_node.sh CONFIG [key=value ...]
#
# For:     one node with NVIDIA GPUs, 8 as written here (RANKS=4 for four). It also runs on a CPU: RANKS=2 and a demo
#          config. `mpdist plan CONFIG --ranks 8 --memory 80GiB` says first whether it fits.
# Expect:  nothing for the time that importing torch takes (half a minute on a cold file system), then the data report
#          and one line every track.every steps. OUT_DIR/NAME keeps that and more: plan.json, ledger.json (what each rank
#          holds) after the first step, one log a rank. torchrun's own status is 0 or 1: status.json there has the real one.
# Stop:    Ctrl-C or TERM saves at the next step, which may take the 600 s that are granted below; the same line
#          again resumes.
#
# `mpdist launch CONFIG` runs the same line, and plans and checks before, signals each rank, and explains the end.
set -eu
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}" # a node's cores divided by its ranks

exec torchrun --nproc-per-node "${RANKS:-8}" --nnodes 1 --max-restarts 0 \
    --rdzv-backend c10d --rdzv-endpoint localhost:0 --local-addr 127.0.0.1 \
    --shutdown-timeout 600 --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    -m mpdist "$@"
