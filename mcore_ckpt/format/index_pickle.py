"""The pickle of an index, unpickled with inert stand-ins for all that it names, each field of which is checked.

The allowed names were found by reading the planners and writers of torch 2.1 to 2.15 and of megatron-core 0.12 to 0.19,
and by loading what they wrote (`tests/format`). A stand-in keeps what pickle puts into it and does nothing; it is built
in C by pickle's NEWOBJ and BUILD, so that it costs less than the class it stands for. A chunk costs about ten
microseconds in all; where the code is less plain than it could be, that is why.
"""

from __future__ import annotations

import io
import math
import operator
import pickle
import re
import reprlib
from array import array
from collections.abc import Iterable
from itertools import repeat
from pathlib import Path
from typing import Any, NoReturn

from mcore_ckpt.core.errors import CorruptCheckpointError, UnsafePickleError
from mcore_ckpt.format.index import (
    MAX_AXES,
    MAX_OFFSET,
    CheckpointIndex,
    ObjectEntry,
    StoredChunk,
    StoredItem,
    TensorEntry,
    check_file_name,
    is_compressed,
    named_blocks,
)
from mcore_ckpt.format.integrity import Manifest
from mcore_ckpt.format.tensor_pickle import DTYPE_NAMES, WrongArgumentsError, checked_size
from mcore_ckpt.format.unpickler import NotUnderstoodError, ReadOnly, as_read_errors, check_opcodes


def _stand_in(name: str, attributes: str = "") -> Any:
    """A class in the place of one of torch's or Megatron's; its attributes are None where a pickle sets none."""
    return ReadOnly(name, (), dict.fromkeys(attributes.split()))


# Megatron's `MCoreMetadata`, too.
MetadataState = _stand_in("Metadata", "state_dict_metadata planner_data storage_data storage_meta version mcore_data")
# Hashed by identity: cheaper than by value, and a hostile value cannot make it slow.
IndexState = _stand_in("MetadataIndex", "fqn offset index")
TensorEntryState = _stand_in("TensorStorageMetadata", "properties size chunks")
BytesEntryState = _stand_in("BytesStorageMetadata")
ChunkState = _stand_in("ChunkStorageMetadata", "offsets sizes")
# The last came with torch 2.7, and None is left out of the state since.
StorageInfoState = _stand_in("_StorageInfo", "relative_path offset length transform_descriptors")
StorageMetaState = _stand_in("StorageMeta", "checkpoint_id save_id load_id modules")


class PropertiesState(metaclass=ReadOnly):
    """`TensorProperties`: pickled as (dtype, layout, requires_grad, memory format, pin_memory), and since torch 2.15
    its strides (a tuple, or None). What a later torch appends is read over if it is plain.
    """

    dtype: Any = None
    layout: Any = None
    requires_grad: Any = False

    def __setstate__(self, state: Any) -> None:
        if type(state) is dict:
            self.dtype, self.layout = state.get("dtype"), state.get("layout")
            self.requires_grad = state.get("requires_grad", False)
        else:
            self.dtype, self.layout, self.requires_grad, _memory_format, _pin_memory = state[:5]
            for value in state[5:]:
                if type(value) is tuple:
                    known = _INTS.issuperset(map(type, value)) and len(value) <= MAX_AXES
                else:
                    known = type(value) in _PLAIN
                if not known:
                    raise NotUnderstoodError(
                        f"tensor properties of {len(state)} values, one of them a {type(value).__name__} that is not "
                        "plain; expected 5, or 6 with the strides"
                    )


class PathState(metaclass=ReadOnly):
    """`pathlib` paths, as the checkpoint id in `StorageMeta`."""

    def __init__(self, *parts: Any) -> None:
        if not all(type(part) is str for part in parts):
            raise TypeError("parts of a path that are no text")
        self.parts = parts


class OtherPathState(metaclass=ReadOnly):
    """The path of a multi-storage client, which is pickled as its attributes: its text, and a path in the storage."""

    text = ""

    def __setstate__(self, state: Any) -> None:
        text = state.get("_path") if type(state) is dict else None
        if type(text) is not str:
            raise TypeError("a path without its text")
        self.text = text


class DtypeName(str):
    """A `torch.dtype`, as its name without `torch.`."""

    __slots__ = ()


