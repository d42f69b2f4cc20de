"""Images come out as they were laid out, and a failure leaves nothing behind."""

from __future__ import annotations

import mmap
import struct
import threading
import zlib
from array import array
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.save.buckets import FileImage, PlannedFile, Window, WrittenFile
from mcore_ckpt.save.writer import ImageWriter, WindowPool
from mcore_ckpt.storage.base import RangeWriter
from tests.support.local_files import random_bytes

PAGE = mmap.PAGESIZE


def make_image(
    lengths: list[int], gaps: list[int], *, crc_gaps: tuple[int, ...] = (3, 40), name: str = "file"
) -> PlannedFile:
    """Payloads of `lengths` bytes, `gaps[i]` unused bytes before payload i, and CRCs at `crc_gaps` behind each."""
    offsets, positions = array("q"), array("q")
    end = 0
    for length, gap in zip(lengths, gaps, strict=True):
        offsets.append(end + gap)
        end += gap + length
        for crc_gap in crc_gaps:
            positions.append(end + crc_gap)
            end += crc_gap + 4
    return PlannedFile(name, FileImage(end + 5, offsets, array("q", lengths), positions))


def expected(planned: PlannedFile, content: bytes) -> tuple[bytes, list[int]]:
    """The file and its CRCs, the plain way."""
    image = planned.image
    file, crcs = bytearray(content), []
    per_item = len(image.crc_positions) // max(1, len(image.payload_offsets))
    for item, (offset, length) in enumerate(zip(image.payload_offsets, image.payload_lengths, strict=True)):
        crcs.append(zlib.crc32(content[offset : offset + length]))
        for position in image.crc_positions[item * per_item : (item + 1) * per_item]:
            struct.pack_into("<I", file, position, crcs[-1])
    return bytes(file), crcs


def write_windows(
    writer: RangeWriter, image: PlannedFile, fill: Callable[[Window, memoryview], None], *args: Any, **options: Any
) -> WrittenFile:
    """Write one image by windows."""
    with ImageWriter(*args, **options) as images:
        images.write_windows(writer, image, fill)
    return images.results[0]


def copy_from(content: bytes) -> Callable[[Window, memoryview], None]:
    def fill(window: Window, view: memoryview) -> None:
        view[:] = content[window.start : window.stop]

    return fill


class MemoryWriter(RangeWriter):
    """Keeps what is written; for properties, where a file for each example would be slow."""

    name = "memory"
    direct = False

    def __init__(self) -> None:
        self.content = bytearray()
        self.finished: int | None = None
        self._lock = threading.Lock()

    def write(self, offset: int, view: memoryview) -> None:
        with self._lock:
            self.content.extend(bytes(max(0, offset + len(view) - len(self.content))))
            self.content[offset : offset + len(view)] = view

    def finish(self, size_bytes: int) -> None:
        del self.content[size_bytes:]
        self.finished = size_bytes

    def abort(self) -> None:
        self.content.clear()


@given(
    payloads=st.lists(st.tuples(st.integers(0, 3 * PAGE), st.integers(0, PAGE)), max_size=12),
    crc_gaps=st.lists(st.integers(0, PAGE), min_size=1, max_size=3),
    window_pages=st.integers(1, 4),
    windows=st.integers(1, 3),
    io_threads=st.integers(1, 3),
)
def test_any_layout_is_summed_and_patched(
    payloads: list[tuple[int, int]], crc_gaps: list[int], window_pages: int, windows: int, io_threads: int
) -> None:
    image = make_image([length for length, _ in payloads], [gap for _, gap in payloads], crc_gaps=tuple(crc_gaps))
    content = random_bytes(image.image.size_bytes)
    file, crcs = expected(image, content)
    written = MemoryWriter()
    pool = WindowPool(window_pages * PAGE, windows)
    result = write_windows(written, image, copy_from(content), pool, io_threads=io_threads)
    assert list(result.crcs) == crcs
    assert bytes(written.content) == file


# Failures
