"""A plan carried out: which bytes of which files, read into destination tensors, and checked on the way.

    small chunks     those that are requested as they are, all at once (`small.SmallChunks`)
    packed items     small; head and tail included, many in one span; each is located inside the buffer and copied out
    complete items   the payload in parts of at most a window
    slices           the parts of the payload that hold them. Rows with short gaps between them are read gaps included;
                     where that is most of the payload, all of it is read and checked as a complete item
    all others       (objects; strided, or not what this package writes there) are decoded
                     completely (`ItemDecoder`), tensors one at a time, after all else

The CRC-32 of a payload that is read completely is compared. Of a slice, the blocks are checked that it lies in, if
`.metadata` has their sums. Where the index does not tell where large payloads lie, their headers are read a little
ahead.
"""

from __future__ import annotations

import ctypes
import heapq
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import groupby, islice
from operator import attrgetter
from typing import NamedTuple

import torch

from mcore_ckpt.core.boxes import Box, intersect, relative, runs
from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import IF_DAMAGED, ChecksumError, CorruptCheckpointError, LoadError
from mcore_ckpt.core.options import LoadOptions
from mcore_ckpt.core.process import in_parallel, run_concurrently
from mcore_ckpt.format.index import CheckpointIndex, ObjectEntry, StoredChunk, StoredItem
from mcore_ckpt.format.integrity import inner_blocks
from mcore_ckpt.format.item_layout import tensor_template
from mcore_ckpt.format.item_reading import Forms, LocatedTensor, locate_tensor, locate_tensor_in
from mcore_ckpt.format.safe_pickle import load_object
from mcore_ckpt.format.zip_records import NotRangeable
from mcore_ckpt.load.files import OpenFiles, ReadStats, named, naming, padded_range
from mcore_ckpt.load.placement import (
    HostBytes,
    ReadBuffer,
    Want,
    WantedItem,
    alignment_for,
    memory_at,
    narrow,
    place_box,
)
from mcore_ckpt.load.policy import ReadPolicy
from mcore_ckpt.load.ranges import (
    ChunkPart,
    Extent,
    Span,
    batches,
    cluster_boxes,
    coalesce,
    split_box,
)
from mcore_ckpt.load.records import (
    PartSum,
    PayloadSums,
    check_proportion,
    check_records,
    checksum_error,
    chunk_name,
    contiguous_around,
    item_name,
    whole_blocks,
)
from mcore_ckpt.load.requests import LoadPlan
from mcore_ckpt.load.small import SmallRead, place, scatter
from mcore_ckpt.state.torch_classes import dtype_name
from mcore_ckpt.storage.base import ALIGNMENT_BYTES, RangeReader, align_up

_logger = logger_of(__name__)