class _Inert(metaclass=ReadOnly):
    """What is allowed to be there but is not used: takes any arguments and any state."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


# What the three below return is as shallow as `check_opcodes` takes it to be.
class _Size(metaclass=ReadOnly):
    """`torch.Size`, as a tuple of ints."""

    def __new__(cls, values: Any = ()) -> Any:
        return checked_size(values)


class _Ordered(dict[Any, Any], metaclass=ReadOnly):
    """`OrderedDict`, which is filled after it was made."""

    def __init__(self, *pairs: Any) -> None:
        if pairs and pairs != ([],):
            raise WrongArgumentsError("expected an empty OrderedDict")

    def __setstate__(self, state: Any) -> None:
        pass


class _Slice(metaclass=ReadOnly):
    """`slice`, of ints."""

    def __new__(cls, *bounds: Any) -> Any:
        if not all(bound is None or type(bound) is int for bound in bounds):
            raise TypeError("a slice of something else than ints")
        return slice(*bounds)


_INTS = frozenset((int,))
_PLAIN = frozenset((bool, int, float, str, type(None)))


_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"

ALLOWED_GLOBALS: dict[tuple[str, str], Any] = {
    (_METADATA, "Metadata"): MetadataState,
    (_MEGATRON, "MCoreMetadata"): MetadataState,
    (_METADATA, "MetadataIndex"): IndexState,
    (_METADATA, "TensorStorageMetadata"): TensorEntryState,
    (_METADATA, "BytesStorageMetadata"): BytesEntryState,
    (_METADATA, "ChunkStorageMetadata"): ChunkState,
    (_METADATA, "StorageMeta"): StorageMetaState,
    (_METADATA, "TensorProperties"): PropertiesState,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _Inert,
    # Up to torch 2.2, DCP took these two from the older sharded tensors.
    (_SHARDED_TENSOR, "TensorProperties"): PropertiesState,
    (_SHARDED_TENSOR, "MEM_FORMAT_ENCODING"): _Inert,
    (_FILESYSTEM, "_StorageInfo"): StorageInfoState,
    (_FILESYSTEM, "_StoragePrefix"): _Inert,
    # `all_local_plans`: every rank's plan, which Megatron keeps for its own reuse.
    (_PLANNER, "SavePlan"): _Inert,
    (_MEGATRON, "MCoreSavePlan"): _Inert,
    (_PLANNER, "WriteItem"): _Inert,
    (_PLANNER, "WriteItemType"): _Inert,
    (_PLANNER, "TensorWriteData"): _Inert,
    (_PLANNER, "BytesIOWriteData"): _Inert,
    ("torch", "Size"): _Size,
    ("torch.serialization", "_get_layout"): _Inert,
    # Python 3.11.0 to 3.11.2 and 3.12 alphas pickle an enum member as getattr(class, name).
    ("builtins", "getattr"): _Inert,
    ("builtins", "slice"): _Slice,
    ("collections", "OrderedDict"): _Ordered,
    **{
        (module, name): PathState
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path")
    },
    # NVIDIA's multi-storage client writes its own paths into the checkpoint id.
    ("multistorageclient.pathlib", "MultiStoragePath"): OtherPathState,
    **{("torch", name): DtypeName(name) for name in DTYPE_NAMES},
}


def unpickle_index(data: bytes, where: str) -> Any:
    """The stand-in for what an index is pickled from. Raises `UnsafePickleError` for a name that is not known."""
    with as_read_errors(where, len(data)):
        check_opcodes(data)
        return _Unpickler(data, where).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data))
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name."""
        try:
            return ALLOWED_GLOBALS[module, name]
        except KeyError:
            pass
        if _is_newer(module, name):
            known = sorted({name for home, name in ALLOWED_GLOBALS if home == module}) or ["another module"]
            raise NotUnderstoodError(f"it names {module:.200}.{name:.200}; expected {', '.join(known)}")
        raise UnsafePickleError(
            f"{self._where}: the pickle asks for {module:.200}.{name:.200}, which is not among the classes that a "
            "checkpoint index may hold. Nothing was imported or run. The file is damaged, was tampered with, or "
            "was written by something other than Megatron-Core, torch.distributed.checkpoint or this package."
        )

    def persistent_load(self, reference: Any) -> NoReturn:
        """An index refers to nothing outside it."""
        shown = repr(reference)[:80] if type(reference) in (str, int) else type(reference).__name__
        raise UnsafePickleError(
            f"{self._where}: the pickle asks for an external object (persistent id {shown}); an index has none. "
            "The file is damaged or is not a checkpoint index."
        )


# Where classes of an index come from, and how dtypes are called.
_HOMES = re.compile(r"(torch\.distributed\.(checkpoint|tensor|_shard)|megatron\.core\.dist_checkpointing)\b[\w.]*")
_CLASS = re.compile(r"_*[A-Z]\w*", re.ASCII)
_DTYPE = re.compile(r"[a-z]*(complex|float|int|bits)\d\w*", re.ASCII)


def _is_newer(module: str, name: str) -> bool:
    """Whether a later torch or Megatron-Core may write that name; one character off a known name is damage."""
    if not (_DTYPE.fullmatch(name) if module == "torch" else _HOMES.fullmatch(module) and _CLASS.fullmatch(name)):
        return False
    text, known = f"{module}.{name}", map(".".join, ALLOWED_GLOBALS)
    return not any(len(text) == len(other) and sum(map(operator.ne, text, other)) == 1 for other in known)


_DTYPES = {DtypeName(name): name for name in DTYPE_NAMES}  # stand-in -> one str for all entries
_ZEROS = tuple((0,) * dimensions for dimensions in range(MAX_AXES + 1))


# As a key in the pickled state of Metadata, as protocol 4 and later write it.
_PLANS_KEY = b"\x8c\x0fall_local_plans\x94"


