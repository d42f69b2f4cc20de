"""Local files, read and written with O_DIRECT where that serves, and the system calls under that.

Names come from files without a guarantor, and may lead to a pipe that blocks for ever, or to a link to anything at all.
So only regular files are opened, and below the directory no symbolic link is followed.

A checkpoint is read once, so what is cold is read with O_DIRECT, which neither evicts other pages nor pays for
allocating and filling new ones. What was just written, or read by another rank, is often still cached, and is then
copied at memory speed. `mincore` tells the two apart without touching a page. It is asked for each piece of a read,
since a file may well be cached in part.

A checkpoint is not read back by the machine that wrote it, so it is written with O_DIRECT, too, where the file system
can: caching it only evicts what training needs, at the price of a copy. Elsewhere the page cache is
written back while the save goes on, and what has reached the device is dropped, so that the final fsync has nearly
nothing left to do.

The calls that Python does not wrap are advice: where one is lacking, the data are written all the same, more slowly.

On file systems that hosts share, another host may just have replaced or removed a file. For some seconds GlusterFS
gives a name's old file from its caches, or answers ESTALE; NFS answers so of an open file that is gone. So the server
has to confirm what was opened, and a look that is answered ESTALE is repeated for half a minute (`look_again`), after
the directory was listed: clients take names from the server then. No change of a file is asked for twice.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from mcore_ckpt.core.errors import CorruptCheckpointError, LoadError
from mcore_ckpt.storage.base import (
    ALIGNMENT_BYTES,
    DirectIo,
    FileVersion,
    RangeReader,
    RangeWriter,
    advice,
    align_up,
    check_name,
    saving,
    shown,
)

_T = TypeVar("_T")

# GlusterFS with two bricks has been seen to answer ESTALE for 9 s when it was asked for what a healthy file holds.
# (EAGAIN: a lock that another process has, if only to look.)
_LOOKS_S: Final = 30.0
_AGAIN: Final = (errno.ESTALE, errno.EAGAIN)
_PAUSE_S: Final = 0.02
# Listings make a client take names from its server, but keep one alive that two bricks have answered wrongly.
_LISTS_S: Final = 1.2
_QUIET_S: Final = 2.2
# No file has it. Clients answer from their caches about names and contents, but ask the server for this.
_ATTRIBUTE: Final = "user.mcore_ckpt"


def look_again(path: str, look: Callable[[], _T]) -> _T:
    """What `look` returns; while it is answered ESTALE it is called again, for some seconds. It changes nothing."""
    began_s = time.monotonic()
    while True:
        try:
            return look()
        except OSError as error:
            passed_s = time.monotonic() - began_s
            if error.errno not in _AGAIN or passed_s > _LOOKS_S:
                raise
        is_quiet = passed_s // _LISTS_S % 2 == 1
        if not is_quiet:
            with contextlib.suppress(OSError):
                os.listdir(os.path.dirname(path) or ".")
        time.sleep(_QUIET_S if is_quiet else _PAUSE_S)


@contextlib.contextmanager
def was_there() -> Iterator[None]:
    """A file was there right before the block; if it is gone within, it is looked at again."""
    try:
        yield
    except FileNotFoundError as error:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), error.filename) from error


def close_read(fd: int) -> None:
    """Close what was only read: whatever that is answered, nothing is lost."""
    with contextlib.suppress(OSError):
        os.close(fd)


# Answers of a file system that does not know a call, as opposed to a call that failed.
_NOT_SUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EPERM})

# What one answers that has no O_DIRECT, to the flag or to a write.
_REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP})

_SYNC_WRITE, _SYNC_WRITE_AND_WAIT = 2, 7  # flags of sync_file_range

_MADV_POPULATE_WRITE: Final = 23  # <linux/mman.h>, which the mmap module does not name

_HUGE_PAGE_BYTES = 2 * 1024 * 1024
_SHORT_COPY_BYTES = 256 * 1024
_SAMPLE_PAGES = 16
_MAP_FAILED = ctypes.c_void_p(-1).value


def aligned_buffer(nbytes: int) -> memoryview:
    """Private zeroed memory in whole pages, huge ones if it is large: short device requests leave a disk idle."""
    size_bytes = max(align_up(nbytes), ALIGNMENT_BYTES)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # a forked child would write into memory that is shared
    if size_bytes < _HUGE_PAGE_BYTES:
        return memoryview(mmap.mmap(-1, size_bytes, flags=flags))
    memory = mmap.mmap(-1, size_bytes + _HUGE_PAGE_BYTES, flags=flags)  # what is not touched takes no memory
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    start = -address(view) % _HUGE_PAGE_BYTES
    return view[start : start + size_bytes]


def copy_bytes(destination: memoryview, source: memoryview) -> None:
    """`destination[:] = source`, of the same length, without the GIL, which the threads that write need."""
    if len(destination) != len(source):
        raise ValueError(f"{len(source)} bytes do not fit into {len(destination)} exactly")
    if source.readonly or len(source) < _SHORT_COPY_BYTES:  # (ctypes takes writable memory only)
        destination[:] = source
    else:
        ctypes.memmove(address(destination), address(source), len(source))


def enable(fd: int) -> bool:
    """Put O_DIRECT on a file if its file system has it, and say whether. Some then refuse a write."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        return False
    return True


