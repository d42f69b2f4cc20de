"""Boxes of an n-dimensional tensor: what two of them share, where one lies in memory, and whether many tile a tensor.

Plain ints, no arrays and no torch: the same functions serve the planner, the reader and the command.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Box(NamedTuple):
    """A block of a tensor: elements `[offsets[i], offsets[i] + sizes[i])` along each axis `i`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def intersect(a: Box, b: Box) -> Box | None:
    """What two boxes of one tensor share, in the same coordinates; None if they share no element."""
    offsets, sizes = [], []
    for a_start, a_size, b_start, b_size in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True):
        start = a_start if a_start > b_start else b_start
        a_stop, b_stop = a_start + a_size, b_start + b_size
        size = (a_stop if a_stop < b_stop else b_stop) - start
        if size <= 0:
            return None
        offsets.append(start)
        sizes.append(size)
    return Box(tuple(offsets), tuple(sizes))


def relative(box: Box, origin: Sequence[int]) -> Box:
    """A box in coordinates that begin at `origin`."""
    return Box(tuple(map(operator.sub, box.offsets, origin)), box.sizes)


def bounding(boxes: Sequence[Box]) -> Box:
    """The smallest box around some boxes, of which there is at least one."""
    starts = tuple(map(min, zip(*(box.offsets for box in boxes), strict=True)))
    stops = map(max, zip(*(map(operator.add, box.offsets, box.sizes) for box in boxes), strict=True))
    return Box(starts, tuple(map(operator.sub, stops, starts)))


