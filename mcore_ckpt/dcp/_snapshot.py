"""A copy of a nested state dict that is the trainer's no longer."""

from __future__ import annotations

import copy
from typing import Any

import torch

from mcore_ckpt.layout.shards import is_sharded_object, is_sharded_tensor

__all__ = ["snapshot"]


def snapshot(state: Any, previous: Any = None) -> Any:
    """Copy a nested state dict to the host: tensors (views, tied ones, DTensors), Megatron's shards, objects.

    Args:
        state: what to copy. Tied tensors stay tied, views become tensors of their own.
        previous: an earlier snapshot; where the structure is the same, its memory is used again.
    """
    return _copy(state, previous, {}, set())


def _copy(value: Any, previous: Any, done: dict[int, Any], reused: set[int]) -> Any:
    if id(value) in done:
        return done[id(value)]
    copied: Any
    if isinstance(value, torch.Tensor):
        copied = _copy_tensor(value, previous, reused)
    elif isinstance(value, dict):
        before = previous if isinstance(previous, dict) else {}
        copied = {key: _copy(item, before.get(key), done, reused) for key, item in value.items()}
    elif isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        before_items = previous if isinstance(previous, (list, tuple)) and len(previous) == len(value) else value
        unchanged = before_items is value
        items = [
            _copy(item, None if unchanged else before, done, reused)
            for item, before in zip(value, before_items, strict=True)
        ]
        copied = items if isinstance(value, list) else tuple(items)
    elif is_sharded_tensor(value) or is_sharded_object(value):
        copied = copy.copy(value)
        copied.data = _copy(value.data, getattr(previous, "data", None), done, reused)
    else:
        copied = copy.deepcopy(value)
    done[id(value)] = copied
    return copied


def _copy_tensor(tensor: torch.Tensor, previous: Any, reused: set[int]) -> torch.Tensor:
    source = tensor.detach()
    if type(source) is not torch.Tensor:
        # DTensor and its like know how to move their local part.
        return source.clone() if source.device.type == "cpu" else source.to("cpu", copy=True)
    if (
        type(previous) is torch.Tensor
        and previous.shape == source.shape
        and previous.dtype == source.dtype
        and previous.is_contiguous()
        and id(previous) not in reused  # tensors that were tied then, and are not now
    ):
        reused.add(id(previous))
        return previous.copy_(source)
    target = torch.empty(source.shape, dtype=source.dtype, device="cpu")
    return target.copy_(source)
