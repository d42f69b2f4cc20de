"""Which ranges are read: one long read or several short ones, by example; and each byte once, whatever the boxes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt.core.boxes import Box, runs
from mcore_ckpt.load.ranges import CHEAP_GAP_BYTES, ChunkPart, Extent, cluster_boxes, coalesce, split_box
from tests.support.tilings import boxes_in

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


def test_a_row_longer_than_the_window_is_cut_inside() -> None:
    pieces = split((2, 20 * MIB), Box((0, 0), (2, 20 * MIB)))
    assert [piece.stop - piece.start for piece in pieces] == [8 * MIB, 8 * MIB, 4 * MIB] * 2


@pytest.mark.parametrize(("gap_bytes", "spans"), [(CHEAP_GAP_BYTES, 1), (CHEAP_GAP_BYTES + 1, 2)])
def test_short_gaps_are_read_and_long_ones_skipped(gap_bytes: int, spans: int) -> None:
    extents = [Extent("f", 0, 1000, 1000, "a"), Extent("f", 1000 + gap_bytes, 2000 + gap_bytes, 1000, "b")]
    assert len(list(coalesce(extents, window_bytes=WINDOW, max_gap_bytes=GAP))) == spans


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


@given(shapes_and_boxes(), st.sampled_from([1, 4]), st.integers(0, 40))
def test_no_piece_reads_over_a_gap_longer_than_allowed(
    shape_and_box: tuple[tuple[int, ...], Box], elem_bytes: int, max_gap_bytes: int
) -> None:
    shape, box = shape_and_box
    for piece in split_box(shape, box, elem_bytes, window_bytes=10**6, max_gap_bytes=max_gap_bytes):
        inside = sorted(bytes_of(shape, piece.box, elem_bytes))
        gaps = [after - before - 1 for before, after in itertools.pairwise(inside)]
        assert max(gaps, default=0) <= max_gap_bytes


@st.composite
def file_extents(draw: st.DrawFn) -> list[Extent]:
    extents = []
    for name in draw(st.lists(st.sampled_from("abc"), max_size=3, unique=True).map(sorted)):
        position = 0
        for number in range(draw(st.integers(1, 12))):
            position += draw(st.sampled_from([0, 0, 1, 64, 4096, CHEAP_GAP_BYTES, CHEAP_GAP_BYTES + 1, 300_000]))
            length = draw(st.sampled_from([1, 100, 4096, 65_536, 200_000]))
            wanted_bytes = draw(st.integers(1, length))
            extents.append(
                Extent(
                    name, position, position + length, wanted_bytes, number, draw(st.sampled_from([False] * 4 + [True]))
                )
            )
            position += draw(st.sampled_from([0, length // 2, length, length, length]))
    return extents


@given(file_extents(), st.sampled_from([1, 65_536, 1_000_000]), st.sampled_from([0, 4096, 262_144]))
@settings(max_examples=100)
def test_every_extent_lies_in_one_span(extents: list[Extent], window_bytes: int, max_gap_bytes: int) -> None:
    spans = list(coalesce(extents, window_bytes=window_bytes, max_gap_bytes=max_gap_bytes))
    assert [extent for span in spans for extent in span.extents] == extents
    for span in spans:
        assert span.start == min(extent.start for extent in span.extents)
        assert span.stop == max(extent.stop for extent in span.extents)
        assert {extent.file for extent in span.extents} == {span.file}
        assert span.stop - span.start <= window_bytes or len(span.extents) == 1
        if len(span.extents) > 1:
            assert not any(extent.alone for extent in span.extents)
        stop = span.start
        for extent in span.extents:
            assert extent.start - stop <= max_gap_bytes
            stop = max(stop, extent.stop)


@given(st.data(), st.lists(st.integers(1, 8), min_size=1, max_size=3).map(tuple))
def test_clusters_hold_every_box_and_overlapping_boxes_share_one(data: st.DataObject, shape: tuple[int, ...]) -> None:
    boxes = data.draw(st.lists(boxes_in(shape), min_size=1, max_size=6))
    clusters = cluster_boxes(shape, boxes)
    assert sorted(member for _, members in clusters for member in members) == list(range(len(boxes)))
    read: list[int] = []
    for bounding, members in clusters:
        inside = bytes_of(shape, bounding, 1)
        for member in members:
            assert bytes_of(shape, boxes[member], 1) <= inside
        read += inside
    assert len(read) == len(set(read)), "an element is read twice"
