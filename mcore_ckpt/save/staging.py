"""preload_tensors: from the trainer's memory to memory that a writer may read during training.

`BucketSource` produces any part of a bucket's file from the tensors where they lie. `preload_tensors` fills a staging
buffer with it, laid out as the file: that is the snapshot of an asynchronous save. The writer process then needs no
layout but the places of checksums. `start_writing` dispatches it. A save that does not fit into the staging budget
passes through the buffer window by window, which blocks the trainer for the part that does not fit, at the disk's speed
(`writer="persistent"` only). A synchronous save fills the windows of its own writes.

Staging buffers are shared memory, kept between saves. Copying into memory that has been touched before costs about
0.06 s per GB, touching new memory two to eight times that. So a `StagingBuffer` is reused, and the first save, which
finds it new, writes to it instead of touching it. A save leases one (`lease_buffer`) from its copy until its writer has
ended; the next one waits for that.

Tensors on a device are copied by `DeviceCopies`, while the trainer computes. Each device has one side stream. It
first waits for what the trainer has queued on its current stream, which belongs to the state that is saved; then come
the copies, and an event behind the last of each fill. Waiting is for that event, so it ends with the last copy and
never waits for the device as a whole, nor does it keep a core busy.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from mcore_ckpt.core.boxes import flat_boxes
from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import OptionError, SaveError
from mcore_ckpt.core.options import SaveOptions, ranks_of_this_host
from mcore_ckpt.core.process import free_host_bytes
from mcore_ckpt.save.buckets import (
    Fill,
    GlobalPlan,
    PlannedFile,
    Window,
    WriteBucket,
    WrittenFile,
    check_results,
    plan_windows,
)
from mcore_ckpt.save.child_processes import ChildJob, fork_call, report_progress
from mcore_ckpt.save.writer import WINDOW_BYTES, Job, JobResult, Ring, WriterJob, run_job, write_files
from mcore_ckpt.save.writer_process import fill_ring, shared_writer
from mcore_ckpt.state.torch_classes import pointer_of
from mcore_ckpt.storage import direct_io
from mcore_ckpt.storage.base import ALIGNMENT_BYTES, Storage, align_up

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
    """A staging buffer that a save may use until it gives it back, and how much of it."""

    buffer: StagingBuffer
    budget_bytes: int
    _job: ChildJob | None = None
    _thread: threading.Thread = field(default_factory=threading.current_thread)

    def is_used_by(self, job: ChildJob) -> None:
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


def is_busy() -> bool:
    """Whether an async save would have to wait for one of this rank to be written."""
    _collect()
    return bool(_in_use)


def lease_buffer(options: SaveOptions) -> BufferLease:
    """A staging buffer for a save; waits for the save of this rank that is in flight."""
    lease = None
    try:
        while lease is None:
            _collect()
            dropped: list[StagingBuffer] = []
            with _changed:
                oldest = _in_use[0] if _in_use else None
                if oldest is None:
                    lease = _lease(options, dropped)
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


def _lease(options: SaveOptions, dropped: list[StagingBuffer]) -> BufferLease:
    budget_bytes = max(_budget_bytes(options), _LEAST_BYTES)
    buffer = _free.pop() if _free else StagingBuffer()
    if buffer.capacity_bytes > budget_bytes:  # of a time when the budget was larger
        dropped.append(buffer)
        buffer = StagingBuffer()
    _in_use.append(BufferLease(buffer, budget_bytes))
    return _in_use[-1]


def _drop(buffer: StagingBuffer) -> None:
    """Give a staging buffer's memory back to the host; the writer's mapping would keep it."""
    shared_writer().forget_buffer(buffer.fd)
    buffer.close()


def _budget_bytes(options: SaveOptions) -> int:
    """What the staging buffer of this rank may take."""
    if options.staging_budget_bytes is not None:
        return options.staging_budget_bytes
    share = int(free_host_bytes() * _DEFAULT_SHARE) // ranks_of_this_host()
    # What it holds already is no longer free memory, and needs no new leave.
    return max(share, sum(buffer.capacity_bytes for buffer in _free))


def warm_up_buffer(nbytes: int, options: SaveOptions) -> None:
    """Before the first save: start the writer, and allocate and touch a buffer of `nbytes`, within the budget."""
    lease = lease_buffer(options)
    try:
        lease.buffer.reserve(min(nbytes, lease.budget_bytes))
        if options.writer == "persistent":
            shared_writer().warm_up(buffer_fd=lease.buffer.fd)
    finally:
        lease.give_back()


# The side stream of each device, for the saves of this process.
_streams: dict[torch.device, Any] = {}


class DeviceCopies:
    """Copies in progress of one snapshot, by streams and events of `torch.get_device_module`; a device that has none is
    copied from one tensor at a time, completely.
    """

    def __init__(self) -> None:
        self._in_order: set[torch.device] = set()
        # Kept until their copies are done: whatever interrupts the save, their memory must not be given away.
        self._pending: dict[torch.device, list[torch.Tensor]] = {}
        # An event belongs to the device that it was first recorded on.
        self._events: dict[torch.device, Any] = {}

    def copy(self, tensor: torch.Tensor, source: Callable[[], torch.Tensor], target: torch.Tensor) -> None:
        """Queue a copy to host memory; it is complete after `wait`. `source` makes the bytes on the side stream, so
        that what makes them contiguous is queued there, too.
        """
        runtime = torch.get_device_module(tensor.device)
        if not hasattr(runtime, "Stream"):
            target.copy_(source())
            return
        stream = self._stream(runtime, tensor.device)
        self._pending.setdefault(tensor.device, []).append(tensor)
        with runtime.stream(stream):
            target.copy_(source(), non_blocking=True)

    def _stream(self, runtime: Any, device: torch.device) -> Any:
        stream = _streams.get(device)
        if stream is None:
            stream = _streams[device] = runtime.Stream(device)
        if device not in self._in_order:
            stream.wait_stream(runtime.current_stream(device))
            self._in_order.add(device)
        return stream

    def wait(self) -> None:
        """Wait for the copies queued so far, by one event of each device, and for nothing else on the device."""
        while self._pending:
            device = next(iter(self._pending))
            event = self._events.get(device)
            if event is None:
                event = self._events[device] = _new_event(torch.get_device_module(device))
            event.record(_streams[device])
            event.synchronize()
            del self._pending[device]
        # What the trainer queues from now on belongs to the state of a later snapshot.
        self._in_order.clear()


def _new_event(runtime: Any) -> Any:
    try:
        return runtime.Event(blocking=True)  # a trainer's core must not spin
    except TypeError:
        return runtime.Event()


def _wait_for_copies_to_host(tensors: Sequence[torch.Tensor]) -> None:
    """Wait for copies that the trainer has queued into pinned memory, which a read by address does not. The stream is
    not known, so each device is waited for; only where there is such memory.
    """
    # A torch that is built without CUDA has no such memory. (There is no other way to ask for the second.)
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)  # noqa: SLF001
    if has_context is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    if not any(tensor.is_cpu and tensor.is_pinned() for tensor in tensors):
        return
    for index in range(torch.cuda.device_count()):
        if has_context(index):  # asking a device that is not in use would put it into use
            torch.cuda.synchronize(index)


_ZEROS = bytes(4096)
# Writing a shorter payload by a system call costs more than the few pages that it saves from being cleared.
_LEAST_WRITTEN_BYTES = 16 * 1024

# Of a tensor that is not contiguous, this much is put in order at a time.
_PIECE_BYTES = 32 * 1024 * 1024

_Write = Callable[[int, int, int], None]


class _Payloads:
    """The bytes of a bucket's tensors, copied piecewise to host memory."""

    def __init__(self, tensors: Sequence[torch.Tensor], pointers: Sequence[int] | None = None) -> None:
        self._tensors = tensors
        self.pointers = list(map(pointer_of, tensors)) if pointers is None else pointers
        self._device_copies = DeviceCopies()
        # In place of copying host memory: called with the addresses of target and source, and a number of bytes.
        self.write: _Write | None = None

    def _move(self, address: int, source: int, nbytes: int) -> None:
        if self.write is not None and nbytes >= _LEAST_WRITTEN_BYTES:
            self.write(address, source, nbytes)
        else:
            ctypes.memmove(address, source, nbytes)

    def copy(self, index: int, start: int, stop: int, address: int) -> None:
        """Copy bytes [start, stop) of tensor `index` to `address`; device copies are complete after `wait`."""
        if stop <= start:
            return
        pointer = self.pointers[index]
        if pointer:
            self._move(address, pointer + start, stop - start)
            return
        tensor = self._tensors[index]
        if not tensor.is_cpu:
            for at, source in _contiguous_slices(tensor, start, stop):
                memory = (ctypes.c_char * source.nbytes).from_address(address + at - start)
                self._device_copies.copy(tensor, source.bytes, torch.frombuffer(memory, dtype=torch.uint8))
            return
        if not tensor.data_ptr():
            raise SaveError(f"tensor {index} of a file: its memory was given back (a storage of 0 bytes)")
        for at, source in _contiguous_slices(tensor, start, stop):
            in_order = source.bytes()
            self._move(address + at - start, in_order.data_ptr(), in_order.nbytes)

    def wait(self) -> None:
        """Wait for the device copies queued so far, and for nothing else on the device."""
        self._device_copies.wait()


