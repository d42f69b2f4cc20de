"""Columns back into DCP's plan objects, for `.metadata` that stock Megatron can reuse (`all_local_plans`)."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from mcore_ckpt.checkpoint_index import CheckpointIndex
from mcore_ckpt.local_plan import LocalPlan

__all__ = ["local_plans_as_dcp", "plans_of_index"]

_DATA_FILE = re.compile(r"__(\d+)_\d+\.distcp$")


def local_plans_as_dcp(plans: Sequence[LocalPlan], object_keys: Sequence[Sequence[str]]) -> list[SavePlan]:
    """Every rank's `SavePlan`: its tensors from the columns, and its objects."""
    return [_as_dcp(plan, keys) for plan, keys in zip(plans, object_keys, strict=True)]


def _as_dcp(plan: LocalPlan, object_keys: Sequence[str]) -> SavePlan:
    properties = [TensorProperties(dtype=getattr(torch, name)) for name in plan.dtypes]
    items = []
    position = 0
    for key, ndim, code in zip(plan.keys, plan.ndims, plan.dtype_codes, strict=True):
        shape, offsets, sizes = (
            (
                torch.Size(plan.boxes[begin : begin + ndim])
                for begin in range(position, position + 3 * ndim, max(ndim, 1))
            )
            if ndim
            else (torch.Size(()),) * 3
        )
        chunk = ChunkStorageMetadata(offsets=offsets, sizes=sizes)
        data = TensorWriteData(chunk=chunk, properties=properties[code], size=shape)
        items.append(WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data))
        position += 3 * ndim
    items += [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in object_keys]
    return SavePlan(items=items)


def plans_of_index(index: CheckpointIndex) -> list[SavePlan]:
    """Every rank's `SavePlan` of a stored checkpoint, told by whose file each item lies in."""
    items: dict[int, list[WriteItem]] = {}
    for entry in index.tensors.values():
        properties = TensorProperties(dtype=getattr(torch, entry.dtype))
        for stored in entry.chunks:
            offsets = torch.Size(stored.offsets)
            chunk = ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(stored.sizes))
            data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(entry.shape))
            item = WriteItem(MetadataIndex(entry.fqn, offsets), WriteItemType.SHARD, tensor_data=data)
            items.setdefault(_rank_of(stored.item.file), []).append(item)
    for key, stored_object in index.objects.items():
        item = WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)
        items.setdefault(_rank_of(stored_object.item.file), []).append(item)
    return [SavePlan(items=items.get(rank, [])) for rank in range(max(items, default=-1) + 1)]


def _rank_of(file: str) -> int:
    match = _DATA_FILE.search(file)
    return int(match.group(1)) if match else 0
