"""preload_tensors: from the trainer's memory to memory that a writer may read during training.

`BucketSource` produces any part of a bucket's file from the tensors where they lie. `preload_tensors` fills a staging
buffer with it, laid out as the file: that is the snapshot of an asynchronous save. The writer process then needs no
layout but the places of checksums. `start_writing` dispatches it. A synchronous save fills the windows of its own
writes; so does one that does not fit into the staging budget.

The staging buffer is shared memory, kept between saves. Copying into memory that has been touched before costs about
0.06 s per GB, touching new memory two to eight times that: the first save, which finds it new, writes to it instead. A
process has one: a save waits until the job that reads it for the save before has ended.

Tensors on a device are copied by `DeviceCopies`, while the trainer computes. The side stream of a device first waits
for what the trainer has queued, which belongs to the saved state; then come the copies, and an event behind the last
one. Waiting is for that event, and keeps no core busy.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from mcore_ckpt.core.boxes import flat_boxes
from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.core.options import SaveOptions, ranks_of_this_host
from mcore_ckpt.core.process import free_host_bytes
from mcore_ckpt.image.layout import Fill, GlobalPlan, PlannedFile, Window, WriteBucket, WrittenFile
from mcore_ckpt.image.writer import write_files
from mcore_ckpt.save.jobs import ChildJob, Job, JobResult, WriterJob, run_job, timed_result
from mcore_ckpt.save.writer_process import shared_writer
from mcore_ckpt.state.shards import pointer_of
from mcore_ckpt.storage import direct_io
from mcore_ckpt.storage.base import Storage, align_up

_logger = logger_of(__name__)

# Short enough that neither a call of the trainer that maps memory nor the end of the process waits for it.
_TOUCHED_AT_ONCE_BYTES = 2 * 1024 * 1024


class StagingBuffer:
    """Shared memory of one rank that holds snapshots, one save after the other.

    It is a memfd: it needs no name, so nothing is left behind whatever dies, and no space in /dev/shm.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("mcore_ckpt_buffer", os.MFD_CLOEXEC)  # to be sent to the writer
        self.capacity_bytes = 0  # grows on demand, never shrinks
        self.contents: object = None  # what was laid out last, as the caller notes it
        self.reader: ChildJob | None = None  # the last job that reads it
        self.is_touched = False  # its pages are mapped; until then a first access is a fault, and `write` is faster
        self._memory: mmap.mmap | None = None
        self._pinned = False
        self._touching: tuple[threading.Thread, threading.Event] | None = None

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
        assert self._memory is not None
        if touch and not self.is_touched:
            if not direct_io.populate(direct_io.address(memoryview(self._memory)), self.capacity_bytes):
                for offset in range(0, self.capacity_bytes, mmap.PAGESIZE):  # a kernel before 5.14
                    self._memory[offset] = 0
                self.contents = None
            self.is_touched = True
        return memoryview(self._memory)[:nbytes]

    def write(self, address: int, source: int, nbytes: int) -> None:
        """Copy host memory to `address`, in what `reserve` returned, by a system call: into untouched pages this takes
        half the time, since the kernel need not clear them, nor handle a fault for each.
        """
        assert self._memory is not None
        offset = address - direct_io.address(memoryview(self._memory))
        try:
            direct_io.write_all(self.fd, memoryview((ctypes.c_char * nbytes).from_address(source)), offset)
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
        """Register the memory with CUDA, for copies at full speed; where CUDA refuses, they are slower."""
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


# Share of the host's free memory that the staging buffers of all its ranks may take together by default. The state,
# the page cache and the optimizer's peaks need the rest.
_DEFAULT_SHARE = 0.25
# Even on a host without free memory: a save has to pass through something.
_LEAST_BYTES = 1024 * 1024

_kept: StagingBuffer | None = None
# A save has the staging buffer to itself until its job is dispatched. Saves may be begun in several threads; a thread
# may have its turn again, as in a signal handler.
_turn = threading.RLock()