@dataclass(frozen=True, slots=True)
class _SliceBytes:
    """Bytes [start, stop) of `part`, a view of a slice of a tensor, in row-major order."""

    part: torch.Tensor
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def bytes(self) -> torch.Tensor:
        """As a flat uint8 tensor on the tensor's device: a view, or a copy where the tensor is not contiguous."""
        in_order = self.part.contiguous()
        # Not `view(-1)`: of a single element that keeps the stride, whatever it is, and is no view as bytes then.
        flat = in_order.as_strided((in_order.numel(),), (1,)).view(torch.uint8)
        return flat.narrow(0, self.start, self.nbytes)


def _contiguous_slices(tensor: torch.Tensor, start: int, stop: int) -> Iterator[tuple[int, _SliceBytes]]:
    """Cut bytes [start, stop) of a tensor's row-major form into pieces, each with the byte at which it begins. What is
    not contiguous is copied first; pieces bound the memory that this takes.
    """
    if tensor.is_contiguous():
        yield start, _SliceBytes(tensor, start, stop)
        return
    size = tensor.itemsize
    step = max(1, _PIECE_BYTES // size)
    for low in range(start // size, -(-stop // size), step):
        at = low
        for box in flat_boxes(tensor.shape, low, min(low + step, -(-stop // size))):
            part = tensor
            for dim, (offset, extent) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                part = part.narrow(dim, offset, extent)
            count = part.numel()
            first, last = max(start, at * size), min(stop, (at + count) * size)
            yield first, _SliceBytes(part, first - at * size, last - at * size)
            at += count


class BucketSource:
    """The bytes of a bucket's file, from where the trainer keeps them."""

    def __init__(self, bucket: WriteBucket) -> None:
        self.bucket = bucket
        self._size_bytes = bucket.layout.image.size_bytes
        self._footer_offset = bucket.layout.footer_offset
        tensors = bucket.tensor_data
        _wait_for_copies_to_host(tensors)
        self._payloads = _Payloads(tensors, bucket.pointers)
        self.on_device = not all(self._payloads.pointers) and not all(tensor.is_cpu for tensor in tensors)

    def fill(self, start: int, stop: int, view: memoryview) -> None:
        """Put bytes [start, stop) of the file at the beginning of `view`; checksum fields are left zero."""
        try:
            self._fill(start, stop, view)
        finally:
            self._payloads.wait()  # also after an error: what is under way must not land in the view's next contents

    def _fill(self, start: int, stop: int, view: memoryview) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        self._fill_region(start, stop, view)
        layout = self.bucket.layout
        payload_offsets = layout.image.payload_offsets
        payload_lengths = layout.image.payload_lengths
        # Items are in file order: from the one that holds `start` to the last that begins before `stop`.
        first = max(0, bisect_right(layout.item_offsets, start) - 1)
        last = bisect_left(layout.item_offsets, stop)
        filled = max(start, layout.region_bytes)
        memmove, copy = ctypes.memmove, self._payloads.copy
        base = address - start  # where the first byte of the file would lie
        for index in range(first, last):
            template = layout.templates[index]
            head, end_bytes = template.head, template.tail
            item, payload = layout.item_offsets[index], payload_offsets[index]
            tail = payload + payload_lengths[index]
            end = tail + len(end_bytes)
            if end <= start:
                continue
            if item > filled:
                ctypes.memset(base + filled, 0, min(item, stop) - filled)
            if item >= start and end <= stop:
                memmove(base + item, head, payload - item)
                copy(index, 0, tail - payload, base + payload)
                memmove(base + tail, end_bytes, end - tail)
            else:
                _put(view, start, stop, item, head)
                low, high = max(payload, start), min(tail, stop)
                copy(index, low - payload, high - payload, base + low)
                _put(view, start, stop, tail, end_bytes)
            filled = min(end, stop)
        ctypes.memset(base + filled, 0, max(0, min(stop, self._footer_offset) - filled))
        _put(view, start, stop, self._footer_offset, self.bucket.footer)

    def _fill_region(self, start: int, stop: int, view: memoryview) -> None:
        end = min(stop, self.bucket.layout.region_bytes)
        if start >= end:
            return
        filled = start
        for offset, data in zip(self.bucket.offsets, self.bucket.bytes_data, strict=True):
            if offset + len(data) <= start or offset >= end:
                continue
            if offset > filled:
                _zero(view, filled - start, offset - start)
            _put(view, start, stop, offset, data)
            filled = min(offset + len(data), end)
        _zero(view, filled - start, end - start)

    def fill_buffer(
        self, view: memoryview, laid_out: bool, write: Callable[[int, int, int], None] | None = None
    ) -> None:
        """Put the whole file into `view`, a part of a staging buffer. Where its last file had the same layout
        (`laid_out`), heads, tails and gaps are there already. `write` puts host memory into pages never touched.
        """
        size_bytes = self._size_bytes
        if not laid_out:
            self._payloads.write = write
            try:
                self.fill(0, size_bytes, view)
            finally:
                self._payloads.write = None
            _zero(view, size_bytes, len(view))
            return
        try:
            self._fill_payloads(view)
        finally:
            self._payloads.wait()

    def _fill_payloads(self, view: memoryview) -> None:
        """Put objects and payloads into a piece that has everything else already."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        layout = self.bucket.layout
        self._fill_region(0, self._size_bytes, view)
        _put(view, 0, self._size_bytes, self._footer_offset, self.bucket.footer)
        pointers = self._payloads.pointers
        lengths = layout.image.payload_lengths
        memmove = ctypes.memmove
        for index, offset in enumerate(layout.image.payload_offsets):
            pointer = pointers[index]
            if pointer:
                memmove(address + offset, pointer, lengths[index])
            else:
                self._payloads.copy(index, 0, lengths[index], address + offset)


def write_in_process(storage: Storage, buckets: Sequence[WriteBucket], options: SaveOptions) -> list[WrittenFile]:
    """Write the files of a rank in the process that calls, from the tensors where they lie. All of them are made
    durable, or none stays.
    """
    files: list[tuple[PlannedFile, Fill | memoryview]] = [
        (bucket.file, partial(_fill_window, BucketSource(bucket))) for bucket in buckets
    ]
    results = write_files(
        storage,
        files,
        deadline_s=options.write_deadline_s,
    )
    check_results([file for file, _ in files], results)
    return results


def _fill_window(source: BucketSource, window: Window, view: memoryview) -> None:
    source.fill(window.start, window.stop, view)


def _put(view: memoryview, start: int, stop: int, offset: int, data: bytes | memoryview) -> None:
    """Copy the part of `data`, which lies at `offset` of the file, that falls into [start, stop)."""
    low, high = max(offset, start), min(offset + len(data), stop)
    if low < high:
        view[low - start : high - start] = data[low - offset : high - offset]


def _zero(view: memoryview, low: int, high: int) -> None:
    """Zero `view[low:high]`: buffers are reused, and a checkpoint must not carry what they held before."""
    while low < high:
        step = min(len(_ZEROS), high - low)
        view[low : low + step] = _ZEROS[:step]
        low += step


# A ring of fewer windows would make the trainer and the device wait for each other.
_LEAST_SLOTS = 2


def start_writing(
    storage: Storage,
    buckets: Sequence[WriteBucket],
    options: SaveOptions,
    what: str,
    plan: GlobalPlan | None = None,
    started: Callable[[Job], None] = lambda _: None,
) -> Job:
    """Take the snapshot and start the writing; when this returns, the trainer may change its state. An error waits for
    `Job.result`, where all ranks are notified of it. `started` gets the job as soon as there is one.
    """
    if not storage.serves_forks:
        options = replace(options, writer="persistent")
    try:
        return _copy_and_dispatch(storage, buckets, options, what, plan, started)
    except SaveError as error:  # the other ranks are on their way to the commit, where they are notified of it
        return Job(what, error=error)
    except Exception as error:  # noqa: BLE001  (see above)
        wrapped = SaveError(f"{what}: the writing could not be started: {error}")
        wrapped.__cause__ = error
        return Job(what, error=wrapped)


def _copy_and_dispatch(
    storage: Storage,
    buckets: Sequence[WriteBucket],
    options: SaveOptions,
    what: str,
    plan: GlobalPlan | None,
    started: Callable[[Job], None],
) -> Job:
    files = []
    total_bytes = 0
    for bucket in buckets:
        files.append(replace(bucket.file, buffer_offset=total_bytes))
        total_bytes += align_up(bucket.file.image.size_bytes)
    writer_job = WriterJob(
        storage=storage,
        files=tuple(files),
        deadline_s=options.write_deadline_s,
        plan=plan,
    )
    lease = lease_buffer(options)
    try:
        if lease.budget_bytes < total_bytes:
            return _stream(writer_job, buckets, lease, total_bytes, options, what, started)
        preload_tensors(files, buckets, lease.buffer, total_bytes)
        job = _dispatch(writer_job, lease, options, what)
        started(job)
        lease.buffer.touch_meanwhile(lease.buffer.capacity_bytes)  # while the writer is busy with the device
        return job
    except BaseException:
        lease.abort()
        raise


def preload_tensors(
    files: Sequence[PlannedFile], buckets: Sequence[WriteBucket], buffer: StagingBuffer, total_bytes: int
) -> None:
    """Copy all buckets into a staging buffer, laid out as their files; where the last ones there had the same layout,
    objects and tensors only.
    """
    sources = [BucketSource(bucket) for bucket in buckets]
    on_device = any(source.on_device for source in sources)
    view = buffer.reserve(max(total_bytes, 1), touch=on_device)
    if on_device:
        buffer.pin()
    layouts = [bucket.layout for bucket in buckets]
    laid_out = buffer.contents == layouts
    buffer.contents = None
    for source, file in zip(sources, files, strict=True):
        part = view[file.buffer_offset : file.buffer_offset + align_up(file.image.size_bytes)]
        source.fill_buffer(part, laid_out, None if buffer.is_touched else buffer.write)
    buffer.contents = layouts


def _dispatch(writer_job: WriterJob, lease: BufferLease, options: SaveOptions, what: str) -> ChildJob:
    if options.writer == "persistent":
        return shared_writer().submit(writer_job, lease.buffer.fd, lease.is_used_by)
    with lease.buffer.lent() as fd:
        write = partial(_run_in_child, writer_job, fd, lease.buffer.capacity_bytes)
        deadline_s = options.write_deadline_s
        return fork_call(write, what=what, expendable=True, deadline_s=deadline_s, on_submit=lease.is_used_by)


def _run_in_child(job: WriterJob, fd: int, nbytes: int) -> JobResult:
    # Mapped again: pages that are pinned for a device are not inherited by a forked child.
    return run_job(job, memoryview(mmap.mmap(fd, nbytes)), report_progress)


def _stream(
    writer_job: WriterJob,
    buckets: Sequence[WriteBucket],
    lease: BufferLease,
    total_bytes: int,
    options: SaveOptions,
    what: str,
    started: Callable[[Job], None],
) -> Job:
    """Pass a save that is larger than its budget through a ring of windows."""
    if options.writer == "fork":
        raise OptionError(
            f"the save has {total_bytes} bytes, the staging budget {lease.budget_bytes}: a forked writer cannot be"
            ' fed piece by piece; raise staging_budget_bytes, or use writer="persistent"'
        )
    began_s = time.perf_counter()
    sources = [BucketSource(bucket) for bucket in buckets]
    slot_bytes = min(WINDOW_BYTES, lease.budget_bytes // _LEAST_SLOTS // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
    ring = Ring(0, slot_bytes, lease.budget_bytes // slot_bytes)
    view = lease.buffer.reserve(ring.slots * slot_bytes)
    if any(source.on_device for source in sources):
        lease.buffer.pin()
    lease.buffer.contents = None
    job = _dispatch(replace(writer_job, ring=ring), lease, options, what)
    started(job)
    windows = (
        partial(_fill_slot, source, view, window)
        for source in sources
        for window in plan_windows(source.bucket.file.image.size_bytes, slot_bytes)
    )
    try:
        fill_ring(job, ring, windows)
    except BaseException as error:
        # Where the job has failed, its own error says why, and `Job.result` will raise it.
        if not (isinstance(error, SaveError) and job.poll()):
            raise  # and the job is given up, or it would wait for ever for windows that are not filled
    blocked_s = time.perf_counter() - began_s
    _logger.warning(
        "%s: %d bytes do not fit into the staging budget of %d bytes; training was blocked for %.2f s (%.2f GB/s)",
        what,
        total_bytes,
        lease.budget_bytes,
        blocked_s,
        total_bytes / 1e9 / max(blocked_s, 1e-9),
    )
    job.submitted_s = time.monotonic()  # the snapshot is complete only now
    return job


def _fill_slot(source: BucketSource, view: memoryview, window: Window, offset: int) -> None:
    source.fill(window.start, window.stop, view[offset : offset + window.stop - window.start])
