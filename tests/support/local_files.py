"""Looking at files, descriptors and the page cache with plain calls, past the code under test."""

import ctypes
import mmap
import os
import random
from pathlib import Path

from mcore_ckpt.format.integrity import data_file_of
from mcore_ckpt.storage.base import align_up
from mcore_ckpt.storage.direct_io import aligned_buffer

MIB = 1024 * 1024


def aligned(content: bytes) -> memoryview:
    """`content` in page-aligned memory, padded with zeros to whole blocks."""
    view = aligned_buffer(max(1, len(content)))
    view[: len(content)] = content
    return view[: align_up(len(content))]


def random_bytes(count: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(count)


def data_file(directory: Path, rank: int = 0, number: int = 0) -> Path:
    """A data file of a checkpoint that holds one save, whoever has named it."""
    (found,) = (path for path in directory.iterdir() if (data_file_of(path.name) or ())[:2] == (rank, number))
    return found


def flip(path: Path, at: int, bits: int = 1) -> None:
    """Flip bits of a byte of a file; from its end if `at` is negative."""
    content = bytearray(path.read_bytes())
    content[at] ^= bits
    path.write_bytes(content)


def contents(directory: Path) -> dict[str, bytes]:
    """All files below a directory, by their path in it."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def open_fds() -> set[str]:
    return {f"{fd}->{os.readlink(f'/proc/self/fd/{fd}')}" for fd in os.listdir("/proc/self/fd") if _is_open(fd)}


def _is_open(fd: str) -> bool:
    try:
        return not os.readlink(f"/proc/self/fd/{fd}").startswith("/proc/")
    except FileNotFoundError:
        return False


def has_direct_io(directory: Path) -> bool:
    """Found out by hand."""
    path = directory / "probe"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    except OSError:
        return False
    try:
        return os.pwrite(fd, aligned(b"x" * 4096), 0) == 4096
    except OSError:
        return False
    finally:
        os.close(fd)
        path.unlink()


def cached_pages(path: Path) -> int:
    """Pages of the file that lie in the page cache, by the C library's word."""
    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        vector = ctypes.create_string_buffer(pages)
        result = ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), vector)
        del start
        assert result == 0
    return sum(byte & 1 for byte in vector.raw)


def drop_cached(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def device_bytes() -> int:
    """Bytes that this process has had read from devices so far, read-ahead included."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])
