"""Reading local files: from the page cache what is there, past it what is not.

A checkpoint is read once, so what is cold is read with O_DIRECT, which neither evicts other pages nor pays for
allocating and filling new ones. What was just written, or read by another rank, is often still cached, and is then
copied at memory speed. `mincore` tells the two apart without touching a page. It is asked for each piece of a read,
since a file may well be cached in part.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

from mcore_ckpt.errors import CorruptCheckpointError, LoadError
from mcore_ckpt.storage import direct_io
from mcore_ckpt.storage.base import ALIGNMENT_BYTES, DirectIo, RangeReader, align_up

__all__ = ["BouncePool", "LocalReader"]

# Below this, one read through the page cache costs less than finding out where the bytes are; headers are read so.
_MIN_DIRECT_BYTES: Final = 64 * 1024
# Up to here, copying the whole read from an aligned buffer is cheaper than two more requests for its ragged ends.
_MAX_COPIED_BYTES: Final = 1024 * 1024
_PIECE_BYTES: Final = 8 * 1024 * 1024
# Bytes are summed and copied in slices that are still in the CPU's cache when they are looked at again.
_SLICE_BYTES: Final = 1024 * 1024

_Arrived = Callable[[memoryview], None]


def _ignore(_: memoryview) -> None:
    pass


class BouncePool:
    """Aligned buffers for reads whose destination O_DIRECT cannot take, as many as there are threads that need one.

    They lie in huge pages, which makes up for the copy (see `aligned_buffer`): a destination that happens to be aligned
    is read into without one, as it is most likely such a buffer itself.

    Shared by the readers of a storage, and freed when the last of them closes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[memoryview] = []
        self._readers = 0

    def enter(self) -> None:
        """A reader starts using the pool."""
        with self._lock:
            self._readers += 1

    def leave(self) -> None:
        """A reader has closed."""
        with self._lock:
            self._readers -= 1
            if self._readers == 0:
                self._free.clear()

    def take(self) -> memoryview:
        """A buffer of one piece, page-aligned."""
        with self._lock:
            if self._free:
                return self._free.pop()
        return direct_io.aligned_buffer(_PIECE_BYTES)

    def give_back(self, buffer: memoryview) -> None:
        """Return a buffer that `take` lent."""
        with self._lock:
            self._free.append(buffer)