@lru_cache(maxsize=1)
def _mincore() -> Any:
    """The call takes two microseconds, and does not release the GIL for them: another thread would take it."""
    function = ctypes.PyDLL(None).mincore
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    function.restype = ctypes.c_int
    return function


@lru_cache(maxsize=1)
def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    offset = ctypes.c_int64
    for name, arguments in (
        ("fallocate", [ctypes.c_int, ctypes.c_int, offset, offset]),
        ("sync_file_range", [ctypes.c_int, offset, offset, ctypes.c_uint]),
        ("munmap", [ctypes.c_void_p, ctypes.c_size_t]),
        ("madvise", [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]),
    ):
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = ctypes.c_int
    library.preadv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, offset]
    library.preadv.restype = ctypes.c_ssize_t
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, offset]
    library.mmap.restype = ctypes.c_void_p
    return library


def address(view: memoryview) -> int:
    """Where the memory of a writable, contiguous view begins; 0 if it is empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if len(view) else 0


def _advise(name: str, *arguments: int) -> None:
    """A call of the C library that the file system may lack; raises `OSError` if it fails otherwise."""
    while getattr(_libc(), name)(*arguments) != 0:
        code = ctypes.get_errno()
        if code in _NOT_SUPPORTED:
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def write_all(fd: int, view: memoryview, offset: int, granule: int = 1) -> None:
    """Write all of `view`; a short write continues at the last multiple of `granule`. Raises `OSError`."""
    done = 0
    while done < len(view):
        written = os.pwrite(fd, view[done:], offset + done)
        if done + written < len(view):
            written -= (done + written) % granule
            if written <= 0:
                # No space is the one cause known for a write that gets nowhere; the next one would say so itself,
                # but a file system that returns 0 for ever would keep us here.
                raise OSError(errno.ENOSPC, "the write stopped short and does not go on")
        done += written


def populate(address: int, nbytes: int) -> bool:
    """Map pages of shared memory (page-aligned), so that touching them is no fault; whether all are there."""
    done: int = _libc().madvise(address, nbytes, _MADV_POPULATE_WRITE)
    return done == 0


def drop_cached(fd: int, offset: int = 0, nbytes: int = 0) -> None:
    """Drop clean pages of a range from the page cache (`nbytes=0`: to the end of the file)."""
    try:
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise


class Residency:
    """Tells which part of a file the page cache holds, without reading; its mapping is never touched."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._address: int | None = None
        # `mincore` calls every page of a file cached that the process neither owns nor may write (Linux 5.2 and later).
        # Such a file shows by the page behind its end, which no cache holds; its residency is then not known. (The C
        # library maps the file: `mmap.mmap` keeps a second descriptor, and tells no address of a read-only map.)
        self._mapped_bytes = align_up(size_bytes, mmap.PAGESIZE) + mmap.PAGESIZE
        if size_bytes > 0:
            mapped = _libc().mmap(None, self._mapped_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
            if mapped not in (None, _MAP_FAILED):
                self._address = mapped
                if self._cached_pages(self._mapped_bytes // mmap.PAGESIZE - 1, 1):
                    self.close()

    def cached_share(self, offset: int, nbytes: int) -> float:
        """About what part of bytes `[offset, offset + nbytes)` is cached, 0.0 to 1.0, by its ends."""
        if self._address is None or offset >= self._size_bytes:
            return 0.0
        first = offset // mmap.PAGESIZE
        pages = align_up(min(offset + nbytes, self._size_bytes), mmap.PAGESIZE) // mmap.PAGESIZE - first
        if pages <= 2 * _SAMPLE_PAGES:
            return self._cached_pages(first, pages) / pages
        samples = first, first + pages - _SAMPLE_PAGES
        return sum(self._cached_pages(sample, _SAMPLE_PAGES) for sample in samples) / (2 * _SAMPLE_PAGES)

    def _cached_pages(self, first: int, pages: int) -> int:
        resident = ctypes.create_string_buffer(pages)
        address = (self._address or 0) + first * mmap.PAGESIZE
        if _mincore()(address, pages * mmap.PAGESIZE, resident) != 0:
            return 0
        return pages - resident.raw[:pages].count(b"\0")

    def close(self) -> None:
        """Unmap the file. Twice is harmless."""
        mapped, self._address = self._address, None
        if mapped is not None:
            _libc().munmap(mapped, self._mapped_bytes)


def open_regular(root: str | os.PathLike[str], name: str, flags: int = 0, *, follow_links: bool = False) -> int:
    """The descriptor of a regular file below a directory, which may itself be reached through links; `flags` for
    `os.open`, beyond those for reading. Raises `CorruptCheckpointError` for anything else, and for a link on the way
    unless `follow_links`, or `OSError`. It is the file that the server has under that name.
    """
    path = os.path.join(root, check_name(name))
    return look_again(path, partial(_open_once, path, root, name, flags, follow_links))


def _open_once(path: str, root: str | os.PathLike[str], name: str, flags: int, follow_links: bool) -> int:
    with contextlib.ExitStack() as opened:
        entry, folder = path, None
        if "/" in name and not follow_links:
            *folders, entry = name.split("/")
            folder = _open_folder(os.fspath(root), os.O_CLOEXEC)
            opened.callback(close_read, folder)
            for part in folders:
                if stat.S_ISLNK(os.stat(part, dir_fd=folder, follow_symlinks=False).st_mode):
                    raise _link_error(path, f"it lies behind the symbolic link {part!r}")
                folder = _open_folder(part, os.O_CLOEXEC | os.O_NOFOLLOW, folder)
                opened.callback(close_read, folder)
        # It is looked at before it is opened: a pipe would block, and a device may act. (O_NONBLOCK, against the first,
        # makes file systems that keep files on tape refuse those.) NFS asks the server when it is opened.
        no_link, seen = 0 if follow_links else os.O_NOFOLLOW, True
        try:
            _check_regular(path, os.stat(entry, dir_fd=folder, follow_symlinks=follow_links).st_mode)
        except FileNotFoundError:
            flags, seen = flags | os.O_NONBLOCK, False
        with was_there() if seen else contextlib.nullcontext():
            fd = os.open(entry, os.O_RDONLY | os.O_CLOEXEC | no_link | flags, dir_fd=folder)
    try:
        try:
            os.getxattr(fd, _ATTRIBUTE)  # the server is asked for the file that was opened
        except OSError as error:
            if error.errno in (errno.ESTALE, errno.ENOENT):  # it is gone
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE)) from error
        _check_regular(path, os.fstat(fd).st_mode)
    except BaseException:
        close_read(fd)
        raise
    return fd


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


