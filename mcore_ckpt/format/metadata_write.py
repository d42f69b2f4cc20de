"""`.metadata` emitted by hand: a pickle of DCP's own classes, made without torch and re-made for a few microseconds.

Stock Megatron-Core and torch.distributed.checkpoint (torch 2.6 and later) unpickle it into the same objects that their
own writers would have pickled; nothing else is named in it.

The pickle (protocol 4, one frame) is put together from pieces that refer to each other by memo number only:

    names        classes, attribute names, one TensorProperties for each dtype, file names: memoized, then popped
    Metadata
      planner_data, mcore_data
      state_dict_metadata    tensors | objects
      storage_data           tensors | objects
      storage_meta, version

Memo numbers count upwards in the order of the stream. The pieces of the tensors come before those of the objects
wherever both memoize something, so they depend on the tensors alone: while the structure of a model is unchanged, they
are emitted once, and later saves of it only add the objects' places.
"""

from __future__ import annotations

import io
import pickle
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import chain
from struct import Struct
from typing import Any, NamedTuple

from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.format.index import META_IDS, CheckpointIndex, ObjectEntry, TensorEntry, object_section, tensor_section
from mcore_ckpt.format.integrity import NO_FINGERPRINT, Manifest, ManifestFile, with_manifest
from mcore_ckpt.format.metadata_read import COMMON_FILE

# What torch 2.8 and later write into `Metadata.version`; earlier ones ignore it.
FORMAT_VERSION = "1.0.0"

_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = {
    "Metadata": _METADATA,
    "MetadataIndex": _METADATA,
    "TensorStorageMetadata": _METADATA,
    "BytesStorageMetadata": _METADATA,
    "ChunkStorageMetadata": _METADATA,
    "StorageMeta": _METADATA,
    "TensorProperties": _METADATA,
    "_MEM_FORMAT_ENCODING": _METADATA,
    "_StorageInfo": "torch.distributed.checkpoint.filesystem",
    "Size": "torch",
    "_get_layout": "torch.serialization",
}
_ATTRIBUTES = (
    *("fqn", "offset", "index", "properties", "size", "chunks", "offsets", "sizes"),
    *("relative_path", "length"),
)

_PACK_INT = Struct("<ci").pack
_PACK_GET = Struct("<cI").pack


def _text(value: str) -> bytes:
    """SHORT_BINUNICODE or BINUNICODE."""
    data = value.encode("utf-8", "surrogatepass")
    if len(data) < 256:
        return b"\x8c" + bytes((len(data),)) + data
    return b"X" + len(data).to_bytes(4, "little") + data


_BYTES = tuple(b"K" + bytes((value,)) for value in range(256))


def _integer(value: int) -> bytes:
    """BININT1, BININT or LONG1."""
    if 0 <= value < 256:
        return _BYTES[value]
    if -(2**31) <= value < 2**31:
        return _PACK_INT(b"J", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes((len(data),)) + data


_PACK_FRAME = Struct("<cQ").pack


def _tuple(values: Iterable[int]) -> bytes:
    """MARK, the ints, TUPLE."""
    return b"(" + b"".join(map(_integer, values)) + b"t"


def _new(class_get: bytes, state: bytes) -> bytes:
    """NEWOBJ without arguments, its state as a dict (MARK, names and values, SETITEMS), BUILD."""
    return class_get + b")\x81}(" + state + b"ub"


@dataclass(slots=True)
class _Memo:
    """Numbers of what has been memoized so far; MEMOIZE takes the next one."""

    count: int = 0

    def next(self) -> bytes:
        """The BINGET or LONG_BINGET of what the MEMOIZE that is being emitted stores."""
        number = self.count
        self.count += 1
        return b"h" + bytes((number,)) if number < 256 else _PACK_GET(b"j", number)


def _pickled(value: Any, memo: _Memo) -> bytes:
    """Any picklable value, in one piece that continues the memo."""
    # The C pickler numbers by the size of its memo, so placeholders move its first number. Protocol 3 has no frames,
    # which must not be nested into ours; its opcodes are legal in a protocol 4 stream.
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=3)
    placeholders = [object() for _ in range(memo.count)]
    pickler.memo = {number: (number, placeholder) for number, placeholder in enumerate(placeholders)}
    pickler.dump(value)
    memo.count = len(pickler.memo.copy())
    return stream.getvalue()[2:-1]  # without PROTO and STOP


