"""The files that describe a checkpoint: `.metadata`, the index of what is stored, and `metadata.json`.

`read_index` turns the `.metadata` of any writer (Megatron-Core 0.12 and later, torch.distributed.checkpoint, this
package) into one plain structure that the reader, the command and verify share, without importing torch. What this
package wrote is read from the columns of its manifest. A pickle is read with inert stand-ins for the classes that it
names, and every field of theirs is checked before it counts. A chunk costs about ten microseconds in all; where the
code is less plain than it could be, that is why.

`metadata_write` makes such a file; `state.torch_classes` turns the index into DCP's own classes.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, cast

from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError, LoadError
from mcore_ckpt.core.options import checkpoint_path
from mcore_ckpt.core.process import collector_paused
from mcore_ckpt.format.index import (
    CheckpointIndex,
    IndexColumns,
    ObjectEntry,
    StoredChunk,
    StoredFingerprints,
    StoredItem,
    TensorEntry,
    read_columns,
)
from mcore_ckpt.format.index_pickle import (
    BytesEntryState,
    ChunkState,
    DtypeName,
    IndexState,
    MetadataState,
    OtherPathState,
    PathState,
    PropertiesState,
    StorageInfoState,
    StorageMetaState,
    TensorEntryState,
    unpickle_index,
)
from mcore_ckpt.format.integrity import FOOTER_BYTES, FileFooter, Manifest, check_footer, decode_footer, split_metadata
from mcore_ckpt.format.tensor_pickle import DTYPE_NAMES, MAX_AXES
from mcore_ckpt.storage.base import RangeReader
from mcore_ckpt.storage.resolve import storage_at

METADATA_FILE = ".metadata"
CONFIG_FILE = "metadata.json"
COMMON_FILE = "common.pt"
# The number of an iteration, or a word.
MAX_TRACKER_BYTES = 64 * 1024
TRACKER_FILE = "latest_checkpointed_iteration.txt"
# Of a directory of NeMo 2: the checkpoint, and what the model is.
NEMO_WEIGHTS, NEMO_CONTEXT = "weights", "context"
INCOMPLETE_MARKER = ".mcore_ckpt_incomplete"
DRAIN_FILE = ".mcore_ckpt_drain"
# Of Megatron-Core, from 0.19 on: SHA-256 of all files.
INTEGRITY_FILE = "integrity.json"

# The index of 1,024 ranks with 1,000 items each, plans included, is 0.43 GB; ten times that is no index any more.
MAX_METADATA_BYTES = 4 * 1024**3
MAX_CONFIG_BYTES = 1024 * 1024
_METADATA_OF_RANK = re.compile(r"__(\d+)" + re.escape(METADATA_FILE))


def index_name(rank: int | None) -> str:
    """Name of the index of a checkpoint that one rank has saved alone; for None, of one that all ranks have saved."""
    return METADATA_FILE if rank is None else f"__{rank}{METADATA_FILE}"


def open_index(path: str | Path, rank: int | None = None) -> RangeReader:
    """The file that `read_index` reads. Raises `CheckpointNotFoundError`, `CorruptCheckpointError`."""
    return _open_small_file(checkpoint_path(path), index_name(rank), MAX_METADATA_BYTES)


def read_index(
    path: str | Path, *, strict: bool = True, rank: int | None = None, opened: RangeReader | None = None
) -> CheckpointIndex:
    """Read the index of the checkpoint in directory `path`, or that of a `rank` saved with `use_collectives=False`.

    `strict`: raise for a chunk or object that has no place in any file; otherwise list it in `problems`. `opened`: its
    file, which stays open. Raises `CheckpointNotFoundError`, `CorruptCheckpointError`, or `UnsafePickleError` for a
    class that no index holds.
    """
    directory, name = checkpoint_path(path), index_name(rank)
    if opened is None:
        data = read_small_file(directory, name, MAX_METADATA_BYTES)
    else:
        data = opened.read(0, opened.size_bytes)
    return parse_index(data, str(directory), strict=strict, name=name)


def parse_index(data: bytes, where: str, *, strict: bool = True, name: str = METADATA_FILE) -> CheckpointIndex:
    """The index in `data`, the content of the file `name` of the checkpoint `where`. Raises as `read_index`."""
    file = f"{where}/{name}"
    with collector_paused():
        pickled, manifest = split_metadata(data, file)  # compares the checksum, before anything is unpickled
        builder = _IndexBuilder(where, file, strict, manifest)
        if manifest is None or manifest.columns is None:
            return builder.build(_unpickle(pickled, file), _PLANS_NAME in pickled)
        what = f"{file}: the index in its manifest"
        return builder.build_of(read_columns(manifest.columns, list(manifest.files), manifest.crcs, DTYPE_NAMES, what))


def checked_footer(index: CheckpointIndex, name: str, reader: RangeReader) -> FileFooter | None:
    """Compare the end of a data file with the manifest; returns the footer, if it has one. Raises as `check_footer`."""
    size_bytes = reader.size_bytes
    end = reader.read(size_bytes - FOOTER_BYTES, FOOTER_BYTES) if size_bytes >= FOOTER_BYTES else b""
    footer = decode_footer(end, reader.name)
    check_footer(footer, size_bytes, None if index.manifest is None else index.manifest.files.get(name), reader.name)
    return footer


def pickle_differs(path: str | Path) -> str | None:
    """What the pickle in the `.metadata` of the checkpoint in `path` says otherwise than its columns; None if nothing.

    Others read the pickle, this package the columns. Raises as `read_index`.
    """
    directory = checkpoint_path(path)
    data = read_small_file(directory, METADATA_FILE, MAX_METADATA_BYTES)
    pickled, manifest = split_metadata(data, str(directory / METADATA_FILE))
    if manifest is None or manifest.columns is None:
        return None
    ours, others = parse_index(data, str(directory)), parse_index(pickled, str(directory))
    for kind, own, other in (
        ("tensor", ours.tensors, others.tensors),
        ("object", ours.objects, others.objects),
    ):
        for key in dict.fromkeys((*own, *other)):
            said = [_without_crcs(entries[key]) if key in entries else None for entries in (own, other)]
            if said[0] != said[1]:
                return f"{kind} {key!r:.200}: its columns say {said[0]!r:.300}, its pickle {said[1]!r:.300}"
    for field in ("planner_data", "mcore_data", "storage_meta", "version", "has_local_plans"):
        if getattr(ours, field) != getattr(others, field):
            return f"{field}: its columns and its pickle differ"  # not shown: it may nest without end
    return None


def _without_crcs(entry: TensorEntry | ObjectEntry) -> TensorEntry | ObjectEntry:
    if isinstance(entry, ObjectEntry):
        return ObjectEntry(entry.fqn, entry.item._replace(crc32=None))
    chunks = tuple(chunk._replace(item=chunk.item._replace(crc32=None)) for chunk in entry.chunks)
    return entry._replace(chunks=chunks)


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """`metadata.json`: which strategy wrote the sharded and the common part."""

    backend: str = "torch_dist"
    version: int = 1
    common_backend: str = "torch"
    common_version: int = 1


def read_config(path: str | Path) -> CheckpointConfig | None:
    """`metadata.json` of the checkpoint in `path`; None where there is none (plain DCP). Raises
    `CorruptCheckpointError`.
    """
    directory = checkpoint_path(path)
    try:
        text = read_small_file(directory, CONFIG_FILE, MAX_CONFIG_BYTES)
    except CheckpointNotFoundError:
        return None
    try:
        fields = json.loads(text)
        config = CheckpointConfig(
            fields.pop("sharded_backend"),
            fields.pop("sharded_backend_version"),
            fields.pop("common_backend", "torch"),
            fields.pop("common_backend_version", 1),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{directory / CONFIG_FILE}: expected a JSON object with sharded_backend and sharded_backend_version "
            f"({type(error).__name__}: {error!s:.200}). Restore it from another checkpoint of the same run."
        ) from error
    values = (config.backend, config.version, config.common_backend, config.common_version)
    if list(map(type, values)) != [str, int, str, int]:
        raise CorruptCheckpointError(
            f"{directory / CONFIG_FILE}: expected sharded_backend and common_backend to be strings and their versions "
            f"to be ints, got {values!r:.200}. Restore it from another checkpoint of the same run."
        )
    return config


def encode_config() -> bytes:
    """The content of `metadata.json`, in Megatron's form."""
    sharded = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    return json.dumps({**sharded, "common_backend": "torch", "common_backend_version": 1}).encode()


