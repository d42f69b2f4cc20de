"""Which ranges are read: one long read or several short ones, by example; and each byte once, whatever the boxes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.core.boxes import Box, runs
from mcore_ckpt.load.ranges import split_box
from tests.support.tilings import boxes_in

# --- whatever the boxes and layouts


@st.composite
def shapes_and_boxes(draw: st.DrawFn, max_axes: int = 4, max_size: int = 9) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(1, max_size), max_size=max_axes)))
    return shape, draw(boxes_in(shape))


def bytes_of(shape: tuple[int, ...], box: Box, elem_bytes: int) -> set[int]:
    return {byte for start, length in runs(shape, box, elem_bytes) for byte in range(start, start + length)}


@given(shapes_and_boxes(), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 300), st.sampled_from([0, 1, 8, 1000]))
def test_pieces_are_the_box_and_lie_where_they_say(
    shape_and_box: tuple[tuple[int, ...], Box], elem_bytes: int, window_bytes: int, max_gap_bytes: int
) -> None:
    shape, box = shape_and_box
    pieces = list(split_box(shape, box, elem_bytes, window_bytes=window_bytes, max_gap_bytes=max_gap_bytes))
    wanted: list[int] = []
    for piece in pieces:
        inside = bytes_of(shape, piece.box, elem_bytes)
        assert min(inside) == piece.start
        assert max(inside) + 1 == piece.stop
        assert piece.stop - piece.start <= max(window_bytes, elem_bytes)
        wanted += inside
    assert len(wanted) == len(set(wanted)), "a byte lies in two pieces"
    assert set(wanted) == bytes_of(shape, box, elem_bytes)
    assert [piece.start for piece in pieces] == sorted(piece.start for piece in pieces)
