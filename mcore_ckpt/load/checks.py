"""All records of a checkpoint compared with its index: small ones are read many at a time, large ones in windows.

And each data file's own word of what it holds, the table before its integrity footer; and what the stored chunks of a
tensor add to its fingerprint.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from mcore_ckpt.core.boxes import Stretch
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import ChecksumError, CorruptCheckpointError, LoadError
from mcore_ckpt.core.fingerprints import part_of_elements, part_of_run
from mcore_ckpt.core.options import checkpoint_path
from mcore_ckpt.core.process import in_parallel
from mcore_ckpt.format.index import (
    CheckpointIndex,
    ObjectEntry,
    StoredChunk,
    StoredItem,
    TensorEntry,
    read_item,
    unpacked,
)
from mcore_ckpt.format.integrity import BLOCK_BYTES, FOOTER_BYTES, TABLE_HEAD, Columns, FileFooter, split_metadata
from mcore_ckpt.format.item import Forms, element_bytes, locate_tensor
from mcore_ckpt.format.metadata_read import METADATA_FILE, checked_footer, parse_index, read_small_file
from mcore_ckpt.format.safe_pickle import refusals
from mcore_ckpt.format.tensor_pickle import DTYPES
from mcore_ckpt.format.zip_records import NotRangeable
from mcore_ckpt.load.ranges import WINDOW_BYTES, Extent, ReadPolicy, Span, coalesce
from mcore_ckpt.load.records import (
    OpenFiles,
    check_kind,
    check_located,
    check_proportion,
    check_records,
    checksum_error,
    chunk_name,
    item_name,
    named,
)
from mcore_ckpt.storage.base import RangeReader, Storage
from mcore_ckpt.storage.direct_io import aligned_buffer

_MIN_ITEM_BYTES: Final = 64


class TensorRow(NamedTuple):
    """A tensor item as an index or a file's table describes it: dtype, and box of a global tensor, in elements."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


Items = dict[tuple[int, int], str | TensorRow]
"""By offset and length, in bytes, what lies in a file: an object's key, or a tensor item."""


def decode_table(data: bytes, footer: FileFooter, where: str) -> Items:
    """The table of a file, from the bytes before its footer; raises `CorruptCheckpointError`."""
    what = f"{where}: the table of its integrity footer"
    whole = Columns(data, what)
    if len(data) != footer.table_bytes or crc32(data) != footer.table_crc32:
        raise whole.wrong(f"it does not have the CRC-32 {footer.table_crc32:#010x} that the footer states")
    places_bytes = 16 * footer.object_count
    if places_bytes > len(data):
        raise whole.wrong(f"{footer.object_count} objects are said to be in it")
    table = Columns.inflated(whole.bytes(len(data) - places_bytes), footer.unpacked_bytes, what)
    tensors, objects, dtypes = TABLE_HEAD.unpack(table.bytes(TABLE_HEAD.size))
    if (tensors + objects) * _MIN_ITEM_BYTES > footer.file_bytes:
        raise table.wrong(f"{tensors + objects} items cannot lie in {footer.file_bytes} bytes")
    if objects != footer.object_count:
        raise table.wrong(f"the footer counts {footer.object_count} objects, the table {objects}")
    lengths = table.column("I", dtypes + tensors + objects)
    codes, ndims = table.column("I", tensors), table.column("I", tensors)
    if any(code >= dtypes for code in codes):
        raise table.wrong("a tensor has a dtype that is not in it")
    boxes = table.column("q", 3 * sum(ndims)).tolist()
    places = table.column("q", 2 * tensors)
    names = table.texts(lengths)
    table.finish()
    object_places = whole.column("Q", 2 * objects)
    whole.finish()
    dtype_names, keys, object_keys = names[:dtypes], names[dtypes:], names[dtypes + tensors :]
    starts = accumulate((3 * ndim for ndim in ndims), initial=0)
    items: Items = {
        (places[2 * n], places[2 * n + 1]): TensorRow(
            keys[n],
            dtype_names[codes[n]],
            tuple(boxes[at : at + ndim]),
            tuple(boxes[at + ndim : at + 2 * ndim]),
            tuple(boxes[at + 2 * ndim : at + 3 * ndim]),
        )
        for n, (ndim, at) in enumerate(zip(ndims, starts, strict=False))
    }
    return items | {(object_places[2 * n], object_places[2 * n + 1]): object_keys[n] for n in range(objects)}


_WORKERS = 2
# A larger object, which would be read at once, is not searched for classes.
_MAX_OBJECT_BYTES = 1024**3


_ReadInto = Callable[[int, memoryview], None]