# Below this, one read through the page cache costs less than finding out where the bytes are; headers are read so.
_MIN_DIRECT_BYTES: Final = 64 * 1024
# Up to here, copying the whole read from an aligned buffer is cheaper than two more requests for its ragged ends.
_MAX_COPIED_BYTES: Final = 1024 * 1024
_PIECE_BYTES: Final = 8 * 1024 * 1024
# Room for a piece, and for what is read of the pages around it.
_BOUNCE_BYTES: Final = _PIECE_BYTES + 4 * ALIGNMENT_BYTES
# Bytes are summed and copied in slices that are still in the CPU's cache when they are looked at again.
_SLICE_BYTES: Final = 512 * 1024

# The share of a file in the page cache from which the rest is read through it as well. More than one of the two ends,
# which the kernel may have read ahead: each read through the cache would send the next one there, to the file's end.
_MOSTLY_CACHED: Final = 0.75

_Arrived = Callable[[memoryview], None]


# Aligned buffers for reads whose destination O_DIRECT cannot take, as many as there are threads that need one: of the
# open readers of a storage, and freed when the last of these closes.
BounceBuffers = deque[memoryview]


class LocalReader(RangeReader):
    """An open local file; any number of threads may read it at once, but none while it is being closed. Arguments and
    errors as of `open_regular` and `Storage.open_reader`; `bounce`: where reads into unaligned memory borrow their
    buffers.
    """

    def __init__(
        self, root: Path, name: str, direct: DirectIo, bounce: BounceBuffers, *, follow_links: bool = False
    ) -> None:
        self.name = os.path.join(root, name)
        self._bounce: BounceBuffers | None = bounce
        self._direct_fd: int | None = None
        self._residency: Residency | None = None
        self._fd: int | None = open_regular(root, name, follow_links=follow_links)
        try:
            status = os.fstat(self._fd)
            self.size_bytes = status.st_size
            self.version = FileVersion(status.st_ino, status.st_size, status.st_mtime_ns)
            self.may_lag = os.major(status.st_dev) == 0  # on no device of this host
            if direct == "auto":
                try:  # this very file, whatever its name stands for by now
                    self._direct_fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
                except OSError as error:
                    if error.errno not in (errno.EINVAL, errno.ENOENT):
                        raise
            if direct in ("auto", "keep"):
                self._residency = Residency(self._fd, self.size_bytes)
        except BaseException:
            self.close()
            raise

    def read_into(self, offset: int, view: memoryview, arrived: _Arrived | None = None) -> None:
        arrived, view = arrived or (lambda _: None), view.cast("B")
        self.check_range(offset, len(view))
        if self._fd is None:
            raise ValueError(f"{self.name}: the reader is closed")
        done = 0
        try:
            while done < len(view):
                start = offset + done
                # Pieces end on aligned offsets, so that those after the first begin on one.
                piece = view[done : done + _PIECE_BYTES - start % ALIGNMENT_BYTES]
                is_long, fd = len(piece) >= _MIN_DIRECT_BYTES, self._direct_fd
                if fd is not None and is_long and not self.is_cached(start, len(piece)):
                    self._read_direct(fd, start, piece, arrived)
                else:
                    self._read_buffered(self._fd, start, piece, arrived)
                done += len(piece)
        except OSError as error:
            what = f"reading bytes [{offset + done}, {offset + len(view)})"
            raise LoadError(f"{self.name}: {what} failed: {shown(error)}; {advice(error.errno)}") from error

    def scatter(self, offset: int, vectors: int, count: int, nbytes: int) -> bool:
        self.check_range(offset, nbytes)
        while self._fd is not None:
            got = int(_libc().preadv(self._fd, vectors, count, offset))
            if got >= 0 or ctypes.get_errno() != errno.EINTR:
                return got == nbytes
        return False

    def is_cached(self, offset: int, length: int) -> bool:
        return self._residency is not None and self._residency.cached_share(offset, length) >= _MOSTLY_CACHED

    def _read_at(self, fd: int, view: memoryview, offset: int) -> int:
        return look_again(self.name, partial(os.preadv, fd, [view], offset))

    def _read_buffered(self, fd: int, offset: int, view: memoryview, arrived: _Arrived) -> None:
        done = 0
        while done < len(view):
            got = self._read_at(fd, view[done : done + _SLICE_BYTES], offset + done)
            if got == 0:
                self._ended_early(offset + done, offset, len(view))
            arrived(view[done : done + got])
            done += got

    def _read_direct(self, fd: int, offset: int, view: memoryview, arrived: _Arrived) -> None:
        """Read with O_DIRECT, straight into `view` where its address allows it."""
        done = 0
        # Memory and file are aligned together, and the ends are not ragged, or worth their own requests.
        is_aligned = (address(view) - offset) % ALIGNMENT_BYTES == 0
        straight = is_aligned and (len(view) > _MAX_COPIED_BYTES or (offset | len(view)) % ALIGNMENT_BYTES == 0)
        try:
            while done < len(view):
                position, left = offset + done, view[done:]
                whole_bytes = len(left) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
                if straight and position % ALIGNMENT_BYTES == 0 and whole_bytes:
                    got = self._read_at(fd, left[:whole_bytes], position)
                    if got == 0:
                        self._ended_early(position, offset, len(view))
                    arrived(left[:got])
                    done += got
                else:
                    ragged = left[: align_up(position) - position] if straight and position % ALIGNMENT_BYTES else left
                    done += self._read_copied(fd, position, ragged, arrived)
        except OSError as error:
            # The file system takes the flag and not the read, or asks for more alignment than any known to us.
            if error.errno != errno.EINVAL or self._fd is None:
                raise
            self._read_buffered(self._fd, offset + done, view[done:], arrived)

    def _read_copied(self, fd: int, offset: int, view: memoryview, arrived: _Arrived) -> int:
        """Read the first bytes of `view` through an aligned buffer; returns how many."""
        start, bounce = offset - offset % ALIGNMENT_BYTES, self._bounce
        assert bounce is not None
        try:
            buffer = bounce.pop()
        except IndexError:
            buffer = aligned_buffer(_BOUNCE_BYTES)
        try:
            wanted = align_up(min(offset + len(view) - start, len(buffer)))
            got = self._read_at(fd, buffer[:wanted], start) - (offset - start)
            if got <= 0:
                self._ended_early(offset, offset, len(view))
            got, read = min(got, len(view)), buffer[offset - start :]
            for done in range(0, got, _SLICE_BYTES):
                part = view[done : min(done + _SLICE_BYTES, got)]
                copy_bytes(part, read[done : done + len(part)])
                arrived(part)
            return got
        finally:
            bounce.append(buffer)

    def _ended_early(self, at: int, offset: int, nbytes: int) -> NoReturn:
        raise CorruptCheckpointError(
            f"{self.name}: the file ended at byte {at} where [{offset}, {offset + nbytes}) was requested; it had "
            f"{self.size_bytes} bytes when it was opened, so it was cut meanwhile"
        )

    def close(self) -> None:
        fds = [fd for fd in (self._direct_fd, self._fd) if fd is not None]
        if self._residency is not None:
            self._residency.close()
        self._fd = self._direct_fd = self._residency = self._bounce = None
        for fd in fds:
            close_read(fd)


