"""Requested items -> extents: which bytes of which files a load reads of them, in order of the files. Reads nothing.

    small items      one extent each, head and tail included: located and checked in memory, many in one span
    complete items   the payload in parts of at most a window. If this package wrote the item, the parts at either end
                     come with the item's head and tail, which are compared with the expected bytes
    slices           the parts of the payload that hold them. Rows with short gaps between them are read gaps included;
                     where that is most of the payload, all of it is read and checked as a complete item

The CRC-32 of a payload that is read completely is compared. Of a slice, the blocks are checked that it lies in, if
`.metadata` has their sums: these show that the payload lies where it should, too. Otherwise head and tail are read and
compared for that.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from mcore_ckpt.core.boxes import Box, Stretch, intersect, relative, runs
from mcore_ckpt.core.errors import ChecksumError
from mcore_ckpt.core.fingerprints import may_begin_at, rows_to_sum
from mcore_ckpt.format.integrity import BLOCK_BYTES, inner_blocks
from mcore_ckpt.format.item_layout import tensor_template
from mcore_ckpt.load._columns import MAX_COLUMN_BYTES
from mcore_ckpt.load._placement import Want, alignment_for
from mcore_ckpt.load._wanted_items import WantedItem
from mcore_ckpt.load.checksums import BlockSums, RecordSum, checksum_error, contiguous_around, whole_blocks
from mcore_ckpt.load.ranges import CHEAP_GAP_BYTES, MAX_WASTE, ChunkPart, Extent, cluster_boxes, split_box
from mcore_ckpt.state.torch_classes import dtype_name
from mcore_ckpt.storage.base import align_up

# From here on a part goes straight into its destination rather than through a buffer that it shares with others.
_STRAIGHT_BYTES = 1024 * 1024

# What so much of is requested, or is read anyway, is read completely.
_MOSTLY = 0.8


class PayloadPlace(NamedTuple):
    """Where the payload of an item lies in its file."""

    start: int  # its first byte
    crc32: int | None  # of the payload; None if nothing states it
    head: bytes = b""  # what has to stand before and behind it; empty if the item itself has been read and says so
    tail: bytes = b""  # what has to stand before and behind it; empty if the item itself has been read and says so


class PartRead(NamedTuple):
    """A part of a payload, and where it goes."""

    wanted: WantedItem  # the item
    place: PayloadPlace  # of the item's payload
    part: ChunkPart  # slice of the chunk, and bytes of the payload
    wants: list[Want]  # destinations that overlap the part
    address: int  # host memory that takes the part's bytes just as they are; 0 if there is none
    alignment: int  # the bytes have to lie on a multiple of this to be placed without a further copy
    record: RecordSum | None  # sum of the payload, if all of it is read
    blocks: BlockSums | None  # sums of the blocks that the part lies in, if a slice of the payload is read and checked
    head: bytes = b""  # what has to stand before and behind the part, read with it
    tail: bytes = b""  # what has to stand before and behind the part, read with it


class Ends(NamedTuple):
    """The head or tail of an item of which a slice is read that no sum checks: the expected bytes, and where its
    payload starts in its file.
    """

    wanted: WantedItem
    start: int
    expected: bytes


def own_place(wanted: WantedItem) -> PayloadPlace | None:
    """Where the payload lies if this package wrote the item; None if the index does not tell. It tells the CRC-32 of
    each payload in a checkpoint with a manifest, with which its files are compared.
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
    return PayloadPlace(item.offset + len(template.head), item.crc32, template.head, template.tail_with(item.crc32))


