"""The image of one file: which bytes are payloads, and where their checksums belong.

The layout of a file is known before its first byte is written. What is not known is the CRC-32 of each payload, which
the container repeats behind it. An image therefore names the payloads and, for each, the positions of the four bytes
(uint32, little endian) that take its CRC-32. Writing walks the payloads in file order, fills those positions in, and
hands each piece to the I/O threads as soon as nothing in it can change any more, so that checksums cost no time of
their own: the device is busy with the piece before.

Two ways to write, with the same result:

- `write_image`: the whole image lies in memory (the shared-memory stage). Where private memory can have huge pages and
  shared memory cannot, it is copied into windows all the same: the device is so much faster from those, and spends so
  much less CPU time, that the copy pays.
- `write_windows`: the caller puts the image together one window at a time, in a few buffers that are used again; the
  memory this takes does not depend on the size of the image.
"""

from __future__ import annotations

import struct
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

from mcore_ckpt.crc import crc32
from mcore_ckpt.image_writer import FileInProgress, PieceQueue, WindowPool
from mcore_ckpt.storage.base import RangeWriter, align_up
from mcore_ckpt.storage.direct_io import copy_bytes, has_huge_pages

__all__ = ["FileImage", "ImageResult", "ImageWriter", "Window", "plan_windows", "write_image", "write_windows"]

_PIECE_BYTES: Final = 8 * 1024 * 1024
_CRC: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class FileImage:
    """What has to be known of a file to sum and write it; plain arrays, cheap to pickle.

    Attributes:
        file_name: of the file, for results and messages.
        size_bytes: of the file.
        payload_offsets: first byte of each payload in the file (`array('q')`), ascending, without overlap.
        payload_lengths: bytes of each payload (`array('q')`).
        crc_positions: file offsets of the uint32 (little endian) that take the CRC-32 of payload 0, then 1, ...
            (`array('q')`); the same number for each, and each behind the end of its payload.
    """

    file_name: str
    size_bytes: int
    payload_offsets: array[int]
    payload_lengths: array[int]
    crc_positions: array[int]

    def __post_init__(self) -> None:
        payloads, positions = len(self.payload_offsets), len(self.crc_positions)
        if len(self.payload_lengths) != payloads or (positions % payloads if payloads else positions):
            raise ValueError(
                f"{self.file_name}: {payloads} payload offsets, {len(self.payload_lengths)} lengths and {positions} "
                "CRC positions do not go together"
            )


@dataclass(frozen=True, slots=True)
class ImageResult:
    """What became of one image.

    Attributes:
        file_name: the image's.
        size_bytes: of the file, as finished.
        crcs: CRC-32 of each payload (`array('I')`).
        fill_s: seconds in the caller's `fill`.
        crc_s: seconds of summing and patching, on the caller's thread.
        write_s: seconds of writing, summed over the I/O threads; they run beside the two above.
        fsync_s: seconds of finishing the file (truncate, fsync, close).
    """

    file_name: str
    size_bytes: int
    crcs: array[int]
    fill_s: float
    crc_s: float
    write_s: float
    fsync_s: float


@dataclass(frozen=True, slots=True)
class Window:
    """Bytes `[start, stop)` of an image, and the items that may have a byte in there.

    Attributes:
        start: file offset, a multiple of the window size.
        stop: file offset of the end, exclusive; the image's end in the last window.
        first_item: the first item whose payload, or what follows its payload, reaches into the window.
        stop_item: one past the last item whose payload, or what precedes its payload, reaches into the window. At the
            two ends the range may hold one item too many: what lies between two payloads belongs to both neighbours.
    """

    start: int
    stop: int
    first_item: int
    stop_item: int


def plan_windows(image: FileImage, window_bytes: int = _PIECE_BYTES) -> Iterator[Window]:
    """Cut an image into windows of `window_bytes`, in file order; the last may be shorter."""
    offsets = image.payload_offsets
    for start in range(0, image.size_bytes, window_bytes):
        stop = min(start + window_bytes, image.size_bytes)
        first = max(0, bisect_right(offsets, start) - 1)
        yield Window(start, stop, first, min(len(offsets), bisect_left(offsets, stop, lo=first) + 1))


Fill = Callable[[Window, memoryview], None]


