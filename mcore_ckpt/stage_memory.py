"""Shared memory that snapshots lie in, kept between saves.

Copying into memory that has been touched before costs about 0.06 s per GB, touching new memory two to eight times that.
So a stage is reused, and the first save, which finds it new, writes to it instead of touching it.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
from pathlib import Path

import torch

from mcore_ckpt.errors import SaveError
from mcore_ckpt.storage import direct_io

__all__ = ["Stage", "free_host_bytes"]

_logger = logging.getLogger(__name__)

# Short enough that neither a call of the trainer's that maps memory nor the end of the process waits for it.
_MAPPED_AT_ONCE_BYTES = 32 * 1024 * 1024


class Stage:
    """Shared memory of one rank that holds snapshots, one save after the other.

    It is a memfd: it needs no name, so nothing is left behind whatever dies, and no space in /dev/shm.

    Attributes:
        fd: the memory's file descriptor, to be sent to the writer.
        capacity_bytes: how much it holds; grows on demand, never shrinks.
        contents: what was laid out last (the caller's own note), or None.
        is_touched: its pages are mapped; until then every first access to one is a fault, and `write` is faster.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("mcore_ckpt_stage", os.MFD_CLOEXEC)
        self.capacity_bytes = 0
        self.contents: object = None
        self.is_touched = False
        self._memory: mmap.mmap | None = None
        self._pinned = False

    def reserve(self, nbytes: int, *, touch: bool = True) -> memoryview:
        """Memory for `nbytes`, page-aligned. What an earlier call returned must not be used any more.

        Args:
            nbytes: how much.
            touch: have the kernel find, clear and map all of it now; else see `is_touched`.

        Raises:
            SaveError: the host has not that much memory.
        """
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if nbytes > self.capacity_bytes:
            self._unmap()
            try:
                os.ftruncate(self.fd, nbytes)
                self._memory = mmap.mmap(self.fd, nbytes)
            except OSError as error:
                raise SaveError(f"no memory for a stage of {nbytes} bytes: {error}") from error
            self.capacity_bytes = nbytes
            self.contents = None
        if touch and not self.is_touched:
            self._touch_all()
        assert self._memory is not None
        return memoryview(self._memory)[:nbytes]

    def map_again(self) -> memoryview:
        """All of the memory by a mapping of its own, for a forked child."""
        return memoryview(mmap.mmap(self.fd, self.capacity_bytes))

    def _touch_all(self) -> None:
        """Touch all of the memory now, so that no save has to wait for the kernel to find and clear pages."""
        assert self._memory is not None
        try:
            self._memory.madvise(direct_io.MADV_POPULATE_WRITE)
        except OSError:  # a kernel before 5.14
            for offset in range(0, self.capacity_bytes, mmap.PAGESIZE):
                self._memory[offset] = 0
            self.contents = None
        self.is_touched = True

    def write(self, address: int, source: int, nbytes: int) -> None:
        """Copy host memory to `address`, which lies in what `reserve` returned, by a system call.

        Into pages that were never touched this takes half the time of copying: the kernel need not clear what it is
        going to overwrite, nor handle a fault for each page.

        Raises:
            SaveError: the host has not that much memory.
        """
        assert self._memory is not None
        offset = address - direct_io.address(memoryview(self._memory))
        try:
            direct_io.write_from(self.fd, source, nbytes, offset)
        except OSError as error:
            raise SaveError(f"no memory for a stage of {self.capacity_bytes} bytes: {error}") from error

    def touch_meanwhile(self) -> None:
        """Map the pages that were written by `write`, in a thread, while the writer is busy with the device: the next
        save then copies at the speed of memory.
        """
        if self._memory is None or self.is_touched:
            return
        thread = threading.Thread(target=self._map_pages, args=(self._memory,), name="mcore_ckpt-stage", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread to be had: the next save writes to the stage once more
            return
        self.is_touched = True

    def _map_pages(self, memory: mmap.mmap) -> None:
        start, stop = direct_io.address(memoryview(memory)), len(memory)
        for offset in range(0, stop, _MAPPED_AT_ONCE_BYTES):
            if self._memory is not memory:
                return
            direct_io.populate(start + offset, min(_MAPPED_AT_ONCE_BYTES, stop - offset))

    def pin(self) -> None:
        """Register the memory with CUDA, so that device copies run at full speed and beside computation.

        Where that is refused, copies are slower and correct all the same.
        """
        if self._pinned or self._memory is None:
            return
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = int(runtime.cudaHostRegister(address, self.capacity_bytes, 0))
        self._pinned = status == 0
        if not self._pinned:
            # CUDA would report it again from the next call of anybody, a kernel of the trainer's above all.
            forget_error = getattr(ctypes.CDLL(None), "cudaGetLastError", None)
            if forget_error is not None:
                forget_error()
            _logger.warning(
                "the stage of %d bytes cannot be registered with CUDA (cudaHostRegister: error %d): copies to it are "
                "slower; check the limit on locked memory (ulimit -l)",
                self.capacity_bytes,
                status,
            )

    def _unmap(self) -> None:
        if self._memory is None:
            return
        if self._pinned:
            address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(address)
            self._pinned = False
        # Views that a caller still holds keep the mapping alive until they go; it is not reused.
        self._memory = None
        self.capacity_bytes = 0
        self.contents = None
        self.is_touched = False

    def close(self) -> None:
        """Give everything back."""
        self._unmap()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def free_host_bytes() -> int:
    """Memory that this host, or the control group this process lives in, has to spare, in bytes."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        if limit != "max":
            available = min(available, int(limit) - int((group / "memory.current").read_text(encoding="ascii")))
    except OSError:
        pass  # no such file outside Linux or outside a control group: the first figure stands
    return max(available, 0)
