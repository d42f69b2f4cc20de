"""What plain DCP would save of a state dict on this rank: DTensors' local parts, plain tensors, under DCP's keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.checkpoint.utils import find_state_dict_object

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import PlanError


class LocalTensor(NamedTuple):
    """The slice of a tensor that this rank holds."""

    key: str
    data: torch.Tensor
    shape: tuple[int, ...]  # of the whole tensor
    box: Box


def dcp_tensors(tree: Any) -> Iterator[LocalTensor]:
    """All slices in a nested dict/list; raises `PlanError` for what DCP cannot flatten."""
    try:
        flat, _ = flatten_state_dict(tree) if isinstance(tree, dict) else ({}, None)
    except ValueError as error:
        raise PlanError(f"the state dict has no keys as DCP makes them: {error}") from error
    for key, value in flat.items():
        for item in _create_write_items(key, value):
            if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
                continue
            chunk, shape = item.tensor_data.chunk, tuple(item.tensor_data.size)
            data = find_state_dict_object(flat, item.index)
            yield LocalTensor(key, data, shape, Box(tuple(chunk.offsets), tuple(chunk.sizes)))
