"""A plan carried out: bytes are read into destination tensors, and checked on the way.

columns          small items that are requested as they are, all at once (`_columns`)
packed items     many in one span; each is located inside the buffer and copied out
parts            of the payloads of large items: straight into the destination where it has them as the file has,
                 else through a buffer, or out of the mapped page cache
all other items  (compressed, transformed, strided, or not what this package writes there) are decoded completely
                 (`item_decoding`), one at a time, after all others
"""

from __future__ import annotations

import ctypes
import heapq
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import torch

from mcore_ckpt.core.boxes import Box, Stretch
from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import ChecksumError, LoadError
from mcore_ckpt.core.fingerprints import may_begin_at, rows_to_sum
from mcore_ckpt.core.options import LoadOptions
from mcore_ckpt.core.process import in_parallel
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.format.item_reading import ItemForm, LocatedTensor, form_of, locate_tensor_in
from mcore_ckpt.format.zip_records import NotRangeable
from mcore_ckpt.load._columns import ColumnSpan, cut, place, scatter, spans_of
from mcore_ckpt.load._extents import Ends, Extents, PartRead, PayloadPlace, damaged, own_place
from mcore_ckpt.load._item_locations import ItemLocations
from mcore_ckpt.load._placement import HostBytes, ReadBuffer, memory_at, narrow, place_box
from mcore_ckpt.load._wanted_items import WantedItem
from mcore_ckpt.load.arrivals import Arrivals
from mcore_ckpt.load.item_decoding import ItemDecoder
from mcore_ckpt.load.open_files import OpenFiles, ReadStats, naming, padded_range, using
from mcore_ckpt.load.ranges import Extent, Span, coalesce
from mcore_ckpt.load.read_requests import LoadPlan
from mcore_ckpt.storage.base import ALIGNMENT_BYTES, RangeReader

_logger = logger_of(__name__)

# A span of more items than this is placed by one thread at a time, while others read.
_MANY_ITEMS = 32

# So many threads scatter items out of the page cache: half of the work is Python's, and a third would find what it has
# read no longer in its core's cache when its turn comes to sum it.
_SCATTERING_THREADS = 2

# So much is copied at once where bytes are looked at more than once: what a core's own cache holds.
_CACHED_BYTES = 1024 * 1024

# Forms of items that are remembered; each takes 1 to 4 KB.
_MAX_FORMS = 2048

# Copies out of the page cache to a place a few bytes ahead, modulo the page, take four times as long on some CPUs (seen
# on AMD EPYC: 3 GB/s for a shift of 1 to 16 bytes, 12 GB/s for none or for one of half a page).
_FAR_SKEW = 2048


