#!/usr/bin/env bash
# Make .venv312 with the baselines of `make bench` that need Python 3.12, or say that they are not run.
#
# The wheel of nvidia-resiliency-ext 0.7 is marked for glibc 2.39, for the sake of one compiled module that checkpoints do
# not use; pip installs it into a folder of its own for that platform, on every glibc.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv312
if ! python=$(scripts/find_python.sh 3.12 2>/dev/null); then
    echo "no Python 3.12 here: Megatron-Core 0.19, nvidia-resiliency-ext and torch_checkpointing are not run" >&2
    exit 0
fi
make venv VENV="$venv" PYTHON="$python"
if [ ! -d "$venv/baselines/torch_checkpointing" ]; then
    "$venv/bin/python" -m pip install --quiet --no-deps --only-binary=:all: \
        --platform "manylinux_2_39_$(uname -m)" --target "$venv/baselines" \
        nvidia-resiliency-ext==0.7.0 torch_checkpointing==0.1.1
fi
