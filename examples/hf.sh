#!/usr/bin/env bash
# A Hugging Face model as a checkpoint for Megatron, and back; no GPU, no Megatron, no transformers:
#   examples/hf.sh Llama-3.1-8B start/release model 4
set -euo pipefail
model=${1:?see the head of this script}
start=${2:?see the head of this script}
exported=${3:?see the head of this script}
tp=${4:?see the head of this script}

mcore-ckpt import "$model" "$start" --from hf --tp "$tp"
mcore-ckpt verify "$start"
mcore-ckpt export "$start" "$exported" --to hf --hf-config "$model"
