"""Wanted items -> reads -> destination tensors: the middle of a load.

    small items      read whole, many in one span; each is located inside the buffer and copied out; those that are
                     wanted as they are, all at once (`_whole_items`)
    large items      located first (head and tail, once per item and reader); then the wanted boxes of the payload are
                     read, straight into the destination where they lie there as in the file, else through a buffer.
                     Of one that is wanted as a whole and whose CRC-32 `.metadata` has, head and tail are read with the
                     payload and compared with what this package writes; only if one of them differs is it located
    all other items  (compressed, transformed, strided) decoded as a whole (`item_decoding`), one at a time

The CRC-32 of every record that is read whole is compared, in pieces where it is read in pieces; of a part of a record
those of its blocks, where `.metadata` has them (`checksums.BlockSums`).
"""

from __future__ import annotations

import ctypes
import heapq
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch

from mcore_ckpt.core.boxes import Box, relative, runs
from mcore_ckpt.core.errors import ChecksumError, LoadError
from mcore_ckpt.core.options import LoadOptions
from mcore_ckpt.core.threads import in_parallel
from mcore_ckpt.format.crc import crc32
from mcore_ckpt.format.index import StoredItem
from mcore_ckpt.format.item_layout import TensorTemplate, tensor_template
from mcore_ckpt.format.item_reading import ItemForm, LocatedTensor, form_of, locate_tensor_in
from mcore_ckpt.format.seal import BLOCK_BYTES, inner_blocks
from mcore_ckpt.format.zip_records import NotRangeable
from mcore_ckpt.items.checksums import BlockSums, RecordSum, checksum_error, contiguous_around, whole_blocks
from mcore_ckpt.items.open_files import OpenFiles, ReadStats, naming, padded_range
from mcore_ckpt.items.ranges import CHEAP_GAP_BYTES, MAX_WASTE, Extent, Piece, Span, cluster_boxes, coalesce, split_box
from mcore_ckpt.layout.torch_classes import dtype_name
from mcore_ckpt.load._item_locations import ItemLocations
from mcore_ckpt.load._placement import HostBytes, ReadBuffer, Want, alignment_for, memory_at, narrow, place_box
from mcore_ckpt.load._whole_items import (
    MAX_WHOLE_BYTES,
    WholeItem,
    WholeItems,
    WholeSpan,
    cut,
    place,
    scatter,
    spans_of,
)
from mcore_ckpt.load.item_decoding import ItemDecoder
from mcore_ckpt.load.read_requests import WantedItem
from mcore_ckpt.storage.base import ALIGNMENT_BYTES, RangeReader, align_up

__all__ = ["TensorReads"]

# Below, an item is read whole with its neighbours.
_PACKED_ITEM_BYTES = MAX_WHOLE_BYTES

# From here on a piece goes straight into its destination rather than through a buffer that it shares with others.
_DIRECT_PIECE_BYTES = 1024 * 1024

# A packed item of which less is wanted is not read whole.
_MOSTLY = 0.8

# A span of more items than this is placed by one thread at a time, while others read.
_MANY_ITEMS = 32

# So many threads scatter items out of the page cache: half of the work is Python's, and a third would find what it has
# read no longer in its core's cache when its turn comes to sum it.
_SCATTERING_THREADS = 2

# So much of the page cache is copied out of it at once, where it is looked at more than once: what a core's own cache
# holds.
_CACHED_BYTES = 1024 * 1024

# Forms of items that are remembered; each takes 1 to 4 KB.
_MAX_FORMS = 2048

# Copies out of the page cache to a place a few bytes ahead, modulo the page, take four times as long on some CPUs (seen
# on AMD EPYC: 3 GB/s for a shift of 1 to 16 bytes, 12 GB/s for none or for one of half a page).
_FAR_SKEW = 2048


class _PieceRead(NamedTuple):
    """A piece of a located item, and where it goes.

    Attributes:
        wanted: the item.
        payload_start: where the item's payload starts in its file.
        piece: box and bytes of the payload.
        wants: destinations that overlap the piece.
        address: host memory that takes the piece's bytes just as they are; 0 if there is none.
        alignment: the bytes have to lie on a multiple of this to be placed without a further copy.
        record: sum of the whole record, if all of it is read.
        blocks: sums of the blocks that the piece lies in, if a part of the record is read and checked.
        before, after: what must stand before and behind the piece, if its item has not been located; read with it.
        supposed: the item has not been located.
    """

    wanted: WantedItem
    payload_start: int
    piece: Piece
    wants: list[Want]
    address: int
    alignment: int
    record: RecordSum | None
    blocks: BlockSums | None = None
    before: bytes = b""
    after: bytes = b""
    supposed: bool = False


