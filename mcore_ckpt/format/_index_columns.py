"""The index as columns of numbers, behind the pickle in `.metadata`: what this package reads of its own checkpoints.

The pickle says the same, for readers that have no such package; unpickling it takes twenty times as long. Two sections,
each deflated: what follows from the tensors alone, made once while the structure of a model stays as it is, and what
belongs to one save. `docs/format.md` has every field.

Nothing in the columns is trusted. Each number of a section is bounded by its length, which is bounded by that of the
file; chunks lie inside their tensors, items inside 2**63 bytes, and no key is there twice.
"""

from __future__ import annotations

import json
import math
import struct
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from mcore_ckpt.format._columns import Columns, column_bytes, deflated, text_bytes
from mcore_ckpt.format.index import ObjectEntry, PackedTensors, StoredItem, StoredPlaces, TensorEntry, TensorForm

_TENSOR_HEAD: Final = struct.Struct("<QQQQQ")
_OBJECT_HEAD: Final = struct.Struct("<QQQ")
_MAX_OFFSET: Final = 2**63 - 1
_MAX_AXES: Final = 64
_MAX_DETAILS_BYTES: Final = 1024 * 1024
# Chosen for it, very many shapes would have one hash, and each be compared with all others.
_MAX_SHAPES_OF_ONE_HASH: Final = 16
_NOTED: Final = "nd_reformulated_orig_global_shape"


class TensorSection(NamedTuple):
    """The columns of the tensors: deflated, their length before that, and the files, as the columns number them."""

    packed: bytes
    unpacked_bytes: int
    files: tuple[str, ...]

    @classmethod
    def of(
        cls, tensors: Iterable[TensorEntry], mcore_data: Mapping[str, Mapping[str, Any]] | None = None
    ) -> TensorSection | None:
        """Put the columns of an index together; None if they cannot say all of it (stream transforms)."""
        kinds: dict[tuple[str, bool], int] = {}
        forms: dict[bytes, int] = {}  # by their bytes: many hostile shapes may have one hash
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
        if any(item.transforms for item in items):
            return None
        for item in items:
            files.setdefault(item.file, len(files))
        notes = _notes({key: number for number, key in enumerate(keys)}, mcore_data or {})
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
        return cls(*deflated(body), tuple(files))


def _notes(numbers: Mapping[bytes, int], mcore_data: Mapping[str, Mapping[str, Any]]) -> array[int] | None:
    """What Megatron-Core notes of flattened tensors, as numbers; None if it is something else."""
    notes = array("Q")
    for key, note in mcore_data.items():
        number, shape = numbers.get(text_bytes(key)), note.get(_NOTED)
        if number is None or (note and (len(note) != 1 or type(shape) is not tuple)):
            return None
        try:
            notes.extend((number, 0) if shape is None else (number, 1 + len(shape), *shape))
        except (TypeError, OverflowError):
            return None
    return notes


class ObjectSection(NamedTuple):
    """The columns of the objects, and what else an index says."""

    packed: bytes
    unpacked_bytes: int

    @classmethod
    def of(
        cls,
        objects: Mapping[str, ObjectEntry],
        files: Mapping[str, int],
        tensor_keys: Iterable[str],
        planner_data: Any,
        details: Mapping[str, Any],
    ) -> ObjectSection | None:
        """Put the columns of one save together; None if they cannot say all of it. `files`: numbers in the manifest."""
        items = [entry.item for entry in objects.values()]
        keys = [text_bytes(key) for key in objects]
        paths = _path_lengths([*tensor_keys, *objects] if planner_data is not None else (), planner_data)
        text = json.dumps(details).encode()
        if paths is None or len(text) > _MAX_DETAILS_BYTES or any(item.transforms for item in items):
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
        return cls(*deflated(body))


def _path_lengths(keys: Sequence[str], planner_data: Any) -> array[int] | None:
    """For each key the number of parts of its path, and for each part twice its length, and one more if it
    is an int.
    """
    lengths = array("I")
    if planner_data is None:
        return lengths
    if type(planner_data) is not dict or not keys or len(planner_data) != len(keys):
        return None  # of no keys, the columns would say the same as of no planner_data
    for key in keys:
        path = planner_data.get(key)
        if type(path) is not tuple or ".".join(map(str, path)) != key or not {str, int}.issuperset(map(type, path)):
            return None
        lengths.append(len(path))
        lengths.extend([2 * len(str(part)) + (type(part) is int) for part in path])
    return lengths


class IndexColumns(NamedTuple):
    """What the columns say; see `CheckpointIndex`."""

    tensors: PackedTensors
    objects: dict[str, ObjectEntry]
    planner_data: dict[str, tuple[str | int, ...]] | None
    mcore_data: dict[str, dict[str, Any]]
    storage_meta: dict[str, Any] | None
    version: str | None
    has_local_plans: bool