class ItemDecoder:
    """Reads items and decodes them. `opened` gives the files."""

    def __init__(
        self,
        opened: Callable[[], AbstractContextManager[OpenFiles]],
        options: LoadOptions,
        stats: ReadStats,
    ) -> None:
        self._opened = opened
        self._options = options
        self._stats = stats
        self._reasons: set[str] = set()

    def object_contents(self, entries: Iterable[ObjectEntry]) -> Iterator[tuple[ObjectEntry, bytes]]:
        """Stored objects as `torch.save` made them, in order of the files; neighbours are read together."""
        extents = [
            Extent(entry.item.file, entry.item.offset, entry.item.offset + entry.item.length, entry.item.length, entry)
            for entry in entries
        ]
        extents.sort(key=lambda extent: (extent.file, extent.start))
        with self._opened() as files:
            spans = coalesce(extents, files.policy)
            at_once = max(1, files.open_ahead)
            while few := list(islice(spans, at_once)):
                contents = run_concurrently(
                    at_once,
                    *(
                        partial(
                            self._read,
                            files,
                            span.extents[0].owner.fqn,
                            StoredItem(span.file, span.start, span.stop - span.start),
                        )
                        for span in few
                    ),
                )
                for span, content in zip(few, contents, strict=True):
                    for extent in span.extents:
                        stored = content[extent.start - span.start : extent.stop - span.start]
                        yield extent.owner, self._checked(extent.owner.fqn, extent.owner.item, stored, is_object=True)
                        self._stats.add(bytes_needed=len(stored))

    def tensor(self, fqn: str, chunk: StoredChunk, dtype: torch.dtype, reason: str) -> torch.Tensor:
        """Decode a stored chunk of a tensor, for a `reason` that is logged once for each kind."""
        where = chunk_name(fqn, chunk)
        check_proportion(math.prod(chunk.sizes) * dtype.itemsize, chunk.item, where)
        kind = re.sub(r"\d+", "#", reason)
        if kind not in self._reasons:
            self._reasons.add(kind)
            _logger.warning(
                "%s is read and decoded completely, which is slow, because %s; so are others like it", where, reason
            )
        with self._opened() as files:
            stored = self._read(files, fqn, chunk.item)
        content = self._checked(fqn, chunk.item, stored, is_object=False)
        self._stats.add(fallbacks=1)
        try:
            # (The CRC-32 of each record was compared above.)
            loaded = load_object(content, self._options.allowed_classes, where=where, verify_crc=False)
        except CorruptCheckpointError:
            raise
        except Exception as error:
            raise CorruptCheckpointError(
                f"{where}: cannot be decoded ({type(error).__name__}: {str(error)[:300]}); {IF_DAMAGED}"
            ) from error
        if not isinstance(loaded, torch.Tensor) or tuple(loaded.shape) != chunk.sizes or loaded.dtype != dtype:
            got = f"{loaded.dtype} of shape {list(loaded.shape)}" if isinstance(loaded, torch.Tensor) else type(loaded)
            raise CorruptCheckpointError(
                f"{where}: the index says {dtype} of shape {list(chunk.sizes)}, stored is {got}"
            )
        if loaded.layout is not torch.strided or loaded.device.type == "meta":
            kind = "on the meta device" if loaded.device.type == "meta" else f"of layout {loaded.layout}"
            raise CorruptCheckpointError(
                f"{where}: expected a tensor with an element at each place, stored is one {kind}; {IF_DAMAGED}"
            )
        # Through the class: an attribute that the pickle gave it may have any name.
        return torch.Tensor.detach(loaded)

    def _read(self, files: OpenFiles, fqn: str, item: StoredItem) -> bytes:
        with naming(partial(item_name, fqn, item)), files.reader(item.file) as reader:
            stored = reader.read(item.offset, item.length)
        self._stats.add(reads=1, bytes_read=len(stored))
        return stored

    def _checked(self, fqn: str, item: StoredItem, stored: bytes, *, is_object: bool) -> bytes:
        """The item's container, checksums compared."""
        where = item_name(fqn, item)
        # What is no object has the CRC-32 of its payload alone in the index.
        if item.crc32 is not None and is_object:
            got = crc32(stored)
            if got != item.crc32:
                raise checksum_error(where, "its bytes have", got, item.crc32)
        view = memoryview(stored)
        checked = check_records(
            lambda at, length: stored[at : at + length], lambda at, n: crc32(view[at : at + n]), len(stored), where
        )
        self._stats.add(records_checked=checked)
        return stored


class PartRead(NamedTuple):
    """A part of a payload, and where it goes."""

    wanted: WantedItem  # the item
    start: int  # where its payload begins in the file
    part: ChunkPart  # slice of the chunk, and bytes of the payload
    wants: list[Want]  # destinations that overlap the part
    address: int  # host memory that takes the part's bytes just as they are; 0 if there is none
    alignment: int  # the bytes have to lie on a multiple of this to be placed without a further copy
    sums: PayloadSums | None  # of the payload, if all of it is read, or of the blocks that the part lies in


def own_start(wanted: WantedItem) -> int | None:
    """Where the payload begins in its file if this package wrote the item; None if the index does not tell. It tells
    the CRC-32 of each payload in a checkpoint with a manifest, with which its files are compared.
    """
    item = wanted.item
    if item.crc32 is None:
        return None
    try:
        template = tensor_template(dtype_name(wanted.dtype), wanted.chunk.sizes)
    except ValueError:
        return None
    if template.item_bytes != item.length or not template.payload_bytes:
        return None
    return item.offset + len(template.head)