def read_small_file(directory: Path, name: str, max_bytes: int, *, follow_links: bool = False) -> bytes:
    """All of a file that has no reason to be large. Raises `LoadError`, of the class that says why."""
    with _open_small_file(directory, name, max_bytes, follow_links=follow_links) as reader:
        return reader.read(0, reader.size_bytes)


def _open_small_file(directory: Path, name: str, max_bytes: int, *, follow_links: bool = False) -> RangeReader:
    try:
        reader = storage_at(directory, follow_links=follow_links).open_reader(name, direct="off")
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(_not_found(directory, name)) from error
    if reader.size_bytes > max_bytes:
        reader.close()
        raise CorruptCheckpointError(
            f"{reader.name}: expected at most {max_bytes} bytes, the file has {reader.size_bytes}"
        )
    return reader


def _not_found(directory: Path, name: str) -> str:
    """What is wrong with `directory`, and which directory may have been meant."""
    storage = storage_at(directory)
    try:
        names, folders = storage.sizes(), storage.folders()
    except LoadError as error:
        return f"{error}; check the path of the checkpoint"
    if any(other.startswith(INCOMPLETE_MARKER) for other in names):
        return f"{directory}: holds no {name}: a save into it was interrupted. Load an earlier checkpoint."
    iterations = [n for n in folders if n.startswith("iter_") and storage.exists(f"{n}/{METADATA_FILE}")]
    if iterations:
        return (
            f"{directory}: holds no {name} itself, but checkpoints of {len(iterations)} iterations; "
            f"give one of them, for example {directory / iterations[-1]}"
        )
    if storage.exists(f"{NEMO_WEIGHTS}/{METADATA_FILE}"):
        return f"{directory}: holds no {name} itself; NeMo keeps the checkpoint in {directory / NEMO_WEIGHTS}: use that"
    ranks = sorted(int(found[1]) for n in names if (found := _METADATA_OF_RANK.fullmatch(n)))
    if ranks:
        return (
            f"{directory}: holds no {name}, but the checkpoints of {len(ranks)} single ranks ({ranks[0]} to "
            f"{ranks[-1]}): it was saved by `dcp.save(use_collectives=False)`. Each rank can load only what it saved: "
            f"use `dcp.load` on {len(ranks)} ranks, under the layout of the save"
        )
    return (
        f"{directory}: holds no {name}, so there is no finished checkpoint in it. The save did not finish, "
        "or this is not a checkpoint in the torch_dist or torch.distributed.checkpoint format."
    )


