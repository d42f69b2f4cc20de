"""What a checkpoint holds, and where: the types that readers, writers and commands share, and their columns of numbers.

The columns stand behind the pickle in `.metadata`: what this package reads of its own checkpoints. The pickle says the
same, for other readers; unpickling it takes twenty times as long. Two sections, each deflated: what follows from the
tensors alone, made once while the structure of a model stays as it is, and what belongs to one save. `docs/format.md`
has every field. Nothing in the columns is trusted. Each number of a section is bounded by its length, which is bounded
by that of the file; chunks lie inside their tensors, items inside 2**63 bytes, and no key is there twice.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import struct
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain, islice, repeat
from typing import Any, Final, NamedTuple

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import IF_DAMAGED, CorruptCheckpointError, LoadError
from mcore_ckpt.format.integrity import Columns, Manifest, Section, column_bytes, deflated, text_bytes
from mcore_ckpt.storage.base import RangeReader


# These three are named tuples, not dataclasses: there is one of each for every tensor or chunk, and a tuple is made in
# a third of the time of a frozen dataclass.
class StoredItem(NamedTuple):
    """Bytes `[offset, offset + length)` of `file` (relative to the checkpoint), as one `torch.save` container.

    `crc32` is what the manifest states: of a tensor's payload; of an object, of the whole item.
    """

    file: str
    offset: int
    length: int
    crc32: int | None = None
    is_compressed: bool = False  # by DCP's writer, with zstd: the bytes are a container once they are unpacked


class StoredChunk(NamedTuple):
    """One stored box of a global tensor: `offsets` and `sizes` in elements, one for each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: StoredItem


# Up to here a look at every chunk of a tensor is cheaper than an order of them.
_FEW_CHUNKS: Final = 8


class ChunkLookup:
    """Numbers of the chunks of one tensor near a slice; `offsets` and `sizes` of each, in elements. Many are sorted
    along the axis in which they differ most: of a regular grid of n along one axis, which is what sharding makes,
    O(log n) are looked at.
    """

    def __init__(self, offsets: Sequence[tuple[int, ...]], sizes: Sequence[tuple[int, ...]]) -> None:
        self._offsets, self._sizes = offsets, sizes
        self._numbers: Sequence[int] = range(len(offsets))
        self._starts: list[int] | None = None
        if len(offsets) > _FEW_CHUNKS:
            axes = range(len(offsets[0]))
            self._axis = axis = max(axes, key=lambda axis: len({start[axis] for start in offsets}), default=0)
            self._numbers = sorted(self._numbers, key=lambda number: offsets[number][axis])
            self._starts = [offsets[number][axis] for number in self._numbers]
            self._longest = max(size[axis] for size in sizes)

    def near(self, box: Box) -> Sequence[int]:
        """The chunks that may overlap a slice, and few others."""
        if self._starts is None:
            return self._numbers
        start = box.offsets[self._axis]
        first = bisect_left(self._starts, start - self._longest + 1)
        return self._numbers[first : bisect_left(self._starts, start + box.sizes[self._axis])]

    def only(self, box: Box) -> int | None:
        """The chunk that is just this slice, if no other one overlaps it."""
        found = None
        for number in self.near(box):
            offsets, sizes = self._offsets[number], self._sizes[number]
            if offsets == box.offsets and sizes == box.sizes:
                if found is not None:
                    return None
                found = number
                continue
            for start, size, other, other_size in zip(*box, offsets, sizes):  # noqa: B905 (a speed matter)
                if start + size <= other or other + other_size <= start:
                    break
            else:
                return None
        return found


