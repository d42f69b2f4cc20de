"""Reading local files: from the page cache what is there, past it what is not.

Names come from files that nobody vouches for, and what lies under them may be a pipe that blocks for ever, or a link to
anything at all. So only regular files are opened, and below the directory no symbolic link is followed.

A checkpoint is read once, so what is cold is read with O_DIRECT, which neither evicts other pages nor pays for
allocating and filling new ones. What was just written, or read by another rank, is often still cached, and is then
copied at memory speed. `mincore` tells the two apart without touching a page. It is asked for each piece of a read,
since a file may well be cached in part.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NoReturn

from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError, LoadError
from mcore_ckpt.storage import direct_io
from mcore_ckpt.storage.base import ALIGNMENT_BYTES, DirectIo, FileVersion, RangeReader, align_up, check_name


def open_regular(root: str | os.PathLike[str], name: str, flags: int = 0, *, follow_links: bool = False) -> int:
    """Open a regular file below a directory for reading; returns its descriptor.

    Args:
        root: the directory, which may itself be reached through symbolic links: the caller named it.
        name: of the file, relative to it.
        flags: for `os.open`, beyond those for reading.
        follow_links: wherever they lead; for directories whose owner has named them and keeps links in them.

    Raises:
        CorruptCheckpointError: there is something else than a regular file, or a symbolic link on the way to it.
        OSError: it cannot be opened.
    """
    # It is looked at before it is opened: a pipe would block, and a device may act. (O_NONBLOCK, against the first,
    # makes file systems that keep files on tape refuse those.)
    with looked_at(root, name, follow_links) as (entry, folder, _):
        no_link = 0 if follow_links else os.O_NOFOLLOW
        fd = os.open(entry, os.O_RDONLY | os.O_CLOEXEC | no_link | flags, dir_fd=folder)
    try:
        _check_regular(os.path.join(root, name), os.fstat(fd).st_mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextmanager
def looked_at(
    root: str | os.PathLike[str], name: str, follow_links: bool
) -> Iterator[tuple[str, int | None, os.stat_result]]:
    """What leads to a regular file: its name, the descriptor of the folder to start from (None: the working directory),
    and its status. Raises as `open_regular`.
    """
    path = os.path.join(root, check_name(name))
    with contextlib.ExitStack() as opened:
        entry, folder = path, None
        if "/" in name and not follow_links:
            *folders, entry = name.split("/")
            folder = _open_folder(os.fspath(root), os.O_CLOEXEC)
            opened.callback(os.close, folder)
            for part in folders:
                if stat.S_ISLNK(os.stat(part, dir_fd=folder, follow_symlinks=False).st_mode):
                    raise _link_error(path, f"it lies behind the symbolic link {part!r}")
                folder = _open_folder(part, os.O_CLOEXEC | os.O_NOFOLLOW, folder)
                opened.callback(os.close, folder)
        status = os.stat(entry, dir_fd=folder, follow_symlinks=follow_links)
        _check_regular(path, status.st_mode)
        yield entry, folder, status


def _open_folder(path: str, flags: int, folder: int | None = None) -> int:
    return os.open(path, os.O_PATH | os.O_DIRECTORY | flags, dir_fd=folder)


def _check_regular(path: str, mode: int) -> None:
    if stat.S_ISLNK(mode):
        raise _link_error(path, "it is a symbolic link")
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        kind = kinds.get(stat.S_IFMT(mode), "a device")
        raise CorruptCheckpointError(f"{path}: expected a regular file, but it is {kind}; load another copy")


def _link_error(path: str, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path}: expected a regular file inside the directory, but {what}. If you trust what it leads to, copy the"
        " checkpoint with its links resolved (cp -rL) and load the copy"
    )


def open_error(path: str, error: OSError) -> LoadError:
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return CheckpointNotFoundError(
            f"{path}: no such file; the path is wrong, or the checkpoint is incomplete or was deleted meanwhile"
        )
    code = errno.errorcode.get(error.errno or 0, "no errno")
    return LoadError(f"{path}: cannot be opened: {error.strerror or error} ({code})")


# Below this, one read through the page cache costs less than finding out where the bytes are; headers are read so.
_MIN_DIRECT_BYTES: Final = 64 * 1024
# Up to here, copying the whole read from an aligned buffer is cheaper than two more requests for its ragged ends.
_MAX_COPIED_BYTES: Final = 1024 * 1024
_PIECE_BYTES: Final = 8 * 1024 * 1024
# Room for a piece, and for what is read of the pages around it.
_BOUNCE_BYTES: Final = _PIECE_BYTES + 4 * ALIGNMENT_BYTES
# Bytes are summed and copied in slices that are still in the CPU's cache when they are looked at again.
_SLICE_BYTES: Final = 512 * 1024

# Of what is cached for the most part, the rest is read as well.
_MOSTLY_CACHED: Final = 0.5

_Arrived = Callable[[memoryview], None]


def _ignore(_: memoryview) -> None:
    pass


def _copy(view: memoryview, read: memoryview, arrived: _Arrived) -> None:
    """Copy what has been read to the beginning of `view`, where `arrived` then sees it."""
    for done in range(0, len(read), _SLICE_BYTES):
        part = view[done : min(done + _SLICE_BYTES, len(read))]
        direct_io.copy_bytes(part, read[done : done + len(part)])
        arrived(part)


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
        """A buffer for one piece and the pages around it, page-aligned."""
        with self._lock:
            if self._free:
                return self._free.pop()
        return direct_io.aligned_buffer(_BOUNCE_BYTES)

    def give_back(self, buffer: memoryview) -> None:
        """Return a buffer that `take` lent."""
        with self._lock:
            self._free.append(buffer)


class LocalReader(RangeReader):
    """An open local file; any number of threads may read it at once, but none while it is being closed.

    Args:
        root: directory of the storage.
        name: of the file in it.
        direct: as in `Storage.open_reader`.
        bounce: where reads into unaligned memory borrow their buffers.
        follow_links: as in `open_regular`.

    Raises:
        CorruptCheckpointError: if it is no regular file inside the directory.
        OSError: if it cannot be opened.
    """

    def __init__(
        self, root: Path, name: str, direct: DirectIo, bounce: BouncePool, *, follow_links: bool = False
    ) -> None:
        self.name = os.path.join(root, name)
        self._bounce = bounce
        self._direct_fd: int | None = None
        self._residency: direct_io.Residency | None = None
        self._fd: int | None = open_regular(root, name, follow_links=follow_links)
        bounce.enter()
        try:
            status = os.fstat(self._fd)
            self.size_bytes = status.st_size
            self.version = FileVersion(status.st_ino, status.st_size, status.st_mtime_ns)
            if direct == "auto":
                try:
                    self._direct_fd = open_regular(root, name, os.O_DIRECT, follow_links=follow_links)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                else:
                    if not os.path.samestat(status, os.fstat(self._direct_fd)):
                        raise OSError(errno.ESTALE, "another file took its name while it was opened")
            if direct in ("auto", "keep"):
                self._residency = direct_io.Residency(self._fd, self.size_bytes)
        except BaseException:
            self.close()
            raise

    def read_into(self, offset: int, view: memoryview, arrived: _Arrived | None = None) -> None:
        self._read(offset, view, arrived or _ignore)

    def _read(self, offset: int, view: memoryview, arrived: _Arrived) -> None:
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
                if self._wants_direct(start, len(piece)):
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

    def scatter(self, offset: int, vectors: int, count: int, nbytes: int) -> bool:
        self.check_range(offset, nbytes)
        if self._fd is None:
            return False
        return direct_io.read_vectors(self._fd, vectors, count, offset) == nbytes

    def is_cached(self, offset: int, length: int) -> bool:
        return self._residency is not None and self._residency.cached_share(offset, length) >= _MOSTLY_CACHED

    @contextmanager
    def mapped(self, offset: int, length: int) -> Iterator[int]:
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
        return nbytes >= _MIN_DIRECT_BYTES and not self.is_cached(offset, nbytes)

    def _read_buffered(self, fd: int, offset: int, view: memoryview, arrived: _Arrived) -> None:
        done = 0
        while done < len(view):
            got = os.preadv(fd, [view[done : done + _SLICE_BYTES]], offset + done)
            if got == 0:
                self._ended_early(offset + done, offset, len(view))
            arrived(view[done : done + got])
            done += got

    def _read_direct(self, offset: int, view: memoryview, arrived: _Arrived) -> None:
        """Read with O_DIRECT, straight into `view` where its address allows it."""
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
            if error.errno != errno.EINVAL or self._fd is None:
                raise
            self._read_buffered(self._fd, position, view[position - offset :], arrived)

    def _direct(self) -> int:
        if self._direct_fd is None:
            raise OSError(errno.EBADF, "the reader was closed during a read")
        return self._direct_fd

    def _read_copied(self, offset: int, view: memoryview, arrived: _Arrived) -> int:
        """Read the first bytes of `view` through an aligned buffer; returns how many."""
        start = offset - offset % ALIGNMENT_BYTES
        buffer = self._bounce.take()
        try:
            wanted = align_up(min(offset + len(view) - start, len(buffer)))
            got = os.preadv(self._direct(), [buffer[:wanted]], start) - (offset - start)
            if got <= 0:
                self._ended_early(offset, offset, len(view))
            got = min(got, len(view))
            read = buffer[offset - start :][:got]
            _copy(view, read, arrived)
            return got
        finally:
            self._bounce.give_back(buffer)

    def _ended_early(self, at: int, offset: int, nbytes: int) -> NoReturn:
        raise CorruptCheckpointError(
            f"{self.name}: the file ended at byte {at} where [{offset}, {offset + nbytes}) was requested; it had "
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
