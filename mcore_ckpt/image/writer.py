"""write_preloaded_data: one bucket to one durable file, its checksums filled in on the way. No torch, no numpy.

The layout of a file is known before its first byte is written. What is not known is the CRC-32 of each payload, which
the container repeats behind it. An image therefore names the payloads and, for each, the positions of the four bytes
(uint32, little endian) that take its CRC-32. Writing walks the payloads in file order, fills those positions in, and
hands each piece to the I/O threads as soon as nothing in it can change any more, so that checksums cost no time of
their own: the device is busy with the piece before.

The image is put together one window at a time, in a few buffers that are used again. Also one that lies in a staging
buffer is copied into windows: from their huge pages the device is so much faster that the copy pays.

The pieces go to one `Crew` for all files of a rank, so the device stays busy across the boundary between two files, and
the fsync of one overlaps the filling of the next. The first error stops everything: all files of the job are aborted,
finished ones included, since a save is published as a whole or not at all.
"""

from __future__ import annotations

import errno
import heapq
import os
import struct
import threading
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import SaveError, WriteTimeoutError
from mcore_ckpt.core.process import Crew, await_turn
from mcore_ckpt.format.integrity import BLOCK_BYTES
from mcore_ckpt.image.layout import Fill, PlannedFile, Window, WrittenFile
from mcore_ckpt.storage.base import ALIGNMENT_BYTES, RangeWriter, Storage, align_up
from mcore_ckpt.storage.direct_io import aligned_buffer, copy_bytes

if TYPE_CHECKING:
    from mcore_ckpt.core.fingerprints import StridedSums


# Bytes of one write, and of each buffer of a pipelined one: enough for a disk's full speed, few enough to overlap
# filling, summing and writing from the first milliseconds on.
WINDOW_BYTES: Final = 8 * 1024 * 1024
_WINDOWS: Final = 3  # one is filled, one is written, one in between


class WindowPool:
    """Aligned buffers of one size, kept between saves."""

    def __init__(self, window_bytes: int = WINDOW_BYTES, windows: int = _WINDOWS) -> None:
        self.window_bytes = window_bytes
        self.windows = windows
        self.free: deque[memoryview] = deque()
        self.made = 0

    def take(self) -> memoryview | None:
        """A free buffer, made on first use; None when all are lent out. Not for several threads at once."""
        if self.free:
            return self.free.popleft()
        if self.made == self.windows:
            return None
        buffer = aligned_buffer(self.window_bytes)
        self.made += 1
        return buffer

    def give_back(self, buffer: memoryview) -> None:
        """Return a buffer that `take` lent; may come from any thread."""
        self.free.append(buffer)


# How long a Ctrl-C waits for a write in progress to end.
_INTERRUPTED_JOIN_S: Final = 2.0
_CRC: Final = struct.Struct("<I")


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
        self.strided: StridedSums | None = None  # what payloads of several runs add to fingerprints
        if image.strided:
            from mcore_ckpt.core.fingerprints import StridedSums  # (numpy, which few writers need)

            self.strided = StridedSums()
        self._late: list[tuple[int, bytes]] = []  # (file offset, bytes) to patch in windows to come; a heap

    def advance(self, view: memoryview, base: int, stop: int) -> None:
        """Sum all payload bytes before file offset `stop`, and patch what is complete: those bytes are final then.
        `view` holds the image from file offset `base` on, at least to `stop`.
        """
        if self._late:
            self._patch_late(view, base)
        image = self._image
        offsets, lengths, positions = image.payload_offsets, image.payload_lengths, image.crc_positions
        crcs, per_item, stretches, strided = self.crcs, self._crcs_per_item, self._stretches, self.strided
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

    def _advance_blocks(
        self, view: memoryview, base: int, offset: int, end: int, start: int, stop: int, value: int
    ) -> tuple[int, int]:
        """Sum a payload up to its last block boundary before `stop`, and keep each sum; returns place and sum."""
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
        heapq.heappush(self._late, (position, _CRC.pack(value)))
        self._patch_late(view, base)

    def _patch_late(self, view: memoryview, base: int) -> None:
        stop = base + len(view)
        while self._late and self._late[0][0] < stop:
            position, content = heapq.heappop(self._late)
            inside = content[: stop - position]
            view[position - base : position - base + len(inside)] = inside
            if len(inside) < len(content):
                heapq.heappush(self._late, (stop, content[len(inside) :]))