def range_crc(read_into: _ReadInto, start: int, nbytes: int, window: memoryview, value: int = 0) -> int:
    """CRC-32 of bytes `[start, start + nbytes)`, read through a window of memory from front to back; after `value`."""
    done = 0
    while done < nbytes:
        view = window[: min(len(window), nbytes - done)]
        read_into(start + done, view)
        value = crc32(view, value)
        done += len(view)
    return value


def global_shape(index: CheckpointIndex, entry: TensorEntry) -> tuple[int, ...]:
    """The parameter's own shape, where its stretches are stored as rows of a grid (Megatron-Core 0.12 to 0.14)."""
    shape, grid = index.original_shape(entry.fqn), entry.shape[:-1]
    if shape is None:
        return entry.shape
    cell = [size // count for size, count in zip(shape, grid, strict=False) if count]
    if len(grid) != len(shape) or math.prod(cell) != entry.shape[-1] or math.prod(shape) != math.prod(entry.shape):
        raise CorruptCheckpointError(
            f"{entry.fqn}: {index.path} notes the global shape {list(shape)} for what is stored as {list(entry.shape)}"
        )
    return shape


def part_of_chunk(
    entry: TensorEntry, chunk: StoredChunk, shape: tuple[int, ...], crc: int | None, read: Callable[[int, int], Any]
) -> int:
    """What a chunk adds to its tensor's fingerprint; `read(first, count)` gives bytes of elements, `crc`: as stored."""
    stretch = Stretch.of_chunk(entry.shape, chunk.offsets, chunk.sizes, element_bytes(entry.dtype), shape)
    if not stretch.elems:
        return 0
    if crc is not None and (part := part_of_run(crc, stretch)) is not None:
        return part
    step = max(1, WINDOW_BYTES // stretch.elem_bytes)
    total = value = 0
    for at in range(0, stretch.elems, step):
        view = memoryview(read(at, min(step, stretch.elems - at))).cast("B")
        value = crc32(view, value)
        total ^= part_of_elements(view, stretch, at)
    if crc is not None and crc != value:
        raise checksum_error(chunk_name(entry.fqn, chunk), "its elements have", value, crc)
    return total


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong; of one item its key, and the bytes that it has in its file."""

    # "structure" is of chunks and overlaps, "item" of headers.
    kind: Literal["index", "file", "structure", "item", "checksum", "copy", "optimizer"]
    message: str  # what, where, expected and got
    fqn: str | None = None
    file: str | None = None
    offset: int | None = None
    length: int | None = None


class ItemCheck(NamedTuple):
    """One stored item to check: its tensor's entry and chunk, or None for an object; cumulative CRCs, if any."""

    fqn: str
    item: StoredItem
    entry: TensorEntry | None = None
    chunk: StoredChunk | None = None
    blocks: Sequence[int] = ()

    @property
    def where(self) -> str:
        """The item as messages name it."""
        return item_name(self.fqn, self.item)


def checks_of(index: CheckpointIndex) -> list[ItemCheck]:
    """Every item of a checkpoint once, in the order of its files."""
    checks = [ItemCheck(fqn, entry.item) for fqn, entry in index.objects.items()]
    empty: list[ItemCheck] = []
    for fqn, entry in index.tensors.items():
        for chunk in entry.chunks:
            blocks = index.blocks.get((chunk.item.file, chunk.item.offset), ())
            (empty if 0 in chunk.sizes else checks).append(ItemCheck(fqn, chunk.item, entry, chunk, blocks))
    # DCP knows a chunk by its offsets: those without elements may have one item together, or another chunk's.
    named = {check.item for check in checks}
    checks += {check.item: check for check in empty if check.item not in named}.values()
    checks.sort(key=lambda check: (check.item.file, check.item.offset))
    return checks


def check_data_files(storage: Storage, index: CheckpointIndex, names: Iterable[str]) -> None:
    """Compare footers, tables and records of data files with the index; raises `LoadError` for what is wrong first."""
    files = set(names)
    for name in sorted(files):
        with storage.open_reader(name) as reader:
            footer = checked_footer(index, name, reader)
            if footer is not None:
                read_table(reader, footer)
    checks = [check for check in checks_of(index) if check.item.file in files]
    found = ItemChecker(storage).run(list(spans_of(checks)), _WORKERS)
    if found.problems:
        raise CorruptCheckpointError(min(found.problems)[1].message)


def read_table(reader: RangeReader, footer: FileFooter) -> Items:
    """What a data file says that it holds; raises `CorruptCheckpointError`."""
    start = reader.size_bytes - FOOTER_BYTES - footer.table_bytes
    if start < 0:
        raise CorruptCheckpointError(
            f"{reader.name}: its integrity footer states a table of {footer.table_bytes} bytes, the file has "
            f"{reader.size_bytes}"
        )
    return decode_table(reader.read(start, footer.table_bytes), footer, reader.name)


def items_by_file(index: CheckpointIndex) -> dict[str, Items]:
    """The items of each file."""
    found: dict[str, Items] = {}
    for fqn, entry in index.tensors.items():
        for chunk in entry.chunks:
            row = TensorRow(fqn, entry.dtype, entry.shape, chunk.offsets, chunk.sizes)
            found.setdefault(chunk.item.file, {})[chunk.item.offset, chunk.item.length] = row
    for fqn, stored in index.objects.items():
        found.setdefault(stored.item.file, {})[stored.item.offset, stored.item.length] = fqn
    return found


def table_problems(items: Items, table: Items) -> Iterator[str]:
    """In what an index and a file's table contradict each other; a table may list more than the index names."""
    for (offset, length), row in items.items():
        found = table.get((offset, length))
        if found != row:
            yield (
                f"bytes [{offset}, {offset + length}) are {_shown(row)} for .metadata, and "
                f"{'no item' if found is None else _shown(found)} for the file"
            )


def _shown(row: str | TensorRow) -> str:
    if isinstance(row, str):
        return f"the object {row!r:.300}"
    box = f"box at {list(row.offsets)} of sizes {list(row.sizes)}"
    return f"{row.key!r:.300} ({row.dtype}, {box} of shape {list(row.shape)})"


def item_problem(kind: Literal["file", "structure", "item", "checksum"], check: ItemCheck, message: str) -> Problem:
    item = check.item
    return Problem(kind, message, check.fqn, item.file, item.offset, item.length)


def spans_of(checks: Iterable[ItemCheck]) -> Iterator[Span]:
    """What to read of sorted items: small neighbours together, as far as a window goes; each large one for itself."""
    extents = (
        Extent(check.item.file, check.item.offset, check.item.offset + check.item.length, check.item.length, check)
        for check in checks
    )
    return coalesce(extents, ReadPolicy())


@dataclass(slots=True)
class Checked:
    """What an `ItemChecker` has found."""

    problems: list[tuple[str, Problem]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # classes that loads refuse, each with a key that has it
    items: int = 0
    records: int = 0
    read_bytes: int = 0
    unchecked: int = 0


class ItemChecker:
    """Reads spans in threads and collects what is wrong."""

    def __init__(self, storage: Storage) -> None:
        self._found = Checked()
        self._files = OpenFiles(storage, "auto", None)
        self._lock = threading.Lock()
        self._buffers = threading.local()
        self._forms: Forms = {}

    def run(
        self, spans: Sequence[Span], workers: int, advance: Callable[[int], object] = lambda nbytes: None
    ) -> Checked:
        """Check all spans; `advance` is called with the lengths of what was read."""

        def work(span: Span) -> None:
            self._check(span)
            advance(span.stop - span.start)

        try:
            in_parallel(spans, work, workers)
        finally:
            self._files.close()
        return self._found

    def _check(self, span: Span) -> None:
        checks = [extent.owner for extent in span.extents]
        with self._files.reader(span.file) as reader:
            view: memoryview | None = None
            if span.stop - span.start <= WINDOW_BYTES:
                view = self._buffer()[: span.stop - span.start]
                try:
                    reader.read_into(span.start, view)
                except LoadError as error:
                    for check in checks:
                        self._note("item", check, f"{check.where}: {error}")
                    return
            records = unchecked = 0
            for check in checks:
                item = check.item
                inside = None if view is None else view[item.offset - span.start :][: item.length]
                try:
                    checked = check_item(check, reader, inside, self._buffer, self._forms)
                    if check.entry is None and item.length <= _MAX_OBJECT_BYTES:
                        content = read_item(reader, item) if inside is None else unpacked(bytes(inside), item)
                        for name in refusals(content, check.where):
                            self._found.refused.setdefault(name, check.fqn)
                except ChecksumError as error:
                    self._note("checksum", check, str(error))
                except LoadError as error:
                    self._note("item", check, str(named(error, check.where)))
                else:
                    records += checked
                    unchecked += checked == 0
        with self._lock:
            self._found.items += len(checks)
            self._found.records += records
            self._found.unchecked += unchecked
            self._found.read_bytes += span.stop - span.start

    def _note(self, kind: Literal["item", "checksum"], check: ItemCheck, message: str) -> None:
        with self._lock:
            self._found.problems.append((check.where, item_problem(kind, check, message)))

    def _buffer(self) -> memoryview:
        """This thread's window."""
        buffer: memoryview | None = getattr(self._buffers, "window", None)
        if buffer is None:
            buffer = self._buffers.window = _window()
        return buffer


def check_file(storage: Storage, name: str) -> int:
    """Compare all checksums of a file that is one item by itself, as the common state is; as `check_item`."""
    with storage.open_reader(name) as reader:
        return check_item(ItemCheck(name, StoredItem(name, 0, reader.size_bytes)), reader)


def _window() -> memoryview:
    return memoryview(aligned_buffer(WINDOW_BYTES))


def check_item(
    check: ItemCheck,
    reader: RangeReader,
    inside: memoryview | None = None,
    buffer: Callable[[], memoryview] = _window,
    forms: Forms | None = None,
) -> int:
    """Compare all checksums of one item, and its own description with the index; how many records were compared, 0 if
    the item hides them. `inside`: its bytes, if they have been read; otherwise `buffer` returns a window.
    """
    item, where, entry, chunk = check.item, check.where, check.entry, check.chunk
    if entry is not None and entry.dtype not in DTYPES:  # of a quantized one the records alone can be compared
        entry = None
    nbytes = 0
    if entry is not None and chunk is not None:
        nbytes = math.prod(chunk.sizes) * element_bytes(entry.dtype)
    if item.is_compressed:
        check_proportion(nbytes, item, where)
        stored = reader.read(item.offset, item.length) if inside is None else bytes(inside)
        inside = memoryview(unpacked(stored, item, nbytes))
    length = item.length if inside is None else len(inside)

    def read(offset: int, length: int) -> bytes:
        if inside is not None:
            return bytes(inside[offset : offset + length])
        return reader.read(item.offset + offset, length)

    def sum_up(offset: int, length: int) -> int:
        running = iter(check.blocks) if length > BLOCK_BYTES else iter(())
        value = done = 0
        for expected in running:
            value = part_crc(offset + done, BLOCK_BYTES, value)
            done += BLOCK_BYTES
            if value != expected:
                what = f"the first {done} bytes of its payload have"
                raise checksum_error(where, what, value, expected)
        return part_crc(offset + done, length - done, value)

    def part_crc(offset: int, length: int, value: int) -> int:
        if inside is not None:
            return crc32(inside[offset : offset + length], value)
        return range_crc(reader.read_into, item.offset + offset, length, buffer(), value)

    if item.crc32 is not None and check.entry is None:
        whole = part_crc(0, item.length, 0)
        if whole != item.crc32:
            raise checksum_error(where, "its bytes have", whole, item.crc32)
    checked = check_records(read, sum_up, length, where)
    if entry is None or chunk is None:
        return checked
    dtype, sizes = entry.dtype, chunk.sizes
    try:
        found = locate_tensor(read, length, where, (dtype, sizes), forms)
        check_located(found, dtype, sizes, nbytes, item.crc32)
    except NotRangeable:
        check_proportion(nbytes, item, where)
        from mcore_ckpt.format.state_file import read_tensor_outline

        outline = read_tensor_outline(read, length, where)
        if outline is not None:
            check_kind(outline.dtype, outline.shape, (dtype, sizes))
    return checked


def pickle_differs(path: str | Path) -> str | None:
    """What the pickle in `.metadata`, which others read, says otherwise than its columns; None if nothing."""
    directory = checkpoint_path(path)
    data = read_small_file(directory, METADATA_FILE)
    pickled, manifest = split_metadata(data, str(directory / METADATA_FILE))
    if manifest is None or manifest.columns is None:
        return None
    ours, others = parse_index(data, str(directory)), parse_index(pickled, str(directory))
    for kind, own, other in (("tensor", ours.tensors, others.tensors), ("object", ours.objects, others.objects)):
        for key in dict.fromkeys((*own, *other)):
            said = [_without_crcs(entries[key]) if key in entries else None for entries in (own, other)]
            if said[0] != said[1]:
                return f"{kind} {key!r:.200}: its columns say {said[0]!r:.300}, its pickle {said[1]!r:.300}"
    for name in ("planner_data", "mcore_data", "storage_meta", "version"):
        if getattr(ours, name) != getattr(others, name):
            return f"{name}: its columns and its pickle differ"  # not shown: it may nest without end
    return None


def _without_crcs(entry: TensorEntry | ObjectEntry) -> TensorEntry | ObjectEntry:
    if isinstance(entry, ObjectEntry):
        return ObjectEntry(entry.fqn, entry.item._replace(crc32=None))
    chunks = tuple(chunk._replace(item=chunk.item._replace(crc32=None)) for chunk in entry.chunks)
    return entry._replace(chunks=chunks)
