"""How a load reads: every decision, with the numbers that it rests on, and the byte ranges that follow. Pure; no files.

    chunks that are read many at a time                   `max_small_bytes`
    items that are read with their neighbours             `is_packed`
    payloads that are read completely                     `reads_all`
    slices that are read so that they can be checked      `checks_slice`
    gaps that are read and thrown away                    `cheap_gap_bytes`, `is_worth_reading`
    parts that go straight into their destination         `straight_bytes`
    bytes that other ranks of this host read, too         `is_shared`
    how a file is opened, and who reads it in order       `modes`, `stream_bytes`

One decision is left to the storage: of a file that is opened with "auto", the kernel is asked which bytes lie in the
page cache; others are read by O_DIRECT (`LocalReader`).

Two steps make ranges of the slices that are requested. `split_box` turns the wanted box of one stored chunk into
*pieces*, each of which is one stretch of the chunk's payload; `coalesce` joins what lies close together in a file into
*spans*, each of which is one read. Both weigh the same thing: a gap that is read and thrown away costs its bytes, a gap
that is skipped costs one more read. A gap is read when it is shorter than what a device delivers in the time of one
more read, or when all gaps of the span together stay a small part of it; never when it is longer than a policy allows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from mcore_ckpt.core.boxes import Box, bounding, intersect, strides_of
from mcore_ckpt.core.options import PageCache
from mcore_ckpt.format.integrity import BLOCK_BYTES
from mcore_ckpt.storage.base import DirectIo

# Bytes of one read, and of the buffer of each thread: long enough for a disk's full speed.
WINDOW_BYTES = 8 * 1024 * 1024

# The longest gap between two requested ranges that is read and thrown away: about what a disk delivers meanwhile.
MAX_GAP_BYTES = 256 * 1024

# A read costs 20-100 us on a cold disk and 3 us from the page cache; at 1.5 and 8 GB/s that is 30-150 KB and 24 KB.
CHEAP_GAP_BYTES = 32 * 1024

# Bytes thrown away for each byte wanted, when gaps are not cheap each by itself.
MAX_WASTE = 0.25

# What so much of is requested, or is read anyway, is read completely.
_MOSTLY = 0.8

# Up to here, an item is read with its neighbours and copied out of the buffer: a copy at memory speed costs less than
# reads of its own for header and payload.
MAX_SMALL_BYTES = 1024 * 1024

# From here on a part goes straight into its destination rather than through a buffer that it shares with others.
STRAIGHT_BYTES = 1024 * 1024

# What one thread reads in order where the kernel reads ahead of it: a stream fills the page cache with large pages, at
# less than half of the CPU time of 4 KiB ones (seen on ext4, Linux 6.18), and begins with small ones.
STREAM_BYTES = 32 * 1024 * 1024

# How files are opened for what need not stay in the page cache, and for what is to stay.
MODES: dict[PageCache, tuple[DirectIo, DirectIo]] = {"auto": ("auto", "keep"), "on": ("off", "off")}


@dataclass(frozen=True, slots=True)
class ReadPolicy:
    """How data files of one storage are read."""

    window_bytes: int = WINDOW_BYTES
    max_gap_bytes: int = MAX_GAP_BYTES
    cheap_gap_bytes: int = CHEAP_GAP_BYTES
    max_small_bytes: int = MAX_SMALL_BYTES
    straight_bytes: int = STRAIGHT_BYTES
    modes: tuple[DirectIo, DirectIo] = MODES["auto"]  # of a file, for bytes of this rank alone, and of several ranks
    # How much one thread should read in order, of either; 0: any read by any thread.
    stream_bytes: Sequence[int] = (0, STREAM_BYTES)

    def is_worth_reading(self, gap_bytes: int, wasted_bytes: int, wanted_bytes: int) -> bool:
        """Whether a gap is read rather than skipped, in a read that wants and wastes so much already."""
        if gap_bytes > self.max_gap_bytes:
            return False
        return gap_bytes <= self.cheap_gap_bytes or wasted_bytes + gap_bytes <= MAX_WASTE * wanted_bytes

    def is_packed(self, item_bytes: int, needed_bytes: int, *, has_sum: bool) -> bool:
        """Whether an item is read with its neighbours, head and tail included. `has_sum`: all of it is checked then."""
        if item_bytes > self.max_small_bytes:
            return False
        return has_sum or item_bytes <= CHEAP_GAP_BYTES or needed_bytes >= _MOSTLY * item_bytes

    def reads_all(self, read_bytes: int, box_bytes: int, payload_bytes: int) -> bool:
        """Whether all of a payload is read where a slice of it, gaps included, takes `read_bytes`."""
        return read_bytes >= _MOSTLY * payload_bytes and read_bytes > box_bytes

    def checks_slice(self, part_bytes: int, needed_bytes: int) -> bool:
        """Whether a slice is read with what lies between its rows, to be checked: not columns of a wide matrix."""
        return part_bytes <= (1 + MAX_WASTE) * needed_bytes + BLOCK_BYTES

    def is_shared(self, times_wanted: int, *, has_gaps: bool) -> bool:
        """Whether other ranks of this host are about to read the same; they want the gaps that this rank does not."""
        return times_wanted > (0 if has_gaps else 1)


_T = TypeVar("_T")


def batches(things: Iterable[_T], nbytes: Callable[[_T], int], most_bytes: int) -> Iterator[list[_T]]:
    """Things in order, cut where they have more than `most_bytes` together; a larger one stands alone."""
    batch: list[_T] = []
    held_bytes = 0
    for thing in things:
        if batch and held_bytes + nbytes(thing) > most_bytes:
            yield batch
            batch, held_bytes = [], 0
        batch.append(thing)
        held_bytes += nbytes(thing)
    if batch:
        yield batch


class Extent(NamedTuple):
    """Bytes `[start, stop)` of a file that are requested, and by whom."""

    file: str  # name of the file, relative to the checkpoint
    start: int  # first byte
    stop: int  # one past the last byte
    wanted_bytes: int  # how many of them are really wanted (the rest are gaps inside the extent)
    owner: Any  # whatever the caller wants back with the bytes
    alone: bool = False  # the extent is a read of its own, and is never joined with others


class Span(NamedTuple):
    """One read: bytes `[start, stop)` of a file, and the extents that lie in it, in file order."""

    file: str
    start: int
    stop: int
    extents: list[Extent]


class ChunkPart(NamedTuple):
    """A box of a stored chunk, in its elements: bytes `[start, stop)` of its payload, read at once, gaps included."""

    box: Box
    start: int
    stop: int


def coalesce(extents: Iterable[Extent], policy: ReadPolicy) -> Iterator[Span]:
    """Join extents, in order of file and start, into spans of a window at most; gaps worth it are read, too."""
    window_bytes, cheap_gap_bytes = policy.window_bytes, policy.cheap_gap_bytes
    file, start, stop = "", 0, 0
    wanted_bytes = wasted_bytes = 0
    members: list[Extent] = []
    for extent in extents:
        gap_bytes = extent.start - stop
        joins = (
            members
            and not extent.alone
            and not members[-1].alone
            and extent.file == file
            and extent.start >= start
            and max(stop, extent.stop) - start <= window_bytes
            and (
                gap_bytes <= cheap_gap_bytes
                or policy.is_worth_reading(gap_bytes, wasted_bytes, wanted_bytes + extent.wanted_bytes)
            )
        )
        if not joins:
            if members:
                yield Span(file, start, stop, members)
            file, start, stop = extent.file, extent.start, extent.stop
            wanted_bytes = wasted_bytes = 0
            members = []
            gap_bytes = 0
        members.append(extent)
        stop = max(stop, extent.stop)
        wanted_bytes += extent.wanted_bytes
        wasted_bytes += max(gap_bytes, 0) + (extent.stop - extent.start - extent.wanted_bytes)
    if members:
        yield Span(file, start, stop, members)


def split_box(outer_sizes: Sequence[int], box: Box, elem_bytes: int, policy: ReadPolicy) -> Iterator[ChunkPart]:
    """Cut a requested box of a C-contiguous array into disjoint pieces, in order of their bytes, each a read of a
    window at most. Rows that lie close together stay in one piece, and are read with what lies between them.
    """
    sizes = tuple(box.sizes)
    if 0 in sizes:
        return
    rank = len(sizes)
    stride_bytes = [stride * elem_bytes for stride in strides_of(outer_sizes)]
    # span_bytes[d]: from the first to the last wanted byte of one index of the dimensions before d.
    span_bytes = [elem_bytes] * (rank + 1)
    for dim in range(rank - 1, -1, -1):
        span_bytes[dim] = (sizes[dim] - 1) * stride_bytes[dim] + span_bytes[dim + 1]
    first_byte = sum(offset * stride for offset, stride in zip(box.offsets, stride_bytes, strict=True))

    window_bytes, joined = policy.window_bytes, _joined_from(sizes, stride_bytes, span_bytes, elem_bytes, policy)
    # Dimensions before `cut` are walked index by index; dimension `cut` is cut into groups that fit the window.
    cut = joined
    while cut < rank and span_bytes[cut + 1] > window_bytes:
        cut += 1
    if cut == rank:
        group = 1
        cut = rank - 1 if rank else 0
    else:
        group = max(1, (window_bytes - span_bytes[cut + 1]) // stride_bytes[cut] + 1)

    if rank == 0:
        yield ChunkPart(box, first_byte, first_byte + elem_bytes)
        return
    inner_offsets, inner_sizes = tuple(box.offsets)[cut + 1 :], sizes[cut + 1 :]
    for index in itertools.product(*(range(size) for size in sizes[:cut])):
        outer_offsets = tuple(offset + i for offset, i in zip(box.offsets, index, strict=False))
        base = first_byte + sum(i * stride for i, stride in zip(index, stride_bytes, strict=False))
        for begin in range(0, sizes[cut], group):
            count = min(group, sizes[cut] - begin)
            start = base + begin * stride_bytes[cut]
            yield ChunkPart(
                Box(
                    (*outer_offsets, box.offsets[cut] + begin, *inner_offsets),
                    (*(1,) * cut, count, *inner_sizes),
                ),
                start,
                start + (count - 1) * stride_bytes[cut] + span_bytes[cut + 1],
            )


def _joined_from(
    sizes: Sequence[int], stride_bytes: Sequence[int], span_bytes: Sequence[int], elem_bytes: int, policy: ReadPolicy
) -> int:
    """First dimension of the innermost block that is read as one, gaps included."""
    wanted_bytes = elem_bytes
    for dim in range(len(sizes) - 1, -1, -1):
        gap_bytes = stride_bytes[dim] - span_bytes[dim + 1]
        wanted_bytes *= sizes[dim]
        wasted_bytes = span_bytes[dim] - wanted_bytes
        if (
            sizes[dim] > 1
            and gap_bytes > 0
            and not policy.is_worth_reading(gap_bytes, wasted_bytes - gap_bytes, wanted_bytes)
        ):
            return dim + 1
    return 0


def cluster_boxes(outer_sizes: Sequence[int], boxes: Sequence[Box]) -> list[tuple[Box, list[int]]]:
    """Group boxes of one chunk that overlap, or whose bounding box holds few other elements, to be read as that:
    bounding box and positions of members, ordered by first byte.
    """
    if len(boxes) == 1:
        return [(boxes[0], [0])]
    strides = strides_of(outer_sizes)

    def first_elem(box: Box) -> int:
        return sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))

    clusters: list[tuple[Box, list[int], int]] = []
    for position in sorted(range(len(boxes)), key=lambda i: first_elem(boxes[i])):
        merged_box, merged, wanted_elems = boxes[position], [position], math.prod(boxes[position].sizes)
        again = True
        while again:
            again = False
            # What a box can join was added lately: clusters are in order of their first bytes.
            for at in range(len(clusters) - 1, max(-1, len(clusters) - 9), -1):
                other_box, other, other_elems = clusters[at]
                around = bounding((merged_box, other_box))
                overlap = intersect(merged_box, other_box)
                union_elems = wanted_elems + other_elems - (math.prod(overlap.sizes) if overlap else 0)
                if overlap or math.prod(around.sizes) <= (1 + MAX_WASTE) * union_elems:
                    merged_box, merged, wanted_elems = around, other + merged, union_elems
                    del clusters[at]
                    again = True
                    break
        clusters.append((merged_box, merged, wanted_elems))
    return [(box, members) for box, members, _ in sorted(clusters, key=lambda c: first_elem(c[0]))]