class ImageStream:
    """One file in progress: its image is set front to back, and each window of it is written when it is full.

    A caller that has all bytes of a file gives them by `fill`. A caller that has payloads, of many files in turn, gives
    them by `feed`: then `around(n)` are the bytes between payload `n - 1` and payload `n`, with zeros for checksums.
    Times of writing are summed over threads, in seconds.
    """

    def __init__(
        self,
        images: ImageWriter,
        writer: RangeWriter,
        planned: PlannedFile,
        around: Callable[[int], bytes | memoryview] | None,
    ) -> None:
        self.writer = writer
        self.planned = planned
        self.size_bytes = planned.image.size_bytes
        self.buffer: memoryview | None = None  # the window that is being set
        self.write_s = self.fsync_s = 0.0
        self.pending = 0  # pieces that have been handed over, and are not written
        self.closed = False
        self.finished = False
        self._images = images
        self._around = around
        self._checksums = _Checksums(planned)
        self._payload = 0  # number of the payload that is fed
        self.position = 0  # of the next byte to be set
        self.handed_over = 0  # where the bytes begin that have not been handed over
        self.base = self._stop = 0  # of the window

    def fill(self, fill: Fill) -> None:
        """Have `fill(window, view)` set each window: all bytes of `view`, since the buffer has been used before."""
        while self.position < self.size_bytes:
            view = self._space()
            fill(Window(self.position, self._stop), view)
            self._advance(len(view))

    def feed(self, content: memoryview) -> None:
        """Set the next bytes of the payloads, which are copied."""
        self._images.used(self)
        while len(content):
            end = self._next_payload_end()
            assert end is not None, "more bytes than the payloads have"
            part = content[: end - self.position]
            self._append(part)
            content = content[len(part) :]

    def close(self) -> None:
        """All payloads have been fed: set what is behind them. The file is finished when all of it is written."""
        if self._around is not None:
            end = self._next_payload_end()
            assert end is None, "a payload lacks bytes"
            self._append(self._around(self._payload))
        assert self.position == self.size_bytes
        self._images.close(self)

    def _next_payload_end(self) -> int | None:
        """Set what is before the next payload that lacks bytes. Returns where that ends; None: there is none left."""
        offsets, lengths = self.planned.image.payload_offsets, self.planned.image.payload_lengths
        while self._payload < len(offsets):
            start = offsets[self._payload]
            if self.position < start:
                assert self._around is not None
                self._append(self._around(self._payload))
            if self.position < start + lengths[self._payload]:
                return start + lengths[self._payload]
            self._payload += 1
        return None

    def _append(self, content: bytes | memoryview) -> None:
        view = memoryview(content)
        while len(view):
            space = self._space()[: len(view)]
            copy_bytes(space, view[: len(space)])
            self._advance(len(space))
            view = view[len(space) :]

    def _space(self) -> memoryview:
        """The part of the window that is not set; begins a window if there is none."""
        if self.buffer is None:
            self.buffer = self._images.lend(self)
            # Buffer and file are aligned together, so that whole pages can be written from where they lie.
            self.base = self.handed_over // ALIGNMENT_BYTES * ALIGNMENT_BYTES
            self._stop = min(self.base + len(self.buffer), self.size_bytes)
        return self.buffer[self.position - self.base : self._stop - self.base]

    def _advance(self, nbytes: int) -> None:
        assert self.buffer is not None
        self.position += nbytes
        view = self.buffer[: self.position - self.base]
        self._checksums.advance(view, self.base, self.position)
        if self.position == self._stop:
            self._images.release(self)

    def result(self) -> WrittenFile:
        """The result of the file, when it is finished."""
        planned, strided = self.planned, self._checksums.strided
        return WrittenFile(
            name=planned.name,
            size_bytes=self.size_bytes,
            table_crc32=planned.table_crc32,
            object_crcs=planned.object_crcs,
            crcs=self._checksums.crcs,
            long_payloads=planned.image.long_payloads,
            inner_blocks=planned.image.inner_blocks,
            blocks=self._checksums.blocks,
            parts=() if strided is None else tuple(strided.finish().items()),
            write_s=self.write_s,
            fsync_s=self.fsync_s,
        )


