#!/usr/bin/env bash
# Rewrite a checkpoint for other parallel sizes, and compare the two:
#   examples/layout.sh run/iter_0001000 tp4/iter_0001000 4 2
set -euo pipefail
source=${1:?see the head of this script}
target=${2:?see the head of this script}
tp=${3:?see the head of this script}
pp=${4:?see the head of this script}

mcore-ckpt reshard "$source" "$target" --tp "$tp" --pp "$pp" --dry-run
mcore-ckpt reshard "$source" "$target" --tp "$tp" --pp "$pp"
mcore-ckpt diff "$source" "$target"