class LocalReader(RangeReader):
    """An open local file; any number of threads may read it at once, but none while it is being closed.

    Args:
        path: of the file.
        direct: `"auto"`: O_DIRECT for what is not cached, if the file system has it; `"on"`: for everything, or fail;
            `"off"`: never.
        bounce: where reads into unaligned memory borrow their buffers.

    Raises:
        OSError: if it cannot be opened, or has no O_DIRECT and that is insisted on.
    """

    def __init__(self, path: str, direct: DirectIo, bounce: BouncePool) -> None:
        self.name = path
        self._insist = direct == "on"
        self._bounce = bounce
        self._direct_fd: int | None = None
        self._residency: direct_io.Residency | None = None
        self._fd: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        bounce.enter()
        try:
            self.size_bytes = os.fstat(self._fd).st_size
            if direct != "off":
                self._direct_fd = self._open_direct()
            if direct == "auto":
                self._residency = direct_io.Residency(self._fd, self.size_bytes)
        except BaseException:
            self.close()
            raise

    def _open_direct(self) -> int | None:
        try:
            return os.open(self.name, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL or self._insist:
                raise
            return None

    def read_into(self, offset: int, view: memoryview, arrived: _Arrived | None = None) -> None:
        self._read(offset, view, arrived or _ignore, shared=False)

    def read_shared(self, offset: int, view: memoryview) -> None:
        """Through the page cache, from where the next process gets them. The kernel's own read-ahead, of a few threads,
        keeps the device busier than asking it for megabytes at once.
        """
        self._read(offset, view, _ignore, shared=not self._insist)

    def _read(self, offset: int, view: memoryview, arrived: _Arrived, *, shared: bool) -> None:
        view = view.cast("B")
        self.check_range(offset, len(view))
        if self._fd is None:
            raise ValueError(f"{self.name}: the reader is closed")
        done = 0
        try:
            while done < len(view):
                start = offset + done
                # Pieces end on aligned offsets, so that those after the first begin on one.
                piece = view[done : done + _PIECE_BYTES - start % ALIGNMENT_BYTES]
                if not shared and self._wants_direct(start, len(piece)):
                    self._read_direct(start, piece, arrived)
                else:
                    self._read_buffered(self._fd, start, piece, arrived)
                done += len(piece)
        except OSError as error:
            code = errno.errorcode.get(error.errno or 0, "no errno")
            raise LoadError(
                f"{self.name}: reading bytes [{offset + done}, {offset + len(view)}) failed: "
                f"{error.strerror or error} ({code}); check the device and its file system (dmesg)"
            ) from error

    @contextmanager
    def cached(self, offset: int, length: int) -> Iterator[int]:
        """The page cache itself, mapped; only where all of the range is cached.

        Touching a mapped file that another program cuts at that very moment ends the process (SIGBUS), which a read
        would survive. So the mapping serves only what reads serve badly (many short runs), for the milliseconds of a
        copy, after a look at the file's length; `direct="off"` rules it out.
        """
        fd, residency = self._fd, self._residency
        if fd is None or residency is None or os.fstat(fd).st_size != self.size_bytes:
            yield 0
            return
        mapped = residency.address_of(offset, length)
        try:
            yield mapped
        finally:
            if mapped:
                residency.forget(offset, length)

    def _wants_direct(self, offset: int, nbytes: int) -> bool:
        if self._direct_fd is None:
            return False
        if self._residency is None:
            return self._insist
        return nbytes >= _MIN_DIRECT_BYTES and self._residency.cached_share(offset, nbytes) < 0.5

    def _read_buffered(self, fd: int, offset: int, view: memoryview, arrived: _Arrived) -> None:
        done = 0
        while done < len(view):
            got = os.preadv(fd, [view[done : done + _SLICE_BYTES]], offset + done)
            if got == 0:
                self._ended_early(offset + done, offset, len(view))
            arrived(view[done : done + got])
            done += got

    def _read_direct(self, offset: int, view: memoryview, arrived: _Arrived) -> None:
        """Read past the page cache, straight into `view` where its address allows it."""
        stop = offset + len(view)
        position = offset
        straight = (
            len(view) > _MAX_COPIED_BYTES
            and (direct_io.address(view) - offset) % ALIGNMENT_BYTES == 0  # memory and file are aligned together
        )
        try:
            while position < stop:
                if not straight:
                    position += self._read_copied(position, view[position - offset :], arrived)
                elif position % ALIGNMENT_BYTES:
                    to_boundary = align_up(position) - position
                    position += self._read_copied(position, view[position - offset :][:to_boundary], arrived)
                elif stop - position < ALIGNMENT_BYTES:
                    position += self._read_copied(position, view[position - offset :], arrived)
                else:
                    whole_bytes = (stop - position) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
                    space = view[position - offset :][:whole_bytes]
                    got = os.preadv(self._direct(), [space], position)
                    if got == 0:
                        self._ended_early(position, offset, len(view))
                    arrived(space[:got])
                    position += got
        except OSError as error:
            # The file system takes the flag and not the read, or asks for more alignment than any known to us.
            if error.errno != errno.EINVAL or self._insist or self._fd is None:
                raise
            self._read_buffered(self._fd, position, view[position - offset :], arrived)

    def _direct(self) -> int:
        if self._direct_fd is None:
            raise OSError(errno.EBADF, "the reader was closed during a read")
        return self._direct_fd

    def _read_copied(self, offset: int, view: memoryview, arrived: _Arrived) -> int:
        """Read the first bytes of `view` by way of an aligned buffer; returns how many."""
        start = offset - offset % ALIGNMENT_BYTES
        buffer = self._bounce.take()
        try:
            wanted = align_up(min(offset + len(view) - start, len(buffer)))
            got = os.preadv(self._direct(), [buffer[:wanted]], start) - (offset - start)
            if got <= 0:
                self._ended_early(offset, offset, len(view))
            got = min(got, len(view))
            read = buffer[offset - start :][:got]
            for done in range(0, got, _SLICE_BYTES):
                part = read[done : done + _SLICE_BYTES]
                arrived(part)
                direct_io.copy_bytes(view[done : done + len(part)], part)
            return got
        finally:
            self._bounce.give_back(buffer)

    def _ended_early(self, at: int, offset: int, nbytes: int) -> NoReturn:
        raise CorruptCheckpointError(
            f"{self.name}: the file ended at byte {at} where [{offset}, {offset + nbytes}) was wanted; it had "
            f"{self.size_bytes} bytes when it was opened, so it was cut meanwhile"
        )

    def close(self) -> None:
        fds = [fd for fd in (self._direct_fd, self._fd) if fd is not None]
        if self._residency is not None:
            self._residency.close()
        if self._fd is not None:
            self._bounce.leave()
        self._fd = self._direct_fd = self._residency = None
        for fd in fds:
            os.close(fd)
