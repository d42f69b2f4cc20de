"""From the trainer's memory to memory that a writer may read while the trainer goes on.

`BucketSource` knows how to produce any part of a bucket's file from the tensors where they lie: it fills a writer's
window (a synchronous save, or a save larger than its stage), or a whole stage. A `Stage` is shared memory (memfd) that
is kept between saves: copying into memory that has been touched before costs about 0.06 s per GB, touching new memory
two to four times that. The stage is the image of the file, so the writer needs no layout but the places of checksums.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path

import torch

from mcore_ckpt.buckets import BucketLayout
from mcore_ckpt.errors import SaveError

__all__ = ["BucketSource", "Stage", "free_host_bytes"]

_logger = logging.getLogger(__name__)

_ZEROS = bytes(4096)
_MADV_POPULATE_WRITE = 23  # <linux/mman.h>, which the mmap module does not name


class _Payloads:
    """The bytes of a bucket's tensors, copied piecewise to host memory."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        # 0 marks a tensor whose bytes cannot be copied from where it lies as they are.
        self.pointers = [t.data_ptr() if t.is_cpu and t.is_contiguous() else 0 for t in tensors]
        self._flat: tuple[int, torch.Tensor] | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._in_order: set[torch.device] = set()

    def copy(self, index: int, start: int, stop: int, address: int) -> None:
        """Copy bytes [start, stop) of tensor `index` to `address`; device copies are complete after `wait`."""
        if stop <= start:
            return
        pointer = self.pointers[index]
        if pointer:
            ctypes.memmove(address, pointer + start, stop - start)
            return
        tensor = self._tensors[index]
        if tensor.device.type == "cpu":
            source = self._contiguous_bytes(index).data_ptr()
            if not source:
                raise SaveError(f"tensor {index} of a file: its memory was given back (a storage of 0 bytes)")
            ctypes.memmove(address, source + start, stop - start)
            return
        memory = (ctypes.c_char * (stop - start)).from_address(address)
        target = torch.frombuffer(memory, dtype=torch.uint8)
        if tensor.device.type != "cuda":
            target.copy_(self._contiguous_bytes(index)[start:stop])
            return
        stream = self._stream(tensor.device)
        with torch.cuda.stream(stream):
            # What makes the bytes contiguous is queued on this stream, too, or the copy would not wait for it.
            target.copy_(self._contiguous_bytes(index)[start:stop], non_blocking=True)
        tensor.record_stream(stream)

    def _contiguous_bytes(self, index: int) -> torch.Tensor:
        """Tensor `index` as contiguous bytes; only the last one is kept, so that one tensor is doubled at most."""
        if self._flat is None or self._flat[0] != index:
            self._flat = None
            tensor = self._tensors[index].contiguous()
            self._flat = (index, tensor.view(-1).view(torch.uint8))
        return self._flat[1]

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if device not in self._in_order:
            # What the trainer has queued so far belongs to the state that is saved.
            stream.wait_stream(torch.cuda.current_stream(device))
            self._in_order.add(device)
        return stream

    def wait(self) -> None:
        """Wait for the device copies queued so far, and for nothing else on the device."""
        for device in self._in_order:
            self._streams[device].synchronize()
        self._in_order.clear()