class TensorEntry(NamedTuple):
    """A global tensor: dtype without `torch.` (`"bfloat16"`), global shape in elements, stored chunks."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]
    requires_grad: bool = False

    def lookup(self) -> ChunkLookup:
        """Look-up of `chunks` by number."""
        return ChunkLookup([chunk.offsets for chunk in self.chunks], [chunk.sizes for chunk in self.chunks])


class TensorForm(NamedTuple):
    """All that an index says of a tensor but its key and where its chunks lie; many tensors have it in common."""

    dtype: str  # as in `TensorEntry`
    requires_grad: bool  # as in `TensorEntry`
    shape: tuple[int, ...]  # as in `TensorEntry`
    offsets: tuple[tuple[int, ...], ...]  # of each chunk, in elements
    sizes: tuple[tuple[int, ...], ...]  # of each chunk, in elements


class StoredPlaces(NamedTuple):
    """Where items lie, in columns of one entry for each item."""

    files: Sequence[str]  # names; the only member that has another length
    file_numbers: array[int]  # which of them (unsigned int, 4 bytes)
    offsets: array[int]  # in bytes (signed, 8 bytes)
    lengths: array[int]  # in bytes (signed, 8 bytes)
    crcs: array[int]  # as `StoredItem.crc32` (unsigned int, 4 bytes); empty: there are none

    def item(self, number: int) -> StoredItem:
        """One of them."""
        file = self.files[self.file_numbers[number]]
        crc = self.crcs[number] if self.crcs else None
        return StoredItem(file, self.offsets[number], self.lengths[number], crc)


class PackedTensors(Mapping[str, TensorEntry]):
    """Tensors of an index by key, in the order of the file; an entry is made when it is asked for, and kept.

    One of many ranks requests few of the chunks that an index names; of the others, only columns of numbers are made.
    """

    def __init__(self, keys: Sequence[str], forms: Sequence[TensorForm], places: StoredPlaces) -> None:
        self.rows = dict(zip(keys, range(len(keys)), strict=True))  # number of each key
        self.names = keys
        self.forms = forms  # of each tensor
        self.places = places  # of the chunks of all tensors, one after the other
        # Number of the first chunk of each tensor.
        self.firsts = list(accumulate([len(form.offsets) for form in forms], initial=0))
        self._made: dict[str, TensorEntry] = {}
        self._entries: dict[str, TensorEntry] | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, TensorEntry]) -> PackedTensors | None:
        """The tensors in columns; None if an item of theirs has no checksum, or is compressed."""
        forms: dict[TensorForm, TensorForm] = {}
        files: dict[str, int] = {}
        places = StoredPlaces([], array("I"), array("q"), array("q"), array("I"))
        own = []
        for _, dtype, shape, chunks, requires_grad in tensors.values():
            form = TensorForm(dtype, requires_grad, shape, tuple([c[0] for c in chunks]), tuple([c[1] for c in chunks]))
            own.append(forms.setdefault(form, form))
            for _, _, (file, offset, length, crc, compressed) in chunks:
                if crc is None or compressed:
                    return None
                places.file_numbers.append(files.setdefault(file, len(files)))
                places.offsets.append(offset)
                places.lengths.append(length)
                places.crcs.append(crc)
        return cls(list(tensors), own, places._replace(files=list(files)))

    def __getitem__(self, key: str) -> TensorEntry:
        if self._entries is not None:
            return self._entries[key]
        made = self._made.get(key)
        if made is None:
            row = self.rows[key]
            dtype, requires_grad, shape, offsets, sizes = self.forms[row]
            items = map(self.places.item, range(self.firsts[row], self.firsts[row + 1]))
            chunks = tuple(map(StoredChunk, offsets, sizes, items))
            made = self._made[key] = TensorEntry(key, dtype, shape, chunks, requires_grad)
        return made

    def values(self) -> ValuesView[TensorEntry]:
        """All entries, made together, which takes a third of the time."""
        return self._whole().values()

    def items(self) -> ItemsView[str, TensorEntry]:
        """All keys and entries, made together, which takes a third of the time."""
        return self._whole().items()

    def _whole(self) -> dict[str, TensorEntry]:
        if self._entries is None:
            files, numbers, *columns = self.places
            names = map(files.__getitem__, numbers)
            offsets, lengths, crcs = columns
            rows = zip(names, offsets, lengths, crcs or repeat(None), repeat(False), strict=False)
            items = map(_new_item, rows)
            starts = chain.from_iterable([form.offsets for form in self.forms])
            sizes = chain.from_iterable([form.sizes for form in self.forms])
            chunks = map(_new_chunk, zip(starts, sizes, items, strict=True))
            entries = [
                _new_entry((name, form.dtype, form.shape, tuple(islice(chunks, len(form.offsets))), form.requires_grad))
                for name, form in zip(self.names, self.forms, strict=True)
            ]
            self._entries = dict(zip(self.names, entries, strict=True))
        return self._entries

    def __contains__(self, key: object) -> bool:
        return key in self.rows

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._whole()!r})"


# Made of rows without a call of a function of Python's for each.
_new_item = partial(tuple.__new__, StoredItem)
_new_chunk = partial(tuple.__new__, StoredChunk)
_new_entry = partial(tuple.__new__, TensorEntry)


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """A stored object (BYTE_IO): `fqn` is the full key, for Megatron `<key>/shard_<offset>_<shape>`."""

    fqn: str
    item: StoredItem


@dataclass(frozen=True, slots=True)
class Removed:
    """What a checkpoint that stays has lost since it was saved."""

    said: str  # what, when, and by which setting
    saved_at_ns: int  # when the checkpoint was published with it, since 1970
    files: tuple[str, ...] = ()  # data files that it had then, where their names do not tell the save
    tensors: int = 0  # of the optimizer, without flat buckets; 0 if that was not noted


# The name of Megatron's note of a parameter's own global shape, where its stretches are stored as rows of a grid.
ORIGINAL_SHAPE: Final = "nd_reformulated_orig_global_shape"


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """What a checkpoint holds."""

    path: str  # the checkpoint's directory, or what the index was parsed from; for messages
    tensors: Mapping[str, TensorEntry]  # global tensors by fqn, in the order of the file
    objects: dict[str, ObjectEntry]  # stored objects by full key
    # What the saving planner left for the loading one (DCP: flattened fqn -> path in the state dict).
    planner_data: Any = None
    # For each fqn, what Megatron-Core 0.12 to 0.15 noted about flattened tensors (`ORIGINAL_SHAPE`); empty otherwise.
    mcore_data: dict[str, dict[str, Any]] = field(default_factory=dict)
    storage_meta: dict[str, Any] | None = None  # DCP's `StorageMeta` as a dict, None when there is none
    version: str | None = None  # DCP's version of the format, None when there is none
    # With `strict=False`, what the index names but cannot be there; such chunks and objects are left out.
    problems: tuple[str, ...] = ()
    manifest: Manifest | None = None  # what `.metadata` says of its files and their bytes, if this package wrote it
    # By file and offset of the item, the cumulative CRCs that the manifest keeps of a payload.
    blocks: dict[tuple[str, int], array[int]] = field(default_factory=dict)
    removed: Removed | None = None  # what it had when it was saved, and has no longer
    # The stored fingerprint of tensors by key, of this very index: `replace` gives another one none.
    fingerprints: Mapping[str, int] = field(init=False, default_factory=dict, compare=False, repr=False)

    def with_fingerprints(self, fingerprints: Mapping[str, int]) -> CheckpointIndex:
        """This index with the fingerprints of its tensors, as far as they are known; others do no harm."""
        object.__setattr__(self, "fingerprints", fingerprints)
        return self

    def items(self) -> Iterator[tuple[str, StoredChunk | None, StoredItem]]:
        """Key, chunk (None: an object) and item of all that is stored, tensors first."""
        for fqn, entry in self.tensors.items():
            for chunk in entry.chunks:
                yield fqn, chunk, chunk.item
        for fqn, stored in self.objects.items():
            yield fqn, None, stored.item

    def original_shape(self, fqn: str) -> tuple[int, ...] | None:
        """Global shape of a parameter that is stored as flattened stretches; None if it is stored as it is."""
        shape = self.mcore_data.get(fqn, {}).get(ORIGINAL_SHAPE)
        return None if shape is None else tuple(shape)


@dataclass(frozen=True, slots=True)
class ObjectShard:
    """One shard of a Megatron `ShardedObject`: its key, and its place in the grid of shards (in shards)."""

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def object_key(key: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """The full key under which Megatron stores a `ShardedObject`'s shard."""
    return f"{key}/shard_{'.'.join(map(str, offset))}_{'.'.join(map(str, shape))}"


