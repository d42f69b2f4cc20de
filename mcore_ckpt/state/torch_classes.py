"""The index and the plans as classes of torch.distributed.checkpoint, and back: for its planners and stock callers.

Nothing that DCP reads is lost either way: index hints are the positions of the chunks, as stock writers set them, and
take no part in comparing or hashing a `MetadataIndex`.

Versions of torch differ in the fields of these classes. What one of them lacks is set all the same, and not read there;
what is written is what the oldest one reads.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from array import array
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, StorageMeta, TensorProperties

from mcore_ckpt.core.errors import CorruptCheckpointError
from mcore_ckpt.core.process import collector_paused
from mcore_ckpt.format.index import (
    CheckpointIndex,
    ObjectEntry,
    PackedTensors,
    StoredChunk,
    StoredItem,
    TensorEntry,
    is_compressed,
    of_different_offsets,
)
from mcore_ckpt.format.integrity import ManifestFile, split_metadata, with_manifest
from mcore_ckpt.format.metadata_write import MetadataEncoder, manifest_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

# What torch <= 2.14 reads of a pickled TensorProperties; 2.15 appends the strides, and reads five values as well.
_PROPERTIES = 5


def storage_meta(fields: Mapping[str, Any]) -> StorageMeta:
    """DCP's note of which save this is; where the installed torch lacks a field (`modules` in 2.6), nobody reads it."""
    meta = StorageMeta()
    vars(meta).update(fields)
    return meta


def _reduced_properties(properties: Any) -> tuple[Any, ...]:
    return copyreg.__newobj__, (TensorProperties,), properties.__getstate__()[:_PROPERTIES]  # type: ignore[attr-defined]


def _pickled_metadata(metadata: Metadata) -> bytes:
    """`metadata` as DCP pickles it, in a form that older versions of torch read, too."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream)
    pickler.dispatch_table = {**copyreg.dispatch_table, TensorProperties: _reduced_properties}
    pickler.dump(metadata)
    return stream.getvalue()


@collector_paused()
def to_dcp_metadata(index: CheckpointIndex) -> Metadata:
    """`index` as DCP's `Metadata`; raises `CorruptCheckpointError` if the installed torch lacks one of the dtypes."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

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
    index = _index_of(metadata, path, sums["crcs"])
    packed = None if manifest is None else PackedTensors.of(index.tensors)
    return replace(index, tensors=packed or index.tensors, manifest=manifest, blocks=blocks)


@collector_paused()
def encoded_metadata(
    metadata: Metadata,
    path: str | Path,
    save_id: bytes,
    files: Mapping[str, ManifestFile],
    sums: Mapping[tuple[str, int], ItemSums],
) -> bytes:
    """The content of `.metadata` for what DCP has planned; no manifest where an item has no `sums`."""
    if type(metadata).__name__ not in _KNOWN_METADATA or not _KNOWN_ATTRIBUTES.issuperset(vars(metadata)):
        return _pickled_metadata(metadata)  # of a planner that keeps more in it than anybody knows
    index = _index_of(metadata, path, {place: one.crc32 for place, one in sums.items()})
    tensors = dict(index.tensors)
    for key, entry in tensors.items():
        if len(entry.chunks) > 1 and (kept := of_different_offsets(entry.chunks)):
            tensors[key] = entry._replace(chunks=tuple([entry.chunks[n] for n in kept]))
    index = replace(index, tensors=tensors, blocks={place: one.blocks for place, one in sums.items() if one.blocks})
    index = index.with_fingerprints(_fingerprints(index, sums))
    return MetadataEncoder(index).encode(
        index.objects,
        storage_meta=index.storage_meta,
        manifest=manifest_of(index, save_id, files),
    )


_KNOWN_METADATA = {"Metadata", "MCoreMetadata"}
_KNOWN_ATTRIBUTES = {
    *("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"),
    "mcore_data",
}


class ItemSums(NamedTuple):
    """The checksums of a written item, and its file."""

    file: ManifestFile
    crc32: int  # of its payload; of an object, of all of it
    blocks: array[int]  # cumulative CRC-32 at each block boundary inside a long payload
    part: int | None = None  # what it adds to the fingerprint of its tensor; None where that is not known


def _fingerprints(index: CheckpointIndex, sums: Mapping[tuple[str, int], ItemSums]) -> dict[str, int]:
    """Fingerprints of the tensors that were saved in their own shape and have a checksum of each chunk."""
    found: dict[str, int] = {}
    for key, entry in index.tensors.items():
        if key in index.mcore_data:
            continue
        total = 0
        for chunk in entry.chunks:
            of_item = sums.get((chunk.item.file, chunk.item.offset))
            if of_item is None or of_item.part is None:
                break
            total ^= of_item.part
        else:
            found[key] = total
    return found


def _index_of(metadata: Metadata, path: str | Path, crcs: Mapping[tuple[str, int], int]) -> CheckpointIndex:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    if not isinstance(metadata.storage_data, dict):
        raise CorruptCheckpointError(
            f"{path}: the metadata holds no storage data of DCP's file system writer (got "
            f"{type(metadata.storage_data).__name__}); expected a finished checkpoint of torch_dist or DCP"
        )
    items: dict[tuple[str, tuple[int, ...] | None], StoredItem] = {}
    for key, info in metadata.storage_data.items():
        offsets = None if key.offset is None else tuple(key.offset)
        compressed = is_compressed(getattr(info, "transform_descriptors", None), str(path), key.fqn)  # not in torch 2.6
        crc = crcs.get((info.relative_path, info.offset))
        items[key.fqn, offsets] = StoredItem(info.relative_path, info.offset, info.length, crc, compressed)

    def item_of(fqn: str, offsets: tuple[int, ...] | None) -> StoredItem:
        item = items.get((fqn, offsets))
        if item is None:
            at = "" if offsets is None else f", chunk at {list(offsets)},"
            raise CorruptCheckpointError(f"{path}: {fqn!r}{at} is in the index, but no file holds it")
        return item

    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, ObjectEntry] = {}
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            stored = []
            for chunk in entry.chunks:
                offsets = tuple(chunk.offsets)
                stored.append(StoredChunk(offsets, tuple(chunk.sizes), item_of(fqn, offsets)))
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            tensors[fqn] = TensorEntry(
                fqn, dtype, tuple(entry.size), tuple(stored), bool(entry.properties.requires_grad)
            )
        else:
            objects[fqn] = ObjectEntry(fqn, item_of(fqn, None))
    meta = getattr(metadata, "storage_meta", None)
    fields = None
    if meta is not None:
        checkpoint_id = None if meta.checkpoint_id is None else str(meta.checkpoint_id)
        fields = {
            "checkpoint_id": checkpoint_id,
            "save_id": meta.save_id,
            "load_id": meta.load_id,
            "modules": list(getattr(meta, "modules", ())),
        }
    return CheckpointIndex(
        str(path),
        tensors,
        objects,
        planner_data=metadata.planner_data,
        mcore_data=getattr(metadata, "mcore_data", None) or {},
        storage_meta=fields,
        version=getattr(metadata, "version", None),
    )
