#!/usr/bin/env bash
# Run a job that saves to a local disk, with a second tier; the job's launch line follows the two places:
#   examples/tiers.sh /nvme/run s3://bucket/run torchrun ... -m mcore_ckpt.launch pretrain_gpt.py ... --save /nvme/run
set -euo pipefail
near=${1:?see the head of this script}
export MCORE_CKPT_DRAIN_TO=${2:?see the head of this script}
shift 2

"$@" # at its end it waits for the copies

mcore-ckpt list "$near"
mcore-ckpt list "$MCORE_CKPT_DRAIN_TO"
