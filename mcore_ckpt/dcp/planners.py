"""The planners of saves and loads, on `torch.distributed.checkpoint`'s protocols.

They take what DCP takes (plain tensors, DTensors, objects) and, besides, Megatron's `ShardedTensor` and `ShardedObject`
leaves as they are, nested or flat. Items come straight from the shards: a rank plans what it holds, and its cost does
not depend on how many ranks there are. A save is checked to make up each tensor; a load has each key checked for kind,
global shape and dtype before anything is read.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, LoadPlan, Metadata, SavePlan
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from mcore_ckpt.core.boxes import Box, covers, intersect
from mcore_ckpt.core.errors import KindMismatchError, MissingKeyError, OptionError, PlanError, ShapeMismatchError
from mcore_ckpt.core.options import LoadOptions
from mcore_ckpt.core.process import collector_paused
from mcore_ckpt.core.ranks import without_modes
from mcore_ckpt.format.safe_pickle import load_object
from mcore_ckpt.load.reader import destination
from mcore_ckpt.load.records import missing_key
from mcore_ckpt.load.requests import check_dtype, check_planned, not_held
from mcore_ckpt.save.planner import serialize_objects
from mcore_ckpt.state.shards import box_sizes, global_shape, is_main_replica, is_sharded_object, leaves, without_leaves

_PROPERTIES: dict[torch.dtype, TensorProperties] = {}


def _properties(dtype: torch.dtype) -> TensorProperties:
    """Stored properties of a detached, contiguous tensor; one instance for each dtype, since they are never changed."""
    properties = _PROPERTIES.get(dtype)
    if properties is None:
        properties = _PROPERTIES[dtype] = TensorProperties(dtype=dtype)
    return properties


def tensor_write_item(
    key: str,
    dtype: torch.dtype,
    shape: Sequence[int],
    offsets: Sequence[int],
    sizes: Sequence[int],
    index: int | None = None,
) -> WriteItem:
    """The write item of a slice of a global tensor, in elements; `index`: its position among this rank's shards of that
    key.
    """
    begin = torch.Size(offsets)
    chunk = ChunkStorageMetadata(offsets=begin, sizes=torch.Size(sizes))
    data = TensorWriteData(chunk=chunk, properties=_properties(dtype), size=torch.Size(shape))
    return WriteItem(MetadataIndex(key, begin, index), WriteItemType.SHARD, tensor_data=data)


def shard_write_item(shard: Any, index: int | None = None) -> WriteItem:
    """The write item of a Megatron `ShardedTensor`; `index` as in `tensor_write_item`."""
    return tensor_write_item(shard.key, shard.dtype, shard.global_shape, shard.global_offset, box_sizes(shard), index)


def object_write_item(key: str) -> WriteItem:
    """The write item of a sharded object, whose `key` is Megatron's `unique_key`."""
    return WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO)


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

    @without_modes()
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._shards = [leaf for leaf in leaves(state_dict) if is_main_replica(leaf)]
        rest = without_leaves(state_dict)
        super().set_up_planner(rest, storage_meta, is_coordinator)

    @without_modes()
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

    @without_modes()
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


