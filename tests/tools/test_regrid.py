"""From one tiling to another: every target gets its bytes in order, every source is read once and summed."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.format.crc import crc32
from mcore_ckpt.tools.regrid import Walk
from mcore_ckpt.tools.tilings import blocks, slabs
from tests.support.stored_layouts import tilings

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


@given(data=st.data(), shape=SHAPES, slab_bytes=st.sampled_from([2, 8, 64, 4096]), most=st.sampled_from([1, 5, 1000]))
def test_any_tiling_to_any_other(data: st.DataObject, shape: tuple[int, ...], slab_bytes: int, most: int) -> None:
    array = np.arange(int(np.prod(shape, dtype=int)), dtype=np.uint16).reshape(shape)
    source_boxes, target_boxes = data.draw(tilings(shape)), data.draw(tilings(shape))

    def part(box: Box) -> bytes:
        slices = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
        return np.ascontiguousarray(array[slices]).tobytes()

    sources = [_Given(part(box)) for box in source_boxes]
    sinks = [_Taken(most) for _ in target_boxes]
    seen_sources: list[int] = []
    walk = Walk(2, slab_bytes)
    for block in blocks(source_boxes, target_boxes):
        crcs = walk.move(
            [source_boxes[n] for n in block.sources],
            [sources[n] for n in block.sources],
            [target_boxes[n] for n in block.targets],
            [sinks[n] for n in block.targets],
        )
        assert crcs == [crc32(sources[n].content) for n in block.sources]
        seen_sources += block.sources
    assert sorted(seen_sources) == list(range(len(source_boxes)))
    assert [sink.content for sink in sinks] == [part(box) for box in target_boxes]
    assert all(count == 1 for source in sources for count in source.reads)


@given(shape=SHAPES.filter(len), slab_bytes=st.integers(1, 300))
def test_slabs_tile_a_box_in_order_and_are_contiguous(shape: tuple[int, ...], slab_bytes: int) -> None:
    array = np.arange(int(np.prod(shape)))
    flat = []
    for slab in slabs(Box((0,) * len(shape), shape), 1, slab_bytes):
        assert np.prod(slab.sizes) <= max(slab_bytes, 1)
        cut = tuple(slice(start, start + size) for start, size in zip(slab.offsets, slab.sizes, strict=True))
        flat += array.reshape(shape)[cut].ravel().tolist()
    assert flat == array.tolist()


def test_stacked_experts_fall_into_many_blocks_quickly() -> None:
    layers, experts = 48, 64
    boxes = [Box((n, e, 0), (1, 1, 8)) for n in range(layers) for e in range(experts)]
    halves = [Box((n, e, h), (1, 1, 4)) for n in range(layers) for e in range(experts) for h in (0, 4)]
    found = list(blocks(boxes, halves))
    assert len(found) == layers * experts
    assert all(len(block.sources) == 1 and len(block.targets) == 2 for block in found)