class _Checksums:
    """The CRC-32s of one image, computed in file order as the bytes come to lie in memory."""

    def __init__(self, image: FileImage) -> None:
        self.crcs = array("I", bytes(4 * len(image.payload_offsets)))
        self._image = image
        self._crcs_per_item = len(image.crc_positions) // max(1, len(image.payload_offsets))
        self._item = 0
        self._summed_to = 0  # file offset; counts only inside the payload of the current item
        self._partial = 0
        self._late: list[tuple[int, bytes]] = []  # (file offset, bytes) to patch in windows to come

    def advance(self, view: memoryview, base: int, stop: int) -> None:
        """Sum all payload bytes before `stop` that are not summed yet, and patch what is complete.

        Args:
            view: the image's bytes from file offset `base` on; at least to `stop`.
            base: file offset of `view[0]`.
            stop: file offset. After the call, the bytes before it are final.
        """
        if self._late:
            self._patch_late(view, base)
        image = self._image
        offsets, lengths, positions = image.payload_offsets, image.payload_lengths, image.crc_positions
        crcs, per_item = self.crcs, self._crcs_per_item
        view_stop = base + len(view)
        item, start, value = self._item, self._summed_to, self._partial
        while item < len(offsets):
            offset = offsets[item]
            if offset >= stop:
                break
            end = offset + lengths[item]
            if start < offset:
                start = offset
            if end > stop:
                value = crc32(view[start - base : stop - base], value)
                start = stop
                break
            value = crc32(view[start - base : end - base], value)
            crcs[item] = value
            for position in positions[item * per_item : (item + 1) * per_item]:
                if end <= position <= view_stop - 4:
                    _CRC.pack_into(view, position - base, value)
                else:
                    self._patch_edge(view, base, item, position, value)
            value = 0
            item += 1
        self._item, self._summed_to, self._partial = item, start, value

    def _patch_edge(self, view: memoryview, base: int, item: int, position: int, value: int) -> None:
        """Patch a CRC-32 that does not lie in `view`, or not whole."""
        image = self._image
        end = image.payload_offsets[item] + image.payload_lengths[item]
        if not end <= position <= image.size_bytes - 4:
            raise ValueError(
                f"{image.file_name}: the CRC-32 of payload {item}, which ends at byte {end}, cannot lie at byte "
                f"{position} of a file of {image.size_bytes}"
            )
        self._late.append((position, _CRC.pack(value)))
        self._patch_late(view, base)

    def _patch_late(self, view: memoryview, base: int) -> None:
        stop = base + len(view)
        waiting = []
        for position, content in self._late:
            inside = content[: max(0, stop - position)]
            view[position - base : position - base + len(inside)] = inside
            if len(inside) < len(content):
                waiting.append((position + len(inside), content[len(inside) :]))
        self._late = waiting