def _forget() -> None:
    """In a process forked from the trainer, which shares this memory: a save there must not use it."""
    global _kept, _turn
    _turn = threading.RLock()  # a thread that is not here may hold the other
    kept, _kept = _kept, None
    if kept is not None:
        kept.disown()


os.register_at_fork(after_in_child=_forget)


def is_busy() -> bool:
    """Whether an async save would have to wait for one of this rank to be written."""
    return _kept is not None and _kept.reader is not None and not _kept.reader.poll()


@contextlib.contextmanager
def free_buffer(budget_bytes: int) -> Iterator[StagingBuffer]:
    """The staging buffer, for a save that begins: no process reads it, not even one that was killed and hangs in the
    kernel, and it takes `budget_bytes` at most. Waits for the save of this rank that is in flight.
    """
    global _kept
    with _turn:
        if _kept is not None and _kept.reader is not None:
            _kept.reader.wait()
            if not _kept.reader.memory_is_free():
                release_buffer()
        if _kept is not None and _kept.capacity_bytes > budget_bytes:  # of a time when the budget was larger
            release_buffer()
        if _kept is None:
            _kept = StagingBuffer()
        _kept.reader = None
        yield _kept


def release_buffer() -> None:
    """Give the staging buffer's memory back to the host; the next save gets another one."""
    global _kept
    buffer, _kept = _kept, None
    if buffer is not None:
        shared_writer().forget_buffer(buffer.fd)  # its mapping would keep the memory
        buffer.close()


def _budget_bytes(options: SaveOptions) -> int:
    """What the staging buffer of this rank may take."""
    budget_bytes = options.staging_budget_bytes
    if budget_bytes is None:
        share = int(free_host_bytes() * _DEFAULT_SHARE) // ranks_of_this_host()
        # What it holds already is no longer free memory, and needs no new leave.
        budget_bytes = max(share, 0 if _kept is None else _kept.capacity_bytes)
    return max(budget_bytes, _LEAST_BYTES)


def warm_up_buffer(nbytes: int, options: SaveOptions) -> None:
    """Before the first save: start the writer, and allocate and touch a buffer of `nbytes`, within the budget."""
    budget_bytes = _budget_bytes(options)
    with free_buffer(budget_bytes) as buffer:
        buffer.reserve(min(nbytes, budget_bytes))
        if options.writer == "persistent":
            shared_writer().warm_up(buffer_fd=buffer.fd)


# The side stream of each device, for the saves of this process.
_streams: dict[torch.device, Any] = {}


class DeviceCopies:
    """Copies in progress of one snapshot, by streams and events; without these, one tensor at a time."""

    def __init__(self) -> None:
        self._in_order: set[torch.device] = set()
        # Kept until their copies are done: whatever interrupts the save, their memory must not be given away.
        self._pending: dict[torch.device, list[torch.Tensor]] = {}
        # An event belongs to the device that it was first recorded on.
        self._events: dict[torch.device, Any] = {}

    def copy(self, tensor: torch.Tensor, source: Callable[[], torch.Tensor], target: torch.Tensor) -> None:
        """Queue a copy to host memory, complete after `wait`; `source` makes the bytes, on the side stream."""
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
                runtime = torch.get_device_module(device)
                try:
                    event = runtime.Event(blocking=True)  # a trainer's core must not spin
                except TypeError:
                    event = runtime.Event()
                self._events[device] = event
            event.record(_streams[device])
            event.synchronize()
            del self._pending[device]
        # What the trainer queues from now on belongs to the state of a later snapshot.
        self._in_order.clear()


def _wait_for_copies_to_host(tensors: Sequence[torch.Tensor]) -> None:
    """Wait for the trainer's copies into pinned memory, which is read by address: on each device, if there is any."""
    # A torch that is built without CUDA has no such memory. (There is no other way to ask for the second.)
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)  # noqa: SLF001
    if has_context is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    if not any(tensor.is_cpu and tensor.is_pinned() for tensor in tensors):
        return
    for index in range(torch.cuda.device_count()):
        if has_context(index):  # asking a device that is not in use would put it into use
            torch.cuda.synchronize(index)