class ChunkFactors(NamedTuple):
    """How the fingerprints of tensors are put together from the CRC-32s of their chunks, as these are encoded."""

    factors: array[int]  # of each chunk's CRC-32; 0 if that is several runs of its tensor (`array('I')`)
    firsts: array[int]  # number of the first chunk of each tensor (`array('q')`)


class MetadataEncoder:
    """Encodes `.metadata` for one structure of tensors; what depends on the tensors alone is made once. `order`: for
    each item of a tensor, as it is encoded, its number in the plans that were put together. `factors`: if fingerprints
    are to be stored.
    """

    def __init__(
        self, index: CheckpointIndex, order: array[int] | None = None, factors: ChunkFactors | None = None
    ) -> None:
        self.order = array("I") if order is None else order
        self.factors = factors
        memo = _Memo()
        self._names = self._emit_names(memo, index.tensors.values())
        # File names are emitted at the end of the names, for each save: they may change while nothing else does.
        self._files = list(dict.fromkeys(c.item.file for entry in index.tensors.values() for c in entry.chunks))
        self._file_gets = {name: memo.next() for name in self._files}
        self._head = self._attributes["Metadata"] + b")\x81}(" + _text("planner_data")
        self._head += _pickled(index.planner_data, memo)
        if index.mcore_data:
            self._head += _text("mcore_data") + _pickled(index.mcore_data, memo)
        self._head += _text("state_dict_metadata") + b"}("
        self._tensor_entries, self._tensor_places = self._emit_tensors(memo, index.tensors.values())
        self._version = index.version or FORMAT_VERSION
        self._memo_count = memo.count
        self._planner_data = index.planner_data
        self._keys = list(index.tensors) if index.planner_data is not None else []
        self._columns = tensor_section(index.tensors.values(), index.mcore_data)
        self._removed = {} if index.removed is None else {"removed": asdict(index.removed)}

    def encode(
        self,
        objects: Mapping[str, ObjectEntry],
        *,
        files: Mapping[str, str] | None = None,
        storage_meta: Mapping[str, Any] | None = None,
        manifest: Manifest | None = None,
    ) -> bytes:
        """The content of `.metadata`. `files` has new names for files of the tensors; names that are not in it stay.

        The items of `manifest` are the tensors' chunks, then the objects; the index is put into it in columns.
        """
        renamed = files or {}
        pickled_meta = b"N"
        meta: dict[str, Any] | None = None
        if storage_meta is not None:
            ids = {name: None if storage_meta.get(name) is None else str(storage_meta[name]) for name in META_IDS}
            modules = [str(name) for name in storage_meta.get("modules") or ()]
            meta = {**ids, "modules": modules}
            state = b"".join(_text(name) + (b"N" if text is None else _text(text)) for name, text in ids.items())
            state += _text("modules") + b"](" + b"".join(map(_text, modules)) + b"e"
            pickled_meta = _new(self._attributes["StorageMeta"], state)
        file_names = b"".join(_text(renamed.get(name, name)) + b"\x940" for name in self._files)
        entries, places = self._emit_objects(_Memo(self._memo_count), objects)
        parts = [
            self._names,
            file_names,
            self._head,
            self._tensor_entries,
            entries,
            b"u" + _text("storage_data") + b"}(",
            self._tensor_places,
            places,
            b"u" + _text("storage_meta"),
            pickled_meta,
            _text("version") + _text(self._version) + b"ub.",
        ]
        body = b"".join(parts)
        content = b"\x80\x04" + _PACK_FRAME(b"\x95", len(body)) + body
        if manifest is None:
            return content
        # (The last is what earlier versions of this package ask for.)
        details = {"storage_meta": meta, "version": self._version, "has_local_plans": False, **self._removed}
        return with_manifest(content, self._with_columns(manifest, objects, renamed, details))

    def _with_columns(
        self,
        manifest: Manifest,
        objects: Mapping[str, ObjectEntry],
        renamed: Mapping[str, str],
        details: dict[str, Any],
    ) -> Manifest:
        """The manifest with the index in columns, if they can say all of it."""
        of_tensors = self._columns
        own = [] if of_tensors is None else [renamed.get(name, name) for name in of_tensors[1]]
        named = {*own, *(entry.item.file for entry in objects.values())}
        if of_tensors is None or not named <= manifest.files.keys():
            return manifest
        files = {name: manifest.files[name] for name in own} | dict(manifest.files)  # as the columns number them
        numbers = dict(zip(files, range(len(files)), strict=True))
        of_objects = object_section(objects, numbers, self._keys, self._planner_data, details)
        if of_objects is None:
            return manifest
        return replace(manifest, files=files, columns=(of_tensors[0], of_objects))

    def _emit_names(self, memo: _Memo, tensors: Iterable[TensorEntry]) -> bytes:
        """Memoize (and pop) everything that has a name and is used again and again."""
        names = [(name, _text(module) + _text(name) + b"\x93") for name, module in _CLASSES.items()]
        names += [(name, _text(name)) for name in _ATTRIBUTES]
        self._attributes = {name: memo.next() for name, _ in names}
        parts = [made + b"\x940" for _, made in names]
        layout = self._attributes["_get_layout"] + _text("torch.strided") + b"\x85R"
        memory_format = self._attributes["_MEM_FORMAT_ENCODING"] + b"K\x00\x85R"  # contiguous
        self._properties: dict[tuple[str, bool], bytes] = {}
        for dtype, requires_grad in dict.fromkeys((entry.dtype, entry.requires_grad) for entry in tensors):
            parts += [
                self._attributes["TensorProperties"] + b")\x81(",
                _text("torch") + _text(dtype) + b"\x93",
                layout + (b"\x88" if requires_grad else b"\x89") + memory_format + b"\x89",  # pin_memory is False
                b"tb\x940",
            ]
            self._properties[dtype, requires_grad] = memo.next()
        return b"".join(parts)

    def _emit_tensors(self, memo: _Memo, tensors: Iterable[TensorEntry]) -> tuple[bytes, bytes]:
        """Entries of `state_dict_metadata`, and those of `storage_data`, which memoize nothing."""
        get = self._attributes
        all_entries, all_places = bytearray(), bytearray()
        sizes: dict[tuple[int, ...], bytes] = {}

        def new_size(values: tuple[int, ...]) -> bytes:
            sizes[values] = memo.next()
            return size_open + _tuple(values) + b"\x85R\x94"

        size_open = get["Size"]
        entry_open = b"\x94" + get["TensorStorageMetadata"] + b")\x81}(" + get["properties"]
        chunk_open, chunk_sizes_get = get["ChunkStorageMetadata"] + b")\x81}(" + get["offsets"], get["sizes"]
        place_open = get["MetadataIndex"] + b")\x81}(" + get["fqn"]
        numbers: list[bytes] = []  # of the chunks of one tensor
        placed = {name: b"ub" + self._place_open(file_get) for name, file_get in self._file_gets.items()}
        length_get = get["length"]
        for entry in tensors:
            fqn_get = memo.next()
            properties = self._properties[entry.dtype, entry.requires_grad]
            shape = sizes.get(entry.shape) or new_size(entry.shape)
            # Joined for each tensor: the pieces of all take ten times the memory.
            places: list[bytes] = []
            entries = [_text(entry.fqn), entry_open, properties, get["size"], shape, get["chunks"], b"]("]
            while len(numbers) < len(entry.chunks):
                numbers.append(get["index"] + _integer(len(numbers)) + get["offset"])
            for number, (offsets, chunk_sizes, item) in zip(numbers, entry.chunks, strict=False):
                start = sizes.get(offsets) or new_size(offsets)
                entries += (chunk_open, start, chunk_sizes_get, sizes.get(chunk_sizes) or new_size(chunk_sizes), b"ub")
                file, offset, length, _, compressed = item
                if compressed:
                    raise _compressed_error(entry.fqn)
                places += (place_open, fqn_get, number, sizes[offsets], placed[file], _integer(offset), length_get)
                places += (_integer(length), b"ub")
            entries.append(b"eub")
            all_entries += b"".join(entries)
            all_places += b"".join(places)
        return bytes(all_entries), bytes(all_places)

    def _emit_objects(self, memo: _Memo, objects: Mapping[str, ObjectEntry]) -> tuple[bytes, bytes]:
        get = self._attributes
        bytes_entry = get["BytesStorageMetadata"] + b")\x81"
        entries = [_text(fqn) + b"\x94" + bytes_entry for fqn in objects]
        fqn_gets = [memo.next() for _ in objects]
        file_gets: dict[str, bytes] = {}
        places: list[bytes] = []
        for fqn_get, entry in zip(fqn_gets, objects.values(), strict=True):
            item = entry.item
            if item.is_compressed:
                raise _compressed_error(entry.fqn)
            file = file_gets.get(item.file)
            if file is None:
                file, file_gets[item.file] = _text(item.file) + b"\x94", memo.next()
            places += (
                _new(get["MetadataIndex"], get["fqn"] + fqn_get + get["index"] + b"N"),
                self._place_open(file) + _integer(item.offset) + get["length"] + _integer(item.length) + b"ub",
            )
        return b"".join(entries), b"".join(places)

    def _place_open(self, file: bytes) -> bytes:
        """A `_StorageInfo` up to its offset."""
        get = self._attributes
        return get["_StorageInfo"] + b")\x81}(" + get["relative_path"] + file + get["offset"]


