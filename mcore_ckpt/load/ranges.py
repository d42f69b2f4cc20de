"""Read items -> byte ranges: the bytes of files that one load reads, and their order. Pure; no files, no tensors.

Two steps. `split_box` turns the wanted box of one stored chunk into *pieces*, each of which is one stretch of the
chunk's payload; `coalesce` joins what lies close together in a file into *spans*, each of which is one read.

Both weigh the same thing: a gap that is read and thrown away costs its bytes, a gap that is skipped costs one more
read. A gap is read when it is shorter than what a device delivers in the time of one more read, or when all gaps of the
span together stay a small part of it; never when it is longer than the policy allows (`ReadPolicy.is_worth_reading`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from mcore_ckpt.core.boxes import Box, bounding, intersect, strides_of
from mcore_ckpt.load.policy import MAX_WASTE, ReadPolicy

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
    """A box of a stored chunk that is read at once: bytes `[start, stop)` of the chunk's payload.

    The box is relative to the chunk, in elements. Gaps between its runs are part of `[start, stop)`.
    """

    box: Box
    start: int
    stop: int


def coalesce(extents: Iterable[Extent], policy: ReadPolicy) -> Iterator[Span]:
    """Join neighbouring extents, in order of file and start, into spans of at most a window unless one extent is
    longer. Overlapping extents share a span; gaps that are worth it are read and thrown away.
    """
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
    """Cut a requested box of a C-contiguous array of `outer_sizes` into pieces, each small enough for one read.

    Rows that lie close together (a slice of a row-parallel weight: short runs at short distances) stay in one piece and
    are read with what lies between them; rows that lie far apart become pieces of their own. The pieces are disjoint,
    together `box`, and in order of their bytes. A piece spans a window at most (one element at least).
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
    sizes: Sequence[int],
    stride_bytes: Sequence[int],
    span_bytes: Sequence[int],
    elem_bytes: int,
    policy: ReadPolicy,
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
    """Group the boxes requested of one chunk, so that bytes requested twice are read once.

    Boxes that overlap, or whose bounding box holds few other elements, are read together as that bounding box. Returns
    it for each group, with the positions of its members in `boxes`; ordered by first byte.
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