class TensorReads:
    """Reads wanted items into their destinations.

    Args:
        files: readers of the checkpoint's files.
        options: window, gap, threads, and whether checksums are compared.
        located: where payloads lie, as far as known; added to.
        stats: counters; added to.
        decoder: reads an item that cannot be ranged.
        running: running sums of payloads, by file and offset of the item (`CheckpointIndex.blocks`).
    """

    def __init__(
        self,
        files: OpenFiles,
        options: LoadOptions,
        located: ItemLocations,
        stats: ReadStats,
        decoder: ItemDecoder,
        running: Mapping[tuple[str, int], Sequence[int]],
    ) -> None:
        self._running = running
        self._files = files
        self._options = options
        self._located = located
        self._stats = stats
        self._decoder = decoder
        self._unranged: list[tuple[WantedItem, str]] = []
        self._doubted: dict[tuple[str, int, str], WantedItem] = {}
        self._forms: dict[tuple[torch.dtype, tuple[int, ...], int], ItemForm] = {}
        self._pinned = False
        self._threads = min(options.io_threads, max(1, options.buffer_bytes // options.window_bytes))
        self._per_thread = threading.local()
        self._placing = threading.Lock()
        self._scattering = threading.BoundedSemaphore(_SCATTERING_THREADS)

    def run(self, items: Sequence[WantedItem], whole: WholeItems | None = None) -> None:
        """Fill the destinations of `items`, which are in order of file and offset, and of `whole`, in any order.

        Raises:
            ChecksumError: a record's bytes are not those that were written.
            CorruptCheckpointError: an item is not what the index says, or its file is too short.
            LoadError: reading failed.
        """
        self._pinned = any(want.tensor.is_cuda for wanted in items[:64] for want in wanted.wants)
        window_bytes, max_gap_bytes = self._options.window_bytes, self._options.max_gap_bytes
        whole_spans: list[WholeSpan] = []
        if whole is not None:
            whole_spans, shared = spans_of(whole, window_bytes=window_bytes, max_gap_bytes=max_gap_bytes)
            items = _with_shared(items, shared) if shared else items
        rangeable: list[tuple[WantedItem, bool]] = []
        unlocated: list[WantedItem] = []
        needed_bytes = sum(int(span.items.payloads.sum()) for span in whole_spans)
        for wanted in items:
            needed = wanted.needed_bytes
            needed_bytes += needed
            item = wanted.chunk.item
            if item.transforms:
                self._unranged.append((wanted, f"it is stored through {', '.join(item.transforms)}"))
                continue
            packed = self._is_packed(item, needed)
            rangeable.append((wanted, packed))
            if not packed and wanted not in self._located and self._supposed(wanted) is None:
                unlocated.append(wanted)
        self._stats.add(bytes_needed=needed_bytes)
        self._read_all(rangeable, unlocated, whole_spans)
        if self._doubted:
            # Not just what was supposed, and nothing worse as yet: to be looked at, each by itself.
            doubted = [self._doubted[key] for key in sorted(self._doubted)]
            self._read_all([(wanted, False) for wanted in doubted], doubted, [])
        for wanted, reason in self._unranged:
            self._place_decoded(wanted, reason)

    def _read_all(
        self,
        rangeable: Iterable[tuple[WantedItem, bool]],
        unlocated: Sequence[WantedItem],
        whole_spans: Iterable[WholeSpan],
    ) -> None:
        """Read items, each of which is packed or not, and spans of whole items.

        Args:
            rangeable: the items, in order.
            unlocated: those of them that have to be located.
            whole_spans: in order.
        """
        window_bytes, max_gap_bytes = self._options.window_bytes, self._options.max_gap_bytes

        def decode_later(wanted: WantedItem, reason: str) -> None:
            self._unranged.append((wanted, reason))

        with self._located.ahead(unlocated, self._files, self._stats, self._threads, decode_later) as located:
            extents = self._extents(rangeable, located)
            spans: Iterator[Span | WholeSpan] = coalesce(
                extents, window_bytes=window_bytes, max_gap_bytes=max_gap_bytes
            )
            try:
                in_parallel(heapq.merge(spans, whole_spans, key=_position), self._read_span, self._threads)
            finally:
                self._per_thread = threading.local()  # frees the buffers

    # ------------------------------------------------------------------------------------------------- what to read

    def _is_packed(self, item: StoredItem, needed_bytes: int) -> bool:
        length = item.length
        if length > _PACKED_ITEM_BYTES or length > self._options.window_bytes:
            return False
        if item.crc32 is not None and self._checks_parts:
            return True  # all of it is a single block, or less
        return length <= CHEAP_GAP_BYTES or needed_bytes >= _MOSTLY * length

    def _extents(
        self, rangeable: Iterable[tuple[WantedItem, bool]], located_at: Callable[[WantedItem], LocatedTensor | None]
    ) -> Iterator[Extent]:
        for wanted, packed in rangeable:
            if packed:
                item = wanted.chunk.item
                start, length = item.offset, item.length
                yield Extent(item.file, start, start + length, length, wanted)
            elif wanted not in self._located and (supposed := self._supposed(wanted)):
                yield from self._supposed_extents(wanted, supposed)
            elif located := located_at(wanted):  # else it was found not to be rangeable
                yield from self._piece_extents(wanted, located)

    def _supposed(self, wanted: WantedItem) -> TensorTemplate | None:
        """What this package writes around the payload of such an item, if its sum is known and all of it is wanted."""
        item = wanted.item
        if item.crc32 is None or _key(wanted) in self._doubted or not any(want.whole for want in wanted.wants):
            return None
        try:
            template = tensor_template(dtype_name(wanted.dtype), wanted.chunk.sizes)
        except ValueError:
            return None
        return template if template.item_bytes == item.length and template.payload_bytes else None

    def _supposed_extents(self, wanted: WantedItem, template: TensorTemplate) -> Iterator[Extent]:
        """The pieces of all of an item that has not been located, with what stands before and behind its payload.

        Whoever doubts an item reads it again, so that it is enough to say where the payload of a sound one lies.
        """
        item, nbytes = wanted.item, wanted.payload_bytes
        start, crc = item.offset + len(template.head), item.crc32 or 0
        record = RecordSum(nbytes, crc) if self._options.verify_crc else None
        sizes = wanted.chunk.sizes
        whole = Box((0,) * len(sizes), sizes)
        if len(wanted.wants) == 1 and wanted.wants[0].address:
            extents = self._straight_extents(wanted, start, whole, record)
        else:
            extents = self._cluster_extents(wanted, start, whole, wanted.wants, record)
        for extent in extents:
            read: _PieceRead = extent.owner
            before = template.head if read.piece.start == 0 else b""
            after = template.tail_with(crc) if read.piece.stop == nbytes else b""
            yield extent._replace(
                start=extent.start - len(before),
                stop=extent.stop + len(after),
                owner=read._replace(before=before, after=after, supposed=True),
            )

    def _straight_extents(
        self, wanted: WantedItem, payload_start: int, whole: Box, record: RecordSum | None
    ) -> Iterator[Extent]:
        """The pieces of a payload all of which goes to one place as it is: stretches of bytes of about one length.

        No more is looked at of their box, which is that of all of them, than where it begins.
        """
        nbytes, address = wanted.payload_bytes, wanted.wants[0].address
        count = -(-nbytes // self._options.window_bytes)
        length = align_up(-(-nbytes // count))
        for begin in range(0, nbytes, length):
            piece = Piece(whole, begin, min(begin + length, nbytes))
            start, stop = payload_start + begin, payload_start + piece.stop
            read = _PieceRead(wanted, payload_start, piece, wanted.wants, address + begin, 1, record)
            yield Extent(wanted.item.file, start, stop, stop - start, read, alone=True)

    def _piece_extents(self, wanted: WantedItem, located: LocatedTensor) -> Iterator[Extent]:
        clusters = cluster_boxes(wanted.chunk.sizes, [want.box for want in wanted.wants])
        record = None
        whole = clusters[0][0].sizes == wanted.chunk.sizes
        if self._options.verify_crc and located.crc32 is not None and whole:
            record = RecordSum(wanted.payload_bytes, located.crc32)
        payload_start = wanted.item.offset + located.payload_offset

        def extents(box: Box, wants: list[Want]) -> Iterator[Extent]:
            part = None if whole else self._checked_part(wanted, located, box, wants)
            if part is not None:
                return self._part_extents(wanted, payload_start, wants, *part)
            return self._cluster_extents(wanted, payload_start, box, wants, record)

        if len(clusters) == 1:
            return extents(clusters[0][0], wanted.wants)
        # Pieces of one cluster may lie between those of another.
        return heapq.merge(
            *(extents(box, [wanted.wants[at] for at in members]) for box, members in clusters),
            key=lambda extent: extent.start,
        )

    @property
    def _checks_parts(self) -> bool:
        return self._options.verify_crc and self._options.verify_slices != "off"

    def _checked_part(
        self, wanted: WantedItem, located: LocatedTensor, box: Box, wants: list[Want]
    ) -> tuple[Box, BlockSums] | None:
        """What is read of an item to check the part that is wanted, and its sums; None if it is not to be checked."""
        item, nbytes = wanted.item, wanted.payload_bytes
        running = self._running.get((item.file, item.offset), ())
        if item.crc32 is None or not self._checks_parts or len(running) != inner_blocks(nbytes):
            return None
        box, elem_bytes = contiguous_around(wanted.chunk.sizes, box), wanted.dtype.itemsize
        part_bytes = math.prod(box.sizes) * elem_bytes
        needed_bytes = sum(math.prod(want.box.sizes) for want in wants) * elem_bytes
        # Columns of a wide matrix take a read of all of it, which the page cache would have spared.
        if self._options.verify_slices == "auto" and part_bytes > (1 + MAX_WASTE) * needed_bytes + BLOCK_BYTES:
            return None

        def damaged(start: int, stop: int, got: int, expected: int) -> ChecksumError:
            return _damaged(wanted, located.payload_offset + start, stop - start, got, expected)

        return box, BlockSums(nbytes, running, item.crc32, damaged)

    def _part_extents(
        self, wanted: WantedItem, payload_start: int, wants: list[Want], box: Box, blocks: BlockSums
    ) -> Iterator[Extent]:
        """The pieces of a box without gaps, and what is missing of the blocks at both of its ends."""
        first = runs(wanted.chunk.sizes, box, wanted.dtype.itemsize).first_byte
        last = first + math.prod(box.sizes) * wanted.dtype.itemsize
        start, stop = whole_blocks(first, last, wanted.payload_bytes)

        def edge(a: int, b: int) -> Iterator[Extent]:
            if a < b:
                read = _PieceRead(wanted, payload_start, Piece(box, a, b), [], 0, 1, None, blocks)
                yield Extent(wanted.item.file, payload_start + a, payload_start + b, b - a, read)

        yield from edge(start, first)
        yield from self._cluster_extents(wanted, payload_start, box, wants, None, blocks)
        yield from edge(last, stop)

    def _cluster_extents(
        self,
        wanted: WantedItem,
        payload_start: int,
        box: Box,
        wants: list[Want],
        record: RecordSum | None,
        blocks: BlockSums | None = None,
    ) -> Iterator[Extent]:
        options, elem_bytes = self._options, wanted.dtype.itemsize
        alignment = max(alignment_for(want.tensor, wanted.dtype) for want in wants)
        for piece in split_box(
            wanted.chunk.sizes,
            box,
            elem_bytes,
            window_bytes=options.window_bytes,
            max_gap_bytes=options.max_gap_bytes,
        ):
            wanted_bytes = math.prod(piece.box.sizes) * elem_bytes
            contiguous = wanted_bytes == piece.stop - piece.start
            fits = contiguous and len(wants) == 1 and (blocks is None or wants[0].box == box)
            address = _address(wants[0], piece.box, elem_bytes) if fits else 0
            # Long straight pieces need no buffer to share; pieces that are mostly gaps may be copied without a read.
            straight = address != 0 and wanted_bytes >= _DIRECT_PIECE_BYTES
            gappy = piece.stop - piece.start > (1 + MAX_WASTE) * wanted_bytes
            yield Extent(
                wanted.item.file,
                payload_start + piece.start,
                payload_start + piece.stop,
                wanted_bytes,
                _PieceRead(wanted, payload_start, piece, wants, address, alignment, record, blocks),
                alone=straight or gappy,
            )

    # -------------------------------------------------------------------------------------------- reading and placing

    def _read_span(self, span: Span | WholeSpan) -> None:
        if isinstance(span, WholeSpan):
            self._read_whole(span)
            return
        first = span.extents[0]
        owner = first.owner
        try:
            with self._files.reader(span.file) as reader:
                if first.alone and owner.address:
                    if owner.supposed:
                        reader.check_range(owner.wanted.item.offset, owner.wanted.item.length)
                    self._read_straight(reader, span, owner)
                    return
                reader.check_range(span.start, span.stop - span.start)
                if first.alone and self._copy_cached(reader, first):
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
                else:
                    self._place_piece(buffer, extent.start + shift, owner)
        self._stats.add(records_checked=checked)

    def _read_whole(self, span: WholeSpan) -> None:
        """Read items that go where they belong as they are."""
        try:
            with self._files.reader(span.file) as reader:
                reader.check_range(span.start, span.stop - span.start)
                # What comes out of the page cache is summed while it is in the CPU's.
                parts = cut(span, _CACHED_BYTES) if reader.is_cached(span.start, span.stop - span.start) else []
        except LoadError as error:
            raise _naming(error, span.items.part(0, 1).items()[0].wanted()) from error
        with self._files.reader(span.file) as reader:
            if not parts:
                self._read_and_place(reader, span)
                return
            with self._scattering:
                for part in parts:
                    self._scatter(reader, part)

    def _scatter(self, reader: RangeReader, span: WholeSpan) -> None:
        """Read items of which the page cache has most."""
        nbytes, verify = span.stop - span.start, self._options.verify_crc
        buffer = self._buffer(nbytes)
        read = scatter(span, reader, buffer)
        if read is not None and read.are_sound(verify):
            self._stats.add(reads=1, bytes_read=nbytes, records_checked=len(span.items.starts) if verify else 0)
        else:
            self._read_and_place(reader, span)

    def _read_and_place(self, reader: RangeReader, span: WholeSpan) -> None:
        buffer = self._buffer(span.stop - span.start)
        start, stop = padded_range(span.start, span.stop, reader.size_bytes)
        try:
            reader.read_into(start, buffer.view[: stop - start])
        except LoadError as error:
            raise _naming(error, span.items.part(0, 1).items()[0].wanted()) from error
        self._stats.add(reads=1, bytes_read=stop - start)
        with self._placing:
            self._place_whole(buffer, span, -start)

    def _place_whole(self, buffer: ReadBuffer, span: WholeSpan, shift: int) -> None:
        verify = self._options.verify_crc
        if place(span, buffer.view, buffer.address, shift, verify):
            self._stats.add(records_checked=len(span.items.starts) if verify else 0)
            return
        checked = 0
        for row in span.items.items():  # each by itself: one of them is damaged, or not as this package writes it
            checked += self._place_packed(buffer, row.offset + shift, row.wanted())
        self._stats.add(records_checked=checked)

    def _read_straight(self, reader: RangeReader, span: Span, read: _PieceRead) -> None:
        """Read a piece to where it belongs, summing it while its bytes are in the CPU's cache."""
        length, crc = read.piece.stop - read.piece.start, 0
        stream = None if read.blocks is None else read.blocks.stream(read.piece.start)

        def add_to_sum(part: memoryview) -> None:
            nonlocal crc
            crc = crc32(part, crc)

        arrived = stream.feed if stream else add_to_sum if read.record else None
        view = memory_at(read.address, length)
        if read.before or read.after:
            before, after = bytearray(len(read.before)), bytearray(len(read.after))
            reader.read_framed(span.start, memoryview(before), view, memoryview(after), arrived)
            if before != read.before or after != read.after:
                self._doubt(read)
        else:
            reader.read_into(span.start, view, arrived)
        if stream:
            stream.finish()
        self._stats.add(reads=1, bytes_read=span.stop - span.start)
        self._compare(read, length, crc)

    def _copy_cached(self, reader: RangeReader, extent: Extent) -> bool:
        """Copy the wanted bytes of a piece that is mostly gaps straight out of the page cache, if they are there."""
        length = extent.stop - extent.start
        with reader.cached(extent.start, length) as address:
            if not address or address % extent.owner.alignment:
                return False
            self._place_piece(HostBytes.at(address, length), 0, extent.owner)
        self._stats.add(reads=1, bytes_read=extent.wanted_bytes)
        return True

    def _buffer(self, needed_bytes: int) -> ReadBuffer:
        buffer: ReadBuffer | None = getattr(self._per_thread, "buffer", None)
        size_bytes = max(needed_bytes, self._options.window_bytes) + 3 * ALIGNMENT_BYTES
        if buffer is None or buffer.size_bytes < size_bytes:
            self._per_thread.buffer = None  # freed before the larger one is made
            buffer = self._per_thread.buffer = ReadBuffer(size_bytes, self._pinned)
        return buffer

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
            if known and (not self._options.verify_crc or crc32(view[start:stop]) == stated):
                self._place_payload(buffer, at + start, stop - start, wanted)
                return int(self._options.verify_crc)
        try:
            located = locate_tensor_in(view, wanted.fqn)
            wanted.check(located)
        except NotRangeable as reason:
            self._unranged.append((wanted, str(reason).removeprefix(f"{wanted.fqn}: ")))
            return 0
        except LoadError as error:
            raise _naming(error, wanted) from error
        expected = located.record_crc32 if self._options.verify_crc else None
        if located.crc32 is not None and len(self._forms) < _MAX_FORMS:
            form = form_of(view, located.payload_offset, located.payload_bytes, located.crc32)
            if form is not None:
                self._forms[kind] = form
        if expected is not None:
            offset, length = located.record_offset, located.record_bytes
            got = crc32(view[offset : offset + length])
            if got != expected:
                raise _damaged(wanted, offset, length, got, expected)
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

    def _place_piece(self, memory: HostBytes, at: int, read: _PieceRead) -> None:
        length = read.piece.stop - read.piece.start
        if read.before or read.after:
            around = memory_at(memory.address + at, len(read.before) + length + len(read.after))
            at += len(read.before)
            if around[: len(read.before)] != read.before or around[len(read.before) + length :] != read.after:
                self._doubt(read)
        if read.record is not None:
            self._compare(read, length, crc32(memory_at(memory.address + at, length)))
        elif read.blocks is not None:
            stream = read.blocks.stream(read.piece.start)
            stream.feed(memory_at(memory.address + at, length))
            stream.finish()
        if read.address:
            ctypes.memmove(read.address, memory.address + at, length)
            return
        for want in read.wants:
            place_box(memory, at, read.piece.box, read.wanted.chunk.sizes, read.wanted.dtype, want)

    def _compare(self, read: _PieceRead, length: int, crc: int) -> None:
        """Note a piece's CRC-32; with the last piece of a record, compare the sum with what was written."""
        if read.record is None:
            return
        total = read.record.add(read.piece.start, length, crc)
        if total is None:
            return
        if total != read.record.expected and read.supposed:
            self._doubt(read)
        elif total != read.record.expected:
            offset = read.payload_start - read.wanted.item.offset
            raise _damaged(read.wanted, offset, read.record.length, total, read.record.expected)
        else:
            self._stats.add(records_checked=1)

    def _doubt(self, read: _PieceRead) -> None:
        self._doubted[_key(read.wanted)] = read.wanted


def _key(wanted: WantedItem) -> tuple[str, int, str]:
    return wanted.item.file, wanted.item.offset, wanted.fqn


def _position(span: Span | WholeSpan) -> tuple[str, int]:
    return span.file, span.start


def _with_shared(items: Sequence[WantedItem], shared: Iterable[WholeItem]) -> list[WantedItem]:
    """All as items that several destinations may want, in order of file and offset."""
    found = {_key(wanted): wanted for wanted in items}
    for row in shared:
        own = row.wanted()
        known = found.setdefault((row.file, row.offset, row.fqn), own)
        if known is not own:
            known.wants += own.wants
    return [found[key] for key in sorted(found)]


def _address(want: Want, box: Box, elem_bytes: int) -> int:
    """Where in host memory the bytes of `box` (relative to the chunk) belong, if they are contiguous there; else 0."""
    if not want.address:
        return 0
    destination = runs(want.box.sizes, relative(box, want.box.offsets), elem_bytes)
    return 0 if destination.counts else want.address + destination.first_byte


def _skew(first: Extent, start: int) -> int:
    """How far into the buffer to read a span from `start` on, so that its first piece lies aligned there."""
    owner = first.owner
    skew = 0 if isinstance(owner, WantedItem) else -(first.start + len(owner.before) - start) % owner.alignment
    return skew + _FAR_SKEW if skew else 0


def _damaged(wanted: WantedItem, offset: int, length: int, got: int, expected: int) -> ChecksumError:
    """The error for bytes `[offset, offset + length)` of an item, which hold its elements."""
    start = wanted.item.offset + offset
    what = f"the bytes [{start}, {start + length}) of {wanted.item.file} have"
    return checksum_error(wanted.where, what, got, expected)


def _naming(error: LoadError, wanted: WantedItem) -> LoadError:
    return naming(error, wanted.where)