def strides_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides of a C-contiguous array, in elements; as in torch, an axis of size 0 counts as 1."""
    inner = [size or 1 for size in reversed(sizes[1:])]
    return tuple(itertools.accumulate(inner, operator.mul, initial=1))[::-1] if sizes else ()


@dataclass(frozen=True, slots=True)
class Runs:
    """The contiguous byte runs of a box in a larger C-contiguous array, all of one length: a million rows are a few
    ints. Iterating yields them in ascending order, as `(start_byte, nbytes)`.
    """

    first_byte: int  # start of the first run, relative to the array
    run_bytes: int  # length of each run; 0 if the box is empty
    # How often the run repeats, outermost axis first; `()` for a single run. Axes that continue one another are merged.
    counts: tuple[int, ...]
    strides: tuple[int, ...]  # distance in bytes between repetitions, for each of `counts`

    def __len__(self) -> int:
        return math.prod(self.counts) if self.run_bytes else 0

    @property
    def payload_bytes(self) -> int:
        """Bytes of all runs together."""
        return math.prod(self.counts) * self.run_bytes

    def __iter__(self) -> Iterator[tuple[int, int]]:
        if not self.run_bytes:
            return
        if not self.counts:
            yield self.first_byte, self.run_bytes
            return
        outer = [range(0, n * stride, stride) for n, stride in zip(self.counts[:-1], self.strides[:-1], strict=True)]
        extent, stride, run_bytes = self.counts[-1] * self.strides[-1], self.strides[-1], self.run_bytes
        for shifts in itertools.product(*outer):
            first = self.first_byte + sum(shifts)
            for start in range(first, first + extent, stride):
                yield start, run_bytes


def runs(outer_sizes: Sequence[int], inner: Box, elem_bytes: int) -> Runs:
    """The fewest and longest runs of bytes of the box `inner` in a C-contiguous array; `ValueError`: outside it."""
    first, stride = 0, elem_bytes
    run_bytes = elem_bytes
    whole = True  # the run still covers every axis so far completely
    repeats: list[tuple[int, int]] = []  # (count, stride), innermost first
    for outer, offset, size in zip(reversed(outer_sizes), reversed(inner.offsets), reversed(inner.sizes), strict=True):
        if offset < 0 or size < 0 or offset + size > outer:
            raise ValueError(f"box {inner} does not lie inside an array of shape {list(outer_sizes)}")
        first += offset * stride
        if whole:
            run_bytes *= size
            whole = size == outer
        elif size != 1:
            if repeats and repeats[-1][0] * repeats[-1][1] == stride:
                repeats[-1] = (repeats[-1][0] * size, repeats[-1][1])  # goes on where the axis inside it ended
            else:
                repeats.append((size, stride))
        stride *= outer
    if not run_bytes or any(not count for count, _ in repeats):
        return Runs(first, 0, (), ())
    counts, strides = tuple(count for count, _ in reversed(repeats)), tuple(step for _, step in reversed(repeats))
    return Runs(first, run_bytes, counts, strides)


# A tiling by n boxes has at most n * 2**axes corners that do not cancel, and real ones have far fewer. Boxes that were
# made up to be costly are refused instead of worked through.
_MAX_CORNERS_PER_BOX = 64


def covers(shape: Sequence[int], boxes: Iterable[Box]) -> str | None:
    """None if boxes tile a tensor, every element in exactly one; otherwise the problem and the first such element.

    The corners of all boxes, signed like those of a summed-area table, have to cancel out but for the corners of the
    tensor itself. Done axis by axis this takes about 2 n steps for a regular grid of n boxes, and needs no grid.
    """
    shape = tuple(shape)
    boxes = list(boxes)
    if _in_a_row(shape, boxes):
        return None
    rank = len(shape)
    for box in boxes:
        if not len(box.offsets) == len(box.sizes) == rank:
            return f"chunk at {list(box.offsets)} of sizes {list(box.sizes)} does not have the axes of {list(shape)}"
    divided: list[int] = []  # the axes that some box does not span; the others need no checking
    bounds: list[list[int]] = []  # starts and stops of all boxes, axis after axis
    for axis, outer in enumerate(shape):
        starts, sizes = [box.offsets[axis] for box in boxes], [box.sizes[axis] for box in boxes]
        if sizes.count(outer) == len(boxes) == starts.count(0):
            continue
        stops = list(map(operator.add, starts, sizes))
        if boxes and (min(starts) < 0 or min(sizes) < 0 or max(stops) > outer):
            wrong = next(n for n, stop in enumerate(stops) if starts[n] < 0 or sizes[n] < 0 or stop > outer)
            return (
                f"chunk at {list(boxes[wrong].offsets)} of sizes {list(boxes[wrong].sizes)} does not lie inside "
                f"{list(shape)}"
            )
        divided.append(axis)
        bounds += (starts, stops)
    if not all(shape):
        return None  # no elements; boxes inside are empty too
    if len(divided) == 1:  # intervals that follow one another, in any order: the commonest tiling
        intervals = sorted(pair for pair in zip(*bounds, strict=True) if pair[0] != pair[1])
        chain = [0, *itertools.chain.from_iterable(intervals), shape[divided[0]]]
        if chain[0::2] == chain[1::2]:
            return None

    excess: dict[tuple[int, ...], int] = {}  # (start, stop) of each axis -> boxes there, less the one that is expected
    for key in zip(*bounds, strict=True) if divided else ((),) * len(boxes):
        excess[key] = excess.get(key, 0) + 1
    whole = tuple(bound for axis in divided for bound in (0, shape[axis]))
    excess[whole] = excess.get(whole, 0) - 1

    limit = _MAX_CORNERS_PER_BOX * (len(boxes) + 1)
    for position in range(len(divided)):
        corners: dict[tuple[int, ...], int] = {}
        for key, count in excess.items():
            start, stop = key[: position + 1] + key[position + 2 :], key[:position] + key[position + 1 :]
            corners[start] = corners.get(start, 0) + count
            corners[stop] = corners.get(stop, 0) - count
        excess = {key: count for key, count in corners.items() if count}
        if len(excess) > limit:
            return f"{len(boxes)} chunks of {list(shape)} lie too irregularly to be checked"
    excess = {key: count for key, count in excess.items() if count}
    if not excess:
        return None
    # No corner precedes the first one, so what is left over there is what the element itself has in excess.
    first = min(excess)
    element = [0] * len(shape)
    for axis, coordinate in zip(divided, first, strict=True):
        element[axis] = coordinate
    return f"element {element} of {list(shape)} lies in {excess[first] + 1} chunks, expected exactly 1"


def _in_a_row(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """Whether the boxes follow one another, as listed, along one axis and span the others; False says nothing."""
    if not boxes or not shape:
        return boxes == [((), ())]
    first = boxes[0].sizes
    axis = next((axis for axis, (size, outer) in enumerate(zip(first, shape, strict=False)) if size != outer), 0)
    before, after, start = (0,) * axis, (0,) * (len(shape) - axis - 1), 0
    for offsets, sizes in boxes:
        if offsets != (*before, start, *after) or len(sizes) != len(shape):
            return False
        if sizes[axis] <= 0 or sizes[:axis] != shape[:axis] or sizes[axis + 1 :] != shape[axis + 1 :]:
            return False
        start += sizes[axis]
    return start == shape[axis]


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cut the elements [start, stop) of a row-major array of `shape` into boxes, in order.

    Flat optimizer shards are ranges of flattened parameters; this is what such a range is in the parameter's own shape.
    There are at most 2 * len(shape) - 1 boxes.
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    row_elems = math.prod(shape[1:])
    first, last = -(-start // row_elems), stop // row_elems
    boxes: list[Box] = []

    def part_of_row(row: int, low: int, high: int) -> None:
        boxes.extend(Box((row, *box.offsets), (1, *box.sizes)) for box in flat_boxes(shape[1:], low, high))

    if first > last:  # inside one row
        part_of_row(last, start - last * row_elems, stop - last * row_elems)
        return boxes
    if start < first * row_elems:
        part_of_row(first - 1, start - (first - 1) * row_elems, row_elems)
    if first < last:
        boxes.append(Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])))
    if last * row_elems < stop:
        part_of_row(last, 0, stop - last * row_elems)
    return boxes


class Stretch(NamedTuple):
    """Where the elements of one stored chunk lie in their tensor: `elems` elements, from `first` on, of the flattened
    slice `box` of a tensor of `shape`. Most chunks are such a slice completely.
    """

    shape: tuple[int, ...]
    box: Box
    first: int
    elems: int
    elem_bytes: int

    @classmethod
    def of_chunk(
        cls,
        shape: tuple[int, ...],
        offsets: tuple[int, ...],
        sizes: tuple[int, ...],
        elem_bytes: int,
        own_shape: tuple[int, ...] | None = None,
    ) -> Stretch:
        """The stretch of a stored chunk. `own_shape`: of a parameter stored as rows of a grid (`format.md`)."""
        if own_shape is None or own_shape == shape:
            return cls(shape, Box(offsets, sizes), 0, math.prod(sizes), elem_bytes)
        cell = tuple(map(operator.floordiv, own_shape, shape[:-1]))
        base = tuple(map(operator.mul, offsets[:-1], cell))
        return cls(own_shape, Box(base, cell), offsets[-1], sizes[-1], elem_bytes)

    def bytes_behind(self) -> int | None:
        """Bytes of the tensor behind the elements, if they are one run of it or none; else None."""
        shape, (offsets, sizes), first, elems, elem_bytes = self
        if not elems:
            return 0
        if sizes[1:] == shape[1:]:  # rows, as most are
            row_elems = math.prod(shape[1:])
            start = (offsets[0] * row_elems if offsets else 0) + first
            return (math.prod(shape) - start - elems) * elem_bytes
        boxes = list(self.boxes(0, elems))
        found = runs(shape, boxes[0], elem_bytes)
        if len(boxes) > 1 or len(found) > 1:
            return None
        return math.prod(shape) * elem_bytes - found.first_byte - found.run_bytes

    def boxes(self, first: int, count: int) -> Iterator[Box]:
        """Elements `[first, first + count)` of these as slices of the tensor, in order."""
        begin = self.first + first
        for box in flat_boxes(self.box.sizes, begin, begin + count):
            yield Box(tuple(map(operator.add, self.box.offsets, box.offsets)), box.sizes)
