#!/usr/bin/env bash
# Rewrite a checkpoint for other parallel sizes, and compare the two:
#   examples/layout.sh run/iter_0001000 tp4/iter_0001000 4 2
set -euo pipefail
source=$1
target=$2
tp=$3
pp=$4

mcore-ckpt reshard "$source" "$target" --tp "$tp" --pp "$pp" --dry-run
mcore-ckpt reshard "$source" "$target" --tp "$tp" --pp "$pp"
mcore-ckpt diff "$source" "$target"
