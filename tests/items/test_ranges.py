"""Which ranges are read: the decisions between one long read and several short ones, by example."""

from __future__ import annotations

import itertools

import pytest

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.items.ranges import CHEAP_GAP_BYTES, ChunkPart, Extent, cluster_boxes, coalesce, split_box

MIB = 1024 * 1024
WINDOW = 8 * MIB
GAP = 256 * 1024


def split(shape: tuple[int, ...], box: Box, elem_bytes: int = 1) -> list[ChunkPart]:
    return list(split_box(shape, box, elem_bytes, window_bytes=WINDOW, max_gap_bytes=GAP))


def test_half_of_every_short_row_is_one_piece() -> None:
    pieces = split((4096, 512), Box((0, 256), (4096, 256)), elem_bytes=2)
    assert [(piece.start, piece.stop) for piece in pieces] == [(512, 4096 * 1024)]


def test_half_of_every_long_row_is_a_piece_each() -> None:
    row = 4 * CHEAP_GAP_BYTES
    pieces = split((16, row), Box((0, 0), (16, row // 2)))
    assert [(piece.start, piece.stop) for piece in pieces] == [(at * row, at * row + row // 2) for at in range(16)]


def test_most_of_every_long_row_is_read_with_the_gaps() -> None:
    row = 5 * CHEAP_GAP_BYTES
    gap = CHEAP_GAP_BYTES + 1
    assert len(split((16, row), Box((0, 0), (16, row - gap)))) == 1


def test_whole_rows_are_cut_by_the_window() -> None:
    pieces = split((64, MIB), Box((1, 0), (62, MIB)))
    assert pieces[0].start == MIB
    assert [piece.box.sizes[0] for piece in pieces] == [8] * 7 + [6]
    assert all(before.stop == after.start for before, after in itertools.pairwise(pieces))


def test_a_row_longer_than_the_window_is_cut_inside() -> None:
    pieces = split((2, 20 * MIB), Box((0, 0), (2, 20 * MIB)))
    assert [piece.stop - piece.start for piece in pieces] == [8 * MIB, 8 * MIB, 4 * MIB] * 2


def test_gaps_between_outer_planes_do_not_hide_gaps_inside() -> None:
    # The outer gap is short, the inner ones are long: rows are read one by one.
    pieces = split((2, 3, 4 * GAP), Box((0, 0, 0), (2, 3, 10)))
    assert len(pieces) == 6
    assert sum(piece.stop - piece.start for piece in pieces) == 60


def test_a_scalar_is_one_element() -> None:
    assert split((), Box((), ()), elem_bytes=4) == [ChunkPart(Box((), ()), 0, 4)]


@pytest.mark.parametrize(("gap_bytes", "spans"), [(CHEAP_GAP_BYTES, 1), (CHEAP_GAP_BYTES + 1, 2)])
def test_short_gaps_are_read_and_long_ones_skipped(gap_bytes: int, spans: int) -> None:
    extents = [Extent("f", 0, 1000, 1000, "a"), Extent("f", 1000 + gap_bytes, 2000 + gap_bytes, 1000, "b")]
    assert len(list(coalesce(extents, window_bytes=WINDOW, max_gap_bytes=GAP))) == spans


def test_max_gap_bytes_is_obeyed_below_the_cheap_gap() -> None:
    extents = [Extent("f", 0, 1000, 1000, "a"), Extent("f", 1200, 2000, 800, "b")]
    assert len(list(coalesce(extents, window_bytes=WINDOW, max_gap_bytes=100))) == 2


def test_files_are_never_joined() -> None:
    extents = [Extent("f", 0, 10, 10, "a"), Extent("g", 10, 20, 10, "b")]
    assert [span.file for span in coalesce(extents, window_bytes=WINDOW, max_gap_bytes=GAP)] == ["f", "g"]


def test_an_extent_of_its_own_is_not_joined_from_either_side() -> None:
    extents = [
        Extent("f", 0, 10, 10, "a"),
        Extent("f", 10, 20, 10, "b", alone=True),
        Extent("f", 20, 30, 10, "c"),
    ]
    spans = list(coalesce(extents, window_bytes=WINDOW, max_gap_bytes=GAP))
    assert [[extent.owner for extent in span.extents] for span in spans] == [["a"], ["b"], ["c"]]


def test_the_same_box_wanted_twice_is_one_cluster() -> None:
    box = Box((3, 0), (4, 8))
    assert cluster_boxes((10, 8), [box, box]) == [(box, [0, 1])]
