"""Boxes against numpy, which enumerates elements one by one."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.core.boxes import Box, covers, intersect, runs

SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offsets, sizes = [], []
    for size in shape:
        start = draw(st.integers(0, size))
        offsets.append(start)
        sizes.append(draw(st.integers(0, size - start)))
    return Box(tuple(offsets), tuple(sizes))


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))


@given(SHAPES, st.data())
def test_intersection_is_what_both_contain(shape: tuple[int, ...], data: st.DataObject) -> None:
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    in_both = np.zeros(shape, dtype=np.int8)
    in_both[index(a)] += 1
    in_both[index(b)] += 1
    shared = intersect(a, b)
    assert shared == intersect(b, a)
    expected = np.zeros(shape, dtype=bool)
    if shared is not None:
        assert all(shared.sizes)
        expected[index(shared)] = True
    assert np.array_equal(in_both == 2, expected)


@given(SHAPES, st.sampled_from([1, 2, 4, 8, 16]), st.data())
def test_runs_are_the_bytes_of_the_box_in_order(shape: tuple[int, ...], elem_bytes: int, data: st.DataObject) -> None:
    box = data.draw(boxes_in(shape))
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)[index(box)].ravel()
    expected = [byte for number in numbers for byte in range(number * elem_bytes, (number + 1) * elem_bytes)]
    found = runs(shape, box, elem_bytes)
    pieces = list(found)
    assert [byte for start, nbytes in pieces for byte in range(start, start + nbytes)] == expected
    assert len(pieces) == len(found)
    assert found.payload_bytes == len(expected)
    for (start, nbytes), (following, _) in itertools.pairwise(pieces):
        assert start + nbytes < following, "two runs that touch should be one"
    if expected:
        assert (found.first_byte, found.stop_byte) == (expected[0], expected[-1] + 1)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor cut in two again and again, at any place and along any axis."""
    shape = draw(st.lists(st.integers(1, 6), max_size=4).map(tuple))
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        first = draw(st.integers(0, box.sizes[axis]))
        sizes, offsets = list(box.sizes), list(box.offsets)
        sizes[axis] = first
        boxes.append(Box(box.offsets, tuple(sizes)))
        sizes[axis], offsets[axis] = box.sizes[axis] - first, offsets[axis] + first
        boxes.append(Box(tuple(offsets), tuple(sizes)))
    return shape, draw(st.permutations(boxes))


@given(tilings())
def test_every_tiling_covers(tiling: tuple[tuple[int, ...], list[Box]]) -> None:
    assert covers(*tiling) is None


@given(tilings(), st.data())
def test_exactly_the_tilings_cover(tiling: tuple[tuple[int, ...], list[Box]], data: st.DataObject) -> None:
    shape, boxes = tiling
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(boxes)))
        if data.draw(st.booleans()):
            boxes = [*boxes[:at], data.draw(boxes_in(shape)), *boxes[at:]]
        else:
            boxes = [*boxes[:at], *boxes[at + 1 :]]
    count = np.zeros(shape, dtype=int)
    for box in boxes:
        count[index(box)] += 1
    problem = covers(shape, boxes)
    if (count == 1).all():
        assert problem is None
    else:
        element = np.argwhere(count != 1)[0].tolist()  # the first in row-major order
        assert (
            problem == f"element {element} of {list(shape)} lies in {count[tuple(element)]} chunks, expected exactly 1"
        )