class TensorReads:
    """Carries out one plan. `arrivals`: where it is noted what has been summed where it belongs; `ranks`: of this host,
    as `LoadPlan.wanted_by_several` takes them.
    """

    def __init__(
        self,
        files: OpenFiles,
        options: LoadOptions,
        located: ItemLocations,
        stats: ReadStats,
        decoder: ItemDecoder,
        index: CheckpointIndex,
        arrivals: Arrivals | None,
        ranks: int,
    ) -> None:
        self._files = files
        self._ranks = ranks
        self._shared: frozenset[str] = frozenset()  # keys of items that other ranks of this host read, too
        self._columns_are_shared = False
        self._options = options
        self._located = located
        self._stats = stats
        self._decoder = decoder
        self._sizes = files.read_sizes()
        self._index = index
        self._arrivals = arrivals
        rows = None if arrivals is None else self._columns_of
        self._planner = Extents(self._sizes, index.blocks, rows)
        self._unfit: dict[tuple[str, int, str], WantedItem] = {}
        self._unranged: dict[tuple[str, int, str], tuple[WantedItem, str]] = {}
        self._forms: dict[tuple[torch.dtype, tuple[int, ...], int], ItemForm] = {}
        self._pinned = False
        self._threads = files.reads_at_once
        self._per_thread = threading.local()
        self._placing = threading.Lock()
        self._scattering = threading.BoundedSemaphore(_SCATTERING_THREADS)

    def run(self, plan: LoadPlan) -> None:
        """Fill all destinations of a plan."""
        items = [plan.items[key] for key in sorted(plan.items)]
        self._pinned = any(want.tensor.is_cuda for wanted in items[:64] for want in wanted.wants)
        sizes = self._sizes
        if self._ranks > 1:
            self._shared = plan.wanted_by_several(self._ranks)
            self._columns_are_shared = plan.columns is not None and plan.columns.wanted_by_several(self._ranks)
        columns = [] if plan.columns is None else spans_of(plan.columns, **sizes)
        if self._arrivals is not None:
            self._arrivals.expect(self._index, (want.tensor for wanted in items for want in wanted.wants))
            self._arrivals.expect(self._index, () if plan.columns is None else plan.columns.tensors)
        ranged: list[tuple[WantedItem, PayloadPlace | None]] = []  # no place: packed, or still to be located
        packed: set[int] = set()
        unlocated: list[WantedItem] = []
        needed_bytes = sum(int(span.items.payloads.sum()) for span in columns)
        for wanted in items:
            needed = wanted.needed_bytes
            needed_bytes += needed
            transforms = wanted.chunk.item.transforms
            if transforms:
                self._decode_later(wanted, f"it is stored through {', '.join(transforms)}")
                continue
            where = None
            if self._planner.is_packed(wanted, needed):
                packed.add(id(wanted))
            elif (where := own_place(wanted)) is None and wanted not in self._located:
                unlocated.append(wanted)
            ranged.append((wanted, where))
        self._stats.add(bytes_needed=needed_bytes)
        with self._located.ahead(unlocated, self._files, self._stats, self._threads, self._decode_later) as located:
            extents = self._extents(ranged, packed, located)
            spans: Iterator[Span | ColumnSpan] = coalesce(extents, **sizes)
            try:
                in_order = heapq.merge(spans, columns, key=_position)
                names = {wanted.item.file for wanted, _ in ranged} | {span.file for span in columns}
                reads = _opening_ahead(in_order, sorted(names), self._files.open_ahead)
                in_parallel(reads, self._read, self._threads)
            finally:
                self._per_thread = threading.local()  # frees the buffers
        for wanted, reason in map(self._unranged.__getitem__, sorted(self._unranged)):
            with using(wanted.item.file):
                self._place_decoded(wanted, reason)
        for wanted in map(self._unfit.__getitem__, sorted(self._unfit)):
            with using(wanted.item.file):
                self._read_again(wanted)

    def _extents(
        self,
        ranged: Sequence[tuple[WantedItem, PayloadPlace | None]],
        packed: set[int],
        located_at: Callable[[WantedItem], LocatedTensor | None],
    ) -> Iterator[Extent]:
        for wanted, where in ranged:
            if id(wanted) in packed:
                yield self._planner.packed(wanted)
            elif where is not None:
                yield from self._planner.of(wanted, where)
            elif located := located_at(wanted):  # else it was found not to be rangeable
                start = wanted.item.offset + located.payload_offset
                yield from self._planner.of(wanted, PayloadPlace(start, located.crc32))

    def _decode_later(self, wanted: WantedItem, reason: str) -> None:
        self._unranged[wanted.key] = wanted, reason

    # ---------------------------------------------------------------------------------------------------- reading

    def _read(self, read: _Read) -> None:
        if not isinstance(read, _Opening):
            with using(read.file):
                self._read_span(read)
            return
        with suppress(LoadError), self._files.reader(read.file):
            pass  # (who reads it tells the error, and what of it was to be read)

    def _read_span(self, span: Span | ColumnSpan) -> None:
        if isinstance(span, ColumnSpan):
            self._read_columns(span)
            return
        first = span.extents[0]
        owner = first.owner
        try:
            with self._files.reader(span.file, keeps=self._is_shared(span)) as reader:
                reader.check_range(span.start, span.stop - span.start)
                if first.alone and owner.address and self._read_straight(reader, span, owner):
                    return
                if first.alone and not owner.address and self._copy_cached(reader, first):
                    return
                buffer = self._buffer(span.stop - span.start)
                start, stop = padded_range(span.start, span.stop, reader.size_bytes)
                skew = _skew(first, start)
                reader.read_into(start, buffer.view[skew : skew + stop - start])
        except LoadError as error:
            raise _naming(error, owner if isinstance(owner, WantedItem) else owner.wanted) from error
        self._stats.add(reads=1, bytes_read=stop - start)
        shift = skew - start
        checked = 0
        # Many small items are Python's work more than memory's: two threads at it would only wait for each other.
        with self._placing if len(span.extents) > _MANY_ITEMS else nullcontext():
            for extent in span.extents:
                owner = extent.owner
                if isinstance(owner, WantedItem):
                    checked += self._place_packed(buffer, extent.start + shift, owner)
                elif isinstance(owner, Ends):
                    content = buffer.view[extent.start + shift :][: len(owner.expected)]
                    self._compare_ends(owner.wanted, owner.start, content, owner.expected)
                else:
                    self._place_part(buffer, extent.start + shift, owner)
        self._stats.add(records_checked=checked)

    def _is_shared(self, span: Span | ColumnSpan) -> bool:
        """Whether other ranks of this host are about to read the same, as far as the first tensor of a span tells."""
        if isinstance(span, ColumnSpan):
            return self._columns_are_shared
        owner = span.extents[0].owner
        return (owner if isinstance(owner, WantedItem) else owner.wanted).fqn in self._shared

    def _read_columns(self, span: ColumnSpan) -> None:
        start, nbytes, keeps = span.start, span.stop - span.start, self._is_shared(span)
        try:
            with self._files.reader(span.file, keeps=keeps) as reader:
                reader.check_range(start, nbytes)
                # What comes out of the page cache is summed while it is in the CPU's.
                parts = cut(span, _CACHED_BYTES) if reader.is_cached(start, nbytes) else []
        except LoadError as error:
            raise _naming(error, span.items.first()) from error
        with self._files.reader(span.file, keeps=keeps) as reader:
            if not parts:
                self._read_and_place(reader, span)
                return
            with self._scattering:
                for part in parts:
                    self._scatter(reader, part)

    def _scatter(self, reader: RangeReader, span: ColumnSpan) -> None:
        nbytes = span.stop - span.start
        read = scatter(span, reader, self._buffer(nbytes))
        if read is not None and read.are_sound():
            self._stats.add(reads=1, bytes_read=nbytes, records_checked=len(span.items.starts))
        else:
            self._read_and_place(reader, span)

    def _read_and_place(self, reader: RangeReader, span: ColumnSpan) -> None:
        buffer = self._buffer(span.stop - span.start)
        start, stop = padded_range(span.start, span.stop, reader.size_bytes)
        try:
            reader.read_into(start, buffer.view[: stop - start])
        except LoadError as error:
            raise _naming(error, span.items.first()) from error
        self._stats.add(reads=1, bytes_read=stop - start)
        with self._placing:
            if place(span, buffer.view, buffer.address, -start):
                checked = len(span.items.starts)
            else:  # each by itself: one of them is damaged, or not as this package writes it
                checked = sum(self._place_packed(buffer, row.item.offset - start, row) for row in span.items.wanted())
        self._stats.add(records_checked=checked)

    def _read_straight(self, reader: RangeReader, span: Span, read: PartRead) -> bool:
        """Read a part to where it belongs, summing it while its bytes are in the CPU's cache. False if its head and
        tail are better read with it, into a buffer.
        """
        item = read.wanted.item
        reader.check_range(item.offset, item.length)
        if (read.head or read.tail) and not reader.is_cached(span.start, span.stop - span.start):
            return False
        length, sums = read.part.stop - read.part.start, self._sums_of(read)
        start = span.start + len(read.head)
        self._compare_ends(read.wanted, read.place.start, reader.read(span.start, len(read.head)), read.head)
        with self._again_if_unfit(read):
            reader.read_into(start, memory_at(read.address, length), sums.feed)
            self._finish(read, length, sums)
        self._compare_ends(read.wanted, read.place.start, reader.read(start + length, len(read.tail)), read.tail)
        self._stats.add(reads=1, bytes_read=span.stop - span.start)
        return True

    def _copy_cached(self, reader: RangeReader, extent: Extent) -> bool:
        """Copy the requested bytes of a part that is mostly gaps straight out of the page cache, if they are there."""
        read: PartRead = extent.owner
        with reader.mapped(extent.start, extent.stop - extent.start) as address:
            if not address or (address + len(read.head)) % read.alignment:
                return False
            memory = HostBytes.at(address, extent.stop - extent.start)
            self._place_part(memory, 0, read._replace(record=None, blocks=None))
        self._stats.add(reads=1, bytes_read=extent.wanted_bytes)
        return True

    def _buffer(self, needed_bytes: int) -> ReadBuffer:
        buffer: ReadBuffer | None = getattr(self._per_thread, "buffer", None)
        size_bytes = max(needed_bytes, self._sizes["window_bytes"]) + 3 * ALIGNMENT_BYTES
        if buffer is None or buffer.size_bytes < size_bytes:
            self._per_thread.buffer = None  # freed before the larger one is made
            buffer = self._per_thread.buffer = ReadBuffer(size_bytes, self._pinned)
        return buffer

    # ---------------------------------------------------------------------------------------------------- placing

    def _place_packed(self, buffer: ReadBuffer, at: int, wanted: WantedItem) -> int:
        """Copy a whole item out of the buffer; returns how many records were checked."""
        chunk = wanted.chunk
        length = chunk.item.length
        view = buffer.view[at : at + length]
        kind = wanted.dtype, chunk.sizes, length
        form = self._forms.get(kind)
        if form is not None:
            stated = form.payload_crc32(view)
            start, stop = len(form.head), form.payload_stop
            known = stated is not None and (stated == chunk.item.crc32 or chunk.item.crc32 is None)
            if known and crc32(view[start:stop]) == stated:
                self._place_payload(buffer, at + start, stop - start, wanted)
                return 1
        try:
            located = locate_tensor_in(view, wanted.fqn, wanted.expected)
            wanted.check(located)
        except NotRangeable as reason:
            self._decode_later(wanted, str(reason).removeprefix(f"{wanted.fqn}: "))
            return 0
        except LoadError as error:
            raise _naming(error, wanted) from error
        expected = located.record_crc32
        if located.crc32 is not None and len(self._forms) < _MAX_FORMS:
            form = form_of(view, located.payload_offset, located.payload_bytes, located.crc32)
            if form is not None:
                self._forms[kind] = form
        if expected is not None:
            offset, length = located.record_offset, located.record_bytes
            got = crc32(view[offset : offset + length])
            if got != expected:
                raise damaged(wanted, offset, length, got, expected)
        self._place_payload(buffer, at + located.payload_offset, located.payload_bytes, wanted)
        return int(expected is not None)

    def _place_payload(self, buffer: ReadBuffer, at: int, length: int, wanted: WantedItem) -> None:
        """Copy a whole payload out of the buffer."""
        for want in wanted.wants:
            if want.whole and want.address:
                ctypes.memmove(want.address, buffer.address + at, length)
            else:
                sizes = wanted.chunk.sizes
                place_box(buffer, at, Box((0,) * len(sizes), sizes), sizes, wanted.dtype, want)

    def _place_decoded(self, wanted: WantedItem, reason: str) -> None:
        loaded = self._decoder.tensor(wanted.fqn, wanted.chunk, wanted.dtype, reason)
        with torch.no_grad():
            for want in wanted.wants:
                want.tensor.detach().copy_(narrow(loaded, want.box))

    def _place_part(self, memory: HostBytes, at: int, read: PartRead) -> None:
        """Check a part that lies in memory, its head and tail included, and copy it to where it belongs."""
        length = read.part.stop - read.part.start
        at += len(read.head)
        for begin, expected in ((at - len(read.head), read.head), (at + length, read.tail)):
            content = memory_at(memory.address + begin, len(expected))
            self._compare_ends(read.wanted, read.place.start, content, expected)
        sums = self._sums_of(read)
        with self._again_if_unfit(read):
            if sums.needed or read.address:
                for done in range(0, length, _CACHED_BYTES):
                    nbytes, source = min(_CACHED_BYTES, length - done), memory.address + at + done
                    if read.address:
                        ctypes.memmove(read.address + done, source, nbytes)
                        source = read.address + done
                    sums.feed(memory_at(source, nbytes))
            self._finish(read, length, sums)
        if not read.address:
            for want in read.wants:
                place_box(memory, at, read.part.box, read.wanted.chunk.sizes, read.wanted.dtype, want)

    @contextmanager
    def _again_if_unfit(self, read: PartRead) -> Iterator[None]:
        """Where bytes are summed in their destination and do not fit, they are read again before that says anything of
        the file: something else may have written there, and that memory is not ours.
        """
        try:
            yield
        except ChecksumError:
            if not read.address:
                raise
            self._unfit[read.wanted.key] = read.wanted

    def _read_again(self, wanted: WantedItem) -> None:
        """Read an item into memory of our own, where its sums are compared, and copy it from there."""
        again = replace(wanted, wants=[want._replace(address=0) for want in wanted.wants])
        for span in coalesce(self._extents([(again, own_place(wanted))], set(), self._located.of), **self._sizes):
            self._read_span(span)
        _logger.warning(
            "%s: after it was read, its destination held other bytes than the file, which is sound; it was read again. "
            "Does something else write to this tensor during the load? If not, check the memory of this host",
            wanted.where,
        )

    def _sums_of(self, read: PartRead) -> _PartSums:
        if self._arrivals is None or not read.address:
            return _PartSums(read)
        columns = None
        if read.record is not None and read.wants[0].whole:
            columns = self._columns_of(read.wanted)
            rows = None if columns is None else rows_to_sum(columns)
            if rows is not None and not (may_begin_at(rows, read.part.start) and may_begin_at(rows, read.part.stop)):
                columns = None
        return _PartSums(read, self._arrivals, columns)

    def _columns_of(self, wanted: WantedItem) -> Stretch | None:
        return None if self._arrivals is None else self._arrivals.columns_of(self._index, wanted)

    def _finish(self, read: PartRead, length: int, sums: _PartSums) -> None:
        """Note a part's CRC-32; with the last part of a payload, compare the sum with what was written."""
        sums.finish()
        if read.record is None:
            return
        total = read.record.add(read.part.start, length, sums.crc)
        if total is None or read.wanted.key in self._unranged:
            return
        if total != read.record.expected:
            offset = read.place.start - read.wanted.item.offset
            raise damaged(read.wanted, offset, read.record.length, total, read.record.expected)
        self._stats.add(records_checked=1)

    def _compare_ends(self, wanted: WantedItem, start: int, content: bytes | memoryview, expected: bytes) -> None:
        """Compare head or tail of an item, whose payload should start at `start` of its file. Where they differ the
        item itself tells where its payload lies.
        """
        if content == expected:
            return
        self._located.locate([wanted], self._files, self._stats, self._decode_later)
        located = self._located.of(wanted)
        if located is not None and wanted.item.offset + located.payload_offset != start:
            self._decode_later(wanted, "its elements do not lie where this package writes them")