# Writing a shorter payload by a system call costs more than the few pages that it saves from being cleared.
_LEAST_WRITTEN_BYTES = 16 * 1024

# Bytes of a tensor that is not contiguous which are put in order at a time.
_PIECE_BYTES = 32 * 1024 * 1024

_Write = Callable[[int, int, int], object]  # addresses of target and source, and a number of bytes


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
    """Cut bytes [start, stop) of a tensor in row-major form into slices, each with the byte at which it begins."""
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
        self._pointers = list(map(pointer_of, tensors)) if bucket.pointers is None else bucket.pointers
        self.on_device = not all(self._pointers) and not all(tensor.is_cpu for tensor in tensors)
        self._device_copies: DeviceCopies | None = None
        self._move: _Write = ctypes.memmove

    def fill(self, window: Window, view: memoryview) -> None:
        """Put the bytes of a window of the file at the beginning of `view`; checksum fields are left zero."""
        start, stop = window
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        layout = self.bucket.layout
        if start < layout.region_bytes:
            self._fill_region(start, stop, view)
        payload_offsets = layout.image.payload_offsets
        payload_lengths = layout.image.payload_lengths
        # Items are in file order: from the one that holds `start` to the last that begins before `stop`.
        first = max(0, bisect_right(layout.item_offsets, start) - 1)
        last = bisect_left(layout.item_offsets, stop)
        filled = max(start, layout.region_bytes)
        memmove, copy = ctypes.memmove, self._copy
        base = address - start  # where the first byte of the file would lie
        try:
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
        finally:
            # Also after an error: what is under way must not land in the view's next contents.
            if self._device_copies is not None:
                self._device_copies.wait()
        ctypes.memset(base + filled, 0, max(0, min(stop, self._footer_offset) - filled))
        _put(view, start, stop, self._footer_offset, self.bucket.footer)

    def _copy(self, index: int, start: int, stop: int, address: int) -> None:
        """Copy bytes [start, stop) of tensor `index` to `address`; from a device after the wait for these copies."""
        if stop <= start:
            return
        pointer = self._pointers[index]
        if pointer:
            self._move(address, pointer + start, stop - start)
            return
        tensor = self.bucket.tensor_data[index]
        if not tensor.is_cpu:
            if self._device_copies is None:
                self._device_copies = DeviceCopies()
            for at, source in _contiguous_slices(tensor, start, stop):
                memory = (ctypes.c_char * source.nbytes).from_address(address + at - start)
                self._device_copies.copy(tensor, source.bytes, torch.frombuffer(memory, dtype=torch.uint8))
            return
        if not tensor.data_ptr():
            raise SaveError(f"tensor {index} of a file: its memory was given back (a storage of 0 bytes)")
        for at, source in _contiguous_slices(tensor, start, stop):
            in_order = source.bytes()
            self._move(address + at - start, in_order.data_ptr(), in_order.nbytes)

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

    def fill_buffer(self, view: memoryview, laid_out: bool, write: _Write | None = None) -> None:
        """Put the file into `view` of a staging buffer. `laid_out`: heads, tails and gaps are there from the last one.
        `write` puts host memory into pages never touched.
        """
        size_bytes = self._size_bytes
        if not laid_out:
            self._move = ctypes.memmove if write is None else partial(_move_by, write)
            self.fill(Window(0, size_bytes), view)
            _zero(view, size_bytes, len(view))
            return
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        self._fill_region(0, size_bytes, view)
        _put(view, 0, size_bytes, self._footer_offset, self.bucket.footer)
        pointers, image, memmove = self._pointers, self.bucket.layout.image, ctypes.memmove
        lengths = image.payload_lengths
        try:
            for index, offset in enumerate(image.payload_offsets):
                pointer = pointers[index]
                if pointer:
                    memmove(address + offset, pointer, lengths[index])
                else:
                    self._copy(index, 0, lengths[index], address + offset)
        finally:
            if self._device_copies is not None:
                self._device_copies.wait()


