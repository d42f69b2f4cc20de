"""The system calls under local files that Python does not wrap, and memory that O_DIRECT accepts.

All of it is advice: where the C library or the file system lacks a call, nothing happens and the data are written all
the same, more slowly. What is not advice is the error of a write-back, which `write_back` does report.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from functools import lru_cache
from typing import Any, Final

from mcore_ckpt.storage.base import ALIGNMENT_BYTES, align_up

# What a file system answers that does not know a call, as opposed to a call that failed.
_NOT_SUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EPERM})

_SYNC_FILE_RANGE_WAIT_BEFORE = 1
_SYNC_FILE_RANGE_WRITE = 2
_SYNC_FILE_RANGE_WAIT_AFTER = 4

MADV_POPULATE_WRITE: Final = 23  # <linux/mman.h>, which the mmap module does not name

_HUGE_PAGE_BYTES = 2 * 1024 * 1024
_SHORT_COPY_BYTES = 256 * 1024
_SAMPLES = 2
_SAMPLE_PAGES = 16
_MAP_FAILED = ctypes.c_void_p(-1).value

_direct_io_by_device: dict[int, bool] = {}


def aligned_buffer(nbytes: int) -> memoryview:
    """Private zeroed memory of `nbytes`, rounded up to whole pages, and page-aligned.

    Large buffers lie in huge pages if the kernel has some. A device request is made of contiguous pieces of memory, a
    few hundred at most; of 4 KiB pages that is too little to keep a fast disk busy (a virtual one was seen to be two
    to two and a half times slower), and each page costs CPU time, too.

    Private, since anonymous memory of `mmap.mmap` is by default shared with forked children, who would then write into
    the same buffer.
    """
    size_bytes = max(align_up(nbytes), ALIGNMENT_BYTES)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if size_bytes < _HUGE_PAGE_BYTES or not has_huge_pages():
        return memoryview(mmap.mmap(-1, size_bytes, flags=flags))
    memory = mmap.mmap(-1, size_bytes + _HUGE_PAGE_BYTES, flags=flags)  # what is not touched takes no memory
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    start = -address(view) % _HUGE_PAGE_BYTES
    return view[start : start + size_bytes]


@lru_cache(maxsize=1)
def has_huge_pages() -> bool:
    """Whether private memory may lie in transparent huge pages."""
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled") as setting:
            return "[never]" not in setting.read()
    except OSError:
        return False


def copy_bytes(destination: memoryview, source: memoryview) -> None:
    """`destination[:] = source`, for contiguous bytes of the same length, without holding the GIL meanwhile.

    The threads that keep the device busy need it a few hundred times a second, and an assignment would make them wait.
    """
    if len(destination) != len(source):
        raise ValueError(f"{len(source)} bytes do not fit into {len(destination)} exactly")
    if source.readonly or len(source) < _SHORT_COPY_BYTES:  # (ctypes takes writable memory only)
        destination[:] = source
    else:
        ctypes.memmove(address(destination), address(source), len(source))


def enable(fd: int) -> bool:
    """Put O_DIRECT on a new, empty file if its file system has it, and say whether.

    Some file systems take the flag and then refuse the write, so there is a trial, once for each file system. Its zeros
    lie at the start of the file, where the file's own first bytes are going to replace them.

    Raises:
        OSError: if the trial fails for any other reason than being refused; for example ENOSPC.
    """
    device = os.fstat(fd).st_dev
    if _direct_io_by_device.get(device) is False:
        return False
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        if device not in _direct_io_by_device:
            with aligned_buffer(ALIGNMENT_BYTES) as zeros:
                os.pwrite(fd, zeros, 0)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        _direct_io_by_device[device] = False
        return False
    _direct_io_by_device[device] = True
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
        function = getattr(library, name, None)
        if function is not None:
            function.argtypes = arguments
            function.restype = ctypes.c_int
    library.preadv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, offset]
    library.preadv.restype = ctypes.c_ssize_t
    library.pwrite.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, offset]
    library.pwrite.restype = ctypes.c_ssize_t
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, offset]
    library.mmap.restype = ctypes.c_void_p
    return library


def address(view: memoryview) -> int:
    """Where the memory of a writable, contiguous view begins; 0 if it is empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if len(view) else 0


def preallocate(fd: int, nbytes: int) -> None:
    """Reserve space for bytes `[0, nbytes)` and set the file's length, where the file system can.

    `os.posix_fallocate` is not used: where the file system cannot, the C library would write into every block.

    Raises:
        OSError: above all ENOSPC, before a byte is written.
    """
    fallocate = getattr(_libc(), "fallocate", None)
    if fallocate is None or nbytes <= 0:
        return
    while fallocate(fd, 0, 0, nbytes) != 0:
        code = ctypes.get_errno()
        if code == errno.EINTR:
            continue
        if code in _NOT_SUPPORTED:
            return
        raise OSError(code, os.strerror(code))


def write_all(fd: int, view: memoryview, offset: int, granule: int = 1) -> None:
    """Write all of `view`; a write that stops short continues at the last multiple of `granule` that it reached.

    Raises:
        OSError: as `os.pwrite`.
    """
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