class _PartSums:
    """The sums of one part, fed with its bytes from the first to the last. With `arrivals` these lie where they belong,
    and that is noted.
    """

    __slots__ = ("_arrivals", "_columns", "_done", "_number", "_read", "_stream", "crc", "needed")

    def __init__(self, read: PartRead, arrivals: Arrivals | None = None, columns: Stretch | None = None) -> None:
        self.crc = self._done = 0
        self._read = read
        self._arrivals = arrivals
        self._number = 0 if arrivals is None else arrivals.new_read()
        self._columns = columns
        self._stream = None if read.blocks is None else read.blocks.stream(read.part.start)
        self.needed = self._stream is not None or read.record is not None or arrivals is not None

    def feed(self, content: memoryview) -> None:
        if self._stream is not None:
            self._stream.feed(content)
        if self._columns is not None and self._arrivals is not None:
            first_byte = self._read.part.start + self._done
            self._arrivals.feed_rows(self._number, self._columns, content, first_byte)
        elif self._read.record is not None or self._arrivals is not None:
            self.crc = crc32(content, self.crc)
        self._done += len(content)

    def finish(self) -> None:
        """All bytes have come. `ChecksumError`: a block of them is not what was written."""
        if self._stream is not None:
            self._stream.finish()
        if self._arrivals is not None:
            read = self._read
            if self._columns is not None:
                self.crc = self._arrivals.crc32_of_rows(self._number)
            self._arrivals.note(self._number, read.wants[0].tensor, read.address, self._done, self.crc, self._columns)


class _Opening(NamedTuple):
    """A file that is read later, and is opened already: where that takes a request, nobody waits for it then."""

    file: str


_Read = Span | ColumnSpan | _Opening


def _opening_ahead(spans: Iterable[Span | ColumnSpan], files: Iterable[str], ahead: int) -> Iterator[_Read]:
    """The same, and between them files that come later, if any are to be opened ahead."""
    left = map(_Opening, files if ahead else ())
    yield from islice(left, ahead)
    current = None
    for span in spans:
        if span.file != current:
            current = span.file
            yield from islice(left, 1)
        yield span


def _position(span: Span | ColumnSpan) -> tuple[str, int]:
    return span.file, span.start


def _skew(first: Extent, start: int) -> int:
    """How far into the buffer to read a span from `start` on, so that its first part lies aligned there."""
    owner = first.owner
    skew = -(first.start + len(owner.head) - start) % owner.alignment if isinstance(owner, PartRead) else 0
    return skew + _FAR_SKEW if skew else 0


def _naming(error: LoadError, wanted: WantedItem) -> LoadError:
    return naming(error, wanted.where)
