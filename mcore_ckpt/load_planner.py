"""The load planner: what is wanted -> read items, each key checked for kind, global shape and dtype."""

from __future__ import annotations

import difflib
import io
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan, Metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from mcore_ckpt.errors import DtypeMismatchError, KindMismatchError, MissingKeyError, ShapeMismatchError
from mcore_ckpt.options import LoadOptions
from mcore_ckpt.safe_pickle import load_object
from mcore_ckpt.shards import box_sizes, is_sharded_object, leaves, without_leaves

__all__ = ["MCoreLoadPlanner"]


class MCoreLoadPlanner(DefaultLoadPlanner):
    """Plans a load, and checks key, kind, global shape and dtype of everything that is asked for.

    Args:
        shapes_validation_sharded_tensors: Megatron shards whose global shape must be the stored one (for Megatron's
            sake; all tensors are checked, whether listed or not).
        allow_shape_mismatch_sharded_tensors: shards by key whose global shape may differ: the overlap is loaded.
        options: `LoadOptions`; `allow_dtype_cast` and `allowed_classes` matter here.
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

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._shards = list(leaves(state_dict))
        rest = without_leaves(state_dict) if self._shards else state_dict
        super().set_up_planner(rest, metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        """Read items for this rank.

        Raises:
            MissingKeyError: a key is not in the checkpoint (and `allow_partial_load` is off).
            KindMismatchError, ShapeMismatchError, DtypeMismatchError: it is stored as something else.
        """
        for shard in self._validated:
            self._check_shape(self._stored_tensor(shard.key), shard.key, tuple(shard.global_shape))
        for key, value in self.state_dict.items():
            self._check(key, value)
        items = list(super().create_local_plan().items)
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
            self._check_shape(stored, key, tuple(value.size()))
            self._check_dtype(stored, key, value.dtype)
        elif isinstance(stored, TensorStorageMetadata) and not (
            hasattr(value, "__create_chunk_list__") or hasattr(value, "local_shards")
        ):
            raise KindMismatchError(f"{key}: the checkpoint holds a tensor, the state dict a {type(value).__name__}")

    def _missing(self, key: str) -> MissingKeyError:
        assert self.metadata is not None
        return MissingKeyError(_missing_key_message(key, self.metadata.state_dict_metadata))

    def _stored_tensor(self, key: str) -> TensorStorageMetadata:
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata.get(key)
        if stored is None:
            raise self._missing(key)
        if not isinstance(stored, TensorStorageMetadata):
            raise KindMismatchError(f"{key}: a tensor is wanted, the checkpoint holds an object under this key")
        return stored

    def _check_shape(self, stored: TensorStorageMetadata, key: str, wanted: tuple[int, ...]) -> None:
        if tuple(stored.size) != wanted and key not in self._flexible:
            raise ShapeMismatchError(
                f"{key}: the checkpoint holds global shape {tuple(stored.size)}, the model expects {wanted}"
            )

    def _check_dtype(self, stored: TensorStorageMetadata, key: str, wanted: torch.dtype) -> None:
        if stored.properties.dtype != wanted and not self._options.allow_dtype_cast:
            raise DtypeMismatchError(
                f"{key}: the checkpoint holds {stored.properties.dtype}, the model expects {wanted};"
                " LoadOptions(allow_dtype_cast=True) converts"
            )

    def _tensor_items(self, shard: Any) -> list[ReadItem]:
        stored = self._stored_tensor(shard.key)
        if not shard.allow_shape_mismatch:
            self._check_shape(stored, shard.key, tuple(shard.global_shape))
            self._check_dtype(stored, shard.key, shard.dtype)  # what may differ in shape is converted, too
        if shard.data is None:
            shard.init_data("cpu", torch.zeros if shard.allow_shape_mismatch else torch.empty)
        elif shard.allow_shape_mismatch:
            shard.data.detach().zero_()
        sizes = box_sizes(shard)
        self._targets[shard.key, tuple(shard.global_offset)] = shard.data.detach().view(sizes)
        chunk = ChunkStorageMetadata(offsets=torch.Size(shard.global_offset), sizes=torch.Size(sizes))
        return list(create_read_items_for_chunk_list(shard.key, stored, [chunk]))

    def _object_items(self, shard: Any) -> list[ReadItem]:
        assert self.metadata is not None
        key = shard.unique_key
        stored = self.metadata.state_dict_metadata.get(key)
        if stored is None:
            raise self._missing(key)
        if not isinstance(stored, BytesStorageMetadata):
            raise KindMismatchError(f"{key}: an object is wanted, the checkpoint holds a tensor under this key")
        first = key not in self._objects
        self._objects.setdefault(key, []).append(shard)
        if not first:
            return []
        index = MetadataIndex(key)
        zero = torch.Size((0,))
        return [ReadItem(LoadItemType.BYTE_IO, index, zero, index, zero, zero)]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a stored object where it belongs; its pickle goes through the allow-list.

        Raises:
            UnsafePickleError: the object contains a class outside the allow-list.
        """
        key = read_item.dest_index.fqn
        loaded = load_object(value, self._options.allowed_classes)
        shards = self._objects.get(key)
        if shards is None:
            # DCP's planner knows where the object belongs in a nested state dict; its pickle has just been checked.
            value.seek(0)
            super().load_bytes(read_item, value)
            return
        if not isinstance(loaded, list):
            raise KindMismatchError(f"{key}: expected the list in which Megatron stores objects, got {type(loaded)}")
        if len(loaded) != len(shards):
            raise KindMismatchError(f"{key}: {len(shards)} objects are wanted, the checkpoint holds {len(loaded)}")
        for shard, data in zip(shards, loaded, strict=True):
            shard.data = data

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        offset = None if index.offset is None else tuple(index.offset)
        target = self._targets.get((index.fqn, offset)) if offset is not None else None
        return super().lookup_tensor(index) if target is None else target


def _missing_key_message(key: str, keys: Iterable[str]) -> str:
    """What to say of a key that a checkpoint does not have; names the most similar keys that it has."""
    close = difflib.get_close_matches(key, list(keys), n=3, cutoff=0.6)
    hint = f"; similar keys: {', '.join(close)}" if close else ""
    return f"{key}: the checkpoint has no such key{hint}"