def _metadata_of(data: bytes, file: str) -> Any:
    """The pickled Metadata, without `all_local_plans` where that can be skipped."""
    # The plans come last and are half of the file. Cut at their key, the closed state (SETITEMS, BUILD, STOP) is a
    # complete Metadata. Where the key's bytes mean something else, the cut pickle fails or lacks storage data.
    cut = data.find(_PLANS_KEY)
    if cut > 0:
        shortened = bytearray(data)
        shortened[cut : cut + 3] = b"ub."  # the rest stays, behind STOP, to fill the frame that was announced
        try:
            state = unpickle_index(bytes(shortened), file)
        except CorruptCheckpointError:
            state = None
        # Megatron 0.12 to 0.15 also wrote `mcore_data`, before the plans; where it is only behind them, nothing is cut.
        whole = type(state) is MetadataState and type(state.storage_data) is dict
        if whole and (state.mcore_data is not None or data.find(b"mcore_data", cut) < 0):
            return state
    state = unpickle_index(data, file)
    if type(state) is not MetadataState:
        raise CorruptCheckpointError(
            f"{file}: expected a pickled torch.distributed.checkpoint Metadata, got {type(state).__name__}. "
            "The file is not the index of a checkpoint."
        )
    return state


def index_of_pickle(data: bytes, path: str, file: str, strict: bool, manifest: Manifest | None) -> CheckpointIndex:
    """The index that the pickle in `data` describes; arguments and errors as of `parse_index`."""
    return _IndexBuilder(path, file, strict, manifest).build(_metadata_of(data, file))


class _IndexBuilder:
    """Checks the stand-ins of one `.metadata` and makes the index of them."""

    def __init__(self, path: str, file: str, strict: bool, manifest: Manifest | None) -> None:
        self._path, self._file, self._strict, self._manifest = path, file, strict, manifest
        self._blocks: dict[tuple[str, int], array[int]] = {}
        self._problems: list[str] = []
        self._safe_names: set[str] = set()

    def build(self, state: Any) -> CheckpointIndex:
        """The index that `state` describes."""
        tensors, objects = self._entries(state)
        return CheckpointIndex(
            self._path,
            tensors,
            objects,
            planner_data=self._plain(state.planner_data, "planner_data"),
            mcore_data=self._mcore_data(state.mcore_data),
            storage_meta=self._storage_meta(state.storage_meta),
            version=state.version if type(state.version) is str else None,
            problems=tuple(self._problems),
            manifest=self._manifest,
            blocks=self._blocks,
        )

    def _entries(self, state: Any) -> tuple[dict[str, TensorEntry], dict[str, ObjectEntry]]:
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
                if type(name) is not str:
                    raise self._wrong(f"file of {fqn!r}", "a str", name)
                check_file_name(self._file, fqn, name)
                safe_names.add(name)
            if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
                raise self._wrong(f"place of {fqn!r} in {name!r}", "non-negative offset and length", (offset, length))
            if offset + length > MAX_OFFSET:
                raise self._wrong(f"end of {fqn!r} in {name!r}", "less than 2**63 bytes", offset + length)
            compressed = is_compressed(info.transform_descriptors, self._file, fqn)
            items[fqn, offsets] = StoredItem(name, offset, length, crc, compressed)
        if manifest is not None:
            if len(items) != len(storage_data):
                raise self._wrong("storage_data", "each key and offset once", len(items))
            if unlisted := safe_names - manifest.files.keys():
                raise self._wrong("the manifest", f"an entry for {min(unlisted)!r}", len(manifest.files))
            self._blocks = named_blocks(manifest, list(items.values()).__getitem__)
        return items

    def _tensor(self, fqn: str, entry: Any, items: dict[tuple[str, tuple[int, ...] | None], StoredItem]) -> TensorEntry:
        properties, shape = entry.properties, _checked_sizes(entry.size)
        if type(properties) is not PropertiesState or type(properties.dtype) is not DtypeName:
            raise self._wrong(f"properties of {fqn!r}", "TensorProperties with a dtype", properties)
        if shape is None:
            raise self._wrong(f"shape of {fqn!r}", f"at most {MAX_AXES} non-negative ints", entry.size)
        if type(entry.chunks) is not list:
            raise self._wrong(f"chunks of {fqn!r}", "a list", entry.chunks)
        if 0 in shape and math.prod(filter(None, shape)) > MAX_OFFSET:
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
        """`value` with plain values for stand-ins; each container once, so shared references cost nothing."""
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
                result = str(Path(*part.parts))
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


# Values in messages are never long, and never a walk through something huge or nested without end.
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
        if type(value) is not int or not 0 <= value <= MAX_OFFSET:
            return None
    return values


def _inside(offsets: tuple[Any, ...], sizes: tuple[Any, ...], shape: tuple[int, ...]) -> bool:
    if not len(offsets) == len(sizes) == len(shape):
        return False
    for start, size, whole in zip(offsets, sizes, shape):  # noqa: B905  (lengths compared above; strict= costs time)
        if type(start) is not int or type(size) is not int or start < 0 or size < 0 or start + size > whole:
            return False
    return True
