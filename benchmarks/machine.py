"""The machine: what it is, and what its memory and its page cache cost."""

from __future__ import annotations

import mmap
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

__all__ = ["costs_of_memory", "describe_machine", "drop_page_cache", "private_memory"]

_BYTES = 512 * 1024 * 1024
_PIECE_BYTES = 8 * 1024 * 1024


def describe_machine(folder: Path) -> dict[str, str | int | float]:
    """Processor, memory, kernel, and the file system of a folder."""
    cpu = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor() or platform.machine(),
    )
    mounts = [line.split() for line in _lines("/proc/self/mountinfo")]
    mount = max((m for m in mounts if folder.resolve().is_relative_to(m[4])), key=lambda m: len(m[4]))
    file_system = mount[mount.index("-") + 1]
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory GB": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        "kernel": platform.release(),
        "file system": f"{file_system} on {mount[mount.index('-') + 2]}",
        "huge pages": Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip(),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def costs_of_memory(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds and CPU seconds per GB, one value a round, of touching memory and of reading a file in `folder`."""
    file = folder / "pages"
    noise = os.urandom(_PIECE_BYTES)
    with file.open("wb") as stream:
        for _ in range(_BYTES // _PIECE_BYTES):
            stream.write(noise)
    samples: dict[str, list[float]] = {}

    def note(name: str, work: Callable[[], None]) -> None:
        started, spent = time.perf_counter(), time.process_time()
        work()
        took = {"s": time.perf_counter() - started, "cpu s": time.process_time() - spent}
        for figure, seconds in took.items():
            samples.setdefault(f"{name}, {figure} per GB", []).append(seconds * 1e9 / _BYTES)

    for _ in range(rounds):
        for name, advice in (("small pages", mmap.MADV_NOHUGEPAGE), ("huge pages", mmap.MADV_HUGEPAGE)):
            with private_memory(_BYTES, advice) as memory:
                pages = np.frombuffer(memory, dtype=np.uint8)[::4096]
                note(f"memory touched first, {name}", partial(pages.fill, 1))
                note(f"memory touched again, {name}", partial(pages.fill, 2))
                del pages
        drop_page_cache(file)
        note("read by O_DIRECT", partial(_read, file, os.O_DIRECT))
        drop_page_cache(file)
        note("read into the page cache", partial(_read, file, 0))
        note("read out of the page cache", partial(_read, file, 0))
    file.unlink()
    return samples


def private_memory(size_bytes: int, advice: int = mmap.MADV_HUGEPAGE) -> mmap.mmap:
    """Memory of this process alone: that of a mapping which could be shared has small pages, whatever is advised."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(advice)
    return memory


def drop_page_cache(path: Path) -> None:
    """Drop a file, or all files below a folder, from the page cache, once they are synced."""
    os.sync()
    for file in [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]:
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _read(file: Path, flags: int) -> None:
    fd = os.open(file, os.O_RDONLY | flags)
    with private_memory(_PIECE_BYTES) as buffer:
        while os.readv(fd, [buffer]):
            pass
    os.close(fd)
