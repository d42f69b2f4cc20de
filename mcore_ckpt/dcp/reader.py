"""Loads by DCP: `FileSystemReader`, its `StorageReader` in front of this package's reader; and `MCoreLoadPlanner`.

So `dcp.load(state_dict, storage_reader=FileSystemReader(path))` works, with any planner: the default one's destinations
are filled in place, those of others some at a time. `MCoreLoadPlanner` is DCP's own, which checks more.
"""

from __future__ import annotations

import io
import math
import operator
import os
import uuid
from array import array
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint import planner as dcp
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from mcore_ckpt.core.boxes import Box, covers
from mcore_ckpt.core.errors import CorruptCheckpointError, KindMismatchError, LoadError, OptionError, ShapeMismatchError
from mcore_ckpt.core.options import LoadOptions, checkpoint_path, is_supported
from mcore_ckpt.core.process import collector_paused, run_concurrently
from mcore_ckpt.core.ranks import without_modes
from mcore_ckpt.dcp.writer import index_of, storage_meta
from mcore_ckpt.format.index import CheckpointIndex, PackedTensors, StoredItem, TensorEntry
from mcore_ckpt.format.integrity import shown_id, split_metadata, with_manifest
from mcore_ckpt.format.metadata_read import METADATA_FILE, index_name
from mcore_ckpt.format.safe_pickle import ANY_CLASS, load_object
from mcore_ckpt.load.ranges import batches
from mcore_ckpt.load.reader import CheckpointReader
from mcore_ckpt.load.records import check_apart, missing_key, of_one_save, replaced_error
from mcore_ckpt.load.requests import ReadRequest, check_dtype, stored_dtype, tensor_entry
from mcore_ckpt.state.shards import global_shape, local_chunks

# Bytes of destinations for which a planner makes buffers at once.
_BATCH_BYTES = 64 * 1024 * 1024


