"""Files written front to back by one thread, while other threads carry what is full to the disk.

Unlike a save (see `writing._image_writer`), a reshard may be interrupted and go on later: files are opened at any
position, `WriteBehind.drain` waits for everything that was handed over, and nothing is removed on failure.

Whole pages go past the page cache (O_DIRECT) where the file system can; the ragged ends of a stretch go through it. No
page is written both ways at once: what a stretch has of a shared page goes through the cache.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.core.threads import start_thread
from mcore_ckpt.format.seal import RunningSum
from mcore_ckpt.storage import direct_io
from mcore_ckpt.storage.base import ALIGNMENT_BYTES, align_up

__all__ = ["FileStream", "StreamSink", "Streams", "TargetFile", "WriteBehind"]

_NO_DIRECT: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})


def _write_error(path: str, what: str, error: OSError) -> SaveError:
    code = errno.errorcode.get(error.errno or 0, "no errno")
    advice = "free space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check the device and the permissions"
    return SaveError(f"{path}: {what} failed: {error.strerror or error} ({code}); {advice}, and run the command again")


class TargetFile:
    """A file that is written at any offset by any number of threads, and may have been begun by an earlier run.

    Args:
        path: of the file; made if it is not there.
        size_bytes: what it is going to have; reserved at once.
        direct: past the page cache where possible.
    """

    def __init__(self, path: str, size_bytes: int, *, direct: bool = True) -> None:
        self.path = path
        self._direct_fd: int | None = None
        try:
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                direct_io.preallocate(self.fd, size_bytes)
                os.ftruncate(self.fd, size_bytes)
                if direct:
                    self._direct_fd = self._open_direct()
            except BaseException:
                self.close()
                raise
        except OSError as error:
            raise _write_error(path, "making the file", error) from error

    def _open_direct(self) -> int | None:
        try:
            return os.open(self.path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _NO_DIRECT:
                return None
            raise

    def write(self, offset: int, view: memoryview) -> None:
        """Write all of `view`; raises `SaveError`."""
        try:
            aligned = offset % ALIGNMENT_BYTES == 0 and len(view) % ALIGNMENT_BYTES == 0
            if self._direct_fd is not None and aligned:
                try:
                    direct_io.write_all(self._direct_fd, view, offset, ALIGNMENT_BYTES)
                    return
                except OSError as error:
                    # Some file systems take the flag and refuse the write.
                    if error.errno not in _NO_DIRECT:
                        raise
                    self._direct_fd = None
            direct_io.write_all(self.fd, view, offset)
            if len(view) >= 64 * 1024:
                direct_io.write_back(self.fd, offset, len(view), wait=False)
        except OSError as error:
            raise _write_error(self.path, f"writing bytes [{offset}, {offset + len(view)})", error) from error

    def sync(self) -> None:
        """Make what was written durable."""
        try:
            os.fsync(self.fd)
        except OSError as error:
            raise _write_error(self.path, "fsync", error) from error

    def close(self) -> None:
        """Close; twice is harmless."""
        fds = [fd for fd in (self.fd, self._direct_fd) if fd is not None and fd >= 0]
        self.fd, self._direct_fd = -1, None
        for fd in fds:
            os.close(fd)


class WriteBehind:
    """Threads that write pieces; a context manager, which waits for them on leaving. Where no threads are to be had, at
    the end of the interpreter, each piece is written when it is submitted.

    Args:
        threads: writes in flight at once.
    """

    def __init__(self, threads: int = 2) -> None:
        self._condition = threading.Condition()
        self._jobs: deque[tuple[Callable[[], None], memoryview | None]] = deque()
        self._free: list[memoryview] = []
        self._pending = 0
        self._stopping = False
        self._failure: BaseException | None = None
        self._has_threads = True
        self._threads = [
            threading.Thread(target=self._work, name=f"mcore-ckpt-write-{n}", daemon=True) for n in range(threads)
        ]

    def submit(self, job: Callable[[], None], buffer: memoryview | None = None) -> None:
        """Have `job` done, then take back the buffer that it wrote. Raises the first error of any thread."""
        with self._condition:
            if self._failure is None:
                self._pending += 1
                self._jobs.append((job, buffer))
                self._condition.notify_all()
        if not self._has_threads:
            self._work(wait=False)
        self._raise()

    def returned(self, *, wait: bool) -> memoryview | None:
        """A buffer that has been written, if there is one; with `wait`, as soon as one of those in flight is."""
        with self._condition:
            while wait and not self._free and self._pending and self._failure is None:
                self._condition.wait()
            if self._failure is None:
                return self._free.pop() if self._free else None
        self._raise()
        return None

    def drain(self) -> None:
        """Wait until everything is written. Raises the first error of any thread."""
        with self._condition:
            while self._pending and self._failure is None:
                self._condition.wait()
        self._raise()

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self, wait: bool = True) -> None:
        while True:
            with self._condition:
                while wait and not self._jobs and not self._stopping:
                    self._condition.wait()
                if not self._jobs:
                    return
                job, buffer = self._jobs.popleft()
            try:
                if self._failure is None:
                    job()
            except BaseException as error:  # noqa: BLE001  (whatever it is, the thread that fills has to hear of it)
                with self._condition:
                    self._failure = self._failure or error
            with self._condition:
                self._pending -= 1
                if buffer is not None:
                    self._free.append(buffer)
                self._condition.notify_all()

    def __enter__(self) -> WriteBehind:
        try:
            self._has_threads = any(list(map(start_thread, self._threads)))  # all are started
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._condition:
            if error is not None and self._failure is None:
                self._failure = error
            self._stopping = True
            self._condition.notify_all()
        for thread in self._threads:
            if thread.ident is not None:  # it was started
                thread.join()
        if error is None:
            self._raise()


class Streams:
    """The streams of one worker: one for each file, in a bounded number of buffers.

    Args:
        writes: where full buffers go.
        buffer_bytes: size of each, whole pages.
        max_buffers: how many; when all are in use, the stream that was idle longest gives up its own.
    """

    def __init__(self, writes: WriteBehind, buffer_bytes: int, max_buffers: int) -> None:
        self.writes = writes
        self.buffer_bytes = buffer_bytes
        self._max_buffers = max_buffers
        self._made = 0
        self._holding: OrderedDict[int, FileStream] = OrderedDict()

    def open(self, file: TargetFile, position: int) -> FileStream:
        """A stream into a file, from a position on."""
        return FileStream(self, file, position)

    def take(self, stream: FileStream) -> memoryview:
        """A buffer for a stream that has none."""
        buffer = self.writes.returned(wait=False)
        if buffer is None and self._made < self._max_buffers:
            self._made += 1
            buffer = memoryview(direct_io.aligned_buffer(self.buffer_bytes))[: self.buffer_bytes]
        while buffer is None:
            buffer = self.writes.returned(wait=True)
            if buffer is None:  # nothing in flight: all buffers are held by streams
                _, idle = self._holding.popitem(last=False)
                idle.flush()
        self._holding[id(stream)] = stream
        return buffer

    def used(self, stream: FileStream) -> None:
        """A stream is being written to."""
        self._holding.move_to_end(id(stream))

    def gave_up(self, stream: FileStream) -> None:
        """A stream has no buffer any more."""
        self._holding.pop(id(stream), None)

    def flush(self) -> None:
        """Hand all buffers over."""
        for stream in list(self._holding.values()):
            stream.flush()


class FileStream:
    """Bytes of one file in ascending order."""

    __slots__ = ("_buffer", "_filled", "_flushed", "_streams", "file", "position")

    def __init__(self, streams: Streams, file: TargetFile, position: int) -> None:
        self.file = file
        self.position = position
        self._streams = streams
        self._buffer: memoryview | None = None
        self._flushed = 0  # of the buffer: what is before it belongs to somebody else, or was written before
        self._filled = 0

    def space(self, nbytes: int) -> memoryview:
        """Memory for the next bytes of the file: `nbytes` of them or fewer, but at least one."""
        if self._buffer is None:
            self._buffer = self._streams.take(self)
            # Buffer and file are aligned together, so that whole pages can be written from where they lie.
            self._flushed = self._filled = self.position % ALIGNMENT_BYTES
        else:
            self._streams.used(self)
        return self._buffer[self._filled : self._filled + nbytes]

    def filled(self, view: memoryview) -> None:
        """`view`, which `space` gave, holds the bytes."""
        self._filled += len(view)
        self.position += len(view)
        if self._filled == self._streams.buffer_bytes:
            self.flush()

    def write(self, content: bytes | memoryview) -> None:
        """Append a copy."""
        view = memoryview(content)
        while len(view):
            space = self.space(len(view))
            space[:] = view[: len(space)]
            self.filled(space)
            view = view[len(space) :]

    def pad_to(self, position: int) -> None:
        """Zeros up to a position of the file."""
        while self.position < position:
            space = self.space(position - self.position)
            space[:] = bytes(len(space))
            self.filled(space)

    def seek(self, position: int) -> None:
        """Go on somewhere else: what lies between is written by others."""
        if position != self.position:
            self.flush()
            self.position = position

    def flush(self) -> None:
        """Hand over what is there."""
        buffer, start, stop = self._buffer, self._flushed, self._filled
        if buffer is None:
            return
        self._buffer = None
        self._streams.gave_up(self)
        base = self.position - stop
        self._streams.writes.submit(_Pieces(self.file, base, buffer, start, stop), buffer)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """A buffer on its way to the disk: bytes `[start, stop)` of it belong at `base + start` in the file."""

    file: TargetFile
    base: int
    buffer: memoryview
    start: int
    stop: int

    def __call__(self) -> None:
        for first, last in _page_cuts(self.start, self.stop):
            self.file.write(self.base + first, self.buffer[first:last])


def _page_cuts(start: int, stop: int) -> list[tuple[int, int]]:
    """A ragged beginning, whole pages, a ragged end."""
    first, last = align_up(start), stop // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    if first >= last:
        return [(start, stop)] if start < stop else []
    return [(a, b) for a, b in ((start, first), (first, last), (last, stop)) if a < b]


class StreamSink:
    """A tensor's payload on its way into a stream; sums it."""

    __slots__ = ("stream", "sums")

    def __init__(self, stream: FileStream) -> None:
        self.stream = stream
        self.sums = RunningSum()

    @property
    def crc32(self) -> int:
        """CRC-32 of what has gone through."""
        return self.sums.crc32

    def space(self, nbytes: int) -> memoryview:
        """As `FileStream.space`."""
        return self.stream.space(nbytes)

    def filled(self, view: memoryview) -> None:
        """As `FileStream.filled`."""
        self.sums.feed(view)
        self.stream.filled(view)