class ImageWriter:
    """Writes images one after the other through one set of I/O threads, as one job: all of them or none.

    A context manager. Inside, `write_image` and `write_windows` return when their image has been handed over, so that
    the next one's first pieces follow without a gap; on leaving, all files are finished and `results` is complete. If
    anything fails, on any thread, all files of the job are removed and the first error is raised.

    Args:
        io_threads: writes in flight at once.
        pool: buffers for `write_windows`; keep one between saves.
        piece_bytes: size of one write, a multiple of 4096, where no pool is given.
        through_windows: whether `write_image` copies into windows; None: if those lie in huge pages.
        fsync: make each file durable before it counts as finished.
        on_written: called with a number of bytes after each write, on an I/O thread.
        deadline_s: seconds without progress after which the device counts as stuck (`WriteTimeoutError`); None: never.
    """

    def __init__(
        self,
        *,
        io_threads: int = 2,
        pool: WindowPool | None = None,
        piece_bytes: int = _PIECE_BYTES,
        fsync: bool = True,
        on_written: Callable[[int], None] | None = None,
        through_windows: bool | None = None,
        deadline_s: float | None = None,
    ) -> None:
        self.results: list[ImageResult] = []
        self._queue = PieceQueue(io_threads, on_written, deadline_s)
        self._pool = pool
        self._piece_bytes = piece_bytes
        self._fsync = fsync
        self._through_windows = has_huge_pages() if through_windows is None else through_windows
        self._written: list[_Written] = []

    def write_image(self, writer: RangeWriter, image: FileImage, view: memoryview) -> None:
        """Write an image from memory.

        Args:
            writer: of the new file; from here on the job's to finish or abort.
            image: its layout.
            view: all of it, writable (checksums may be patched in place) and page-aligned, padded to a multiple of 4096
                bytes. Not to be touched before the job is done.
        """
        padded_bytes = align_up(image.size_bytes)
        if len(view) < padded_bytes:
            writer.abort()
            raise ValueError(
                f"{image.file_name}: the view has {len(view)} bytes; expected {padded_bytes}, the "
                f"{image.size_bytes} of the file in whole pages"
            )
        if self._through_windows:

            def fill(window: Window, buffer: memoryview) -> None:
                copy_bytes(buffer, view[window.start : window.stop])

            self.write_windows(writer, image, fill)
        else:
            self._write_in_place(writer, image, view)

    def _write_in_place(self, writer: RangeWriter, image: FileImage, view: memoryview) -> None:
        file = self._queue.open_file(writer, image.size_bytes, fsync=self._fsync)
        padded_bytes = align_up(image.size_bytes)
        checksums = _Checksums(image)
        written = _Written(image, file, checksums)
        for start in range(0, padded_bytes, self._piece_bytes):
            stop = min(start + self._piece_bytes, padded_bytes)
            started = time.perf_counter()
            checksums.advance(view, 0, stop)
            written.crc_s += time.perf_counter() - started
            self._queue.submit(file, start, view[start:stop])
        self._queue.close_file(file)
        self._written.append(written)

    def write_windows(self, writer: RangeWriter, image: FileImage, fill: Fill) -> None:
        """Write an image that never lies in memory as a whole.

        Args:
            writer: of the new file; from here on the job's to finish or abort.
            image: its layout.
            fill: `fill(window, view)` puts the bytes `[window.start, window.stop)` of the image into `view`, all of
                them, those between two items included, as the buffer has been used before. Called in file order on
                this thread. What it raises is raised here.
        """
        file = self._queue.open_file(writer, image.size_bytes, fsync=self._fsync)
        pool = self._pool
        if pool is None:
            pool = self._pool = WindowPool(self._piece_bytes)
        checksums = _Checksums(image)
        written = _Written(image, file, checksums)
        for window in plan_windows(image, pool.window_bytes):
            buffer = self._queue.take(pool)
            try:
                view = buffer[: window.stop - window.start]
                started = time.perf_counter()
                fill(window, view)
                filled = time.perf_counter()
                checksums.advance(view, window.start, window.stop)
                written.fill_s += filled - started
                written.crc_s += time.perf_counter() - filled
            except BaseException:
                pool.give_back(buffer)
                raise
            # Padded to whole blocks for O_DIRECT; the file is cut to its size when it is finished.
            self._queue.submit(file, window.start, buffer[: align_up(len(view))], _GiveBack(pool, buffer))
        self._queue.close_file(file)
        self._written.append(written)

    def __enter__(self) -> ImageWriter:
        self._queue.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._queue.__exit__(kind, error, traceback)
        if error is None:
            self.results = [written.result() for written in self._written]


@dataclass(slots=True)
class _Written:
    """An image on its way."""

    image: FileImage
    file: FileInProgress
    checksums: _Checksums
    fill_s: float = field(default=0.0)
    crc_s: float = field(default=0.0)

    def result(self) -> ImageResult:
        return ImageResult(
            file_name=self.image.file_name,
            size_bytes=self.image.size_bytes,
            crcs=self.checksums.crcs,
            fill_s=self.fill_s,
            crc_s=self.crc_s,
            write_s=self.file.write_s,
            fsync_s=self.file.fsync_s,
        )


@dataclass(frozen=True, slots=True)
class _GiveBack:
    """Returns the whole buffer, of which a piece was written, to its pool."""

    pool: WindowPool
    buffer: memoryview

    def __call__(self, piece: memoryview) -> None:
        self.pool.give_back(self.buffer)


def write_image(
    writer: RangeWriter,
    image: FileImage,
    view: memoryview,
    *,
    piece_bytes: int = _PIECE_BYTES,
    io_threads: int = 2,
    fsync: bool = True,
) -> ImageResult:
    """Write one image from memory; see `ImageWriter.write_image`. The file is finished, or removed, on return."""
    with ImageWriter(io_threads=io_threads, piece_bytes=piece_bytes, fsync=fsync) as images:
        images.write_image(writer, image, view)
    return images.results[0]


def write_windows(
    writer: RangeWriter,
    image: FileImage,
    fill: Fill,
    *,
    pool: WindowPool | None = None,
    io_threads: int = 2,
    fsync: bool = True,
) -> ImageResult:
    """Write one image by windows; see `ImageWriter.write_windows`. The file is finished, or removed, on return."""
    with ImageWriter(io_threads=io_threads, pool=pool, fsync=fsync) as images:
        images.write_windows(writer, image, fill)
    return images.results[0]