class FileSystemReader(CheckpointReader, StorageReader):
    """A `CheckpointReader` that DCP loads by.

    Args:
        path: the checkpoint's directory.
        _extension_registry: DCP's, for stream transforms; refused. (What is compressed with zstd needs none.)
        options: how to read; by default from the environment.

    Raises:
        OptionError: an `_extension_registry` is given.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        _extension_registry: Any = None,
        *,
        options: LoadOptions | None = None,
    ) -> None:
        self._load = ExitStack()
        if _extension_registry is not None:
            raise OptionError(
                "stream transforms (`_extension_registry`) are not supported, and zstd is read without one; read "
                "others with DCP's own FileSystemReader. Options are passed as `options=`"
            )
        self.load_id = str(uuid.uuid4())
        super().__init__(path, options=options)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget what is known of the checkpoint, and read from another one if `checkpoint_id` names it."""
        if checkpoint_id is not None and str(checkpoint_id):
            self.path = checkpoint_path(checkpoint_id)
        self.forget()
        self.load_id = str(uuid.uuid4())

    def forget(self, rank: int | None = None) -> None:
        """As that of the class above; a load that was begun is over."""
        self._load.close()
        self._load = ExitStack()
        self._metadata: Metadata | None = None
        self._covered: set[str] = set()  # keys of tensors of which no chunk is missing
        super().forget(rank)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The directory that is read."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True for what can be a directory of a file system; see `checkpoint_path`."""
        return is_supported(checkpoint_id)

    @without_modes()
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's `Metadata` of the checkpoint, which is read at each call: it may have been replaced since.

        Args:
            args: not used.
            kwargs: `rank`, which DCP gives where there is no `.metadata`: then of what that rank has saved with
                `use_collectives=False`.

        Raises:
            CheckpointNotFoundError, CorruptCheckpointError, UnsafePickleError: as `index`.
        """
        self.forget(kwargs.get("rank"))
        run_concurrently(self._storage.asks_at_once, self._begin_load, lambda: self.index)
        return self.dcp_metadata()

    def dcp_metadata(self) -> Metadata:
        """DCP's `Metadata` of the index in force, which is read if there is none. Raises as `index`."""
        if self._metadata is None:
            self._metadata = to_dcp_metadata(self.index)
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata

    def _begin_load(self) -> None:
        """Until `read_data` has ended, or this reader is deleted, no `prune` removes the checkpoint."""
        with ExitStack() as begun:
            begun.enter_context(self._storage.in_use(METADATA_FILE))
            if self._index is not None:
                begun.enter_context(self.other_tier_in_use())
            self._load.close()  # of a load that was begun before; after the other, so that there is no moment between
            self._load = begun.pop_all()

    @without_modes()
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take the metadata that this load goes by: what this reader has read, or what DCP or a caller hands over.

        Raises:
            CorruptCheckpointError: it does not say where things lie.
        """
        index = self._index
        keys = metadata.state_dict_metadata.keys()  # a caller may have renamed, added or removed some
        if index is None or metadata is not self._metadata or keys != {*index.tensors, *index.objects}:
            index = from_dcp_metadata(metadata, self.path)
            check_apart(index)
            self.read_by(index, self._storage.version(index_name(self._rank)))
            self._metadata = metadata
        self._begin_load()

    def prepare_local_plan(self, plan: dcp.LoadPlan) -> dcp.LoadPlan:
        """The plan, with the id of the save that the index in force is of; empty if it has none, or is of one rank."""
        save = ""
        if self._rank is None and self.index.manifest is not None:
            save = shown_id(self.index.manifest.save_id)
        elif self._rank is None:
            save = str((self.index.storage_meta or {}).get("save_id") or "")
        return replace(plan, storage_data=save)

    def prepare_global_plan(self, plans: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        """The plans.

        Raises:
            LoadError: ranks go by the indexes of two saves.
        """
        saves = {plan.storage_data: rank for rank, plan in enumerate(plans) if plan.storage_data}
        if len(saves) > 1:
            (first, rank), (second, other) = list(saves.items())[:2]
            what = f"rank {rank} has read the index of save {first}, rank {other} that of {second}"
            raise replaced_error(self.path, what)
        return [replace(plan, storage_data=None) for plan in plans]

    @without_modes()
    def read_data(self, plan: dcp.LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan into what its planner gives as destinations.

        Raises:
            ShapeMismatchError, DtypeMismatchError: a destination has another shape than what is stored, or another
                dtype (`LoadOptions.on_dtype_mismatch`).
            CorruptCheckpointError, ChecksumError, UnsafePickleError: stored bytes cannot be right, or not be trusted.
        """
        self._begin_load()
        try:
            with of_one_save(self.index, self.index_version, self._rank), self.files_stay_open():
                self._read_data(plan, planner)
        finally:
            self._load.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_data(self, plan: dcp.LoadPlan, planner: LoadPlanner) -> None:
        if _is_default(planner, "create_local_plan", "create_global_plan", "finish_plan"):
            where = f"{self.path}" if self._rank is None else f"{self.path} of rank {self._rank}"
            _check_planned(plan.items, planner.state_dict, self.index.tensors, where)
        objects: dict[str, list[ReadItem]] = {}
        tensors: list[ReadItem] = []
        for read_item in plan.items:
            if read_item.type == LoadItemType.BYTE_IO:
                objects.setdefault(read_item.storage_index.fqn, []).append(read_item)
            else:
                tensors.append(read_item)
        for entry, content in self._object_contents(self._object_entry(fqn) for fqn in objects):
            given = content if ANY_CLASS in self.options.allowed_classes else self._pickled_again(entry.fqn, content)
            for read_item in objects[entry.fqn]:
                planner.load_bytes(read_item, io.BytesIO(given))
        # A planner may make a buffer for each destination and keep it until the commit (to dequantize from, say): those
        # of a few items at a time must do.
        in_place = _is_default(planner, "resolve_tensor", "transform_tensor", "commit_tensor")
        with self.conversions.of_one_load():
            for batch in [tensors] if in_place else batches(tensors, self._destination_bytes, _BATCH_BYTES):
                destinations: list[torch.Tensor] = []
                self.read_items(self._planned(batch, planner, destinations))
                for read_item, tensor in zip(batch, destinations, strict=True):
                    planner.commit_tensor(read_item, tensor)

    @collector_paused()
    def _planned(
        self, items: Iterable[ReadItem], planner: LoadPlanner, destinations: list[torch.Tensor]
    ) -> list[ReadRequest]:
        """What DCP has planned, with the planner's destinations, which are appended to `destinations`."""
        requests = []
        for read_item in items:
            tensor = planner.resolve_tensor(read_item)
            destinations.append(tensor)
            stored, sizes = read_item.storage_index, tuple(read_item.lengths)
            entry = tensor_entry(stored.fqn, self.index)
            if sizes != entry.shape:
                self._check_covered(entry)
            offsets = tuple(map(operator.add, stored.offset or (), read_item.storage_offsets))
            requests.append(ReadRequest(stored.fqn, tensor, offsets, sizes, entry.shape))
        return requests

    def _check_covered(self, entry: TensorEntry) -> None:
        """Raise `CorruptCheckpointError` if a stored chunk is missing: the destination would stay as it was."""
        if entry.fqn in self._covered or self._rank is not None:
            return
        problem = covers(entry.shape, [Box(chunk.offsets, chunk.sizes) for chunk in entry.chunks])
        if problem:
            raise CorruptCheckpointError(
                f"{entry.fqn}: the stored chunks do not make up the tensor: {problem}. The save of {self.path} did not"
                " finish or its index is damaged; load an earlier checkpoint"
            )
        self._covered.add(entry.fqn)

    def _pickled_again(self, fqn: str, content: bytes) -> bytes:
        """An object in bytes of our own, for a planner that unpickles without restraint, as DCP's does: torch reads the
        stored bytes in other ways (the archive at the other end), so what was checked need not be what it finds.
        """
        found = self._unpickled(fqn, content)
        saved = io.BytesIO()
        try:
            torch.save(found, saved)
        except Exception as error:
            raise LoadError(
                f"{fqn} in {self.path}: was read, but cannot be handed to the load planner ({type(error).__name__}: "
                f"{error!s:.200}); read it with `open_checkpoint({str(self.path)!r}).objects`"
            ) from error
        return saved.getvalue()

    def _destination_bytes(self, read_item: ReadItem) -> int:
        entry = tensor_entry(read_item.storage_index.fqn, self.index)
        return math.prod(read_item.lengths) * stored_dtype(entry).itemsize