# ------------------------------------------------------------------------------------------ from stand-ins to index

_MAX_OFFSET = 2**63 - 1
_DTYPES = {DtypeName(name): name for name in DTYPE_NAMES}  # stand-in -> one str for all entries
_ZEROS = tuple((0,) * dimensions for dimensions in range(MAX_AXES + 1))


_PLANS_NAME = b"all_local_plans"
# The name as a key in the pickled state of Metadata, as protocol 4 and later write it.
_PLANS_KEY = b"\x8c\x0f" + _PLANS_NAME + b"\x94"


def _unpickle(data: bytes, file: str) -> MetadataState:
    """The pickled Metadata, without `all_local_plans` where that can be skipped."""
    # The plans come last and are half of the file. Cut at their key, the closed state (SETITEMS, BUILD, STOP) is a
    # complete Metadata. Where the key's bytes mean something else, the cut pickle fails or lacks storage data.
    cut = data.find(_PLANS_KEY)
    if cut > 0:
        shortened = bytearray(data)
        shortened[cut : cut + 3] = b"ub."  # the rest stays, behind STOP, to fill the frame that was announced
        try:
            state: Any = unpickle_index(bytes(shortened), file)
        except CorruptCheckpointError:
            state = None
        # Megatron 0.12 to 0.15 also wrote `mcore_data`, before the plans; where it is only behind them, nothing is cut.
        whole = type(state) is MetadataState and type(state.storage_data) is dict
        if whole and (state.mcore_data is not None or data.find(b"mcore_data", cut) < 0):
            return cast("MetadataState", state)
    state = unpickle_index(data, file)
    if type(state) is not MetadataState:
        raise CorruptCheckpointError(
            f"{file}: expected a pickled torch.distributed.checkpoint Metadata, got {type(state).__name__}. "
            "The file is not the index of a checkpoint."
        )
    return state


