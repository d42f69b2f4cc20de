"""Hypothesis strategies for boxes, and for boxes that together hold each element of a tensor once."""

from __future__ import annotations

from hypothesis import strategies as st

from mcore_ckpt.core.boxes import Box


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...], *, empty: bool = False) -> Box:
    """A box inside `shape`; with `empty`, also one without elements."""
    least = 0 if empty else 1
    offsets, sizes = [], []
    for size in shape:
        start = draw(st.integers(0, size - least))
        offsets.append(start)
        sizes.append(draw(st.integers(least, size - start)))
    return Box(tuple(offsets), tuple(sizes))


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...], max_boxes: int = 8, *, empty: bool = False) -> list[Box]:
    """Boxes that hold each element once: `shape` cut, and some of the parts cut again, along any axes.

    With `empty`, some of the boxes may have no elements.
    """
    least = 0 if empty else 1
    boxes = [Box((0,) * len(shape), tuple(shape))]
    for _ in range(draw(st.integers(0, max_boxes - 1))):
        at = draw(st.integers(0, len(boxes) - 1))
        offsets, sizes = boxes[at]
        axes = [axis for axis, size in enumerate(sizes) if size >= 2 * least]
        if not axes:
            continue
        axis = draw(st.sampled_from(axes))
        cut = draw(st.integers(least, sizes[axis] - least))
        first = Box(offsets, (*sizes[:axis], cut, *sizes[axis + 1 :]))
        second = Box(
            (*offsets[:axis], offsets[axis] + cut, *offsets[axis + 1 :]),
            (*sizes[:axis], sizes[axis] - cut, *sizes[axis + 1 :]),
        )
        boxes[at : at + 1] = [first, second]
    return boxes