class BucketSource:
    """The bytes of one bucket's file, from where the trainer keeps them.

    Args:
        layout: where everything lies in the file.
        tensors: the bucket's tensors, detached, in the layout's order.
        objects: the serialized objects.
        object_offsets: where each of them lies in the file.

    Attributes:
        on_device: some tensor is not in host memory.
    """

    def __init__(
        self,
        layout: BucketLayout,
        tensors: Sequence[torch.Tensor],
        objects: Sequence[memoryview],
        object_offsets: Sequence[int],
    ) -> None:
        self.layout = layout
        self.objects = objects
        self.object_offsets = object_offsets
        self._payloads = _Payloads(tensors)
        self.on_device = not all(tensor.is_cpu for tensor in tensors)
        self._tensors = tensors

    @property
    def is_pinned(self) -> bool:
        """Some tensor is in host memory that is registered with a device; takes a look-up for each tensor."""
        return any(tensor.device.type == "cpu" and tensor.is_pinned() for tensor in self._tensors)

    def fill(self, start: int, stop: int, view: memoryview) -> None:
        """Put bytes [start, stop) of the file at the beginning of `view`; checksum fields are left zero."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        self._fill_region(start, stop, view)
        layout = self.layout
        payload_offsets = layout.image.payload_offsets
        payload_lengths = layout.image.payload_lengths
        # Items are in file order: from the one that holds `start` to the last that begins before `stop`.
        first = max(0, bisect_right(layout.item_offsets, start) - 1)
        last = bisect_left(layout.item_offsets, stop)
        filled = max(start, layout.region_bytes)
        for index in range(first, last):
            template = layout.templates[index]
            item = layout.item_offsets[index]
            payload = payload_offsets[index]
            tail = payload + payload_lengths[index]
            end = tail + len(template.tail)
            if end <= start:
                continue
            if item > filled:
                _zero(view, filled - start, min(item, stop) - start)
            _put(view, start, stop, item, template.head)
            low, high = max(payload, start), min(tail, stop)
            self._payloads.copy(index, low - payload, high - payload, address + low - start)
            _put(view, start, stop, tail, template.tail)
            filled = min(end, stop)
        _zero(view, filled - start, stop - start)
        self._payloads.wait()

    def _fill_region(self, start: int, stop: int, view: memoryview) -> None:
        end = min(stop, self.layout.region_bytes)
        if start >= end:
            return
        filled = start
        for offset, data in zip(self.object_offsets, self.objects, strict=True):
            if offset + len(data) <= start or offset >= end:
                continue
            if offset > filled:
                _zero(view, filled - start, offset - start)
            _put(view, start, stop, offset, data)
            filled = min(offset + len(data), end)
        _zero(view, filled - start, end - start)

    def fill_stage(self, view: memoryview, laid_out: bool) -> None:
        """Put the whole file into `view`, which is a piece of a stage.

        Args:
            view: writable bytes, at least the file's size.
            laid_out: the last thing that this piece held had the same layout: heads, tails and gaps are there already.
        """
        size_bytes = self.layout.image.size_bytes
        if not laid_out:
            self.fill(0, size_bytes, view)
            _zero(view, size_bytes, len(view))
            return
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        self._fill_region(0, size_bytes, view)
        pointers = self._payloads.pointers
        lengths = self.layout.image.payload_lengths
        memmove = ctypes.memmove
        for index, offset in enumerate(self.layout.image.payload_offsets):
            pointer = pointers[index]
            if pointer:
                memmove(address + offset, pointer, lengths[index])
            else:
                self._payloads.copy(index, 0, lengths[index], address + offset)
        self._payloads.wait()


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


class Stage:
    """Shared memory of one rank that holds snapshots, one save after the other.

    It is a memfd: it needs no name, so nothing is left behind whatever dies, and no space in /dev/shm.

    Attributes:
        fd: the memory's file descriptor, to be sent to the writer.
        capacity_bytes: how much it holds; grows on demand, never shrinks.
        contents: what was laid out last (the caller's own note), or None.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("mcore_ckpt_stage", os.MFD_CLOEXEC)
        self.capacity_bytes = 0
        self.contents: object = None
        self._memory: mmap.mmap | None = None
        self._pinned = False

    def reserve(self, nbytes: int) -> memoryview:
        """Memory for `nbytes`, page-aligned. What an earlier call returned must not be used any more.

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
            self.populate()  # it is going to be filled at once, and faults one by one take longer
        assert self._memory is not None
        return memoryview(self._memory)[:nbytes]

    def map_again(self) -> memoryview:
        """All of the memory by a mapping of its own, for a forked child."""
        return memoryview(mmap.mmap(self.fd, self.capacity_bytes))

    def populate(self) -> None:
        """Touch all of the memory now, so that no save has to wait for the kernel to find and clear pages."""
        if self._memory is None:
            return
        try:
            self._memory.madvise(_MADV_POPULATE_WRITE)
        except OSError:  # a kernel before 5.14
            for offset in range(0, self.capacity_bytes, mmap.PAGESIZE):
                self._memory[offset] = 0
            self.contents = None

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
