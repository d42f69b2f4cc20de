"""Boxes: overlaps, where rows lie in memory, what a tiling's faults are called; by example and against numpy."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.core.boxes import Box, covers
from tests.support.stored_layouts import boxes_in, tilings

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    "box", [Box((2, 0), (3, 4)), Box((-1, 0), (2, 4)), Box((0, 0), (-2, 4)), Box((0, 5), (4, 0)), Box((0, 1), (4, 4))]
)
def test_a_chunk_outside_the_tensor_is_named(box: Box) -> None:
    problem = covers((4, 4), [Box((0, 0), (4, 4)), box])
    assert problem == f"chunk at {list(box.offsets)} of sizes {list(box.sizes)} does not lie inside [4, 4]"


@pytest.mark.timeout(60)
def test_boxes_made_to_be_costly_are_refused_in_bounded_time() -> None:
    axes = 40
    generator = random.Random(3)
    boxes = []
    for _ in range(200):
        offsets = tuple(generator.randrange(500) for _ in range(axes))
        boxes.append(Box(offsets, tuple(generator.randrange(1, 500) for _ in range(axes))))
    assert "too irregularly" in str(covers((1000,) * axes, boxes))


# --- against numpy


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))


TILINGS = (
    st.lists(st.integers(1, 6), max_size=4)
    .map(tuple)
    .flatmap(lambda shape: st.tuples(st.just(shape), tilings(shape, empty=True).flatmap(st.permutations)))
)


@given(TILINGS, st.data())
def test_exactly_the_tilings_cover(tiling: tuple[tuple[int, ...], list[Box]], data: st.DataObject) -> None:
    shape, boxes = tiling
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, len(boxes)))
        if data.draw(st.booleans()):
            boxes = [*boxes[:at], data.draw(boxes_in(shape, empty=True)), *boxes[at:]]
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