def _check_planned(
    items: Iterable[ReadItem], state_dict: Mapping[str, Any], stored: Container[str], where: str
) -> None:
    """Raise `CorruptCheckpointError` unless DCP's read items fill the tensors; DCP leaves what it does not find."""
    planned: Counter[str] = Counter()
    for item in items:
        planned[item.storage_index.fqn] += math.prod(item.lengths)
    for key, value in state_dict.items():
        if isinstance(value, torch.Tensor) and key in stored:
            elems = sum(math.prod(chunk.sizes) for chunk in local_chunks(value))
            if planned[key] != elems:
                raise CorruptCheckpointError(
                    f"{key}: {elems} stored elements are requested, the chunks in {where} hold {planned[key]} of "
                    "them: the save did not finish or its index is damaged (load an earlier checkpoint), or it holds "
                    "the part of one rank alone (load under the layout of the save)"
                )


def _is_default(planner: LoadPlanner, *methods: str) -> TypeGuard[DefaultLoadPlanner]:
    """Whether these methods of a planner are those of DCP's default planner."""
    kind = type(planner)
    return isinstance(planner, DefaultLoadPlanner) and all(
        getattr(kind, name) is getattr(DefaultLoadPlanner, name) for name in methods
    )


class MCoreLoadPlanner(DefaultLoadPlanner):
    """Plans a load as DCP's default planner does, and checks key, kind, global shape and dtype of what is asked for.

    Args:
        options: `LoadOptions`; `on_dtype_mismatch` and `allowed_classes` matter here.
        **default_options: `flatten_state_dict`, `flatten_sharded_tensors`, `allow_partial_load` of DCP's planner.
    """

    def __init__(self, *, options: LoadOptions | None = None, **default_options: Any) -> None:
        super().__init__(**default_options)
        self._options = LoadOptions.from_environment() if options is None else options

    @collector_paused()
    @without_modes()
    def create_local_plan(self) -> dcp.LoadPlan:
        """Read items for this rank.

        Raises:
            MissingKeyError: a key is not in the checkpoint (and `allow_partial_load` is off).
            KindMismatchError, ShapeMismatchError, DtypeMismatchError: it is stored as something else.
            CorruptCheckpointError: the stored chunks do not hold all that is requested.
        """
        assert self.metadata is not None  # DCP sets the planner up with it
        stored = self.metadata.state_dict_metadata
        for key, value in self.state_dict.items():
            if key in stored:
                self._check(key, value, stored[key])
            elif not self.allow_partial_load:
                raise missing_key(key, "the checkpoint", stored)
        plan = super().create_local_plan()
        _check_planned(plan.items, self.state_dict, stored, "the checkpoint")
        return plan

    def _check(self, key: str, value: Any, stored: Any) -> None:
        is_tensor = isinstance(stored, TensorStorageMetadata)
        if isinstance(value, torch.Tensor):
            if not is_tensor:
                raise KindMismatchError(f"{key}: a tensor is requested, the checkpoint holds an object under this key")
            if tuple(stored.size) != global_shape(value):
                raise ShapeMismatchError(
                    f"{key}: the checkpoint holds global shape {tuple(stored.size)}, the model expects "
                    f"{global_shape(value)}"
                )
            policy = self._options.on_dtype_mismatch
            check_dtype(key, "the checkpoint", stored.properties.dtype, value.dtype, policy)
        elif is_tensor and not (hasattr(value, "__create_chunk_list__") or hasattr(value, "local_shards")):
            raise KindMismatchError(f"{key}: the checkpoint holds a tensor, the state dict a {type(value).__name__}")

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a stored object where it belongs; its pickle goes through the allow-list.

        Raises:
            UnsafePickleError: the object contains a class outside the allow-list.
        """
        key = read_item.dest_index.fqn
        loaded = load_object(value.read(), self._options.allowed_classes, where=key)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[key], loaded)
        else:
            self.state_dict[key] = loaded


# --- the index as DCP's `Metadata`, and back --------------------------------------------------------------------------

# Nothing that DCP reads is lost either way: index hints are the positions of the chunks, as stock writers set them, and
# take no part in comparing or hashing a `MetadataIndex`.


@collector_paused()
def to_dcp_metadata(index: CheckpointIndex) -> Metadata:
    """`index` as DCP's `Metadata`; raises `CorruptCheckpointError` if the installed torch lacks one of the dtypes."""

    def info(item: StoredItem) -> _StorageInfo:
        return _StorageInfo(item.file, item.offset, item.length)

    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    properties: dict[tuple[str, bool], TensorProperties] = {}
    for fqn, entry in index.tensors.items():
        kind = entry.dtype, entry.requires_grad
        if kind not in properties:
            dtype = getattr(torch, entry.dtype, None)
            if not isinstance(dtype, torch.dtype):
                raise CorruptCheckpointError(
                    f"{index.path}: {fqn!r} is stored as {entry.dtype}, which torch {torch.__version__} does not have; "
                    "load the checkpoint with a newer torch"
                )
            properties[kind] = TensorProperties(dtype=dtype, requires_grad=entry.requires_grad)
        chunks = []
        for number, chunk in enumerate(entry.chunks):
            offsets = torch.Size(chunk.offsets)
            chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk.sizes)))
            places[MetadataIndex(fqn, offsets, number)] = info(chunk.item)
        entries[fqn] = TensorStorageMetadata(properties[kind], torch.Size(entry.shape), chunks)
    for fqn, stored in index.objects.items():
        entries[fqn] = BytesStorageMetadata()
        places[MetadataIndex(fqn)] = info(stored.item)
    meta = index.storage_meta
    metadata = Metadata(
        entries,
        planner_data=index.planner_data,
        storage_data=places,
        storage_meta=storage_meta(meta or {}),
    )
    # Neither is a field of every torch's Metadata; where it is not, it is an attribute that nobody reads.
    metadata.version = index.version
    if index.mcore_data:
        metadata.mcore_data = index.mcore_data  # type: ignore[attr-defined]
    if index.manifest is not None:
        sums = {
            "manifest": with_manifest(b"", replace(index.manifest, columns=None)),
            "crcs": {(item.file, item.offset): item.crc32 for _, _, item in index.items()},
            "blocks": {place: running.tolist() for place, running in index.blocks.items()},
        }
        setattr(metadata, _SUMS, sums)
    return metadata


# Where the manifest travels through DCP, which may hand the coordinator's `Metadata` to all ranks: an
# attribute of plain values.
_SUMS = "mcore_ckpt_sums"


@collector_paused()
def from_dcp_metadata(metadata: Metadata, path: str | Path) -> CheckpointIndex:
    """The index that a `Metadata` of DCP describes. Raises `CorruptCheckpointError` if an item has no place."""
    sums = getattr(metadata, _SUMS, None) or {"manifest": b"", "crcs": {}, "blocks": {}}
    manifest = split_metadata(sums["manifest"], str(path))[1]
    blocks = {place: array("I", running) for place, running in sums["blocks"].items()}
    index = index_of(metadata, path, sums["crcs"])
    packed = None if manifest is None else PackedTensors.of(index.tensors)
    return replace(index, tensors=packed or index.tensors, manifest=manifest, blocks=blocks)