def read_columns(
    sections: Sequence[tuple[bytes, int]],
    files: Sequence[str],
    crcs: Sequence[int],
    dtypes: Collection[str],
    where: str,
) -> IndexColumns:
    """Read the two sections of a manifest with these files and CRC-32s; `dtypes`: the names that there are. Raises
    `CorruptCheckpointError` if they cannot be right.
    """
    of_tensors, of_objects = (Columns.inflated(*section, where) for section in sections)
    tensors, mcore_data = _read_tensors(of_tensors, files, crcs, {name: name for name in dtypes})
    chunks = len(tensors.places.crcs)
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
    items = map(StoredItem, map(files.__getitem__, file_numbers), offsets, lengths, [()] * count, crcs[chunks:])
    objects = {key: ObjectEntry(key, item) for key, item in zip(keys, items, strict=True)}
    if len(objects) != count or tensors.keys() & objects.keys():
        raise of_objects.wrong("a key is there twice")
    planner_data = _paths(of_objects, paths, [*tensors.names, *keys]) if paths else None
    return IndexColumns(tensors, objects, planner_data, mcore_data, *_details(of_objects, bytes(text)))


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
    if min(offsets) < 0 or min(lengths) < 0 or max(map(int.__add__, offsets, lengths)) > _MAX_OFFSET:
        raise columns.wrong("an item that does not end within 2**63 bytes")


def _forms(
    columns: Columns, words: list[int], kinds: Sequence[tuple[str, bool]], tensor_count: int, chunk_count: int
) -> list[TensorForm]:
    """Dtype, shape and chunks of tensors: of each, number of its kind, of its axes and of its chunks, and all sizes.
    Each is that of at least one tensor, so there are no more of them, and of their chunks, than of those.
    """
    forms: list[TensorForm] = []
    shapes = _Shapes(columns)
    at, end = 0, len(words)
    while at < end:
        kind, axes, chunks = words[at : at + 3] if at + 3 <= end else (len(kinds), 0, 0)
        first = at + 3 + axes
        stop = first + 2 * axes * chunks
        chunk_count -= chunks
        if kind >= len(kinds) or axes > _MAX_AXES or chunk_count < 0 or stop > end or len(forms) == tensor_count:
            raise columns.wrong("a form of tensors that cannot be")
        shape = tuple(words[at + 3 : first])
        parts = [tuple(words[n : n + axes]) for n in range(first, stop, axes)] if axes else [()] * (2 * chunks)
        starts, sizes = tuple(parts[::2]), tuple(parts[1::2])
        shapes.check(shape, starts, sizes)
        forms.append(TensorForm(*kinds[kind], shape, starts, sizes))
        at = stop
    return forms


class _Shapes:
    """Looks at shapes and chunks; at each once."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._known: dict[int, list[tuple[int, ...]]] = {}

    def check(
        self, shape: tuple[int, ...], starts: tuple[tuple[int, ...], ...], sizes: tuple[tuple[int, ...], ...]
    ) -> None:
        for values in (shape, *starts, *sizes):
            same = self._known.setdefault(hash(values), [])
            if values not in same:
                same.append(values)
                if len(same) > _MAX_SHAPES_OF_ONE_HASH or (values and max(values) > _MAX_OFFSET):
                    raise self._columns.wrong("shapes that nobody has")
        if 0 in shape and math.prod(filter(None, shape)) > _MAX_OFFSET:  # axes that cannot be multiplied
            raise self._columns.wrong("a shape whose axes cannot be multiplied")
        if len(starts) == 1 and sizes[0] == shape and not any(starts[0]):
            return
        for first, counts in zip(starts, sizes, strict=True):
            if any(a + n > whole for a, n, whole in zip(first, counts, shape, strict=True)):
                raise self._columns.wrong("a chunk outside its tensor")
        if len(set(starts)) != len(starts):
            raise self._columns.wrong("two chunks at the same offsets")


def _noted(columns: Columns, words: list[int], keys: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What Megatron-Core noted of flattened tensors: number of the tensor; 0, or one more than the axes; shape."""
    noted: dict[str, dict[str, Any]] = {}
    at = 0
    while at < len(words):
        number, axes = words[at : at + 2] if at + 2 <= len(words) else (len(keys), 0)
        stop = at + 1 + max(axes, 1)
        if number >= len(keys) or axes > _MAX_AXES + 1 or stop > len(words):
            raise columns.wrong("a note of no tensor")
        noted[keys[number]] = {_NOTED: tuple(words[at + 2 : stop])} if axes else {}
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


def _details(columns: Columns, text: bytes) -> tuple[dict[str, Any] | None, str | None, bool]:
    try:
        details = json.loads(text)
        meta, version, plans = details["storage_meta"], details["version"], details["has_local_plans"]
        if meta is not None:
            meta = {
                **{name: None if meta[name] is None else str(meta[name]) for name in _IDS},
                "modules": [str(name) for name in meta["modules"]],
            }
        return meta, None if version is None else str(version), plans is True
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise columns.wrong(f"its details cannot be read ({type(error).__name__})") from error


_IDS: Final = ("checkpoint_id", "save_id", "load_id")