def _move_by(write: _Write, address: int, source: int, nbytes: int) -> None:
    move = write if nbytes >= _LEAST_WRITTEN_BYTES else ctypes.memmove
    move(address, source, nbytes)


def write_in_process(storage: Storage, buckets: Sequence[WriteBucket], options: SaveOptions) -> list[WrittenFile]:
    """Write the files of a rank from the tensors where they lie: all are made durable, or none stays. Work during
    training leaves the disk to this meanwhile.
    """
    files: list[tuple[PlannedFile, Fill | memoryview]] = [
        (bucket.file, BucketSource(bucket).fill) for bucket in buckets
    ]
    lasting: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if options.has_upkeep:
        from mcore_ckpt.save.upkeep import training_waits

        lasting = training_waits()
    with lasting:
        return write_files(storage, files, deadline_s=options.write_deadline_s)


def _put(view: memoryview, start: int, stop: int, offset: int, data: bytes | memoryview) -> None:
    """Copy the part of `data`, which lies at `offset` of the file, that falls into [start, stop)."""
    low, high = max(offset, start), min(offset + len(data), stop)
    if low < high:
        view[low - start : high - start] = data[low - offset : high - offset]


def _zero(view: memoryview, low: int, high: int) -> None:
    """Zero `view[low:high]`: buffers are reused, and a checkpoint must not carry what they held before."""
    if low < high:
        ctypes.memset(direct_io.address(view) + low, 0, high - low)


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
    if storage.is_store:  # whose client a forked child cannot use
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
    budget_bytes = _budget_bytes(options)
    writer_job = WriterJob(storage, tuple(files), deadline_s=options.write_deadline_s, plan=plan)
    with free_buffer(budget_bytes) as buffer:
        if total_bytes > budget_bytes:
            result = timed_result(partial(write_in_process, storage, buckets, options), plan)
            _logger.warning(
                "%s: %d bytes do not fit into the staging budget of %d bytes: the trainer wrote them itself, and "
                "training was blocked for %.2f s",
                what,
                total_bytes,
                budget_bytes,
                result.finished_s - result.started_s,
            )
            return Job(what, result)
        try:
            preload_tensors(files, buckets, buffer, total_bytes)
            job = _dispatch(writer_job, buffer, options, what, started)
            buffer.touch_meanwhile(buffer.capacity_bytes)  # while the writer is busy with the device
            return job
        except BaseException:
            if buffer.reader is not None:
                buffer.reader.abort()
            raise


def preload_tensors(
    files: Sequence[PlannedFile], buckets: Sequence[WriteBucket], buffer: StagingBuffer, total_bytes: int
) -> None:
    """Copy all buckets into a staging buffer, as their files; in an old layout, objects and tensors only."""
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


def _dispatch(
    writer_job: WriterJob, buffer: StagingBuffer, options: SaveOptions, what: str, started: Callable[[Job], None]
) -> ChildJob:
    def read_by(job: ChildJob) -> None:  # before the dispatch, which may be interrupted when it has reached the writer
        buffer.reader = job
        started(job)

    if options.writer == "persistent":
        return shared_writer().submit(writer_job, buffer.fd, read_by)
    from mcore_ckpt.save.forked_child import fork_call, report_progress  # (few jobs need it)

    with buffer.lent() as fd:

        def write() -> JobResult:  # mapped again: a forked child inherits no pages that are pinned for a device
            return run_job(writer_job, memoryview(mmap.mmap(fd, buffer.capacity_bytes)), report_progress)

        return fork_call(write, what=what, expendable=True, deadline_s=options.write_deadline_s, on_submit=read_by)
