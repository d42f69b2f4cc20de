"""Files written front to back by one thread, while other threads write full buffers to the disk.

Unlike a save (see `writing._image_writer`), a target may be interrupted and resumed: files are opened at any position,
and nothing is removed on failure.

Full pages are written with O_DIRECT where the file system can; the ragged ends of a range go through the page cache. No
page is written both ways at once: a range's bytes in a page that it shares go through the cache.
"""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.core.threads import Crew
from mcore_ckpt.format.footer import RunningSum
from mcore_ckpt.storage import direct_io
from mcore_ckpt.storage.base import ALIGNMENT_BYTES, align_up

_NO_DIRECT: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})


def _write_error(path: str, what: str, error: OSError) -> SaveError:
    code = errno.errorcode.get(error.errno or 0, "no errno")
    advice = "free space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check the device and the permissions"
    return SaveError(f"{path}: {what} failed: {error.strerror or error} ({code}); {advice}, and run the command again")


class TargetFile(ABC):
    """A file that is written at any offset by any number of threads; `path` is its name for messages."""

    path: str

    @abstractmethod
    def write(self, offset: int, view: memoryview) -> None:
        """Write all of `view`; raises `SaveError`."""

    @abstractmethod
    def sync(self) -> None:
        """Make what was written durable, where a later run could use it; raises `SaveError`."""

    @abstractmethod
    def close(self) -> None:
        """Close; twice is harmless."""


class LocalFile(TargetFile):
    """A file of a file system, which may have been begun by an earlier run. Its `size_bytes` are reserved at once.
    `direct`: with O_DIRECT where possible.
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
        try:
            os.fsync(self.fd)
        except OSError as error:
            raise _write_error(self.path, "fsync", error) from error

    def close(self) -> None:
        fds = [fd for fd in (self.fd, self._direct_fd) if fd is not None and fd >= 0]
        self.fd, self._direct_fd = -1, None
        for fd in fds:
            os.close(fd)


class Streams:
    """The streams of one worker, one for each file, in at most `max_buffers` buffers of `buffer_bytes` (whole pages).
    When all buffers are in use, the stream that was idle longest releases its own.
    """

    def __init__(self, crew: Crew, buffer_bytes: int, max_buffers: int) -> None:
        self.crew = crew
        self.buffer_bytes = buffer_bytes
        self._max_buffers = max_buffers
        self._made = self._in_flight = 0
        self._free: list[memoryview] = []
        self._holding: OrderedDict[int, FileStream] = OrderedDict()

    def open(self, file: TargetFile, position: int) -> FileStream:
        """A stream into a file, from a position on."""
        return FileStream(self, file, position)

    def take(self, stream: FileStream) -> memoryview:
        """A buffer for a stream that has none."""
        if not self._free:
            if self._made < self._max_buffers:
                self._made += 1
                self._free.append(memoryview(direct_io.aligned_buffer(self.buffer_bytes))[: self.buffer_bytes])
            elif not self._in_flight:  # all buffers are held by streams
                _, idle = self._holding.popitem(last=False)
                idle.flush()
            self.crew.wait_for(lambda: self._free)
        self._holding[id(stream)] = stream
        return self._free.pop()

    def used(self, stream: FileStream) -> None:
        """A stream is being written to."""
        self._holding.move_to_end(id(stream))

    def write(self, stream: FileStream, content: _Buffered) -> None:
        """Have a stream's buffer written; the stream has none any more."""
        self._holding.pop(id(stream), None)
        self._in_flight += 1

        def release() -> None:
            self._in_flight -= 1
            self._free.append(content.buffer)

        self.crew.submit(content, release)

    def flush(self) -> None:
        """Have all buffers written."""
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
        self._flushed = 0  # of the buffer: bytes before it belong to another stream, or were written before
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
        self._streams.write(self, _Buffered(self.file, self.position - stop, buffer, start, stop))


@dataclass(frozen=True, slots=True)
class _Buffered:
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
        return self.stream.space(nbytes)

    def filled(self, view: memoryview) -> None:
        self.sums.feed(view)
        self.stream.filled(view)
