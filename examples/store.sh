#!/usr/bin/env bash
# Copy a checkpoint to a store, check it there, and bring it back:
#   examples/store.sh run/iter_0001000 s3://bucket/run/iter_0001000 back/iter_0001000
set -euo pipefail
checkpoint=${1:?see the head of this script}
url=${2:?see the head of this script}
back=${3:?see the head of this script}

mcore-ckpt copy "$checkpoint" "$url"
mcore-ckpt verify "$url"
mcore-ckpt copy "$url" "$back"
mcore-ckpt diff "$checkpoint" "$back"
