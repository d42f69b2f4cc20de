"""The files of a target while they are written, and the journal of how far they are.

The writers are those of a save (`storage.base.RangeWriter`). In a file system a target may be interrupted and resumed:
files may have been begun by an earlier run, and stay on failure. In an object store each is one upload, which ends when
all of its bytes are there.

A worker fills buffers front to back, while other threads write full ones. Full pages are written with O_DIRECT where
the file system can. The ragged ends of a range lie in pages that it shares, and go through the page cache.

The journal is a file next to the target's folder, locked while a run is at work there. In an object store nothing is
resumed, and the journal is kept in memory only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.core.process import Crew
from mcore_ckpt.format.metadata_read import read_small_file
from mcore_ckpt.storage import direct_io
from mcore_ckpt.storage.base import ALIGNMENT_BYTES, RangeWriter, align_up
from mcore_ckpt.storage.resolve import storage_at


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

    def open(self, file: RangeWriter, position: int) -> FileStream:
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

    def __init__(self, streams: Streams, file: RangeWriter, position: int) -> None:
        self.file = file
        self.position = position
        self._streams = streams
        self._buffer: memoryview | None = None
        self._flushed = 0  # of the buffer: bytes before it belong to another stream, or were written before
        self._filled = 0

    def write(self, content: bytes | memoryview) -> None:
        """Append a copy."""
        view = memoryview(content)
        while len(view):
            if self._buffer is None:
                self._buffer = self._streams.take(self)
                # Buffer and file are aligned together, so that whole pages can be written from where they lie.
                self._flushed = self._filled = self.position % ALIGNMENT_BYTES
            else:
                self._streams.used(self)
            space = self._buffer[self._filled : self._filled + len(view)]
            direct_io.copy_bytes(space, view[: len(space)])
            self._filled += len(space)
            self.position += len(space)
            if self._filled == self._streams.buffer_bytes:
                self.flush()
            view = view[len(space) :]

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

    file: RangeWriter
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


class TargetFiles:
    """The files of one target, in `folder`, each written at any offset by any number of workers.

    `resumable`: a file may have been begun by an earlier run, and stays if this run ends early.
    """

    def __init__(self, folder: Path, *, resumable: bool) -> None:
        self.folder = folder
        self.storage = storage_at(folder)
        self._resumable = resumable
        self._lock = threading.Lock()
        self._sizes: Mapping[str, int] = {}
        self._writers: dict[str, RangeWriter] = {}

    def begin(self, sizes: Mapping[str, int]) -> None:
        """Which files there will be, of these lengths; raises `SaveError` if there is no room for them."""
        self._sizes = sizes
        if not self._resumable:
            return
        needed_bytes = sum(sizes.values())
        for name, size in sizes.items():
            with contextlib.suppress(FileNotFoundError):  # what an earlier run has reserved counts already
                needed_bytes -= min(size, (self.folder / name).stat().st_blocks * 512)
        stat = os.statvfs(self.folder)
        free = stat.f_bavail * stat.f_frsize
        if free < needed_bytes:
            raise SaveError(
                f"{self.folder}: {needed_bytes} bytes are needed, {free} are free: free space, or choose another disk"
            )

    def open(self, name: str) -> RangeWriter:
        """One of the files; raises `SaveError`."""
        with self._lock:
            if name not in self._writers:
                self._writers[name] = self.storage.open_writer(
                    name, size_bytes=self._sizes[name], resumed=self._resumable
                )
            return self._writers[name]

    def write_end(self, name: str, end: bytes) -> None:
        """Write the last bytes of a file; raises `SaveError`."""
        self.open(name).write(self._sizes[name] - len(end), memoryview(end))

    def finish(self) -> None:
        """All bytes have been written: make the files durable and readable. Raises `SaveError`."""
        for name, size_bytes in self._sizes.items():
            self.open(name).finish(size_bytes)
        for inner in {(self.folder / name).parent for name in self._sizes} - {self.folder} if self._resumable else ():
            storage_at(inner).sync()

    def put(self, name: str, content: bytes) -> None:
        """Make a file that `begin` was not told of, durably; raises `SaveError`."""
        writer = self.new_file(name, len(content))
        try:
            writer.write(0, memoryview(content))
            writer.finish(len(content))
        except BaseException:
            writer.abort()
            raise

    def new_file(self, name: str, size_bytes: int) -> RangeWriter:
        """As `put`, for a file of any size; raises `SaveError`."""
        if self._resumable:
            self.storage.delete(name)  # an earlier run may have come so far
        return self.storage.open_writer(name, size_bytes=size_bytes, direct="off")

    def close(self) -> None:
        """Close what is open: files that can be resumed stay, others are removed, finished or not."""
        for writer in self._writers.values():
            with contextlib.suppress(SaveError):
                (writer.leave if self._resumable else writer.abort)()


Sums = tuple[int, list[int]]
"""Of the elements in one slot: their CRC-32, and the cumulative CRC-32s of their blocks."""

# A line for each gibibyte or so, of some bytes for each tensor and MiB.
_MAX_BYTES: Final = 1024**3
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
# On file systems without locks, a journal that was written to within this time may be that of a run at work.
_FRESH_S: Final = 24 * 3600.0


class Written(NamedTuple):
    """A tensor that is durable: the sums of its slots; and the CRC-32s of its chunks in the source, if not stored."""

    sums: list[Sums]
    crcs: list[int] | None


class Journal:
    """What is durable of a target, by the tensors' keys there."""

    def __init__(self) -> None:
        self.written: dict[str, Written] = {}

    def record(self, written: Mapping[str, Written]) -> None:
        """These tensors are durable."""
        self.written.update(written)


