"""What plain DCP would save of a state dict on this rank: DTensors' local parts, plain tensors, under DCP's keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list, _create_write_items
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


# A plain tensor with these attributes stands for slices of a global one (`CheckpointableTensor` of torch from 2.15 on).
_LAYOUT = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def tells_its_slices(tensor: torch.Tensor) -> bool:
    """Whether a tensor itself says which slices of a global tensor it holds, as DTensors do."""
    return hasattr(tensor, "__create_chunk_list__") or _has_layout(tensor)


def _has_layout(tensor: torch.Tensor) -> bool:
    return all(hasattr(tensor, name) for name in _LAYOUT)


def carry_layout(source: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:
    """The copy, which stands for the same slices of a global tensor as its source."""
    if _has_layout(source):
        vars(copied).update({name: getattr(source, name) for name in _LAYOUT})
    return copied


def global_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape that DCP saves a tensor under."""
    return tuple(tensor.global_shape if _has_layout(tensor) else tensor.size())  # type: ignore[attr-defined]


def local_chunks(tensor: torch.Tensor) -> Sequence[ChunkStorageMetadata]:
    """The slices of a global tensor that DCP takes a tensor for; there may be several, of other sizes than its own."""
    found: Sequence[ChunkStorageMetadata] = _create_chunk_list(tensor)
    return found


def local_slices(key: str, tensor: torch.Tensor) -> Iterator[LocalTensor]:
    """These slices, with the memory of each."""
    for number, chunk in enumerate(local_chunks(tensor)):
        data = find_state_dict_object({key: tensor}, MetadataIndex(key, chunk.offsets, number))
        yield LocalTensor(key, data, global_shape(tensor), Box(tuple(chunk.offsets), tuple(chunk.sizes)))