FILE_MODE: Final = 0o666


# One write-back in flight, and one before it that is waited for: enough to keep the device busy, and all that a
# buffered save may leave dirty in the page cache.
_UNSYNCED_WRITES: Final = 2


class LocalWriter(RangeWriter):
    """A new file. `finish` is for one thread, after the last `write` has returned."""

    def __init__(self, path: str, size_bytes: int, direct: DirectIo) -> None:
        self.name = path
        self._size_bytes = size_bytes
        self.direct = False
        self._lock = threading.Lock()
        self._buffered_fd: int | None = None
        self._unsynced: deque[tuple[int, int]] = deque()
        self._writes_in_progress = 0
        self._aborted = False
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        self._fd: int | None = fd
        try:
            if direct != "off":
                self.direct = enable(fd)
            # (`os.posix_fallocate` would write into every block where the file system cannot reserve them.)
            _advise("fallocate", fd, 0, 0, align_up(size_bytes) if self.direct else size_bytes)
        except BaseException:
            self.abort()
            raise

    def write(self, offset: int, view: memoryview) -> None:
        view = memoryview(view).cast("B")
        with saving(f"writing bytes [{offset}, {offset + len(view)})", self.name):
            with self._lock:
                fd = self._open_fd()
                self._writes_in_progress += 1
            try:
                self._write(fd, offset, view)
            finally:
                with self._lock:
                    self._writes_in_progress -= 1
                    if self._aborted and self._writes_in_progress == 0:
                        self._close()

    def _write(self, fd: int, offset: int, view: memoryview) -> None:
        if not self.direct:
            self._write_buffered(fd, offset, view)
            return
        if offset % ALIGNMENT_BYTES == 0 and len(view) % ALIGNMENT_BYTES == 0:
            try:
                write_all(fd, view, offset, ALIGNMENT_BYTES)
                return
            except OSError as error:
                if error.errno not in _REFUSALS:
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
        write_all(fd, view, offset)
        _advise("sync_file_range", fd, offset, len(view), _SYNC_WRITE)  # dirty pages: a failed write is told once
        with self._lock:
            self._unsynced.append((offset, len(view)))
            oldest = self._unsynced.popleft() if len(self._unsynced) > _UNSYNCED_WRITES else None
        if oldest is not None:
            _advise("sync_file_range", fd, *oldest, _SYNC_WRITE_AND_WAIT)
            drop_cached(fd, *oldest)

    def finish(self) -> None:
        with saving(f"finishing the file at {self._size_bytes} bytes", self.name):
            try:
                fd = self._open_fd()
                if os.fstat(fd).st_size != self._size_bytes:
                    os.ftruncate(fd, self._size_bytes)
                if self._buffered_fd is not None:
                    os.fsync(self._buffered_fd)  # a failed write-back is reported to the fd that was open then
                os.fsync(fd)
                if self._unsynced or self._buffered_fd is not None:
                    drop_cached(fd)
            except OSError:
                self._close()
                raise
            self._close(raises=True)

    def _close(self, raises: bool = False) -> None:
        fds = [fd for fd in (self._buffered_fd, self._fd) if fd is not None]
        self._fd = self._buffered_fd = None
        failure: OSError | None = None
        for fd in fds:
            try:
                os.close(fd)
            except OSError as error:
                failure = error
        if failure is not None and raises:
            raise failure

    def abort(self) -> None:
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
            if self._writes_in_progress == 0:
                self._close()
        with contextlib.suppress(OSError):
            os.unlink(self.name)