class FileJournal(Journal):
    """Lines of JSON behind their CRC-32: the fingerprint of the plan, so that a later run resumes only the same work,
    then tensors by key. A torn line is the end. The lock (flock) on the file is the sign of life of a run.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self._lock = path, threading.Lock()
        self.fingerprint = ""
        self.is_new = not path.exists()
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise SaveError(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            self._take_lock()
            self._read()
        except BaseException:
            os.close(self._fd)
            raise

    def _take_lock(self) -> None:
        problem = ""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self._fd).st_nlink == 0:
                problem = "has just finished there; run this one again"
        except OSError as error:
            age_s = time.time() - os.fstat(self._fd).st_mtime
            if error.errno not in _NO_LOCKS:
                problem = "is at work there; wait for it, or end it"
            elif not self.is_new and age_s < _FRESH_S:
                problem = (
                    f"may be at work there: it was written {age_s / 60:.0f} minutes ago, and this file system has no "
                    "locks that would tell. If none is, remove this file and the folder next to it, or wait for a day"
                )
        if problem:
            raise SaveError(f"another command is making this target: {self.path}: a command {problem}")

    def _read(self) -> None:
        nbytes = 0
        for line in read_small_file(self.path.parent, self.path.name, _MAX_BYTES).splitlines(keepends=True):
            if _framed(line[_SUM_BYTES:]) != line:
                break
            found = json.loads(line[_SUM_BYTES:])
            if nbytes:
                self.written.update(
                    {key: Written([(crc, blocks) for crc, blocks in sums], crcs) for key, (sums, crcs) in found.items()}
                )
            else:
                self.fingerprint = found
            nbytes += len(line)
        os.ftruncate(self._fd, nbytes)

    def begin(self, fingerprint: str) -> None:
        """Forget what was written, and name the plan."""
        self.fingerprint, self.written = fingerprint, {}
        os.ftruncate(self._fd, 0)
        self._append(fingerprint)

    def record(self, written: Mapping[str, Written]) -> None:
        super().record(written)
        self._append(written)

    def remove(self) -> None:
        """Remove the file; the lock stays until it is closed."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    def _append(self, content: Any) -> None:
        left = _framed(json.dumps(content).encode() + b"\n")
        try:
            with self._lock:
                while left:
                    left = left[os.write(self._fd, left) :]
                os.fsync(self._fd)
        except OSError as error:
            raise SaveError(f"{self.path}: the journal cannot be written: {error}") from error

    def close(self) -> None:
        """Give the lock up."""
        os.close(self._fd)


_SUM_BYTES: Final = 9


def _framed(text: bytes) -> bytes:
    return b"%08x " % crc32(text) + text