COMMON_STATE_KEY: Final = object_key("common_state", (0,), (1,))
"""The object that holds the common state from megatron-core 0.19 on. To 0.18 a file does."""


def is_flat_bucket(fqn: str) -> bool:
    """Whether a tensor is a flat bucket of the distributed optimizer (`dp_reshardable`): many parameters in a row."""
    return ".gbuf_idx_" in fqn and ".bucket_idx_" in fqn


def is_extra_state(fqn: str) -> bool:
    """Whether an object is a module's extra state: Transformer Engine pickles addresses, others on each rank."""
    return "_extra_state" in fqn


def parse_object_key(fqn: str) -> ObjectShard | None:
    """What `object_key` was made of (-1: a size that old Megatron left out); None for a key of another form."""
    key, slash, shard = fqn.rpartition("/")
    parts = shard.split("_")
    if not slash or len(parts) != 3 or parts[0] != "shard":
        return None
    offset_text, shape_text = parts[1].split("."), parts[2].split(".")
    if not all(text.isascii() and text.isdigit() and len(text) < 20 for text in (*offset_text, *shape_text)):
        return None
    offset, shape = tuple(map(int, offset_text)), tuple(map(int, shape_text))
    if len(offset) > MAX_AXES:  # no grid of shards
        return None
    if len(shape) + 1 == len(offset):
        shape = (*shape, -1)
    return ObjectShard(key, offset, shape) if len(shape) == len(offset) else None