def write_back(fd: int, offset: int, nbytes: int, *, wait: bool) -> None:
    """Start writing dirty pages of a range to the device, and wait for them if asked.

    Raises:
        OSError: if the device failed; the kernel reports it once, so it must not be swallowed.
    """
    sync_file_range = getattr(_libc(), "sync_file_range", None)
    if sync_file_range is None:
        return
    flags = _SYNC_FILE_RANGE_WRITE
    if wait:
        flags |= _SYNC_FILE_RANGE_WAIT_BEFORE | _SYNC_FILE_RANGE_WAIT_AFTER
    while sync_file_range(fd, offset, nbytes, flags) != 0:
        code = ctypes.get_errno()
        if code == errno.EINTR:
            continue
        if code in _NOT_SUPPORTED:
            return
        raise OSError(code, os.strerror(code))


def write_from(fd: int, address: int, nbytes: int, offset: int) -> None:
    """Write `nbytes` of this process's memory, from `address` on, to `offset` of a file.

    Raises:
        OSError: as `os.pwrite`.
    """
    done = 0
    while done < nbytes:
        count = _libc().pwrite(fd, address + done, nbytes - done, offset + done)
        if count <= 0:
            code = ctypes.get_errno() if count else errno.ENOSPC
            if code == errno.EINTR:
                continue
            raise OSError(code, os.strerror(code))
        done += count


def read_vectors(fd: int, vectors: int, count: int, offset: int) -> int:
    """Read from `offset` of a file into `count` places, whose addresses and lengths (uint64 each) lie at `vectors`.

    Returns:
        How many bytes were read; fewer than there is room for at the end of the file, and -1 if it failed.
    """
    while (got := int(_libc().preadv(fd, vectors, count, offset))) < 0:
        if ctypes.get_errno() != errno.EINTR:
            return -1
    return got


def populate(address: int, nbytes: int) -> bool:
    """Make and map pages of shared memory, so that touching them later is no fault; whether all are there now.

    Page-aligned.
    """
    done: int = _libc().madvise(address, nbytes, MADV_POPULATE_WRITE)
    return done == 0


def drop_cached(fd: int, offset: int = 0, nbytes: int = 0) -> None:
    """Drop clean pages of a range from the page cache (`nbytes=0`: to the end of the file)."""
    try:
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise


class Residency:
    """Tells which part of a file lies in the page cache, without reading any of it.

    To look at residency the mapping is never touched, so that a file cut meanwhile does no harm. The C library maps
    the file, since `mmap.mmap` keeps a second descriptor and does not tell the address of a read-only map (a writable
    one counts against the memory that may be committed).

    `mincore` calls every page of a file cached that the process neither owns nor may write (Linux 5.2 and later). Such
    a file shows by the page behind its end, which no cache holds; its residency is then not known.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._address: int | None = None
        self._mapped_bytes = align_up(size_bytes, mmap.PAGESIZE) + mmap.PAGESIZE
        if size_bytes > 0:
            mapped = _libc().mmap(None, self._mapped_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
            if mapped not in (None, _MAP_FAILED):
                self._address = mapped
                if self._cached_pages(self._mapped_bytes // mmap.PAGESIZE - 1, 1):
                    self.close()

    def cached_share(self, offset: int, nbytes: int) -> float:
        """About what part of bytes `[offset, offset + nbytes)` is cached, from 0.0 to 1.0; 0.0 where nobody can tell.

        Of a long range, a few samples are looked at: pages come and go in long runs, and asking for each page would
        cost a fifth of what reading it from the cache costs.
        """
        if self._address is None or offset >= self._size_bytes:
            return 0.0
        first = offset // mmap.PAGESIZE
        pages = align_up(min(offset + nbytes, self._size_bytes), mmap.PAGESIZE) // mmap.PAGESIZE - first
        if pages <= _SAMPLES * _SAMPLE_PAGES:
            return self._cached_pages(first, pages) / pages
        step = (pages - _SAMPLE_PAGES) // (_SAMPLES - 1)
        cached = sum(self._cached_pages(first + i * step, _SAMPLE_PAGES) for i in range(_SAMPLES))
        return cached / (_SAMPLES * _SAMPLE_PAGES)

    def address_of(self, offset: int, nbytes: int) -> int:
        """Where bytes `[offset, offset + nbytes)` are mapped, if every page of them is cached; else 0."""
        if self._address is None or offset < 0 or nbytes <= 0 or offset + nbytes > self._size_bytes:
            return 0
        first = offset // mmap.PAGESIZE
        pages = align_up(offset + nbytes, mmap.PAGESIZE) // mmap.PAGESIZE - first
        return self._address + offset if self._cached_pages(first, pages) == pages else 0

    def forget(self, offset: int, nbytes: int) -> None:
        """Take the pages that were touched through the mapping out of this process, whose memory they count to."""
        if self._address is None:
            return
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        _libc().madvise(self._address + start, offset + nbytes - start, mmap.MADV_DONTNEED)

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
