"""write_preloaded_data: one bucket to one durable file, its checksums filled in on the way. No torch, no numpy.

The layout of a file is known before its first byte is written. What is not known is the CRC-32 of each payload, which
the container repeats behind it. An image therefore names the payloads and, for each, the positions of the four bytes
(uint32, little endian) that take its CRC-32. Writing walks the payloads in file order, fills those positions in, and
hands each piece to the I/O threads as soon as nothing in it can change any more, so that checksums cost no time of
their own: the device is busy with the piece before.

The image is put together one window at a time, in a few buffers that are used again; the memory this takes does not
depend on the size of the image. Also one that lies in a staging buffer is copied into windows: those are private memory
in huge pages, from which the device is so much faster, and spends so much less CPU time, that the copy pays.

The pieces go to one `Crew` for all files of a rank. Its threads are idle only when nothing is ready, so the device
stays busy across the boundary between two files, and the fsync of one overlaps the filling of the next. The thread that
writes the last piece of a file has it finished. The first error stops everything: all files of the job are aborted,
finished ones included, since a save is published as a whole or not at all.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import WriteTimeoutError
from mcore_ckpt.core.process import Crew
from mcore_ckpt.format.integrity import BLOCK_BYTES
from mcore_ckpt.image.layout import Fill, PlannedFile, Window, WrittenFile, plan_windows
from mcore_ckpt.storage.base import RangeWriter, Storage, align_up
from mcore_ckpt.storage.direct_io import aligned_buffer, copy_bytes

if TYPE_CHECKING:
    from mcore_ckpt.core.fingerprints import StridedSums


# Of one write, and of each buffer of a pipelined one: long enough for a disk's full speed, short enough to overlap
# filling, summing and writing from the first milliseconds on.
WINDOW_BYTES: Final = 8 * 1024 * 1024


class WindowPool:
    """Aligned buffers of one size, lent one at a time and kept between saves, so that a save allocates nothing. Three
    keep both ends busy: one is filled, one is written, one is in between.
    """

    def __init__(self, window_bytes: int = WINDOW_BYTES, windows: int = 3) -> None:
        self.window_bytes = window_bytes
        self.windows = windows
        self._free: deque[memoryview] = deque()
        self._made = 0

    @property
    def is_whole(self) -> bool:
        """Whether every buffer that was lent is back. A write that hangs keeps its own for good."""
        return len(self._free) == self._made

    def take(self) -> memoryview | None:
        """A free buffer, made on first use; None when all are lent out. Not for several threads at once."""
        if self._free:
            return self._free.popleft()
        if self._made == self.windows:
            return None
        buffer = aligned_buffer(self.window_bytes)
        self._made += 1
        return buffer

    def give_back(self, buffer: memoryview) -> None:
        """Return a buffer that `take` lent; may come from any thread."""
        self._free.append(buffer)


# How long a Ctrl-C waits for a write in progress to end.
_INTERRUPTED_JOIN_S: Final = 2.0
_WINDOWS: Final = 3  # as `WindowPool` has it
_CRC: Final = struct.Struct("<I")


def _strided_sums() -> StridedSums:
    from mcore_ckpt.core.fingerprints import StridedSums  # (numpy, which few writers need)

    return StridedSums()


class _Checksums:
    """The CRC-32s of one image, computed in file order as the bytes come to lie in memory."""

    def __init__(self, planned: PlannedFile) -> None:
        image = planned.image
        self.crcs = array("I", bytes(4 * len(image.payload_offsets)))
        self.blocks = array("I")
        self._image = image
        self._name = planned.name
        self._crcs_per_item = len(image.crc_positions) // max(1, len(image.payload_offsets))
        self._item = 0
        self._summed_to = 0  # file offset; counts only inside the payload of the current item
        self._partial = 0
        self._stretches = dict(image.strided)
        self._strided = _strided_sums() if image.strided else None
        self._late: list[tuple[int, bytes]] = []  # (file offset, bytes) to patch in windows to come

    def advance(self, view: memoryview, base: int, stop: int) -> None:
        """Sum all payload bytes before file offset `stop`, and patch what is complete: those bytes are final then.
        `view` holds the image from file offset `base` on, at least to `stop`.
        """
        if self._late:
            self._patch_late(view, base)
        image = self._image
        offsets, lengths, positions = image.payload_offsets, image.payload_lengths, image.crc_positions
        crcs, per_item, stretches, strided = self.crcs, self._crcs_per_item, self._stretches, self._strided
        view_stop = base + len(view)
        item, start, value = self._item, self._summed_to, self._partial
        while item < len(offsets):
            offset = offsets[item]
            if offset >= stop:
                break
            end = offset + lengths[item]
            if start < offset:
                start = offset
            if strided is not None and item in stretches:
                cuts = range(BLOCK_BYTES - (start - offset) % BLOCK_BYTES, min(end - 1, stop) - start + 1, BLOCK_BYTES)
                content = view[start - base : min(end, stop) - base]
                *blocks, value = strided.feed(item, stretches[item], content, start - offset, value, cuts)
                self.blocks.extend(blocks)
                start = min(end, stop)
            elif lengths[item] > BLOCK_BYTES:
                start, value = self._advance_blocks(view, base, offset, end, start, stop, value)
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

    def parts(self) -> tuple[tuple[int, int], ...]:
        """As of `WrittenFile`, when all payloads have been summed."""
        return () if self._strided is None else tuple(self._strided.finish().items())

    def _advance_blocks(
        self, view: memoryview, base: int, offset: int, end: int, start: int, stop: int, value: int
    ) -> tuple[int, int]:
        """Sum the payload `[offset, end)` from `start` to its last inner block boundary before `stop`, and keep each
        sum. Returns how far it came, and the sum.
        """
        boundary = offset + ((start - offset) // BLOCK_BYTES + 1) * BLOCK_BYTES
        while boundary <= stop and boundary < end:
            value = crc32(view[start - base : boundary - base], value)
            self.blocks.append(value)
            start = boundary
            boundary += BLOCK_BYTES
        return start, value

    def _patch_edge(self, view: memoryview, base: int, item: int, position: int, value: int) -> None:
        """Patch a CRC-32 that does not lie in `view`, or not whole."""
        image = self._image
        end = image.payload_offsets[item] + image.payload_lengths[item]
        if not end <= position <= image.size_bytes - 4:
            raise ValueError(
                f"{self._name}: the CRC-32 of payload {item}, which ends at byte {end}, cannot lie at byte "
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


class _File:
    """One file in progress, and what it took. Times of writing are summed over threads, in seconds."""

    def __init__(self, writer: RangeWriter, planned: PlannedFile) -> None:
        self.writer = writer
        self.planned = planned
        self.size_bytes = planned.image.size_bytes
        self.checksums = _Checksums(planned)
        self.write_s = self.fsync_s = 0.0
        self.pending = 0  # pieces
        self.closed = False
        self.finished = False

    def result(self) -> WrittenFile:
        planned = self.planned
        return WrittenFile(
            name=planned.name,
            size_bytes=self.size_bytes,
            table_crc32=planned.table_crc32,
            object_crcs=planned.object_crcs,
            crcs=self.checksums.crcs,
            long_payloads=planned.image.long_payloads,
            inner_blocks=planned.image.inner_blocks,
            blocks=self.checksums.blocks,
            parts=self.checksums.parts(),
            write_s=self.write_s,
            fsync_s=self.fsync_s,
        )


class ImageWriter:
    """Writes images one after the other through one crew of threads, as one job: all of them or none.

    A context manager. Inside, `write_windows` returns when all pieces of its image have been submitted, so that the
    next one's first pieces follow without a gap. On leaving, all files are finished and
    `results` is complete. If anything fails, on any thread, all files of the job are removed and the first error is
    raised.

    Args:
        pool: buffers, of the size of one write, a multiple of 4096; keep them between saves.
        io_threads: writes in flight at once.
        on_written: called after each write, on the thread that wrote: a sign of life.
        deadline_s: seconds without the end of any write or fsync, while the caller waits for one, after which the
            device counts as stuck (`WriteTimeoutError`); None waits for ever.
    """

    def __init__(
        self,
        pool: WindowPool,
        *,
        io_threads: int = 2,
        on_written: Callable[[], None] | None = None,
        deadline_s: float | None = None,
    ) -> None:
        self.results: list[WrittenFile] = []
        self._crew = Crew(
            io_threads,
            "mcore-ckpt-write",
            deadline_s=deadline_s,
            stuck=self._stuck,
            interrupted_join_s=_INTERRUPTED_JOIN_S,
        )
        self._pool = pool
        self._on_written = on_written
        self._deadline_s = deadline_s
        self._files: list[_File] = []
        self._lock = threading.Lock()  # of what the threads count

    def write_windows(self, writer: RangeWriter, planned: PlannedFile, fill: Fill) -> None:
        """Write an image that never lies in memory as a whole: `fill(window, view)` puts each window's bytes into
        `view`, all of them (the buffer has been used before), in file order, on this thread.
        """
        file = _File(writer, planned)
        self._files.append(file)
        pool = self._pool
        for window in plan_windows(file.size_bytes, pool.window_bytes):
            buffer = self._crew.wait_for(pool.take)
            assert buffer is not None
            try:
                view = buffer[: window.stop - window.start]
                fill(window, view)
                file.checksums.advance(view, window.start, window.stop)
            except BaseException:
                pool.give_back(buffer)
                raise
            # Padded to whole blocks for O_DIRECT; the file is cut to its size when it is finished.
            with self._lock:
                file.pending += 1
            piece = buffer[: align_up(len(view))]
            self._crew.submit(partial(self._write, file, window.start, piece), partial(pool.give_back, buffer))
        with self._lock:
            file.closed = True
            written = not file.pending
        if written:
            self._crew.submit(partial(self._finish, file))

    def _write(self, file: _File, offset: int, piece: memoryview) -> None:
        started = time.perf_counter()
        file.writer.write(offset, piece)
        took_s = time.perf_counter() - started
        if self._on_written is not None:
            self._on_written()
        with self._lock:
            file.write_s += took_s
            file.pending -= 1
            written = file.closed and not file.pending
        if written:  # a task of its own, so that the buffer of this one is free during the fsync
            self._crew.submit(partial(self._finish, file), first=True)

    def _finish(self, file: _File) -> None:
        started = time.perf_counter()
        file.writer.finish(file.size_bytes)
        file.fsync_s = time.perf_counter() - started
        file.finished = True

    def _stuck(self) -> WriteTimeoutError:
        names = ", ".join(file.writer.name for file in self._files if not file.finished)
        return WriteTimeoutError(
            f"{names}: no write has ended for {self._deadline_s} s (write_deadline_s); the device or the network "
            "file system hangs, or the deadline is too short for it"
        )

    def __enter__(self) -> ImageWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self._crew.__exit__(kind, error, traceback)
        finally:
            if error is not None or self._crew.failed:
                for file in self._files:
                    file.writer.abort()
        if error is None:
            self.results = [file.result() for file in self._files]


# Pools that no job uses at the moment, all of the size that was used last: a save then allocates nothing. One that
# lacks a buffer is given up: the next job would wait for what a stuck write holds.
_kept_pools: list[WindowPool] = []
_pools_lock = threading.Lock()


def _forget_pools() -> None:
    global _pools_lock  # a thread of the process that forked this one may have held it
    _pools_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_pools)


@contextmanager
def _kept_pool(window_bytes: int, windows: int) -> Iterator[WindowPool]:
    """A pool of window buffers, kept for the next job of this process."""
    with _pools_lock:
        _kept_pools[:] = [p for p in _kept_pools if (p.window_bytes, p.windows) == (window_bytes, windows)]
        pool = _kept_pools.pop() if _kept_pools else WindowPool(window_bytes, windows)
    try:
        yield pool
    finally:
        if pool.is_whole:
            with _pools_lock:
                _kept_pools.append(pool)


def write_files(
    storage: Storage,
    files: Sequence[tuple[PlannedFile, Fill | memoryview]],
    *,
    on_written: Callable[[], None] | None = None,
    deadline_s: float | None = None,
) -> list[WrittenFile]:
    """Write files and make them durable: all, or (with a `SaveError` that names file and errno) none stays. The bytes
    of each are in memory, or a function puts them into windows.
    """
    with (
        _kept_pool(storage.write_bytes or WINDOW_BYTES, max(_WINDOWS, storage.writes_at_once + 1)) as pool,
        ImageWriter(
            pool,
            io_threads=storage.writes_at_once,
            on_written=on_written,
            deadline_s=deadline_s,
        ) as images,
    ):
        for planned, content in files:
            write_preloaded_data(images, storage, planned, content)
    return images.results


def write_preloaded_data(
    images: ImageWriter, storage: Storage, planned: PlannedFile, content: Fill | memoryview
) -> None:
    """Write the file of one bucket: its bytes_data, then its tensor_data, from the memory where they have been staged,
    or window by window. It is durable when `images` is left.
    """
    writer = storage.open_writer(planned.name, size_bytes=planned.image.size_bytes)
    writer.is_unique = True  # the name has the save's id; the coordinator looks at the files of all ranks
    fill = partial(_copy_window, content) if isinstance(content, memoryview) else content
    images.write_windows(writer, planned, fill)


def _copy_window(image: memoryview, window: Window, buffer: memoryview) -> None:
    copy_bytes(buffer, image[window.start : window.stop])
