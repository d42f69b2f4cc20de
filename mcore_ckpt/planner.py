"""The save planner: shards -> write items, on DCP's planner protocol.

It takes what `torch.distributed.checkpoint` takes (plain tensors, DTensors, objects) and, besides, Megatron's
`ShardedTensor` and `ShardedObject` leaves as they are, nested or flat. Write items come straight from the shards: a
rank plans what it holds, and its cost does not depend on how many ranks there are.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata, SavePlan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from mcore_ckpt.boxes import Box, covers
from mcore_ckpt.errors import OptionError, PlanError
from mcore_ckpt.shards import box_sizes, is_main_replica, is_sharded_object, leaves, without_leaves

__all__ = ["MCoreSavePlanner", "object_write_item", "serialize_objects", "shard_write_item"]

_PROPERTIES: dict[torch.dtype, TensorProperties] = {}


def _properties(dtype: torch.dtype) -> TensorProperties:
    """Stored properties of a detached, contiguous tensor; one instance for each dtype, since they are never changed."""
    properties = _PROPERTIES.get(dtype)
    if properties is None:
        properties = _PROPERTIES[dtype] = TensorProperties(dtype=dtype)
    return properties


def shard_write_item(shard: Any, index: int | None = None) -> WriteItem:
    """The write item of a Megatron `ShardedTensor`: one box of its global tensor.

    Args:
        shard: the shard, `data` of shape `local_shape`, at `global_offset` of `global_shape` (elements).
        index: position among this rank's shards of the same key, when there are several.
    """
    offsets = torch.Size(shard.global_offset)
    chunk = ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(box_sizes(shard)))
    return WriteItem(
        index=MetadataIndex(shard.key, offsets, index),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=chunk, properties=_properties(shard.dtype), size=torch.Size(shard.global_shape)
        ),
    )


def object_write_item(key: str) -> WriteItem:
    """The write item of a sharded object, whose `key` is Megatron's `unique_key`."""
    return WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO)


def serialize_objects(values: list[Any]) -> io.BytesIO:
    """Serialize the objects that share one key: `torch.save` of their list, which is what Megatron's readers expect."""
    stream = io.BytesIO()
    torch.save(values, stream)
    return stream


class MCoreSavePlanner(DefaultSavePlanner):
    """Plans a save; DCP's default planner for what DCP knows, and Megatron's shards besides.

    Sharded objects are written by every rank that holds a main replica (they are different objects), already
    serialized. Of a replicated shard only the main replica is written.

    Args:
        flatten_state_dict: as in DCP's default planner; only for values that are not Megatron's. None: as needed.
        flatten_sharded_tensors: as in DCP's default planner.
        dedup_replicated_tensors: accepted for Megatron's sake; replicas are never written twice.
        dedup_save_to_lowest_rank: as in DCP's default planner.
        can_run_decentralized_global_plan: each rank may plan alone, the coordinator only makes the metadata. This holds
            where nothing has to be deduplicated across ranks.

    Raises:
        OptionError: decentralized planning is asked for together with flattening or deduplication.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        can_run_decentralized_global_plan: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            flatten_state_dict=flatten_state_dict,
            flatten_sharded_tensors=flatten_sharded_tensors,
            dedup_save_to_lowest_rank=dedup_save_to_lowest_rank,
            **options,
        )
        possible = not flatten_state_dict and not dedup_replicated_tensors
        if can_run_decentralized_global_plan and not possible:
            raise OptionError(
                "can_run_decentralized_global_plan=True needs flatten_state_dict=False and no"
                " dedup_replicated_tensors: flattened names and duplicates are settled by the coordinator"
            )
        self.can_run_decentralized_global_plan = (
            possible if can_run_decentralized_global_plan is None else can_run_decentralized_global_plan
        )
        self._shards: list[Any] = []
        self._sources: dict[tuple[str, tuple[int, ...] | None], Any] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._shards = [leaf for leaf in leaves(state_dict) if is_main_replica(leaf)]
        rest = without_leaves(state_dict)
        super().set_up_planner(rest, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        """This rank's write items.

        Raises:
            PlanError: two shards of this rank fill the same box, or a shard has no data.
        """
        plan = super().create_local_plan()
        self._sources = {}
        items = list(plan.items)
        by_key: dict[str, list[Any]] = {}
        for shard in self._shards:
            by_key.setdefault(shard.unique_key if is_sharded_object(shard) else shard.key, []).append(shard)
        for key, group in by_key.items():
            items += self._items_of_key(key, group)
        self.plan = SavePlan(items=items, planner_data=plan.planner_data)
        return self.plan

    def _items_of_key(self, key: str, group: list[Any]) -> list[WriteItem]:
        if is_sharded_object(group[0]):
            self._sources[key, None] = [shard.data for shard in group]
            return [object_write_item(key)]
        items = []
        for index, shard in enumerate(group):
            if shard.data is None:
                raise PlanError(f"{key} at offset {tuple(shard.global_offset)}: the shard has no data to save")
            item = shard_write_item(shard, index if len(group) > 1 else None)
            place = (key, tuple(shard.global_offset))
            if place in self._sources:
                raise PlanError(f"{key}: two shards of one rank start at offset {place[1]}")
            self._sources[place] = shard.data.detach().view(box_sizes(shard))
            items.append(item)
        return items

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The coordinator's part: deduplicate what is replicated, and check that the chunks make up each tensor.

        Raises:
            PlanError: a chunk is planned twice, is missing, or lies outside its tensor; names the key.
        """
        try:
            plans, metadata = super().create_global_plan(all_plans)
        except (ValueError, AssertionError) as error:
            raise PlanError(f"the ranks' plans do not fit together: {error}") from error
        for key, stored in metadata.state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata):
                boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks]
                problem = covers(tuple(stored.size), boxes)
                if problem:
                    raise PlanError(f"{key}: {problem}")
        return plans, metadata

    def create_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        """The local plan is the global one: nothing that another rank plans can change it.

        Raises:
            PlanError: this planner flattens names, which only a coordinator can merge.
        """
        if self.flatten_state_dict and local_plan.planner_data:
            raise PlanError("a flattened state dict cannot be planned by each rank alone: use flatten_state_dict=False")
        return local_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The tensor (detached, shape of its chunk) or the serialized object (`BytesIO`) of a write item."""
        index = write_item.index
        offset = None if index.offset is None else tuple(index.offset)
        source = self._sources.get((index.fqn, offset))
        if source is None:
            return super().resolve_data(write_item)
        return serialize_objects(source) if isinstance(source, list) else source

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Serialize an object, unless it comes as the `BytesIO` of one."""
        if isinstance(object, io.BytesIO):
            return object
        return super().transform_object(write_item, object)