class Extents:
    """Plans the reads of one load. `sizes`: as `split_box` takes them; `running`: cumulative sums of payloads, by file
    and offset of the item (`CheckpointIndex.blocks`); `columns_of`: the place in its tensor of a chunk whose rows are
    to be summed.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        running: Mapping[tuple[str, int], Sequence[int]],
        columns_of: Callable[[WantedItem], Stretch | None] | None = None,
    ) -> None:
        self._sizes = sizes
        self._running = running
        self._columns_of = columns_of

    def is_packed(self, wanted: WantedItem, needed_bytes: int) -> bool:
        """Whether an item is read with its neighbours, head and tail included; `needed_bytes` of it are requested."""
        item = wanted.chunk.item
        length = item.length
        if length > MAX_COLUMN_BYTES or length > self._sizes["window_bytes"]:
            return False
        if item.crc32 is not None:
            return True  # all of it is a single block, or less
        return length <= CHEAP_GAP_BYTES or needed_bytes >= _MOSTLY * length

    def packed(self, wanted: WantedItem) -> Extent:
        """The extent of an item that `is_packed`."""
        item = wanted.chunk.item
        return Extent(item.file, item.offset, item.offset + item.length, item.length, wanted)

    def of(self, wanted: WantedItem, place: PayloadPlace) -> Iterator[Extent]:
        """The extents of an item that is not packed, in order."""
        clusters = cluster_boxes(wanted.chunk.sizes, [want.box for want in wanted.wants])
        if len(clusters) == 1 and self._reads_all(wanted, clusters[0][0]):
            return self._complete(wanted, place)
        slices = [self._slice(wanted, place, box, [wanted.wants[at] for at in members]) for box, members in clusters]
        # Parts of one cluster may lie between those of another.
        return slices[0] if len(slices) == 1 else heapq.merge(*slices, key=lambda extent: extent.start)

    def _reads_all(self, wanted: WantedItem, box: Box) -> bool:
        sizes, elem_bytes = wanted.chunk.sizes, wanted.dtype.itemsize
        if box.sizes == sizes:
            return True
        joined = {**self._sizes, "window_bytes": wanted.payload_bytes}
        first = next(split_box(sizes, box, elem_bytes, **joined))
        read_bytes = first.stop - first.start
        return read_bytes >= _MOSTLY * wanted.payload_bytes and read_bytes > math.prod(box.sizes) * elem_bytes

    def _complete(self, wanted: WantedItem, place: PayloadPlace) -> Iterator[Extent]:
        """The parts of all of a payload, with the item's head and tail, if it is known what they have to be."""
        nbytes, sizes = wanted.payload_bytes, wanted.chunk.sizes
        whole = Box((0,) * len(sizes), sizes)
        record = None if place.crc32 is None else RecordSum(nbytes, place.crc32)
        if len(wanted.wants) == 1 and wanted.wants[0].whole and wanted.wants[0].address:
            extents = self._straight(wanted, place, whole, record)
        else:
            extents = self._parts(wanted, place, whole, wanted.wants, record, None)
        for extent in extents:
            read: PartRead = extent.owner
            head = place.head if read.part.start == 0 else b""
            tail = place.tail if read.part.stop == nbytes else b""
            if head or tail:
                extent = extent._replace(
                    start=extent.start - len(head),
                    stop=extent.stop + len(tail),
                    owner=read._replace(head=head, tail=tail),
                )
            yield extent

    def _straight(
        self, wanted: WantedItem, place: PayloadPlace, whole: Box, record: RecordSum | None
    ) -> Iterator[Extent]:
        """The parts of a payload all of which goes to one address as it is: byte ranges of about one length, of whose
        slice only the beginning counts.
        """
        nbytes, address = wanted.payload_bytes, wanted.wants[0].address
        count = -(-nbytes // self._sizes["window_bytes"])
        length = align_up(-(-nbytes // count))
        columns = None if self._columns_of is None or count == 1 else self._columns_of(wanted)
        rows = None if columns is None else rows_to_sum(columns)
        if rows is not None and not may_begin_at(rows, length) and rows.run_bytes <= length:
            length += -length % rows.run_bytes  # a row is summed by the read that fills all of it
        for begin in range(0, nbytes, length):
            part = ChunkPart(whole, begin, min(begin + length, nbytes))
            read = PartRead(wanted, place, part, wanted.wants, address + begin, 1, record, None)
            yield _extent(read, part.stop - begin, alone=True)

    def _slice(self, wanted: WantedItem, place: PayloadPlace, box: Box, wants: list[Want]) -> Iterator[Extent]:
        checked = self._checked_slice(wanted, place, box, wants)
        if checked is not None:
            yield from self._checked_parts(wanted, place, wants, *checked)
            return
        item = wanted.item
        if place.head:
            yield Extent(item.file, item.offset, place.start, len(place.head), Ends(wanted, place.start, place.head))
        yield from self._parts(wanted, place, box, wants, None, None)
        if place.tail:
            end = item.offset + item.length
            yield Extent(item.file, end - len(place.tail), end, len(place.tail), Ends(wanted, place.start, place.tail))

    def _checked_slice(
        self, wanted: WantedItem, place: PayloadPlace, box: Box, wants: list[Want]
    ) -> tuple[Box, BlockSums] | None:
        """What is read of an item to check a slice of it, and its sums; None if it is not to be checked."""
        item, nbytes = wanted.item, wanted.payload_bytes
        running = self._running.get((item.file, item.offset), ())
        if item.crc32 is None or len(running) != inner_blocks(nbytes):
            return None
        box, elem_bytes = contiguous_around(wanted.chunk.sizes, box), wanted.dtype.itemsize
        part_bytes = math.prod(box.sizes) * elem_bytes
        needed_bytes = sum(math.prod(want.box.sizes) for want in wants) * elem_bytes
        # Columns of a wide matrix take a read of all of it, which is too much for a check.
        if part_bytes > (1 + MAX_WASTE) * needed_bytes + BLOCK_BYTES:
            return None
        offset = place.start - item.offset

        def error(start: int, stop: int, got: int, expected: int) -> ChecksumError:
            return damaged(wanted, offset + start, stop - start, got, expected)

        return box, BlockSums(nbytes, running, item.crc32, error)

    def _checked_parts(
        self, wanted: WantedItem, place: PayloadPlace, wants: list[Want], box: Box, blocks: BlockSums
    ) -> Iterator[Extent]:
        """The parts of a slice without gaps, and what is missing of the blocks at both of its ends."""
        first = runs(wanted.chunk.sizes, box, wanted.dtype.itemsize).first_byte
        last = first + math.prod(box.sizes) * wanted.dtype.itemsize
        start, stop = whole_blocks(first, last, wanted.payload_bytes)
        if start < first:
            yield _extent(PartRead(wanted, place, ChunkPart(box, start, first), [], 0, 1, None, blocks), first - start)
        yield from self._parts(wanted, place, box, wants, None, blocks)
        if last < stop:
            yield _extent(PartRead(wanted, place, ChunkPart(box, last, stop), [], 0, 1, None, blocks), stop - last)

    def _parts(
        self,
        wanted: WantedItem,
        place: PayloadPlace,
        box: Box,
        wants: list[Want],
        record: RecordSum | None,
        blocks: BlockSums | None,
    ) -> Iterator[Extent]:
        """The parts of a slice, each of which is one read at most."""
        elem_bytes = wanted.dtype.itemsize
        alignment = max(alignment_for(want.tensor, wanted.dtype) for want in wants)
        only = wants[0] if len(wants) == 1 else None
        exact = only is not None and only.box == box
        for part in split_box(
            wanted.chunk.sizes,
            box,
            elem_bytes,
            **self._sizes,
        ):
            read_bytes, part_bytes = part.stop - part.start, math.prod(part.box.sizes) * elem_bytes
            all_needed = exact or blocks is not None
            needed_bytes = part_bytes if all_needed else _overlap_elems(part.box, wants) * elem_bytes
            fits = exact and part_bytes == read_bytes
            address = _address(wants[0], part.box, elem_bytes) if fits else 0
            # Long straight parts need no buffer to share; parts that are mostly gaps may be copied without a read.
            straight = address != 0 and read_bytes >= _STRAIGHT_BYTES
            gappy = read_bytes > (1 + MAX_WASTE) * needed_bytes
            read = PartRead(wanted, place, part, wants, address, alignment, record, blocks)
            yield _extent(read, needed_bytes, alone=straight or gappy)


def _extent(read: PartRead, wanted_bytes: int, alone: bool = False) -> Extent:
    start = read.place.start
    return Extent(read.wanted.item.file, start + read.part.start, start + read.part.stop, wanted_bytes, read, alone)


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