class Extents:
    """Plans the reads of one load, by its policy. `running`: cumulative sums of payloads, by file
    and offset of the item (`CheckpointIndex.blocks`).
    """

    def __init__(self, policy: ReadPolicy, running: Mapping[tuple[str, int], Sequence[int]]) -> None:
        self._policy = policy
        self._running = running

    def is_packed(self, wanted: WantedItem) -> bool:
        """Whether an item is read with its neighbours, head and tail included."""
        item = wanted.chunk.item
        return self._policy.is_packed(item.length, wanted.needed_bytes, has_sum=item.crc32 is not None)

    def of(self, wanted: WantedItem, start: int, crc: int | None) -> Iterator[Extent]:
        """The extents of an item that is not packed, in order; its payload begins at `start`, with that CRC-32."""
        clusters = cluster_boxes(wanted.chunk.sizes, [want.box for want in wanted.wants])
        if len(clusters) == 1 and self._reads_all(wanted, clusters[0][0]):
            return self._complete(wanted, start, crc)
        slices = [self._slice(wanted, start, box, [wanted.wants[at] for at in members]) for box, members in clusters]
        # Parts of one cluster may lie between those of another.
        return slices[0] if len(slices) == 1 else heapq.merge(*slices, key=lambda extent: extent.start)

    def _reads_all(self, wanted: WantedItem, box: Box) -> bool:
        sizes, elem_bytes = wanted.chunk.sizes, wanted.dtype.itemsize
        if box.sizes == sizes:
            return True
        first = next(split_box(sizes, box, elem_bytes, replace(self._policy, window_bytes=wanted.payload_bytes)))
        return self._policy.reads_all(first.stop - first.start, math.prod(box.sizes) * elem_bytes, wanted.payload_bytes)

    def _complete(self, wanted: WantedItem, start: int, crc: int | None) -> Iterator[Extent]:
        """The parts of all of a payload."""
        sizes = wanted.chunk.sizes
        whole = Box((0,) * len(sizes), sizes)
        sums = None if crc is None else self._sums(wanted, start, (), crc)
        if len(wanted.wants) == 1 and wanted.wants[0].whole and wanted.wants[0].address:
            return self._straight(wanted, start, whole, sums)
        return self._parts(wanted, start, whole, wanted.wants, sums, is_complete=True)

    def _straight(self, wanted: WantedItem, start: int, whole: Box, sums: PayloadSums | None) -> Iterator[Extent]:
        """The parts of a payload all of which goes to one address as it is: byte ranges of about one length, of whose
        slice only the beginning counts.
        """
        nbytes, address = wanted.payload_bytes, wanted.wants[0].address
        length = align_up(-(-nbytes // -(-nbytes // self._policy.window_bytes)))
        for begin in range(0, nbytes, length):
            part = ChunkPart(whole, begin, min(begin + length, nbytes))
            read = PartRead(wanted, start, part, wanted.wants, address + begin, 1, sums)
            yield _extent(read, part.stop - begin, alone=True)

    def _slice(self, wanted: WantedItem, start: int, box: Box, wants: list[Want]) -> Iterator[Extent]:
        checked = self._checked_slice(wanted, start, box, wants)
        if checked is None:
            return self._parts(wanted, start, box, wants, None)
        return self._checked_parts(wanted, start, wants, *checked)

    def _sums(self, wanted: WantedItem, start: int, running: Sequence[int], crc: int) -> PayloadSums:
        offset = start - wanted.item.offset

        def error(first: int, stop: int, got: int, expected: int) -> ChecksumError:
            return damaged(wanted, offset + first, stop - first, got, expected)

        return PayloadSums(wanted.payload_bytes, crc, running, error)

    def _checked_slice(
        self, wanted: WantedItem, start: int, box: Box, wants: list[Want]
    ) -> tuple[Box, PayloadSums] | None:
        """What is read of an item to check a slice of it, and its sums; None if it is not to be checked."""
        item, nbytes = wanted.item, wanted.payload_bytes
        running = self._running.get((item.file, item.offset), ())
        if item.crc32 is None or len(running) != inner_blocks(nbytes):
            return None
        box, elem_bytes = contiguous_around(wanted.chunk.sizes, box), wanted.dtype.itemsize
        part_bytes = math.prod(box.sizes) * elem_bytes
        needed_bytes = sum(math.prod(want.box.sizes) for want in wants) * elem_bytes
        if not self._policy.checks_slice(part_bytes, needed_bytes):
            return None
        return box, self._sums(wanted, start, running, item.crc32)

    def _checked_parts(
        self, wanted: WantedItem, start: int, wants: list[Want], box: Box, sums: PayloadSums
    ) -> Iterator[Extent]:
        """The parts of a slice without gaps, and what is missing of the blocks at both of its ends."""
        first = runs(wanted.chunk.sizes, box, wanted.dtype.itemsize).first_byte
        last = first + math.prod(box.sizes) * wanted.dtype.itemsize
        around = whole_blocks(first, last, wanted.payload_bytes)
        for begin, end in ((around[0], first), (last, around[1])):
            if begin == last:
                yield from self._parts(wanted, start, box, wants, sums)
            if begin < end:
                part = ChunkPart(box, begin, end)
                yield _extent(PartRead(wanted, start, part, [], 0, 1, sums), end - begin)

    def _parts(
        self,
        wanted: WantedItem,
        start: int,
        box: Box,
        wants: list[Want],
        sums: PayloadSums | None,
        is_complete: bool = False,
    ) -> Iterator[Extent]:
        """The parts of a slice, each of which is one read at most."""
        elem_bytes = wanted.dtype.itemsize
        alignment = max(alignment_for(want.tensor, wanted.dtype) for want in wants)
        exact = len(wants) == 1 and wants[0].box == box
        for part in split_box(wanted.chunk.sizes, box, elem_bytes, self._policy):
            read_bytes, part_bytes = part.stop - part.start, math.prod(part.box.sizes) * elem_bytes
            all_needed = exact or (sums is not None and not is_complete)
            needed_bytes = part_bytes if all_needed else _overlap_elems(part.box, wants) * elem_bytes
            fits = exact and part_bytes == read_bytes
            address = _address(wants[0], part.box, elem_bytes) if fits else 0
            # Long straight parts need no buffer to share.
            straight = address != 0 and read_bytes >= self._policy.straight_bytes
            read = PartRead(wanted, start, part, wants, address, alignment, sums)
            yield _extent(read, needed_bytes, alone=straight)


def _extent(read: PartRead, wanted_bytes: int, alone: bool = False) -> Extent:
    start, stop = read.start + read.part.start, read.start + read.part.stop
    return Extent(read.wanted.item.file, start, stop, wanted_bytes, read, alone)


def _overlap_elems(box: Box, wants: Sequence[Want]) -> int:
    overlaps = [intersect(box, want.box) for want in wants]
    return min(math.prod(box.sizes), sum(math.prod(overlap.sizes) for overlap in overlaps if overlap))


def _address(want: Want, box: Box, elem_bytes: int) -> int:
    """Where in host memory the bytes of `box` (relative to the chunk) belong, if they are contiguous there; else 0."""
    if not want.address:
        return 0
    destination = runs(want.box.sizes, relative(box, want.box.offsets), elem_bytes)
    return 0 if destination.counts else want.address + destination.first_byte


def damaged(wanted: WantedItem, offset: int, length: int, got: int, expected: int) -> ChecksumError:
    """The error for bytes `[offset, offset + length)` of an item, which hold its elements."""
    start = wanted.item.offset + offset
    what = f"the bytes [{start}, {start + length}) of {wanted.item.file} have"
    return checksum_error(wanted.where, what, got, expected)


# A span of more items than this is placed by one thread at a time, while others read.
_MANY_ITEMS = 32

# So many threads scatter items out of the page cache: half of the work is Python's, and a third would find what it has
# read no longer in its core's cache when its turn comes to sum it.
_SCATTERING_THREADS = 2

# So much is copied at once where bytes are looked at more than once: what a core's own cache holds.
_CACHED_BYTES = 1024 * 1024

# Copies out of the page cache to a place a few bytes ahead, modulo the page, take four times as long on some CPUs (seen
# on AMD EPYC: 3 GB/s for a shift of 1 to 16 bytes, 12 GB/s for none or for one of half a page).
_FAR_SKEW = 2048


Located = dict[tuple[StoredItem, torch.dtype, tuple[int, ...]], LocatedTensor]
"""Where payloads lie whose headers were read: by the item, and by the dtype and sizes that the index says it has."""


class TensorReads:
    """Carries out one plan. `located` is kept as long as a reader's checkpoint; `ranks`: of this host, as
    `LoadPlan.times_wanted` takes them.
    """

    def __init__(
        self,
        files: OpenFiles,
        located: Located,
        stats: ReadStats,
        decoder: ItemDecoder,
        index: CheckpointIndex,
        ranks: int,
    ) -> None:
        self._files = files
        self._ranks = ranks
        self._times_wanted: Mapping[str, int] = {}  # by ranks of this host
        self._small_are_shared = False
        self._located = located
        self._forms: Forms = {}
        self._stats = stats
        self._decoder = decoder
        self._planner = Extents(files.policy, index.blocks)
        self._unranged: dict[tuple[str, int, str], tuple[WantedItem, str]] = {}
        self._pinned = False
        self._threads = files.reads_at_once
        self._per_thread = threading.local()
        self._placing = threading.Lock()
        self._scattering = threading.BoundedSemaphore(_SCATTERING_THREADS)

    def run(self, plan: LoadPlan) -> None:
        """Fill all destinations of a plan."""
        items = [plan.items[key] for key in sorted(plan.items)]
        self._pinned = any(want.tensor.is_cuda for wanted in items[:64] for want in wanted.wants)
        if self._ranks > 1:
            self._times_wanted = plan.times_wanted(self._ranks)
            self._small_are_shared = plan.small.wanted_by_several(self._ranks)
        small = plan.small.reads()
        needed_bytes = sum(int(span.rows["payload"].sum()) for span in small)
        self._stats.add(bytes_needed=needed_bytes + sum(wanted.needed_bytes for wanted in items))
        ranged = [(wanted, self._planner.is_packed(wanted)) for wanted in items]
        unlocated = [
            wanted
            for wanted, packed in ranged
            if not packed and own_start(wanted) is None and _kind(wanted) not in self._located
        ]
        in_parallel(unlocated, self._locate, self._threads)
        spans: Iterator[Span | SmallRead] = coalesce(self._extents(ranged), self._files.policy)
        try:
            in_order = heapq.merge(spans, small, key=attrgetter("file", "start"))
            names = {wanted.item.file for wanted, _ in ranged} | {span.file for span in small}
            reads = _opening_ahead(self._streams(in_order), sorted(names), self._files.open_ahead)
            in_parallel(reads, self._read, self._threads)
        finally:
            self._per_thread = threading.local()  # frees the buffers
        for wanted, reason in map(self._unranged.__getitem__, sorted(self._unranged)):
            self._place_decoded(wanted, reason)

    def _extents(self, ranged: Iterable[tuple[WantedItem, bool]]) -> Iterator[Extent]:
        for wanted, packed in ranged:
            item = wanted.item
            if packed:
                yield Extent(item.file, item.offset, item.offset + item.length, item.length, wanted)
            elif (start := own_start(wanted)) is not None:
                yield from self._planner.of(wanted, start, item.crc32)
            elif located := self._located.get(_kind(wanted)):  # else it was found not to be rangeable
                yield from self._planner.of(wanted, item.offset + located.payload_offset, located.crc32)

    def _locate(self, wanted: WantedItem) -> None:
        """Read the headers of an item of which the index does not tell where its payload lies."""
        item = wanted.item

        def read(offset: int, length: int) -> bytes:
            self._stats.add(reads=1, bytes_read=length)
            return reader.read(item.offset + offset, length)

        try:
            with naming(lambda: wanted.where), self._files.reader(item.file) as reader:
                reader.check_range(item.offset, item.length)
                located = locate_tensor(read, item.length, wanted.where, wanted.expected, self._forms)
                wanted.check(located)
        except NotRangeable as reason:
            self._decode_later(wanted, str(reason).removeprefix(f"{wanted.where}: "))
        else:
            self._located[_kind(wanted)] = located

    def _decode_later(self, wanted: WantedItem, reason: str) -> None:
        self._unranged[wanted.key] = wanted, reason

    # ---------------------------------------------------------------------------------------------------- reading

    def _streams(self, spans: Iterable[Span | SmallRead]) -> Iterator[_Stream]:
        """The spans, grouped by the stream in which one thread should read them in order."""
        for stream_bytes, some in groupby(spans, self._stream_bytes):
            yield from batches(some, lambda span: span.stop - span.start, stream_bytes)

    def _stream_bytes(self, span: Span | SmallRead) -> int:
        return self._files.policy.stream_bytes(shared=self._is_shared(span))

    def _read(self, read: _Stream | _Opening) -> None:
        if not isinstance(read, _Opening):
            for span in read:
                self._read_span(span)
            return
        with suppress(LoadError), self._files.reader(read.file):
            pass  # (who reads it tells the error, and what of it was to be read)

    def _read_span(self, span: Span | SmallRead) -> None:
        if isinstance(span, SmallRead):
            self._read_small(span)
            return
        first = span.extents[0]
        owner = first.owner
        wanted = owner if isinstance(owner, WantedItem) else owner.wanted
        with naming(lambda: wanted.where), self._files.reader(span.file, keeps=self._is_shared(span)) as reader:
            reader.check_range(span.start, span.stop - span.start)
            if first.alone and owner.address:
                self._read_straight(reader, span, owner)
                return
            buffer = self._buffer(span.stop - span.start)
            start, stop = padded_range(span.start, span.stop, reader.size_bytes)
            skew = _skew(first, start)
            reader.read_into(start, buffer.view[skew : skew + stop - start])
        self._stats.add(reads=1, bytes_read=stop - start)
        shift = skew - start
        checked = 0
        # Many small items are Python's work more than memory's: two threads at it would only wait for each other.
        with self._placing if len(span.extents) > _MANY_ITEMS else nullcontext():
            for extent in span.extents:
                owner = extent.owner
                if isinstance(owner, WantedItem):
                    checked += self._place_packed(buffer, extent.start + shift, owner)
                else:
                    self._place_part(buffer, extent.start + shift, owner)
        self._stats.add(records_checked=checked)

    def _is_shared(self, span: Span | SmallRead) -> bool:
        """Whether other ranks of this host are about to read the same, as far as the first tensor of a span tells."""
        if isinstance(span, SmallRead):
            return self._small_are_shared
        first = span.extents[0]
        fqn = (first.owner if isinstance(first.owner, WantedItem) else first.owner.wanted).fqn
        has_gaps = first.wanted_bytes < first.stop - first.start  # requested by other ranks alone
        return self._files.policy.is_shared(self._times_wanted.get(fqn, 0), has_gaps=has_gaps)

    def _read_small(self, span: SmallRead) -> None:
        start, nbytes, keeps = span.start, span.stop - span.start, self._is_shared(span)
        with naming(lambda: span.wanted()[0].where), self._files.reader(span.file, keeps=keeps) as reader:
            reader.check_range(start, nbytes)
            # What comes out of the page cache is summed while it is in the CPU's.
            parts = span.chunks.shorter(span, _CACHED_BYTES) if reader.is_cached(start, nbytes) else []
        with self._files.reader(span.file, keeps=keeps) as reader:
            if not parts:
                self._read_and_place(reader, span)
                return
            with self._scattering:
                for part in parts:
                    self._scatter(reader, part)

    def _scatter(self, reader: RangeReader, span: SmallRead) -> None:
        nbytes = span.stop - span.start
        if scatter(span, reader, self._buffer(nbytes)):
            self._stats.add(reads=1, bytes_read=nbytes, records_checked=len(span.rows))
        else:
            self._read_and_place(reader, span)

    def _read_and_place(self, reader: RangeReader, span: SmallRead) -> None:
        buffer = self._buffer(span.stop - span.start)
        start, stop = padded_range(span.start, span.stop, reader.size_bytes)
        with naming(lambda: span.wanted()[0].where):
            reader.read_into(start, buffer.view[: stop - start])
        self._stats.add(reads=1, bytes_read=stop - start)
        with self._placing:
            if place(span, buffer.view, buffer.address, -start):
                checked = len(span.rows)
            else:  # each by itself: one of them is damaged, or not as this package writes it
                checked = sum(self._place_packed(buffer, row.item.offset - start, row) for row in span.wanted())
        self._stats.add(records_checked=checked)

    def _read_straight(self, reader: RangeReader, span: Span, read: PartRead) -> None:
        """Read a part to where it belongs, summing it while its bytes are in the CPU's cache."""
        item, length = read.wanted.item, span.stop - span.start
        reader.check_range(item.offset, item.length)
        with self._summing(read) as stream:
            reader.read_into(span.start, memory_at(read.address, length), stream.feed)
        self._stats.add(reads=1, bytes_read=length)

    def _buffer(self, needed_bytes: int) -> ReadBuffer:
        buffer: ReadBuffer | None = getattr(self._per_thread, "buffer", None)
        size_bytes = max(needed_bytes, self._files.policy.window_bytes) + 3 * ALIGNMENT_BYTES
        if buffer is None or buffer.size_bytes < size_bytes:
            self._per_thread.buffer = None  # freed before the larger one is made
            buffer = self._per_thread.buffer = ReadBuffer(size_bytes, self._pinned)
        return buffer

    # ---------------------------------------------------------------------------------------------------- placing

    def _place_packed(self, buffer: ReadBuffer, at: int, wanted: WantedItem) -> int:
        """Copy a whole item out of the buffer; returns how many records were checked."""
        view = buffer.view[at : at + wanted.item.length]
        try:
            located = locate_tensor_in(view, wanted.fqn, wanted.expected, self._forms)
            wanted.check(located)
        except NotRangeable as reason:
            self._decode_later(wanted, str(reason).removeprefix(f"{wanted.fqn}: "))
            return 0
        except LoadError as error:
            raise named(error, wanted.where) from error
        expected, offset, length = located.record_crc32, located.record_offset, located.record_bytes
        if expected is not None and (got := crc32(view[offset : offset + length])) != expected:
            raise damaged(wanted, offset, length, got, expected)
        at += located.payload_offset
        for want in wanted.wants:
            if want.whole and want.address:
                ctypes.memmove(want.address, buffer.address + at, located.payload_bytes)
            else:
                sizes = wanted.chunk.sizes
                place_box(buffer, at, Box((0,) * len(sizes), sizes), sizes, wanted.dtype, want)
        return int(expected is not None)

    def _place_decoded(self, wanted: WantedItem, reason: str) -> None:
        loaded = self._decoder.tensor(wanted.fqn, wanted.chunk, wanted.dtype, reason)
        with torch.no_grad():
            for want in wanted.wants:
                want.tensor.detach().copy_(narrow(loaded, want.box))

    def _place_part(self, memory: HostBytes, at: int, read: PartRead) -> None:
        """Check a part that lies in memory, and copy it to where it belongs."""
        length = read.part.stop - read.part.start
        if read.sums is not None or read.address:
            with self._summing(read) as stream:
                for done in range(0, length, _CACHED_BYTES):
                    nbytes, source = min(_CACHED_BYTES, length - done), memory.address + at + done
                    if read.address:
                        ctypes.memmove(read.address + done, source, nbytes)
                        source = read.address + done
                    stream.feed(memory_at(source, nbytes))
        if not read.address:
            for want in read.wants:
                place_box(memory, at, read.part.box, read.wanted.chunk.sizes, read.wanted.dtype, want)

    @contextmanager
    def _summing(self, read: PartRead) -> Iterator[PartSum]:
        """Takes the bytes of a part, and compares their sums."""
        stream = PartSum(read.sums, read.part.start)
        yield stream
        stream.finish()
        self._stats.add(records_checked=stream.records)


def _kind(wanted: WantedItem) -> tuple[StoredItem, torch.dtype, tuple[int, ...]]:
    return wanted.item, wanted.dtype, wanted.chunk.sizes


class _Opening(NamedTuple):
    """A file that is read later, and is opened already: where that takes a request, nobody waits for it then."""

    file: str


_Stream = list[Span | SmallRead]


def _opening_ahead(streams: Iterable[_Stream], files: Iterable[str], ahead: int) -> Iterator[_Stream | _Opening]:
    """The streams, and between them files that come later, if any are to be opened ahead."""
    left = map(_Opening, files if ahead else ())
    yield from islice(left, ahead)
    current = None
    for stream in streams:
        if stream[0].file != current:
            current = stream[0].file
            yield from islice(left, 1)
        yield stream


def _skew(first: Extent, start: int) -> int:
    """How far into the buffer to read a span from `start` on, so that its first part lies aligned there."""
    owner = first.owner
    skew = -(first.start - start) % owner.alignment if isinstance(owner, PartRead) else 0
    return skew + _FAR_SKEW if skew else 0
