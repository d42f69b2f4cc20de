"""Staging buffers: shared memory that snapshots lie in, kept between saves; and which save uses which of them.

Copying into memory that has been touched before costs about 0.06 s per GB, touching new memory two to eight times that.
So a `StagingBuffer` is reused, and the first save, which finds it new, writes to it instead of touching it.

A save leases a staging buffer (`lease_buffer`) from its copy until its writer has ended. All staging buffers of a rank
share one budget. Saves are in flight at once while they fit into it together. A save that fits only alone waits for
those before it. A save that does not fit even then is passed through what there is.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.core.host_memory import free_host_bytes
from mcore_ckpt.core.options import SaveOptions, ranks_of_this_host
from mcore_ckpt.save.supervised_child import Job
from mcore_ckpt.save.writer_process import shared_writer
from mcore_ckpt.storage import direct_io

_logger = logger_of(__name__)

# Short enough that neither a call of the trainer that maps memory nor the end of the process waits for it.
_TOUCHED_AT_ONCE_BYTES = 2 * 1024 * 1024


class StagingBuffer:
    """Shared memory of one rank that holds snapshots, one save after the other.

    It is a memfd: it needs no name, so nothing is left behind whatever dies, and no space in /dev/shm.

    Attributes:
        fd: the memory's file descriptor, to be sent to the writer.
        capacity_bytes: how much it holds; grows on demand, never shrinks.
        contents: what was laid out last (the caller's own note), or None.
        is_touched: its pages are mapped; until then every first access to one is a fault, and `write` is faster.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("mcore_ckpt_buffer", os.MFD_CLOEXEC)
        self.capacity_bytes = 0
        self.contents: object = None
        self.is_touched = False
        self._memory: mmap.mmap | None = None
        self._pinned = False
        self._touching: tuple[threading.Thread, threading.Event] | None = None
        _buffers.add(self)

    def reserve(self, nbytes: int, *, touch: bool = True) -> memoryview:
        """Memory for `nbytes`, page-aligned; what an earlier call returned must not be used any more. With `touch`, the
        kernel maps all of it now. `SaveError`: the host has not that much memory.
        """
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._stop_touching()
        if nbytes > self.capacity_bytes:
            self._unmap()
            try:
                os.ftruncate(self.fd, nbytes)
                self._memory = mmap.mmap(self.fd, nbytes)
            except OSError as error:
                raise SaveError(f"no memory for a staging buffer of {nbytes} bytes: {error}") from error
            self.capacity_bytes = nbytes
            self.contents = None
        if touch and not self.is_touched:
            self._touch_all()
        assert self._memory is not None
        return memoryview(self._memory)[:nbytes]

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
        """Copy host memory to `address`, in what `reserve` returned, by a system call: into untouched pages this takes
        half the time, since the kernel need not clear them, nor handle a fault for each.
        """
        assert self._memory is not None
        offset = address - direct_io.address(memoryview(self._memory))
        try:
            direct_io.write_from(self.fd, source, nbytes, offset)
        except OSError as error:
            raise SaveError(f"no memory for a staging buffer of {self.capacity_bytes} bytes: {error}") from error

    def touch_meanwhile(self, nbytes: int) -> None:
        """Map the pages of the first `nbytes` in a thread, until `reserve` is called."""
        if self._memory is None or self.is_touched:
            return
        stop = threading.Event()
        thread = threading.Thread(
            target=self._touch, args=(self._memory, nbytes, stop), name="mcore_ckpt-buffer", daemon=True
        )
        with contextlib.suppress(RuntimeError):  # no thread to be had: the save finds the pages itself
            thread.start()
            self._touching = (thread, stop)

    def _touch(self, memory: mmap.mmap, nbytes: int, stop: threading.Event) -> None:
        start = direct_io.address(memoryview(memory))
        for offset in range(0, nbytes, _TOUCHED_AT_ONCE_BYTES):
            if stop.is_set() or not direct_io.populate(start + offset, min(_TOUCHED_AT_ONCE_BYTES, nbytes - offset)):
                return
        self.is_touched = True

    def _stop_touching(self) -> None:
        touching, self._touching = self._touching, None
        if touching is not None:
            thread, stop = touching
            stop.set()
            thread.join()

    def pin(self) -> None:
        """Register the memory with CUDA, so that device copies run at full speed and during computation. Where CUDA
        refuses that, or the device is another one, copies are slower.
        """
        cuda = torch.get_device_module("cuda")
        if self._pinned or self._memory is None or not cuda.is_available():
            return
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        runtime = cuda.cudart()
        status = int(runtime.cudaHostRegister(address, self.capacity_bytes, 0))
        self._pinned = status == 0
        if not self._pinned:
            # CUDA would report it again from the next call, a kernel of the trainer.
            forget_error = getattr(ctypes.CDLL(None), "cudaGetLastError", None)
            if forget_error is not None:
                forget_error()
            _logger.warning(
                "the staging buffer of %d bytes cannot be registered with CUDA (cudaHostRegister: error %d): copies to "
                "it are slower; check the limit on locked memory (ulimit -l)",
                self.capacity_bytes,
                status,
            )

    def _unmap(self) -> None:
        self._stop_touching()
        if self._memory is None:
            return
        if self._pinned:
            address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            torch.get_device_module("cuda").cudart().cudaHostUnregister(address)
            self._pinned = False
        # Views that a caller still holds keep the mapping alive until they go; it is not reused.
        self._memory = None
        self.capacity_bytes = 0
        self.contents = None
        self.is_touched = False

    @contextlib.contextmanager
    def lent(self) -> Iterator[int]:
        """A descriptor that a process forked meanwhile can map the memory by: it has none of the trainer's own."""
        fd = os.dup(self.fd)
        try:
            yield fd
        finally:
            os.close(fd)

    def close(self) -> None:
        """Give everything back."""
        self._unmap()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:  # of a save that was interrupted before its staging buffer was leased
        with contextlib.suppress(Exception):
            self.close()

    def disown(self) -> None:
        """In a process forked from the trainer: release memory that would stay taken until this process ends."""
        memory, self._memory = self._memory, None
        self._touching = None  # its thread is not here
        self._pinned = False  # CUDA is not to be touched here
        if memory is not None:
            with contextlib.suppress(
                BufferError
            ):  # forked in the midst of staging: the mapping goes with its last view
                memory.close()
        self.close()


# All of this process, so that a process forked from it can release them.
_buffers: weakref.WeakSet[StagingBuffer] = weakref.WeakSet()


# Share of the host's free memory that the staging buffers of all its ranks may take together by default. The state,
# the page cache and the optimizer's peaks need the rest.
_DEFAULT_SHARE = 0.25
# Even on a host without free memory: a save has to pass through something.
_LEAST_BYTES = 1024 * 1024

_free: list[StagingBuffer] = []
_in_use: list[BufferLease] = []
# Saves may be begun, and ended, in several threads. Not held during calls of the writer, which has a lock of its own. A
# thread that holds it may take it again, as in a signal handler.
_changed = threading.Condition()
# How often a thread that waits for the copy of another thread asks whether there is a job to wait for.
_LOOK_S = 0.02


@dataclass(slots=True, eq=False)
class BufferLease:
    """A staging buffer that a save may use until it gives it back, and how much of it: what other saves in flight have
    left.
    """

    buffer: StagingBuffer
    budget_bytes: int
    _job: Job | None = None
    _thread: threading.Thread = field(default_factory=threading.current_thread)

    def is_used_by(self, job: Job) -> None:
        """From now on the staging buffer is free as soon as this job has ended. To be called before the dispatch, which
        may be interrupted when it has reached the writer.
        """
        self._job = job

    def give_back(self) -> None:
        """The save needs the staging buffer no more; twice is harmless. Memory that a killed process may still read,
        since it hangs in the kernel, is not used again.
        """
        if self not in _in_use:
            return
        reusable = self._job is None or self._job.memory_is_free()
        with _changed:
            if self not in _in_use:  # another thread was first
                return
            _in_use.remove(self)
            if reusable:
                _free.append(self.buffer)
            _changed.notify_all()
        if not reusable:
            _drop(self.buffer)

    def abort(self) -> None:
        """Give up the job that uses the staging buffer, if there is one, and give the buffer back."""
        try:
            if self._job is not None:
                self._job.abort()
        finally:
            self.give_back()

    def ended(self) -> bool:
        """Whether the job that reads the staging buffer has ended."""
        return self._job is not None and self._job.poll()

    @property
    def is_abandoned(self) -> bool:
        """Whether it has no job and will not get one: its thread does something else, or has ended."""
        return self._job is None and (self._thread is threading.current_thread() or not self._thread.is_alive())

    def wait(self) -> None:
        """Wait until the job that reads the staging buffer has ended, well or not."""
        while self in _in_use and self._job is None and not self.is_abandoned:
            with _changed:
                _changed.wait(_LOOK_S)
        if self._job is not None:
            self._job.wait()


def _forget() -> None:
    """In a process forked from the trainer, which shares this memory: a save there must not use it."""
    global _changed
    _changed = threading.Condition()  # a thread that is not here may hold the other
    _free.clear()
    _in_use.clear()
    for buffer in list(_buffers):
        buffer.disown()
    _buffers.clear()


os.register_at_fork(after_in_child=_forget)


def _collect() -> None:
    for lease in [lease for lease in _in_use if lease.ended()]:
        lease.give_back()


def _taken_bytes() -> int:
    return sum(lease.buffer.capacity_bytes for lease in _in_use)


def is_busy() -> bool:
    """Whether an async save would have to wait for one of this rank to be written."""
    _collect()
    return bool(_in_use)


def lease_buffer(nbytes: int, options: SaveOptions) -> BufferLease:
    """A staging buffer for a save of `nbytes`; waits for the save of this rank that is in flight."""
    lease = None
    try:
        while lease is None:
            _collect()
            dropped: list[StagingBuffer] = []
            with _changed:
                oldest = _in_use[0] if _in_use else None
                if oldest is None:
                    lease = _lease(nbytes, options, dropped)
            for buffer in dropped:
                _drop(buffer)
            if oldest is not None:
                oldest.wait()
                oldest.give_back()
    except BaseException:  # a Ctrl-C at any moment
        for taken in [one for one in _in_use if one.is_abandoned]:
            taken.give_back()
        raise
    return lease


def _lease(nbytes: int, options: SaveOptions, dropped: list[StagingBuffer]) -> BufferLease:
    budget_bytes = max(_budget_bytes(options) - _taken_bytes(), _LEAST_BYTES)
    _free.sort(key=lambda buffer: buffer.capacity_bytes)
    buffer = _free.pop() if _free else StagingBuffer()
    if buffer.capacity_bytes > budget_bytes:  # of a time when the budget was larger
        dropped.append(buffer)
        buffer = StagingBuffer()
    # Idle staging buffers may keep only what this save leaves of the budget.
    left_bytes = budget_bytes - max(buffer.capacity_bytes, min(nbytes, budget_bytes))
    while _free and sum(idle.capacity_bytes for idle in _free) > left_bytes:
        dropped.append(_free.pop())
    _in_use.append(BufferLease(buffer, budget_bytes))
    return _in_use[-1]


def _drop(buffer: StagingBuffer) -> None:
    """Give a staging buffer's memory back to the host; the writer's mapping would keep it."""
    shared_writer().forget_buffer(buffer.fd)
    buffer.close()


def _budget_bytes(options: SaveOptions) -> int:
    """What all staging buffers of this rank may take together."""
    if options.staging_budget_bytes is not None:
        return options.staging_budget_bytes
    share = int(free_host_bytes() * _DEFAULT_SHARE) // ranks_of_this_host()
    # What the staging buffers hold already is no longer free memory, and needs no new leave.
    return max(share, _taken_bytes() + sum(buffer.capacity_bytes for buffer in _free))


def warm_up_buffer(nbytes: int, options: SaveOptions) -> None:
    """Before the first save: start the writer, and allocate and touch a buffer of `nbytes`, within the budget."""
    lease = lease_buffer(nbytes, options)
    try:
        lease.buffer.reserve(min(nbytes, lease.budget_bytes))
        if options.writer == "persistent":
            shared_writer().warm_up(buffer_fd=lease.buffer.fd)
    finally:
        lease.give_back()
