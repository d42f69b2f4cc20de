#!/usr/bin/env bash
# Find out whether a checkpoint is damaged, and repair it from a copy:
#   examples/damage.sh run/iter_0001000 copy/iter_0001000
set -euo pipefail
checkpoint=${1:?see the head of this script}
copy=${2:?see the head of this script}

code=0
mcore-ckpt verify "$checkpoint" || code=$?
case $code in
    0) echo "nothing to repair" ;;
    1) mcore-ckpt repair "$checkpoint" --from "$copy" ;;
    *) exit "$code" ;; # not a checkpoint, or it cannot be read
esac