class _IndexBuilder:
    """Checks the stand-ins of one `.metadata` and makes the index of them."""

    def __init__(self, path: str, file: str, strict: bool, manifest: Manifest | None) -> None:
        self._manifest = manifest
        self._blocks: dict[tuple[str, int], array[int]] = {}
        self._path = path
        self._file = file
        self._strict = strict
        self._problems: list[str] = []
        self._safe_names: set[str] = set()

    def build(self, state: MetadataState, has_local_plans: bool) -> CheckpointIndex:
        """The index that `state` describes."""
        tensors, objects = self._entries(state)
        index = CheckpointIndex(
            self._path,
            tensors,
            objects,
            planner_data=self._plain(state.planner_data, "planner_data"),
            mcore_data=self._mcore_data(state.mcore_data),
            storage_meta=self._storage_meta(state.storage_meta),
            version=state.version if type(state.version) is str else None,
            has_local_plans=has_local_plans,
            problems=tuple(self._problems),
            manifest=self._manifest,
            blocks=self._blocks,
        )
        return self._with_fingerprints(index)

    def build_of(self, columns: IndexColumns) -> CheckpointIndex:
        """The index that columns describe."""
        manifest = self._manifest
        assert manifest is not None
        places, objects = columns.tensors.places, [entry.item for entry in columns.objects.values()]
        for file in {*map(places.files.__getitem__, set(places.file_numbers)), *(item.file for item in objects)}:
            self._check_file_name("a file", file)
        chunks = len(places.crcs)
        self._check_manifest(
            manifest,
            chunks + len(objects),
            lambda number: places.item(number) if number < chunks else objects[number - chunks],
        )
        return self._with_fingerprints(
            CheckpointIndex(
                self._path, *columns, problems=tuple(self._problems), manifest=manifest, blocks=self._blocks
            )
        )

    def _with_fingerprints(self, index: CheckpointIndex) -> CheckpointIndex:
        column = None if index.manifest is None else index.manifest.fingerprints
        if column is None:
            return index
        if len(column) != len(index.tensors):
            raise self._wrong("the number of fingerprints", str(len(index.tensors)), len(column))
        return index.with_fingerprints(StoredFingerprints(index.tensors, column))

    def _entries(self, state: MetadataState) -> tuple[dict[str, TensorEntry], dict[str, ObjectEntry]]:
        items = self._items(state.storage_data)
        if type(state.state_dict_metadata) is not dict:
            raise self._wrong("state_dict_metadata", "a dict", state.state_dict_metadata)
        tensors: dict[str, TensorEntry] = {}
        objects: dict[str, ObjectEntry] = {}
        for fqn, entry in state.state_dict_metadata.items():
            if type(fqn) is not str:
                raise self._wrong("a key of state_dict_metadata", "a str", fqn)
            if type(entry) is TensorEntryState:
                tensors[fqn] = self._tensor(fqn, entry, items)
            elif type(entry) is BytesEntryState:
                item = items.get((fqn, None))
                if item is None:
                    self._problem(f"object {fqn!r} is in the index, but no file holds it")
                else:
                    objects[fqn] = ObjectEntry(fqn, item)
            else:
                raise self._wrong(f"{fqn!r}", "TensorStorageMetadata or BytesStorageMetadata", entry)
        return tensors, objects

    def _items(self, storage_data: Any) -> dict[tuple[str, tuple[int, ...] | None], StoredItem]:
        """Where each (fqn, chunk offsets) lies; offsets are None for objects."""
        if type(storage_data) is not dict:
            raise self._wrong("storage_data", "a dict (is the checkpoint unfinished?)", storage_data)
        items: dict[tuple[str, tuple[int, ...] | None], StoredItem] = {}
        safe_names = self._safe_names
        manifest = self._manifest
        if manifest is not None and len(manifest.crcs) != len(storage_data):
            raise self._wrong("the manifest's number of items", str(len(storage_data)), len(manifest.crcs))
        sums: Iterable[int | None] = repeat(None) if manifest is None else manifest.crcs
        for (key, info), crc in zip(storage_data.items(), sums, strict=False):
            if type(key) is not IndexState or type(key.fqn) is not str:
                raise self._wrong("a key of storage_data", "a MetadataIndex with a str fqn", key)
            fqn, offsets = key.fqn, key.offset
            if offsets is not None and (offsets := _checked_sizes(offsets)) is None:
                raise self._wrong(f"offset of {fqn!r}", "non-negative ints", key.offset)
            if type(info) is not StorageInfoState:
                raise self._wrong(f"place of {fqn!r}", "a _StorageInfo", info)
            name, offset, length = info.relative_path, info.offset, info.length
            if type(name) is not str or name not in safe_names:
                self._check_file_name(fqn, name)
            if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
                raise self._wrong(f"place of {fqn!r} in {name!r}", "non-negative offset and length", (offset, length))
            if offset + length > _MAX_OFFSET:
                raise self._wrong(f"end of {fqn!r} in {name!r}", "less than 2**63 bytes", offset + length)
            transforms = info.transform_descriptors
            items[fqn, offsets] = (
                StoredItem(name, offset, length, (), crc)
                if transforms is None
                else StoredItem(name, offset, length, self._transforms(fqn, transforms), crc)
            )
        if manifest is not None:
            self._check_manifest(manifest, len(items), list(items.values()).__getitem__)
        return items

    def _check_manifest(self, manifest: Manifest, count: int, item_at: Callable[[int], StoredItem]) -> None:
        """Compare the manifest with the places, and keep its cumulative CRCs by place; `item_at`: an item by number."""
        if count != len(manifest.crcs):
            raise self._wrong("storage_data", "each key and offset once", count)
        unlisted = self._safe_names - manifest.files.keys()
        if unlisted:
            raise self._wrong(
                "the manifest", f"an entry for each file, {min(unlisted)!r} among them", len(manifest.files)
            )
        for number, sums in manifest.running():
            item = item_at(number)
            self._blocks[item.file, item.offset] = sums

    def _tensor(
        self, fqn: str, entry: TensorEntryState, items: dict[tuple[str, tuple[int, ...] | None], StoredItem]
    ) -> TensorEntry:
        properties, shape = entry.properties, _checked_sizes(entry.size)
        if type(properties) is not PropertiesState or type(properties.dtype) is not DtypeName:
            raise self._wrong(f"properties of {fqn!r}", "TensorProperties with a dtype", properties)
        if shape is None:
            raise self._wrong(f"shape of {fqn!r}", f"at most {MAX_AXES} non-negative ints", entry.size)
        if type(entry.chunks) is not list:
            raise self._wrong(f"chunks of {fqn!r}", "a list", entry.chunks)
        if 0 in shape and math.prod(filter(None, shape)) > _MAX_OFFSET:
            raise self._wrong(f"shape of {fqn!r}", "axes that can be multiplied", shape)
        chunks = []
        zeros = _ZEROS[len(shape)]
        for chunk in entry.chunks:
            if type(chunk) is not ChunkState:
                raise self._wrong(f"a chunk of {fqn!r}", "ChunkStorageMetadata", chunk)
            offsets, sizes = chunk.offsets, chunk.sizes
            if offsets == zeros and sizes == shape:
                offsets, sizes = zeros, shape  # stored whole, most often; these two are known to be tuples of ints
            elif type(offsets) is not tuple or type(sizes) is not tuple or not _inside(offsets, sizes, shape):
                raise self._wrong(f"a chunk of {fqn!r}", f"a box inside the shape {list(shape)}", (offsets, sizes))
            item = items.get((fqn, offsets))
            if item is None:
                self._problem(f"tensor {fqn!r}: no file holds the chunk at {list(offsets)} of sizes {list(sizes)}")
            else:
                chunks.append(StoredChunk(offsets, sizes, item))
        return TensorEntry(fqn, _DTYPES[properties.dtype], shape, tuple(chunks), properties.requires_grad is True)

    def _check_file_name(self, fqn: str, name: Any) -> None:
        if type(name) is not str:
            raise self._wrong(f"file of {fqn!r}", "a str", name)
        problem = file_name_problem(name)
        if problem:
            raise CorruptCheckpointError(
                f"{self._file}: {fqn!r:.200} is said to lie in the file {name!r:.200}, whose name {problem}. "
                "A checkpoint only names files inside its own directory; do not load this one unless you know who "
                "changed it."
            )
        self._safe_names.add(name)

    def _transforms(self, fqn: str, descriptors: Any) -> tuple[str, ...]:
        if type(descriptors) not in (list, tuple) or not all(type(text) is str for text in descriptors):
            raise self._wrong(f"transform_descriptors of {fqn!r}", "a sequence of str", descriptors)
        return tuple(descriptors)

    def _mcore_data(self, value: Any) -> dict[str, dict[str, Any]]:
        plain = self._plain(value, "mcore_data")
        if plain is None:
            return {}
        if type(plain) is not dict or not all(type(k) is str and type(v) is dict for k, v in plain.items()):
            raise self._wrong("mcore_data", "a dict of dicts", value)
        return plain

    def _storage_meta(self, value: Any) -> dict[str, Any] | None:
        if type(value) is not StorageMetaState:
            return None
        fields = {name: getattr(value, name) for name in ("checkpoint_id", "save_id", "load_id", "modules")}
        plain = {name: self._plain(part, f"storage_meta.{name}") for name, part in fields.items()}
        return {**plain, "modules": plain["modules"] or []}  # came with torch 2.7

    def _plain(self, value: Any, what: str) -> Any:
        """`value` with stand-ins turned into plain values; each container once, so that shared references cost
        no more.
        """
        done: dict[int, Any] = {}

        def convert(part: Any) -> Any:
            kind = type(part)
            if part is None or kind in (str, int, float, bool, bytes):
                return part
            if kind is DtypeName:
                return str(part)
            if id(part) in done:
                return done[id(part)]
            if isinstance(part, dict):
                result: Any = {}
                done[id(part)] = result
                result.update((convert(key), convert(item)) for key, item in dict.items(part))
                return result
            if kind is list:
                result = done[id(part)] = []
                result.extend(map(convert, part))
                return result
            if kind is tuple:
                result = tuple(map(convert, part))
            elif kind in (set, frozenset):
                result = kind(map(convert, part))
            elif kind is PathState:
                result = str(Path(*map(str, part.parts)))
            elif kind is OtherPathState:
                result = part.text
            elif kind is slice:
                result = part
            else:
                raise self._wrong(what, "plain containers, numbers and strings", part)
            done[id(part)] = result
            return result

        try:
            return convert(value)
        except (RecursionError, TypeError) as error:
            raise self._wrong(what, "plain containers, numbers and strings", value) from error

    def _problem(self, text: str) -> None:
        if self._strict:
            raise CorruptCheckpointError(
                f"{self._file}: {text:.500}. The save that wrote it did not finish; load an earlier checkpoint, or "
                f"list all that is missing with `mcore-ckpt verify {self._path}`."
            )
        self._problems.append(text)

    def _wrong(self, what: str, expected: str, got: Any) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self._file}: {what:.300}: expected {expected}, got {_SHORT.repr(got)}. The index is damaged; restore it "
            "from another copy, or load an earlier checkpoint."
        )


