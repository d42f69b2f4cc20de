"""Shards as this package looks at them, where no Megatron is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def shard(key: str, data: Any, shape: tuple[int, ...], offset: tuple[int, ...], replica: Any = 0, **more: Any) -> Any:
    """What this package looks at of Megatron's `ShardedTensor`."""
    fields = {
        "key": key,
        "data": data,
        "local_shape": tuple(data.shape) if isinstance(data, torch.Tensor) else shape,
        "global_shape": shape,
        "global_offset": offset,
        "replica_id": replica,
        "prepend_axis_num": 0,
        "flattened_range": None,
        "allow_shape_mismatch": False,
    }
    return SimpleNamespace(**{**fields, **more})
