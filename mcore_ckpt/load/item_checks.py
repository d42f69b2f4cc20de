"""Whether stored items are what the index says, and have the checksums that they should: of each record in them.

Small items are read many at a time, large ones in windows, by a few threads: at the speed of the disk, in bounded
memory, without torch.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import ChecksumError, CorruptCheckpointError, LoadError
from mcore_ckpt.core.process import in_parallel
from mcore_ckpt.format.index import CheckpointIndex, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.format.integrity import BLOCK_BYTES
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.format.item_reading import locate_tensor, locate_tensor_in
from mcore_ckpt.format.metadata_read import checked_footer
from mcore_ckpt.format.state_file import read_tensor_outline
from mcore_ckpt.format.zip_records import NotRangeable
from mcore_ckpt.load.checks import check_located, check_proportion, item_name
from mcore_ckpt.load.checksums import check_records, checksum_error, range_crc
from mcore_ckpt.load.file_footers import read_table
from mcore_ckpt.load.open_files import OpenFiles, naming
from mcore_ckpt.storage.base import RangeReader, Storage
from mcore_ckpt.storage.direct_io import aligned_buffer

_WINDOW_BYTES = 8 * 1024 * 1024
_MAX_GAP_BYTES = 256 * 1024
_WORKERS = 2


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong.

    Attributes:
        kind: `"index"`, `"file"`, `"structure"` (chunks, overlaps), `"item"` (headers), `"checksum"`, `"copy"` (a
            shadow copy with other bits than its tensor) or `"optimizer"`.
        message: what, where, expected and got.
        fqn: the key, where it is one item's problem.
        file, offset, length: the bytes of that item.
    """

    kind: Literal["index", "file", "structure", "item", "checksum", "copy", "optimizer"]
    message: str
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


class _Span(NamedTuple):
    """Items of one file that are read at once; or one item that is too large for that."""

    items: list[ItemCheck]
    start: int
    stop: int


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
    """Compare these data files with the index: their footers and tables, and the CRC-32 of each record.

    Raises `CorruptCheckpointError` that tells what is wrong first, or `LoadError`.
    """
    files = set(names)
    for name in sorted(files):
        with storage.open_reader(name) as reader:
            footer = checked_footer(index, name, reader)
            if footer is not None:
                read_table(reader, footer)
    checks = [check for check in checks_of(index) if check.item.file in files]
    checker = ItemChecker(storage)
    checker.run(list(spans_of(checks)), _WORKERS)
    if checker.problems:
        raise CorruptCheckpointError(min(checker.problems)[1].message)


def item_problem(kind: Literal["file", "structure", "item", "checksum"], check: ItemCheck, message: str) -> Problem:
    item = check.item
    return Problem(kind, message, check.fqn, item.file, item.offset, item.length)


def spans_of(checks: list[ItemCheck]) -> Iterator[_Span]:
    """What to read of sorted items: small neighbours together, as far as a window goes; each large one for itself.

    Zero-length items go along.
    """
    items: list[ItemCheck] = []
    start = stop = 0
    for check in checks:
        item = check.item
        joins = (
            items
            and items[-1].item.file == item.file
            and item.offset - stop <= _MAX_GAP_BYTES
            and max(stop, item.offset + item.length) - start <= _WINDOW_BYTES
        )
        if not joins:
            if items:
                yield _Span(items, start, stop)
            items, start, stop = [], item.offset, item.offset
        items.append(check)
        stop = max(stop, item.offset + item.length)
    if items:
        yield _Span(items, start, stop)


class ItemChecker:
    """Reads spans in threads and collects what is wrong."""

    def __init__(self, storage: Storage) -> None:
        self.problems: list[tuple[str, Problem]] = []
        self.items = self.records = self.read_bytes = self.unchecked = 0
        self._files = OpenFiles(storage, "auto", None)
        self._lock = threading.Lock()
        self._buffers = threading.local()

    def run(self, spans: list[_Span], workers: int, advance: Callable[[int], object] = lambda nbytes: None) -> None:
        """Check all spans; `advance` is called with the lengths of what was read."""

        def work(span: _Span) -> None:
            self._check(span)
            advance(span.stop - span.start)

        try:
            in_parallel(spans, work, workers)
        finally:
            self._files.close()

    def _check(self, span: _Span) -> None:
        with self._files.reader(span.items[0].item.file) as reader:
            view: memoryview | None = None
            if span.stop - span.start <= _WINDOW_BYTES:
                view = self._buffer()[: span.stop - span.start]
                try:
                    reader.read_into(span.start, view)
                except LoadError as error:
                    for check in span.items:
                        self._found(check, item_problem("item", check, f"{check.where}: {error}"))
                    return
            records = unchecked = 0
            for check in span.items:
                item = check.item
                inside = None if view is None else view[item.offset - span.start :][: item.length]
                try:
                    checked = check_item(check, reader, inside, self._buffer)
                except ChecksumError as error:
                    self._found(check, item_problem("checksum", check, str(error)))
                except LoadError as error:
                    self._found(check, item_problem("item", check, str(naming(error, check.where))))
                else:
                    records += checked
                    unchecked += checked == 0
        with self._lock:
            self.items += len(span.items)
            self.records += records
            self.unchecked += unchecked
            self.read_bytes += span.stop - span.start

    def _found(self, check: ItemCheck, problem: Problem) -> None:
        with self._lock:
            self.problems.append((check.where, problem))

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
    return memoryview(aligned_buffer(_WINDOW_BYTES))


def check_item(
    check: ItemCheck, reader: RangeReader, inside: memoryview | None = None, buffer: Callable[[], memoryview] = _window
) -> int:
    """Compare all checksums of one item, and its own description with the index; how many records were compared, 0 if
    the item hides them. `inside`: its bytes, if they have been read; otherwise `buffer` returns a window.
    """
    item, where = check.item, check.where

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

    if item.crc32 is not None and (check.entry is None or item.transforms):
        whole = part_crc(0, item.length, 0)
        if whole != item.crc32:
            raise checksum_error(where, "its bytes have", whole, item.crc32)
    if item.transforms:
        return int(item.crc32 is not None)
    checked = check_records(read, sum_up, item.length, where)
    if check.entry is None or check.chunk is None:
        return checked
    dtype, sizes = check.entry.dtype, check.chunk.sizes
    nbytes = math.prod(sizes) * element_bytes(dtype)
    try:
        said = dtype, sizes
        found = (
            locate_tensor(read, item.length, where, said) if inside is None else locate_tensor_in(inside, where, said)
        )
        check_located(found, dtype, sizes, nbytes, item.crc32)
    except NotRangeable:
        check_proportion(nbytes, item, where)
        outline = read_tensor_outline(read, item.length, where)
        if outline is not None and (outline.dtype, outline.shape) != (dtype, sizes):
            raise CorruptCheckpointError(
                f"{where}: the index says {dtype} of shape {list(sizes)}, stored is {outline.dtype} of shape "
                f"{list(outline.shape)}; index and data file do not belong together"
            ) from None
    return checked
