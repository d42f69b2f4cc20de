"""From one tiling to another: every target gets its bytes in order, every source is read once and summed."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.tools import regrid
from mcore_ckpt.tools.regrid import Walk, blocks, reads_of
from tests.support.tilings import tilings

SHAPES = st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)


class _Given:
    """A chunk in memory that counts how often each byte is read."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.reads = [0] * len(content)

    def read_into(self, start: int, view: memoryview) -> None:
        view[:] = self.content[start : start + len(view)]
        for at in range(start, start + len(view)):
            self.reads[at] += 1


class _Taken:
    """A sink that offers little space at a time."""

    def __init__(self, most: int) -> None:
        self.content = b""
        self._most = most

    def space(self, nbytes: int) -> memoryview:
        return memoryview(bytearray(min(nbytes, self._most)))

    def filled(self, view: memoryview) -> None:
        self.content += bytes(view)


class _Summed(_Taken):
    """One that sums what it is given, as those do whose sum becomes that of the source."""

    @property
    def crc32(self) -> int:
        return crc32(self.content)


@given(
    data=st.data(),
    shape=SHAPES,
    slab_bytes=st.sampled_from([2, 8, 64, 4096]),
    most=st.sampled_from([1, 5, 1000]),
    summed=st.booleans(),
)
def test_any_tiling_to_any_other(
    data: st.DataObject, shape: tuple[int, ...], slab_bytes: int, most: int, summed: bool
) -> None:
    array = np.arange(int(np.prod(shape, dtype=int)), dtype=np.uint16).reshape(shape)
    source_boxes, target_boxes = data.draw(tilings(shape)), data.draw(tilings(shape))

    def part(box: Box) -> bytes:
        slices = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
        return np.ascontiguousarray(array[slices]).tobytes()

    sources = [_Given(part(box)) for box in source_boxes]
    sinks = [_Summed(most) if summed else _Taken(most) for _ in target_boxes]
    seen_sources: list[int] = []
    walk = Walk(2, slab_bytes)
    for block in blocks(source_boxes, target_boxes):
        given_boxes, taken_boxes = [source_boxes[n] for n in block.sources], [target_boxes[n] for n in block.targets]
        foretold: dict[int, list[int]] = {n: [] for n in range(len(given_boxes))}
        for n, start, nbytes in reads_of(given_boxes, taken_boxes, 2, slab_bytes):
            foretold[n] += range(start, start + nbytes)
        assert [foretold[n] for n in foretold] == [list(range(len(sources[n].content))) for n in block.sources]
        with patch.object(regrid, "_MIN_COMBINED_BYTES", 3):
            crcs = walk.move(
                given_boxes,
                [sources[n] for n in block.sources],
                taken_boxes,
                [sinks[n] for n in block.targets],
            )
        assert crcs == [crc32(sources[n].content) for n in block.sources]
        seen_sources += block.sources
    assert sorted(seen_sources) == list(range(len(source_boxes)))
    assert [sink.content for sink in sinks] == [part(box) for box in target_boxes]
    assert all(count == 1 for source in sources for count in source.reads)