def of_different_offsets(chunks: Sequence[StoredChunk]) -> list[int]:
    """Positions of the chunks of one tensor that stay, if not all do: one for each offset, as readers look them up.

    Only an empty chunk can lie where another one begins; it holds nothing that could be missed.
    """
    kept: dict[tuple[int, ...], int] = {}
    for position, chunk in enumerate(chunks):
        if chunk.offsets not in kept or all(chunk.sizes):
            kept[chunk.offsets] = position
    return [] if len(kept) == len(chunks) else list(kept.values())


_TENSOR_HEAD: Final = struct.Struct("<QQQQQ")
_OBJECT_HEAD: Final = struct.Struct("<QQQ")
MAX_OFFSET: Final = 2**63 - 1
MAX_AXES: Final = 64
_MAX_DETAILS_BYTES: Final = 1024 * 1024


def tensor_section(
    tensors: Iterable[TensorEntry], mcore_data: Mapping[str, Mapping[str, Any]]
) -> tuple[Section, tuple[str, ...]] | None:
    """The columns of the tensors, and the files, as they number them; None if they cannot say all of it."""
    kinds: dict[tuple[str, bool], int] = {}
    forms: dict[bytes, int] = {}
    files: dict[str, int] = {}
    keys, own_forms, items = [], array("I"), []
    for key, dtype, shape, chunks, requires_grad in tensors:
        form = [kinds.setdefault((dtype, requires_grad), len(kinds)), len(shape), len(chunks), *shape]
        for starts, sizes, item in chunks:
            form += starts
            form += sizes
            items.append(item)
        keys.append(text_bytes(key))
        own_forms.append(forms.setdefault(column_bytes(array("Q", form)), len(forms)))
    for item in items:
        files.setdefault(item.file, len(files))
    notes = _notes({key: number for number, key in enumerate(keys)}, mcore_data)
    if notes is None:
        return None
    dtypes = [text_bytes(dtype) for dtype, _ in kinds]
    form_bytes = b"".join(forms)
    body = (
        _TENSOR_HEAD.pack(len(keys), len(kinds), len(items), len(form_bytes) // 8, len(notes)),
        column_bytes(array("I", map(len, dtypes))),
        column_bytes(array("I", [grad for _, grad in kinds])),
        column_bytes(array("I", map(len, keys))),
        column_bytes(own_forms),
        column_bytes(array("I", [files[item.file] for item in items])),
        column_bytes(array("Q", [item.offset for item in items])),
        column_bytes(array("Q", [item.length for item in items])),
        form_bytes,
        column_bytes(notes),
        *dtypes,
        *keys,
    )
    return deflated(body), tuple(files)


def _notes(numbers: Mapping[bytes, int], mcore_data: Mapping[str, Mapping[str, Any]]) -> array[int] | None:
    """What Megatron-Core notes of flattened tensors, as numbers; None if it is something else."""
    notes = array("Q")
    for key, note in mcore_data.items():
        number, shape = numbers.get(text_bytes(key)), note.get(ORIGINAL_SHAPE)
        if number is None or (note and (len(note) != 1 or type(shape) is not tuple)):
            return None
        try:
            notes.extend((number, 0) if shape is None else (number, 1 + len(shape), *shape))
        except (TypeError, OverflowError):
            return None
    return notes


def object_section(
    objects: Mapping[str, ObjectEntry],
    files: Mapping[str, int],
    tensor_keys: Iterable[str],
    planner_data: Any,
    details: Mapping[str, Any],
) -> Section | None:
    """The columns of the objects and of the rest of an index; None if they cannot say all of it."""
    items = [entry.item for entry in objects.values()]
    keys = [text_bytes(key) for key in objects]
    paths = array("I") if planner_data is None else _path_lengths([*tensor_keys, *objects], planner_data)
    text = json.dumps(details).encode()
    if paths is None or len(text) > _MAX_DETAILS_BYTES:
        return None
    body = (
        _OBJECT_HEAD.pack(len(keys), len(paths), len(text)),
        column_bytes(array("I", map(len, keys))),
        column_bytes(array("I", [files[item.file] for item in items])),
        column_bytes(array("Q", [item.offset for item in items])),
        column_bytes(array("Q", [item.length for item in items])),
        column_bytes(paths),
        *keys,
        text,
    )
    return deflated(body)


def _path_lengths(keys: Sequence[str], planner_data: Any) -> array[int] | None:
    """For each key the number of parts of its path, and of each part twice its length, plus 1 for an int."""
    lengths = array("I")
    if type(planner_data) is not dict or not keys or len(planner_data) != len(keys):
        return None  # of no keys, the columns would say the same as of no planner_data
    for key in keys:
        path = planner_data.get(key)
        if type(path) is not tuple or ".".join(map(str, path)) != key or not {str, int}.issuperset(map(type, path)):
            return None
        lengths.append(len(path))
        lengths.extend([2 * len(str(part)) + (type(part) is int) for part in path])
    return lengths


def read_columns(manifest: Manifest, path: str, file: str, dtypes: Collection[str]) -> CheckpointIndex:
    """The index in the columns of a manifest; `dtypes`: known names. Raises `CorruptCheckpointError`."""
    assert manifest.columns is not None
    files, crcs = list(manifest.files), manifest.crcs
    what = f"{file}: the index in its manifest"
    of_tensors, of_objects = (Columns.inflated(*section, what) for section in manifest.columns)
    tensors, mcore_data = _read_tensors(of_tensors, files, crcs, {name: name for name in dtypes})
    places = tensors.places
    chunks = len(places.crcs)
    count, path_count, text_bytes_count = _OBJECT_HEAD.unpack(of_objects.bytes(_OBJECT_HEAD.size))
    key_lengths, file_numbers = of_objects.column("I", count), of_objects.column("I", count)
    offsets, lengths = of_objects.column("q", count), of_objects.column("q", count)
    paths = of_objects.column("I", path_count)
    keys = of_objects.texts(key_lengths)
    text = of_objects.bytes(min(text_bytes_count, _MAX_DETAILS_BYTES))
    of_objects.finish()
    if chunks + count != len(crcs):
        raise of_objects.wrong(f"{chunks} chunks and {count} objects, and checksums of {len(crcs)} items")
    _check_places(of_objects, file_numbers, offsets, lengths, len(files))
    items = list(map(StoredItem, map(files.__getitem__, file_numbers), offsets, lengths, crcs[chunks:]))
    objects = {key: ObjectEntry(key, item) for key, item in zip(keys, items, strict=True)}
    if len(objects) != count or tensors.keys() & objects.keys():
        raise of_objects.wrong("a key is there twice")
    for number in {*places.file_numbers, *file_numbers}:
        check_file_name(file, "a file", files[number])
    planner_data = _paths(of_objects, paths, [*tensors.names, *keys]) if paths else None
    details = _details(of_objects, bytes(text))
    blocks = named_blocks(manifest, lambda n: places.item(n) if n < chunks else items[n - chunks])
    found = CheckpointIndex(path, tensors, objects, planner_data, mcore_data, manifest=manifest, blocks=blocks)
    return replace(found, **details)


def _read_tensors(
    columns: Columns, files: Sequence[str], crcs: Sequence[int], dtypes: Mapping[str, str]
) -> tuple[PackedTensors, dict[str, dict[str, Any]]]:
    count, kind_count, chunks, form_words, note_words = _TENSOR_HEAD.unpack(columns.bytes(_TENSOR_HEAD.size))
    dtype_lengths, grads = columns.column("I", kind_count), columns.column("I", kind_count)
    key_lengths, own_forms = columns.column("I", count), columns.column("I", count)
    file_numbers = columns.column("I", chunks)
    offsets, lengths = columns.column("q", chunks), columns.column("q", chunks)
    words, notes = columns.column("Q", form_words).tolist(), columns.column("Q", note_words).tolist()
    names = [dtypes.get(name) for name in columns.texts(dtype_lengths)]
    keys = columns.texts(key_lengths)
    columns.finish()
    kinds = [(name, bool(grad)) for name, grad in zip(names, grads, strict=True) if name is not None]
    if len(kinds) != kind_count:
        raise columns.wrong("a dtype that torch does not have")
    forms = _forms(columns, words, kinds, count, chunks)
    if own_forms and max(own_forms) >= len(forms):
        raise columns.wrong("a tensor of a form that is not there")
    of_each = list(map(forms.__getitem__, own_forms))
    if sum([len(form.offsets) for form in of_each]) != chunks:
        raise columns.wrong(f"{chunks} chunks, and forms of another number")
    _check_places(columns, file_numbers, offsets, lengths, len(files))
    places = StoredPlaces(files, file_numbers, offsets, lengths, array("I", crcs[:chunks]))
    tensors = PackedTensors(keys, of_each, places)
    if len(tensors) != count:
        raise columns.wrong("a key is there twice")
    return tensors, _noted(columns, notes, keys)


def _check_places(
    columns: Columns, file_numbers: array[int], offsets: array[int], lengths: array[int], file_count: int
) -> None:
    if not file_numbers:
        return
    if max(file_numbers) >= file_count:
        raise columns.wrong("an item in a file that is not there")
    if min(offsets) < 0 or min(lengths) < 0 or max(map(int.__add__, offsets, lengths)) > MAX_OFFSET:
        raise columns.wrong("an item that does not end within 2**63 bytes")


def _forms(
    columns: Columns, words: list[int], kinds: Sequence[tuple[str, bool]], tensor_count: int, chunk_count: int
) -> list[TensorForm]:
    """Dtype, shape and chunks of tensors: of each, number of its kind, of its axes and of its chunks, and all sizes.
    Each is that of at least one tensor, so there are no more of them, and of their chunks, than of those.
    """
    forms: list[TensorForm] = []
    at, end = 0, len(words)
    while at < end:
        kind, axes, chunks = words[at : at + 3] if at + 3 <= end else (len(kinds), 0, 0)
        first = at + 3 + axes
        stop = first + 2 * axes * chunks
        chunk_count -= chunks
        if kind >= len(kinds) or axes > MAX_AXES or chunk_count < 0 or stop > end or len(forms) == tensor_count:
            raise columns.wrong("a form of tensors that cannot be")
        shape = tuple(words[at + 3 : first])
        parts = [tuple(words[n : n + axes]) for n in range(first, stop, axes)] if axes else [()] * (2 * chunks)
        starts, sizes = tuple(parts[::2]), tuple(parts[1::2])
        if max(shape, default=0) > MAX_OFFSET:
            raise columns.wrong("shapes that nobody has")
        if 0 in shape and math.prod(filter(None, shape)) > MAX_OFFSET:
            raise columns.wrong("a shape whose axes cannot be multiplied")
        for chunk in zip(starts, sizes, strict=True):
            if any(offset + size > whole for offset, size, whole in zip(*chunk, shape, strict=True)):
                raise columns.wrong("a chunk outside its tensor")
        if len(set(starts)) != len(starts):
            raise columns.wrong("two chunks at the same offsets")
        forms.append(TensorForm(*kinds[kind], shape, starts, sizes))
        at = stop
    return forms


def _noted(columns: Columns, words: list[int], keys: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What Megatron-Core noted of flattened tensors: number of the tensor; 0, or one more than the axes; shape."""
    noted: dict[str, dict[str, Any]] = {}
    at = 0
    while at < len(words):
        number, axes = words[at : at + 2] if at + 2 <= len(words) else (len(keys), 0)
        stop = at + 1 + max(axes, 1)
        if number >= len(keys) or axes > MAX_AXES + 1 or stop > len(words):
            raise columns.wrong("a note of no tensor")
        noted[keys[number]] = {ORIGINAL_SHAPE: tuple(words[at + 2 : stop])} if axes else {}
        at = stop
    return noted


def _paths(columns: Columns, lengths: array[int], keys: Sequence[str]) -> dict[str, tuple[str | int, ...]]:
    found: dict[str, tuple[str | int, ...]] = {}
    numbers = iter(lengths)
    try:
        for key in keys:
            path: list[str | int] = []
            at = 0
            for _ in range(next(numbers)):
                length, is_number = divmod(next(numbers), 2)
                part = key[at : at + length]
                path.append(int(part) if is_number else part)
                at += length + 1
            if ".".join(map(str, path)) != key:
                raise columns.wrong("a path that is not that of its key")
            found[key] = tuple(path)
    except (StopIteration, ValueError):  # int() of something else than a short number
        raise columns.wrong("a path that ends too soon, or a part that is no number") from None
    if next(numbers, None) is not None:
        raise columns.wrong("paths of more keys than there are")
    return found


def _details(columns: Columns, text: bytes) -> dict[str, Any]:
    try:
        details = json.loads(text)
        meta, version = details["storage_meta"], details["version"]
        if meta is not None:
            meta = {
                **{name: None if meta[name] is None else str(meta[name]) for name in META_IDS},
                "modules": [str(name) for name in meta["modules"]],
            }
        if (removed := details.get("removed")) is not None:
            files, tensors = tuple(map(str, removed["files"])), int(removed.get("tensors", 0))
            removed = Removed(str(removed["said"]), int(removed["saved_at_ns"]), files, tensors)
            if not 0 <= removed.saved_at_ns < 2**63:
                raise ValueError("no time")
        return {"storage_meta": meta, "version": None if version is None else str(version), "removed": removed}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise columns.wrong(f"its details cannot be read ({type(error).__name__})") from error


META_IDS: Final = ("checkpoint_id", "save_id", "load_id")
"""What DCP's `StorageMeta` tells saves apart by."""


def named_blocks(manifest: Manifest, item_at: Callable[[int], StoredItem]) -> dict[tuple[str, int], array[int]]:
    """The cumulative CRCs of a manifest by place; `item_at`: an item by its number."""
    found: dict[tuple[str, int], array[int]] = {}
    at = 0
    for number, count in zip(manifest.block_items, manifest.block_counts, strict=True):
        item = item_at(number)
        found[item.file, item.offset] = manifest.blocks[at : at + count]
        at += count
    return found


_ZSTD: Final = re.compile(r"stream\.zstd(@[^/]*)?/1(\..*)?")


def is_compressed(descriptors: Any, where: str, fqn: str) -> bool:
    """Whether DCP's writer has stored an item through zstd; `LoadError`: through another transform."""
    if not descriptors:
        return False
    one = descriptors[0] if type(descriptors) in (list, tuple) and len(descriptors) == 1 else None
    if type(one) is str and _ZSTD.fullmatch(one):
        return True
    raise LoadError(
        f"{where}: {fqn!r:.200} is stored through DCP's stream transforms ({reprlib.repr(descriptors)}), of which only "
        "stream.zstd of version 1 is undone here; load it with `torch.distributed.checkpoint.FileSystemReader`, and "
        "save it without `_extensions`"
    )


# A step of zstd becomes 128 MiB at most; an object is refused beyond its limit.
_ZSTD_STEP_BYTES: Final = 4096
_MAX_UNPACKED_OBJECT_BYTES: Final = 1024**3
MAX_INFLATION: Final = 1100
"""More than any deflated record can grow."""


def read_item(reader: RangeReader, item: StoredItem) -> bytes:
    """The container of an object, unpacked if compressed. Raises `LoadError`."""
    return unpacked(reader.read(item.offset, item.length), item)


def unpacked(stored: bytes, item: StoredItem, nbytes: int = 0) -> bytes:
    """As `read_item`, of any item whose bytes have been read; `nbytes`: of its elements, if known."""
    if not item.is_compressed:
        return stored
    try:
        import zstandard
    except ImportError:
        raise LoadError("is compressed with zstd: install zstandard (pip install 'mcore-ckpt[zstd]')") from None
    most = _MAX_UNPACKED_OBJECT_BYTES if not nbytes else 2 * nbytes + MAX_INFLATION * 4096
    parts, count, at = list[bytes](), 0, 0
    frame = zstandard.ZstdDecompressor().decompressobj()
    try:
        while at < len(stored):
            if frame.eof:
                frame = zstandard.ZstdDecompressor().decompressobj()
            piece = stored[at : at + _ZSTD_STEP_BYTES]
            parts.append(frame.decompress(piece))
            at += len(piece) - len(frame.unused_data)
            count += len(parts[-1])
            if count > most:
                raise CorruptCheckpointError(f"{len(stored)} bytes of zstd hold more than {most}; {IF_DAMAGED}")
    except zstandard.ZstdError as error:
        raise CorruptCheckpointError(f"its bytes are not of zstd ({error}); {IF_DAMAGED}") from error
    if not frame.eof:
        raise CorruptCheckpointError(f"its {len(stored)} bytes end within a frame of zstd; {IF_DAMAGED}")
    return b"".join(parts)


def check_file_name(file: str, fqn: str, name: str) -> None:
    """Raise `CorruptCheckpointError` if the index in `file` says of `fqn` that it lies outside the checkpoint."""
    problem = file_name_problem(name)
    if problem:
        raise CorruptCheckpointError(
            f"{file}: {fqn!r:.200} is said to lie in the file {name!r:.200}, whose name {problem}. A checkpoint only "
            "names files inside its own directory; do not load this one unless you know who changed it."
        )


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