# Of values in messages: never long, and never a walk through something huge or nested without end.
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxtuple, _SHORT.maxstring = 2, 16, 200


def _checked_sizes(values: Any) -> tuple[int, ...] | None:
    """`values` as a tuple of ints from 0 to 2**63 - 1, or None if it is anything else."""
    if type(values) is not tuple or len(values) > MAX_AXES:
        return None
    zeros = _ZEROS[len(values)]
    if values == zeros:
        return zeros  # equal need not mean ints: 0.0 == 0
    for value in values:
        if type(value) is not int or not 0 <= value <= _MAX_OFFSET:
            return None
    return values


def _inside(offsets: tuple[Any, ...], sizes: tuple[Any, ...], shape: tuple[int, ...]) -> bool:
    if not len(offsets) == len(sizes) == len(shape):
        return False
    for start, size, whole in zip(offsets, sizes, shape):  # noqa: B905  (lengths compared above; strict= costs time)
        if type(start) is not int or type(size) is not int or start < 0 or size < 0 or start + size > whole:
            return False
    return True


def file_name_problem(name: str) -> str | None:
    """Why `name` cannot be a data file of a checkpoint, or None: it must stay inside the directory on any system."""
    if not name:
        return "is empty"
    if len(name) > 4096:
        return "is longer than 4096 characters"
    if not name.isprintable():
        return "holds control characters"
    if "\\" in name or ":" in name:
        return "holds a backslash or colon, which some systems read as a path"
    if any(part in ("", ".", "..") for part in name.split("/")):
        return "leaves the checkpoint's directory, or is not in its shortest form"
    return None
