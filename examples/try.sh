#!/usr/bin/env bash
# Try mcore_ckpt on a run's newest checkpoint; the job's launch line follows the two directories:
#   examples/try.sh run trial torchrun --nproc-per-node 8 -m mcore_ckpt.launch pretrain_gpt.py ... --load run --save trial
set -euo pipefail
run=${1:?see the head of this script}
trial=${2:?see the head of this script}
shift 2

mcore-ckpt list "$run"
mcore-ckpt verify "$run"

"$@" # the losses are in the job's log

mcore-ckpt list "$trial"
mcore-ckpt verify "$trial"