def _compressed_error(fqn: str) -> SaveError:
    return SaveError(
        f"{fqn}: is compressed, and only DCP's writer names compressed items; `mcore-ckpt reshard` unpacks"
    )


def encode_metadata(index: CheckpointIndex) -> bytes:
    """The content of `.metadata` for `index`, in one go.

    What is written names classes of torch only, so that it can be read where this package is not installed. It gets
    what is left of the manifest of `index`, if the checksums of all items are known.
    """
    known = index.manifest
    manifest = None if known is None else manifest_of(index, known.save_id, known.files)
    return MetadataEncoder(index).encode(index.objects, storage_meta=index.storage_meta, manifest=manifest)


def manifest_of(index: CheckpointIndex, save_id: bytes, files: Mapping[str, ManifestFile]) -> Manifest | None:
    """The manifest of `index`, in the order of its encoding; None if a checksum is not known."""
    items = [item for _, _, item in index.items()]
    crcs = [item.crc32 for item in items if item.crc32 is not None]
    named = {item.file for item in items}
    if len(crcs) != len(items) or not named <= files.keys():
        return None
    running = [(n, sums) for n, item in enumerate(items) if (sums := index.blocks.get((item.file, item.offset)))]
    known = index.fingerprints
    return Manifest(
        save_id,
        {name: file for name, file in files.items() if name in named or name == COMMON_FILE},
        array("I", crcs),
        array("Q", [n for n, _ in running]),
        array("I", [len(sums) for _, sums in running]),
        array("I", chain.from_iterable(sums for _, sums in running)),
        fingerprints=array("q", [known.get(key, NO_FINGERPRINT) for key in index.tensors]) if known else None,
    )
