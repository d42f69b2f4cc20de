"""Writing local files: with O_DIRECT where a trial says that the file system can.

A checkpoint is not read back by the machine that wrote it, so caching it only evicts what training needs, at the price
of a copy. Elsewhere the page cache is written back while the save goes on, and what has reached the device is dropped,
so that the final fsync has nearly nothing left to do.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import deque
from typing import Final

from mcore_ckpt.storage import direct_io
from mcore_ckpt.storage._durable import FILE_MODE, save_error
from mcore_ckpt.storage.base import ALIGNMENT_BYTES, DirectIo, RangeWriter, align_up

# One write-back in flight, and one before it that is waited for: enough to keep the device busy, and all that a
# buffered save may leave dirty in the page cache.
_UNSYNCED_WRITES: Final = 2


class LocalWriter(RangeWriter):
    """A new file. `finish` is for one thread, after the last `write` has returned.

    Args:
        path: of the file.
        size_bytes: see `Storage.open_writer`.
        direct: see there.
    """

    def __init__(self, path: str, size_bytes: int | None, direct: DirectIo) -> None:
        self.name = path
        self.direct = False
        self._keep = False
        self._lock = threading.Lock()
        self._buffered_fd: int | None = None
        self._unsynced: deque[tuple[int, int]] = deque()
        self._writes_in_progress = 0
        self._aborted = False
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        self._fd: int | None = fd
        try:
            if direct != "off":
                self.direct = direct_io.enable(fd)
            if size_bytes is not None:
                direct_io.preallocate(fd, align_up(size_bytes) if self.direct else size_bytes)
        except BaseException:
            self.abort()
            raise

    def write(self, offset: int, view: memoryview) -> None:
        view = memoryview(view).cast("B")
        try:
            with self._lock:
                fd = self._open_fd()
                self._writes_in_progress += 1
            try:
                self._write(fd, offset, view)
            finally:
                with self._lock:
                    self._writes_in_progress -= 1
                    if self._aborted and self._writes_in_progress == 0:
                        self._close(suppress=True)
        except OSError as error:
            raise save_error(f"writing bytes [{offset}, {offset + len(view)})", self.name, error) from error

    def _write(self, fd: int, offset: int, view: memoryview) -> None:
        if not self.direct:
            self._write_buffered(fd, offset, view)
            return
        if offset % ALIGNMENT_BYTES == 0 and len(view) % ALIGNMENT_BYTES == 0:
            try:
                direct_io.write_all(fd, view, offset, ALIGNMENT_BYTES)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        self._write_buffered(self._buffered(), offset, view)

    def _open_fd(self) -> int:
        if self._fd is None or self._aborted:
            raise OSError(errno.EBADF, "the file has been finished or aborted already")
        return self._fd

    def _buffered(self) -> int:
        """A second fd on the file, for writes that O_DIRECT does not take; the kernel keeps the two coherent."""
        with self._lock:
            if self._buffered_fd is None:
                self._buffered_fd = os.open(self.name, os.O_WRONLY | os.O_CLOEXEC)
            return self._buffered_fd

    def _write_buffered(self, fd: int, offset: int, view: memoryview) -> None:
        direct_io.write_all(fd, view, offset)
        direct_io.write_back(fd, offset, len(view), wait=False)
        with self._lock:
            self._unsynced.append((offset, len(view)))
            oldest = self._unsynced.popleft() if len(self._unsynced) > _UNSYNCED_WRITES else None
        if oldest is not None:
            direct_io.write_back(fd, *oldest, wait=True)
            direct_io.drop_cached(fd, *oldest)

    def finish(self, size_bytes: int) -> None:
        try:
            fd = self._open_fd()
            if os.fstat(fd).st_size != size_bytes:
                os.ftruncate(fd, size_bytes)
            if self._buffered_fd is not None:
                os.fsync(self._buffered_fd)  # a failed write-back is reported to the fd that was open then
            os.fsync(fd)
            if self._unsynced or self._buffered_fd is not None:
                direct_io.drop_cached(fd)
        except OSError as error:
            self._close(suppress=True)
            raise save_error(f"finishing the file at {size_bytes} bytes", self.name, error) from error
        try:
            self._close()
        except OSError as error:
            raise save_error("closing the file", self.name, error) from error

    def _close(self, suppress: bool = False) -> None:
        fds = [fd for fd in (self._buffered_fd, self._fd) if fd is not None]
        self._fd = self._buffered_fd = None
        failure: OSError | None = None
        for fd in fds:
            try:
                os.close(fd)
            except OSError as error:
                failure = error
        if failure is not None and not suppress:
            raise failure

    def abort(self) -> None:
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
            if self._writes_in_progress == 0:
                self._close(suppress=True)
        with contextlib.suppress(OSError):
            os.unlink(self.name)
