"""Loads into Transformer Engine's quantized tensors, a few at a time.

Such a tensor looks like one of bfloat16, but holds FP8 (or narrower) elements and their scales; a checkpoint holds
the wide elements. They are read into scratch memory of the wide dtype and copied over, which quantizes. Megatron before
0.19 makes a wide copy of every quantized tensor ahead of the load; from 0.19 on it leaves that to a strategy which says
`stream_ckpt_dequant`, and the peak is a few tensors instead of the whole model
(`megatron/core/dist_checkpointing/serialization.py`, `load`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mcore_ckpt.load.arrivals import noting_nothing
from mcore_ckpt.load.ranges import batches
from mcore_ckpt.megatron._versions import quantized_test

# Scratch that is held at once, in bytes; more only where a single tensor is larger.
_SCRATCH_BYTES = 64 * 1024 * 1024


def split_quantized(shards: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Divide `ShardedTensor`s into those whose data are plain, and those whose data are quantized."""
    is_quantized = quantized_test()
    if is_quantized is None:
        return shards, ()
    plain: list[Any] = []
    quantized: list[Any] = []
    for shard in shards:
        (quantized if shard.data is not None and is_quantized(shard.data) else plain).append(shard)
    return plain, quantized


def read_quantized(read: Callable[[Sequence[Any]], None], shards: Sequence[Any]) -> None:
    """Fill `ShardedTensor`s whose data are quantized, each at once; `read` fills plain ones. The running maxima of
    delayed scaling (`amax`) stay: what is loaded is not what was trained on.
    """
    for batch in batches(shards, lambda shard: shard.data.numel() * shard.data.dtype.itemsize, _SCRATCH_BYTES):
        scratches = [_with_scratch(shard) for shard in batch]
        with noting_nothing():
            read(scratches)
        for shard, scratch in zip(batch, scratches, strict=True):
            _quantize(shard.data, scratch.data)


def _with_scratch(shard: Any) -> Any:
    wide = shard.data
    copied = copy.copy(shard)
    copied.data = torch.empty(tuple(wide.shape), dtype=wide.dtype, device=wide.device)
    return copied


def _quantize(quantized: torch.Tensor, wide: torch.Tensor) -> None:
    amax = getattr(getattr(quantized, "_quantizer", None), "amax", None)
    kept = amax.detach().clone() if isinstance(amax, torch.Tensor) else None
    with torch.no_grad():
        quantized.copy_(wide)
        if amax is not None and kept is not None:
            amax.copy_(kept)
