"""What the sharded tensors that a rank holds add to the fingerprints of their tensors (`core/fingerprints.py`)."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import PlanError
from mcore_ckpt.core.fingerprints import part_of
from mcore_ckpt.state.shards import contents, leaves_by_kind, local_box


def built_leaves(tree: Any) -> tuple[list[Any], list[Any]]:
    """As `leaves_by_kind`, with what factories make in their place."""
    return leaves_by_kind(_built(tree))


def is_factory(value: object) -> bool:
    """Whether this is Megatron's `ShardedTensorFactory`."""
    return hasattr(value, "build_fn") and hasattr(value, "build")


def _built(tree: Any) -> Any:
    """The same with what factories make in their place."""
    if isinstance(tree, dict):
        return {key: _built(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_built(value) for value in tree]
    return _built(tree.build()) if is_factory(tree) else tree


def crc_of_shard(shard: Any) -> tuple[int, bool]:
    """What a replica adds (by XOR) to the CRC-32 of its tensor, and whether it has the tensor's first element. Raises
    `PlanError` if it has no data, or other than it says.
    """
    key, data, sizes = shard.key, shard.data, local_box(shard)
    if not isinstance(data, torch.Tensor):
        raise PlanError(f"{key}: the shard at {list(shard.global_offset)} has no data ({type(data).__name__})")
    shape, offsets = tuple(map(int, shard.global_shape)), tuple(map(int, shard.global_offset))
    flattened = getattr(shard, "flattened_range", None)
    stretch = (0, math.prod(sizes)) if flattened is None else (flattened.start, flattened.stop)
    if data.numel() != stretch[1] - stretch[0]:
        raise PlanError(
            f"{key}: the shard at {list(offsets)} has data of shape {list(data.shape)}, expected "
            f"{stretch[1] - stretch[0]} elements of the slice of sizes {list(sizes)}"
        )
    crc = 0
    with torch.no_grad():
        for content, inside in contents(key, data, sizes, stretch):
            lies = Box(tuple(map(operator.add, offsets, inside.offsets)), inside.sizes)
            crc ^= part_of(content, shape, lies, data.element_size())
    return crc, not any(offsets) and stretch[0] == 0 and data.numel() > 0