class ImageWriter:
    """Writes images through one crew of threads, as one job: all of them or none.

    A context manager, for one caller. Images may be set one after the other, without a gap, or in turn; when all
    buffers are held then, the stream that was idle longest releases its own. On leaving, all files are finished, and
    `results` are in the order in which they were opened. If anything fails, all files of the job are removed.

    `on_written` is called after each write, on its thread: a sign of life. `deadline_s`: after so long a wait without
    the end of a write or fsync the device counts as stuck (`WriteTimeoutError`); None waits for ever.
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
        self._files: list[ImageStream] = []
        self._setting: OrderedDict[int, ImageStream] = OrderedDict()  # those with a buffer, by number, last used last
        self._lock = threading.Lock()  # of what the threads count
        self._ending = 0  # files that are closed, and not finished

    def open(
        self, writer: RangeWriter, planned: PlannedFile, around: Callable[[int], bytes | memoryview] | None = None
    ) -> ImageStream:
        """Begin a file; arguments as of `ImageStream`."""
        self._files.append(ImageStream(self, writer, planned, around))
        return self._files[-1]

    def await_finished(self, most: int) -> None:
        """Wait until at most so many files have all their bytes, and are open still."""
        self._crew.wait_for(lambda: self._ending <= most)

    def lend(self, stream: ImageStream) -> memoryview:
        """A buffer for a stream that has none."""
        if len(self._setting) == self._pool.windows:
            self.release(next(iter(self._setting.values())))
        buffer = self._crew.wait_for(self._pool.take)
        assert buffer is not None
        self._setting[id(stream)] = stream
        return buffer

    def used(self, stream: ImageStream) -> None:
        """A stream is being fed."""
        if stream.buffer is not None:
            self._setting.move_to_end(id(stream))

    def release(self, stream: ImageStream) -> None:
        """Have the bytes of a stream written that are set, and take the buffer of its window."""
        buffer, stream.buffer = stream.buffer, None
        assert buffer is not None
        start, stop = stream.handed_over, stream.position
        stream.handed_over = stop
        del self._setting[id(stream)]
        if stop == stream.size_bytes:
            stop = align_up(stop)  # whole blocks, for O_DIRECT; the file is cut to its size when it is finished
        with self._lock:
            stream.pending += 1
        work = partial(self._write, stream, buffer, stream.base, start, stop)
        self._crew.submit(work, partial(self._pool.give_back, buffer))

    def close(self, stream: ImageStream) -> None:
        """All of a file has been handed over."""
        with self._lock:
            stream.closed = True
            self._ending += 1
            written = not stream.pending
        if written:
            self._crew.submit(partial(self._finish, stream))

    def _write(self, stream: ImageStream, buffer: memoryview, base: int, start: int, stop: int) -> None:
        await_turn()
        started = time.perf_counter()
        pages = align_up(start), stop // ALIGNMENT_BYTES * ALIGNMENT_BYTES  # (a base is a multiple of a page)
        cuts = (start, *pages, stop) if pages[0] < pages[1] else (start, stop)
        for first, last in pairwise(cuts):  # a ragged beginning, whole pages, a ragged end
            if first < last:
                stream.writer.write(first, buffer[first - base : last - base])
        took_s = time.perf_counter() - started
        if self._on_written is not None:
            self._on_written()
        with self._lock:
            stream.write_s += took_s
            stream.pending -= 1
            written = stream.closed and not stream.pending
        if written:  # a task of its own, so that the buffer of this one is free during the fsync
            self._crew.submit(partial(self._finish, stream), first=True)

    def _finish(self, stream: ImageStream) -> None:
        started = time.perf_counter()
        stream.writer.finish()
        stream.fsync_s = time.perf_counter() - started
        stream.finished = True
        with self._lock:
            self._ending -= 1

    def _stuck(self) -> WriteTimeoutError:
        names = ", ".join(stream.writer.name for stream in self._files if not stream.finished)
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
            for stream in self._setting.values():
                assert stream.buffer is not None
                self._pool.give_back(stream.buffer)
            if error is not None or self._crew.failure is not None:
                for stream in self._files:
                    stream.writer.abort()
        if error is None:
            self.results = [stream.result() for stream in self._files]


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
        if len(pool.free) == pool.made:
            with _pools_lock:
                _kept_pools.append(pool)


def write_files(
    storage: Storage,
    files: Sequence[tuple[PlannedFile, Fill | memoryview]],
    *,
    on_written: Callable[[], None] | None = None,
    deadline_s: float | None = None,
    attempts: int = 3,
) -> list[WrittenFile]:
    """Write files and make them durable, all or none; again if a store found them too slow. Raises `SaveError`."""
    try:
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
    except SaveError as error:
        too_slow = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ETIMEDOUT
        if attempts == 1 or not (too_slow and storage.is_store):
            raise
    return write_files(storage, files, on_written=on_written, deadline_s=deadline_s, attempts=attempts - 1)


def write_preloaded_data(
    images: ImageWriter, storage: Storage, planned: PlannedFile, content: Fill | memoryview
) -> None:
    """Write the file of one bucket, bytes_data, then tensor_data; it is durable when `images` is left."""
    writer = storage.open_writer(planned.name, planned.image.size_bytes)
    writer.is_unique = True  # the name has the save's id; the coordinator looks at the files of all ranks
    stream = images.open(writer, planned)
    if isinstance(content, memoryview):
        stream.fill(lambda window, view: copy_bytes(view, content[window.start : window.stop]))
    else:
        stream.fill(content)
    stream.close()