class MCoreLoadPlanner(DefaultLoadPlanner):
    """Plans a load, and checks key, kind, global shape and dtype of everything that is asked for.

    Args:
        shapes_validation_sharded_tensors: Megatron shards whose global shape must be the stored one (for Megatron's
            sake; all tensors are checked, whether listed or not).
        allow_shape_mismatch_sharded_tensors: shards by key whose global shape may differ: the overlap is loaded.
        options: `LoadOptions`; `on_dtype_mismatch` and `allowed_classes` matter here.
        **default_options: `flatten_state_dict`, `flatten_sharded_tensors`, `allow_partial_load` of DCP's planner.
    """

    def __init__(
        self,
        *,
        shapes_validation_sharded_tensors: Iterable[Any] = (),
        allow_shape_mismatch_sharded_tensors: dict[str, Any] | None = None,
        options: LoadOptions | None = None,
        **default_options: Any,
    ) -> None:
        super().__init__(**default_options)
        self._options = LoadOptions.from_environment() if options is None else options
        self._validated = list(shapes_validation_sharded_tensors)
        self._flexible = dict(allow_shape_mismatch_sharded_tensors or {})
        self._shards: list[Any] = []
        self._targets: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self._objects: dict[str, list[Any]] = {}

    @collector_paused()
    @without_modes()
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._shards = list(leaves(state_dict))
        self._targets, self._objects = {}, {}
        rest = without_leaves(state_dict) if self._shards else state_dict
        super().set_up_planner(rest, metadata, is_coordinator)

    @collector_paused()
    @without_modes()
    def create_local_plan(self) -> LoadPlan:
        """Read items for this rank.

        Raises:
            MissingKeyError: a key is not in the checkpoint (and `allow_partial_load` is off).
            KindMismatchError, ShapeMismatchError, DtypeMismatchError: it is stored as something else.
            CorruptCheckpointError: the stored chunks do not hold all that is requested.
        """
        for shard in self._validated:
            self._check_shape(self._stored_tensor(shard.key), shard.key, tuple(shard.global_shape))
        for key, value in self.state_dict.items():
            self._check(key, value)
        items = list(super().create_local_plan().items)
        assert self.metadata is not None
        check_planned(items, self.state_dict, self.metadata.state_dict_metadata, "the checkpoint", self._flexible)
        for shard in self._shards:
            items += self._object_items(shard) if is_sharded_object(shard) else self._tensor_items(shard)
        return LoadPlan(items)

    def _check(self, key: str, value: Any) -> None:
        assert self.metadata is not None  # DCP sets the planner up with it
        stored = self.metadata.state_dict_metadata.get(key)
        if stored is None:
            if self.allow_partial_load:
                return
            raise self._missing(key)
        if isinstance(value, torch.Tensor):
            stored = self._stored_tensor(key)
            self._check_shape(stored, key, global_shape(value))
            self._check_dtype(stored, key, value.dtype)
        elif isinstance(stored, TensorStorageMetadata) and not (
            hasattr(value, "__create_chunk_list__") or hasattr(value, "local_shards")
        ):
            raise KindMismatchError(f"{key}: the checkpoint holds a tensor, the state dict a {type(value).__name__}")

    def _missing(self, key: str) -> MissingKeyError:
        assert self.metadata is not None
        return missing_key(key, "the checkpoint", self.metadata.state_dict_metadata)

    def _stored_tensor(self, key: str) -> TensorStorageMetadata:
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata.get(key)
        if stored is None:
            raise self._missing(key)
        if not isinstance(stored, TensorStorageMetadata):
            raise KindMismatchError(f"{key}: a tensor is requested, the checkpoint holds an object under this key")
        return stored

    def _check_shape(self, stored: TensorStorageMetadata, key: str, wanted: tuple[int, ...]) -> None:
        if tuple(stored.size) != wanted and key not in self._flexible:
            raise ShapeMismatchError(
                f"{key}: the checkpoint holds global shape {tuple(stored.size)}, the model expects {wanted}"
            )

    def _check_dtype(self, stored: TensorStorageMetadata, key: str, wanted: torch.dtype) -> None:
        check_dtype(key, "the checkpoint", stored.properties.dtype, wanted, self._options.on_dtype_mismatch)

    def _tensor_items(self, shard: Any) -> list[ReadItem]:
        stored = self._stored_tensor(shard.key)
        if not shard.allow_shape_mismatch:
            self._check_shape(stored, shard.key, tuple(shard.global_shape))
        self._check_dtype(stored, shard.key, shard.dtype)
        sizes = box_sizes(shard)
        self._targets[shard.key, tuple(shard.global_offset)] = destination(shard).view(sizes)
        chunk = ChunkStorageMetadata(offsets=torch.Size(shard.global_offset), sizes=torch.Size(sizes))
        items = list(create_read_items_for_chunk_list(shard.key, stored, [chunk]))
        # Of a tensor that may have another shape, what lies inside the stored one.
        inside = intersect(Box(tuple(shard.global_offset), tuple(sizes)), Box((0,) * len(stored.size), stored.size))
        wanted, planned = math.prod(inside.sizes) if inside else 0, sum(math.prod(item.lengths) for item in items)
        if planned != wanted:
            raise not_held(shard.key, wanted, planned, "the checkpoint")
        return items

    def _object_items(self, shard: Any) -> list[ReadItem]:
        assert self.metadata is not None
        key = shard.unique_key
        stored = self.metadata.state_dict_metadata.get(key)
        if stored is None:
            raise self._missing(key)
        if not isinstance(stored, BytesStorageMetadata):
            raise KindMismatchError(f"{key}: an object is requested, the checkpoint holds a tensor under this key")
        first = key not in self._objects
        self._objects.setdefault(key, []).append(shard)
        if not first:
            return []
        index = MetadataIndex(key)
        zero = torch.Size((0,))
        return [ReadItem(LoadItemType.BYTE_IO, index, zero, index, zero, zero)]

    @without_modes()
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a stored object where it belongs; its pickle goes through the allow-list.

        Raises:
            UnsafePickleError: the object contains a class outside the allow-list.
        """
        key = read_item.dest_index.fqn
        loaded = load_object(value.read(), self._options.allowed_classes, where=key)
        shards = self._objects.get(key)
        if shards is None:
            if self.flatten_state_dict:
                set_element(self.original_state_dict, self.mappings[key], loaded)
            else:
                self.state_dict[key] = loaded
            return
        if not isinstance(loaded, list):
            raise KindMismatchError(f"{key}: expected the list in which Megatron stores objects, got {type(loaded)}")
        if len(loaded) != len(shards):
            raise KindMismatchError(f"{key}: {len(shards)} objects are requested, the checkpoint holds {len(loaded)}")
        for shard, data in zip(shards, loaded, strict=True):
            shard.data = data

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        offset = None if index.offset is None else tuple(index.offset)
        target = self._targets.get((index.fqn, offset)) if offset is not None else None
        return super().lookup_tensor(index) if target is None else target
