#!/bin/sh
# One run on several nodes without Slurm. Start it on every node, the same but for NODE:
#
#     NODES=4 NODE=0 ADDRESS=node-a sh launch/by_hand.sh CONFIG [key=value ...]     on node-a
#     NODES=4 NODE=1 ADDRESS=node-a sh launch/by_hand.sh CONFIG [key=value ...]     on the next, and so on
#
# For:     NODES nodes of 8 NVIDIA GPUs (RANKS=4 for four each) that reach each other at ADDRESS:PORT, with the same
#          packages, and with CONFIG and out_dir on a file system that all of them see.
#          `mpdist plan CONFIG --nodes 4 --ranks 8 --memory 80GiB` says first whether it fits.
# Expect:  silence until all nodes are there (600 s at most), then on node 0 what one node would print. If it stays
#          silent: can node 1 open ADDRESS:PORT? Does NCCL take the right network? NCCL_DEBUG=INFO shows it, and
#          NCCL_SOCKET_IFNAME sets it. Global rank 0 is on node 0.
# Stop:    Ctrl-C or TERM on one node saves everywhere at the next step; the same lines again resume.
#
# With `mpdist launch CONFIG --nodes 4 --node-rank N launch.address=node-a` each node also plans and checks first.
set -eu
: "${NODES:?the number of nodes}" "${NODE:?the number of this node, from 0}" "${ADDRESS:?the name of node 0}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}" # a node's cores divided by its ranks

exec torchrun --nproc-per-node "${RANKS:-8}" --nnodes "$NODES" --max-restarts 0 \
    --node-rank "$NODE" --master-addr "$ADDRESS" --master-port "${PORT:-29500}" \
    --rdzv-conf timeout=600 \
    --shutdown-timeout 600 --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    -m mpdist "$@"
