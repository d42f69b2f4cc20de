"""A plan carried out: which bytes of which files, read into destination tensors, and checked on the way.

    small chunks     those that are requested as they are, many at a time (`SmallRead`). The kernel scatters what the
                     page cache holds: payloads to where they belong, the frames side by side into a buffer (`scatter`).
                     What comes from the device is read into a buffer and copied out of it (`place`). Where something
                     differs, each chunk is taken by itself
    packed items     small; head and tail included, many in one span; each is located inside the buffer and copied out
    complete items   the payload in parts of at most a window
    slices           the parts of the payload that hold them. Rows with short gaps between them are read gaps included;
                     where that is most of the payload, all of it is read and checked as a complete item
    all others       (objects; strided, or not what this package writes there) are decoded
                     completely (`ItemDecoder`), tensors one at a time, after all else

The CRC-32 of a payload that is read completely is compared. Of a slice, the blocks are checked that it lies in, if
`.metadata` has their sums. Where the index does not tell where large payloads lie, their headers are read a little
ahead.
"""

from __future__ import annotations

import ctypes
import heapq
import math
import mmap
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby, islice
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch

from mcore_ckpt.core.boxes import Box, intersect, relative, runs, strides_of
from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import IF_DAMAGED, ChecksumError, CorruptCheckpointError, LoadError
from mcore_ckpt.core.options import LoadOptions
from mcore_ckpt.core.process import in_parallel, run_concurrently
from mcore_ckpt.format.index import CheckpointIndex, ObjectEntry, StoredChunk, StoredItem, unpacked
from mcore_ckpt.format.integrity import inner_blocks
from mcore_ckpt.format.item import Forms, LocatedTensor, locate_tensor, locate_tensor_in
from mcore_ckpt.format.safe_pickle import load_object
from mcore_ckpt.format.zip_records import NotRangeable
from mcore_ckpt.load.ranges import ChunkPart, Extent, ReadPolicy, Span, batches, cluster_boxes, coalesce, split_box
from mcore_ckpt.load.records import (
    OpenFiles,
    PartSum,
    PayloadSums,
    ReadStats,
    check_content,
    check_proportion,
    chunk_name,
    contiguous_around,
    item_name,
    named,
    naming,
    padded_range,
    whole_blocks,
)
from mcore_ckpt.load.requests import LoadPlan, SmallRead, Want, WantedItem, narrow
from mcore_ckpt.state.shards import PLAIN, memory_at
from mcore_ckpt.storage.base import ALIGNMENT_BYTES, RangeReader, align_up
from mcore_ckpt.storage.direct_io import aligned_buffer

_logger = logger_of(__name__)


@dataclass(slots=True)
class ItemDecoder:
    """Reads items and decodes them."""

    _opened: Callable[[], AbstractContextManager[OpenFiles]]
    _options: LoadOptions
    _stats: ReadStats
    _reasons: set[str] = field(default_factory=set)

    def object_contents(self, entries: Iterable[ObjectEntry]) -> Iterator[tuple[ObjectEntry, bytes]]:
        """Stored objects as `torch.save` made them, in order of the files; neighbours are read together."""
        extents = [
            Extent(entry.item.file, entry.item.offset, entry.item.offset + entry.item.length, entry.item.length, entry)
            for entry in entries
        ]
        extents.sort(key=lambda extent: (extent.file, extent.start))
        with self._opened() as files:
            spans = coalesce(extents, files.policy)
            at_once = max(1, files.open_ahead)
            while few := list(islice(spans, at_once)):
                items = (StoredItem(span.file, span.start, span.stop - span.start) for span in few)
                owners = (span.extents[0].owner.fqn for span in few)
                reads = [partial(self._read, files, fqn, item) for fqn, item in zip(owners, items, strict=True)]
                for span, content in zip(few, run_concurrently(at_once, *reads), strict=True):
                    for extent in span.extents:
                        item = extent.owner.item
                        where = item_name(extent.owner.fqn, item)
                        with naming(partial(item_name, extent.owner.fqn, item)):
                            stored = unpacked(content[extent.start - span.start : extent.stop - span.start], item)
                        checked = check_content(stored, where, item.crc32)
                        self._stats.add(records_checked=checked)
                        yield extent.owner, stored
                        self._stats.add(bytes_needed=len(stored))

    def tensor(self, fqn: str, chunk: StoredChunk, dtype: torch.dtype, reason: str) -> torch.Tensor:
        """Decode a stored chunk of a tensor, for a `reason` that is logged once for each kind."""
        where = chunk_name(fqn, chunk)
        check_proportion(math.prod(chunk.sizes) * dtype.itemsize, chunk.item, where)
        kind = re.sub(r"\d+", "#", reason)
        if kind not in self._reasons:
            self._reasons.add(kind)
            _logger.warning(
                "%s is read and decoded completely, which is slow, because %s; so are others like it", where, reason
            )
        with self._opened() as files:
            stored = self._read(files, fqn, chunk.item)
        with naming(lambda: where):
            stored = unpacked(stored, chunk.item, math.prod(chunk.sizes) * dtype.itemsize)
        # (What is no object has the CRC-32 of its payload alone in the index.)
        self._stats.add(records_checked=check_content(stored, item_name(fqn, chunk.item)), fallbacks=1)
        try:
            # (The CRC-32 of each record was compared above.)
            loaded = load_object(stored, self._options.allowed_classes, where=where, verify_crc=False)
        except CorruptCheckpointError:
            raise
        except Exception as error:
            raise CorruptCheckpointError(
                f"{where}: cannot be decoded ({type(error).__name__}: {str(error)[:300]}); {IF_DAMAGED}"
            ) from error
        if not isinstance(loaded, torch.Tensor) or tuple(loaded.shape) != chunk.sizes or loaded.dtype != dtype:
            got = f"{loaded.dtype} of shape {list(loaded.shape)}" if isinstance(loaded, torch.Tensor) else type(loaded)
            raise CorruptCheckpointError(
                f"{where}: the index says {dtype} of shape {list(chunk.sizes)}, stored is {got}"
            )
        if loaded.layout is not torch.strided or loaded.device.type == "meta":
            kind = "on the meta device" if loaded.device.type == "meta" else f"of layout {loaded.layout}"
            raise CorruptCheckpointError(
                f"{where}: expected a tensor with an element at each place, stored is one {kind}; {IF_DAMAGED}"
            )
        # Through the class: an attribute that the pickle gave it may have any name.
        return torch.Tensor.detach(loaded)

    def _read(self, files: OpenFiles, fqn: str, item: StoredItem) -> bytes:
        with naming(partial(item_name, fqn, item)), files.reader(item.file) as reader:
            stored = reader.read(item.offset, item.length)
        self._stats.add(reads=1, bytes_read=len(stored))
        return stored


# Same-dtype copies are done on integers of the same width: torch copies those for every dtype, and bit by bit.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class ReadBuffer:
    """Page-aligned host memory for spans, used again and again; pinned, it is copied to a device fast."""

    __slots__ = ("address", "size_bytes", "tensor", "view")

    def __init__(self, size_bytes: int, pinned: bool = False) -> None:
        self.size_bytes = size_bytes
        if pinned:
            block = torch.empty(size_bytes + mmap.PAGESIZE, dtype=torch.uint8, pin_memory=True)
            skip = -block.data_ptr() % mmap.PAGESIZE
            self.tensor = block[skip : skip + size_bytes]
            self.view = memory_at(self.tensor.data_ptr(), size_bytes)
        else:
            self.view = aligned_buffer(size_bytes)[:size_bytes]
            self.tensor = torch.frombuffer(self.view, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()

    def strided(self, at: int, dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
        """Elements of `dtype` from byte `at` on, as a view of that shape and strides (in elements). A copy where they
        are not aligned, which torch requires: stock writers pack items at odd offsets.
        """
        span_elems = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        flat = self.tensor[at : at + span_elems * dtype.itemsize]
        if (self.address + at) % dtype.itemsize:
            flat = flat.clone()
        elif flat.storage_offset() % dtype.itemsize:
            flat = torch.frombuffer(memory_at(self.address + at, len(flat)), dtype=torch.uint8)
        return flat.view(dtype).as_strided(sizes, strides)


def _takes_bits(tensor: torch.Tensor, stored_dtype: torch.dtype) -> bool:
    """True if stored elements can be put into the tensor bit by bit."""
    return tensor.dtype is stored_dtype and type(tensor) in PLAIN and not tensor.is_neg() and not tensor.is_conj()


def alignment_for(tensor: torch.Tensor, stored_dtype: torch.dtype) -> int:
    """The alignment that `place_box` needs of bytes in memory: whole rows are copied as bytes, elements as such."""
    if tensor.dim() and tensor.stride(-1) == 1 and _takes_bits(tensor, stored_dtype):
        return 1
    return stored_dtype.itemsize


def place_box(
    memory: ReadBuffer, at: int, read_box: Box, chunk_sizes: Sequence[int], stored_dtype: torch.dtype, want: Want
) -> None:
    """Copy what is requested of `read_box` (relative to the chunk), whose bytes lie at `at` of a buffer, with gaps."""
    overlap = intersect(read_box, want.box)
    if overlap is None:
        return
    strides = strides_of(chunk_sizes)
    first = sum(
        (offset - base) * stride
        for offset, base, stride in zip(overlap.offsets, read_box.offsets, strides, strict=True)
    )
    span_elems = 1 + sum((size - 1) * stride for size, stride in zip(overlap.sizes, strides, strict=True))
    elem_bytes = stored_dtype.itemsize
    inside = relative(overlap, want.box.offsets)
    destination = want.tensor.detach()
    if inside.sizes != tuple(destination.shape):
        destination = narrow(destination, inside)
    wanted_elems = math.prod(overlap.sizes)
    if want.address and span_elems == wanted_elems and destination.is_contiguous():
        source = memory.address + at + first * elem_bytes
        ctypes.memmove(destination.data_ptr(), source, wanted_elems * elem_bytes)
        return
    same_bits = _takes_bits(destination, stored_dtype)
    at += first * elem_bytes
    with torch.no_grad():
        if same_bits and overlap.sizes and destination.stride(-1) == 1:
            # As bytes, rows need not be aligned; torch copies each of them in one go.
            row = [*overlap.sizes[:-1], overlap.sizes[-1] * elem_bytes]
            source_view = memory.strided(at, torch.uint8, row, [*(stride * elem_bytes for stride in strides[:-1]), 1])
            destination.view(torch.uint8).copy_(source_view)
        elif same_bits:
            carrier = _CARRIERS[elem_bytes]
            destination.view(carrier).copy_(memory.strided(at, carrier, overlap.sizes, strides))
        else:
            destination.copy_(memory.strided(at, stored_dtype, overlap.sizes, strides))


class ItemRead(NamedTuple):
    """A small item that is read with its neighbours, head and tail included, and copied out of the buffer."""

    wanted: WantedItem
    address: int = 0  # as of `PartRead`: there is none for head and tail
    alignment: int = 1

    def extent(self) -> Extent:
        """The bytes of the file."""
        item = self.wanted.item
        return Extent(item.file, item.offset, item.offset + item.length, item.length, self)

    def place(self, buffer: ReadBuffer, at: int, forms: Forms) -> int:
        """Check the item at `at` of a buffer, and copy what is requested of it; how many records were checked."""
        wanted = self.wanted
        view = buffer.view[at : at + wanted.item.length]
        try:
            located = locate_tensor_in(view, wanted.fqn, wanted.expected, forms)
            wanted.check(located)
        except NotRangeable:
            raise
        except LoadError as error:
            raise named(error, wanted.where) from error
        expected, offset, length = located.record_crc32, located.record_offset, located.record_bytes
        if expected is not None and (got := crc32(view[offset : offset + length])) != expected:
            raise wanted.damaged(offset, length, got, expected)
        at += located.payload_offset
        for want in wanted.wants:
            if want.whole and want.address:
                ctypes.memmove(want.address, buffer.address + at, located.payload_bytes)
            else:
                sizes = wanted.chunk.sizes
                place_box(buffer, at, Box((0,) * len(sizes), sizes), sizes, wanted.dtype, want)
        return int(expected is not None)


class PartRead(NamedTuple):
    """A part of a payload, and where it goes."""

    wanted: WantedItem  # the item
    start: int  # where its payload begins in the file
    part: ChunkPart  # slice of the chunk, and bytes of the payload
    wants: list[Want]  # destinations that overlap the part
    address: int  # host memory that takes the part's bytes just as they are; 0 if there is none
    alignment: int  # the bytes have to lie on a multiple of this to be placed without a further copy
    sums: PayloadSums | None  # of the payload, if all of it is read, or of the blocks that the part lies in

    def extent(self, wanted_bytes: int, *, alone: bool = False) -> Extent:
        """The bytes of the file."""
        start, stop = self.start + self.part.start, self.start + self.part.stop
        return Extent(self.wanted.item.file, start, stop, wanted_bytes, self, alone)

    def read_straight(self, reader: RangeReader) -> int:
        """Read the part to where it belongs, summing it while its bytes are in the CPU's cache; as `place`."""
        item, part = self.wanted.item, self.part
        reader.check_range(item.offset, item.length)
        stream = PartSum(self.sums, part.start)
        reader.read_into(self.start + part.start, memory_at(self.address, part.stop - part.start), stream.feed)
        return stream.finish()

    def place(self, buffer: ReadBuffer, at: int, forms: Forms) -> int:
        """Check the part at `at` of a buffer, and copy it to where it belongs; how many records were checked."""
        length, checked = self.part.stop - self.part.start, 0
        if self.sums is not None or self.address:
            stream = PartSum(self.sums, self.part.start)
            for done in range(0, length, _CACHED_BYTES):
                nbytes, source = min(_CACHED_BYTES, length - done), buffer.address + at + done
                if self.address:
                    ctypes.memmove(self.address + done, source, nbytes)
                    source = self.address + done
                stream.feed(memory_at(source, nbytes))
            checked = stream.finish()
        if not self.address:
            for want in self.wants:
                place_box(buffer, at, self.part.box, self.wanted.chunk.sizes, self.wanted.dtype, want)
        return checked


class PayloadReads:
    """Plans the reads of one large item, whose payload begins at `start`. `running`: as `CheckpointIndex.blocks`."""

    def __init__(
        self,
        wanted: WantedItem,
        start: int,
        crc: int | None,
        policy: ReadPolicy,
        running: Mapping[tuple[str, int], Sequence[int]],
    ) -> None:
        self._wanted, self._start, self._crc, self._policy = wanted, start, crc, policy
        self._sizes, self._elem_bytes = wanted.chunk.sizes, wanted.dtype.itemsize
        self._running = running.get((wanted.item.file, wanted.item.offset), ())

    def extents(self) -> Iterator[Extent]:
        """The extents of the item, in order."""
        wants = self._wanted.wants
        clusters = cluster_boxes(self._sizes, [want.box for want in wants])
        if len(clusters) == 1 and self._reads_all(clusters[0][0]):
            sums = None if self._crc is None else self._sums((), self._crc)
            if len(wants) == 1 and wants[0].whole and wants[0].address:
                return self._straight(sums)
            return self._parts(Box((0,) * len(self._sizes), self._sizes), wants, sums, is_complete=True)
        slices = [self._slice(box, [wants[at] for at in members]) for box, members in clusters]
        # Parts of one cluster may lie between those of another.
        return slices[0] if len(slices) == 1 else heapq.merge(*slices, key=attrgetter("start"))

    def _reads_all(self, box: Box) -> bool:
        if box.sizes == self._sizes:
            return True
        payload_bytes = self._wanted.payload_bytes
        unlimited = replace(self._policy, window_bytes=payload_bytes)
        first = next(split_box(self._sizes, box, self._elem_bytes, unlimited))
        return self._policy.reads_all(first.stop - first.start, math.prod(box.sizes) * self._elem_bytes, payload_bytes)

    def _sums(self, running: Sequence[int], crc: int) -> PayloadSums:
        wanted, offset = self._wanted, self._start - self._wanted.item.offset

        def error(first: int, stop: int, got: int, expected: int) -> ChecksumError:
            return wanted.damaged(offset + first, stop - first, got, expected)

        return PayloadSums(wanted.payload_bytes, crc, running, error)

    def _straight(self, sums: PayloadSums | None) -> Iterator[Extent]:
        """The byte ranges, of about one length, of a payload all of which goes to one address as it is."""
        wanted, nbytes, box = self._wanted, self._wanted.payload_bytes, Box((0,) * len(self._sizes), self._sizes)
        length = align_up(-(-nbytes // -(-nbytes // self._policy.window_bytes)))
        for begin in range(0, nbytes, length):
            part = ChunkPart(box, begin, min(begin + length, nbytes))
            read = PartRead(wanted, self._start, part, wanted.wants, wanted.wants[0].address + begin, 1, sums)
            yield read.extent(part.stop - begin, alone=True)

    def _slice(self, box: Box, wants: list[Want]) -> Iterator[Extent]:
        """The parts of a slice; of one that can be checked, also what is missing of the blocks at both of its ends."""
        payload_bytes, elem_bytes = self._wanted.payload_bytes, self._elem_bytes
        around = contiguous_around(self._sizes, box)
        part_bytes = math.prod(around.sizes) * elem_bytes
        needed_bytes = sum(math.prod(want.box.sizes) for want in wants) * elem_bytes
        # (of what the index tells, not of the item's own headers: others' have no sums of blocks)
        crc, has_sums = self._wanted.item.crc32, len(self._running) == inner_blocks(payload_bytes)
        if crc is None or not has_sums or not self._policy.checks_slice(part_bytes, needed_bytes):
            yield from self._parts(box, wants, None)
            return
        sums = self._sums(self._running, crc)
        first = runs(self._sizes, around, elem_bytes).first_byte
        last = first + part_bytes
        start, stop = whole_blocks(first, last, payload_bytes)
        for begin, end in ((start, first), (last, stop)):
            if begin == last:
                yield from self._parts(around, wants, sums)
            if begin < end:
                rest = PartRead(self._wanted, self._start, ChunkPart(around, begin, end), [], 0, 1, sums)
                yield rest.extent(end - begin)

    def _parts(
        self, box: Box, wants: list[Want], sums: PayloadSums | None, *, is_complete: bool = False
    ) -> Iterator[Extent]:
        """The parts of a slice, each of which is one read at most."""
        elem_bytes = self._elem_bytes
        alignment = max(alignment_for(want.tensor, self._wanted.dtype) for want in wants)
        exact = len(wants) == 1 and wants[0].box == box
        for part in split_box(self._sizes, box, elem_bytes, self._policy):
            read_bytes, part_bytes = part.stop - part.start, math.prod(part.box.sizes) * elem_bytes
            needed_bytes = part_bytes
            if not exact and (sums is None or is_complete):
                overlaps = [intersect(part.box, want.box) for want in wants]
                needed_bytes = min(part_bytes, sum(math.prod(o.sizes) for o in overlaps if o) * elem_bytes)
            address = wants[0].address_at(part.box, elem_bytes) if exact and part_bytes == read_bytes else 0
            # Long straight parts need no buffer to share.
            straight = address != 0 and read_bytes >= self._policy.straight_bytes
            read = PartRead(self._wanted, self._start, part, wants, address, alignment, sums)
            yield read.extent(needed_bytes, alone=straight)


# Holding the GIL, which another thread would take for a while: the copies are short.
_memmove = ctypes.PyDLL(None).memmove
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove.restype = None


def scatter(read: SmallRead, reader: RangeReader, buffer: ReadBuffer) -> bool:
    """Have payloads put where they belong, frames around them into a buffer; False if that fails, or they differ."""
    rows = read.rows
    count, addresses = len(rows), rows["address"]
    frames = rows["frame"] - rows["frame"][0]
    frame_bytes = int(frames[-1] + rows["head"][-1] + rows["tail"][-1])
    vectors = np.zeros((count, 4, 2), dtype=np.uint64)
    vectors[:, 0, 0] = frames + buffer.address
    vectors[:, 0, 1] = rows["head"]
    vectors[:, 1, 0] = addresses
    vectors[:, 1, 1] = rows["payload"]
    vectors[:, 2, 0] = vectors[:, 0, 0] + vectors[:, 0, 1]
    vectors[:, 2, 1] = rows["tail"]
    vectors[:, 3, 0] = buffer.address + frame_bytes
    vectors[:-1, 3, 1] = rows["start"][1:] - rows["stop"][:-1]
    if not reader.scatter(read.start, vectors.ctypes.data, 4 * count, read.stop - read.start):
        return False
    if bytes(buffer.view[:frame_bytes]) != read.expected_frames():
        return False
    lowest = int(addresses.min())
    starts = addresses - lowest
    stops = starts + rows["payload"]
    memory = memory_at(lowest, int(stops.max()))
    return read.has_sums(map(memory.__getitem__, map(slice, starts.tolist(), stops.tolist())))


def place(read: SmallRead, view: memoryview, address: int, shift: int) -> bool:
    """Check chunks in memory, whose file would begin at `shift`, and copy their payloads; False, if one differs."""
    rows = read.rows
    heads = rows["start"] + shift
    payloads = heads + rows["head"]
    tails = payloads + rows["payload"]
    sources, stops = payloads.tolist(), tails.tolist()
    frames = chain.from_iterable(
        zip(map(slice, heads.tolist(), sources), map(slice, stops, (rows["stop"] + shift).tolist()), strict=True)
    )
    if b"".join(map(view.__getitem__, frames)) != read.expected_frames():
        return False
    if not read.has_sums(map(view.__getitem__, map(slice, sources, stops))):
        return False
    for target, source, nbytes in zip(
        rows["address"].tolist(), (payloads + address).tolist(), rows["payload"].tolist(), strict=True
    ):
        _memmove(target, source, nbytes)
    return True


# A span of more items than this is placed by one thread at a time, while others read.
_MANY_ITEMS = 32

# So many threads scatter items out of the page cache: half of the work is Python's, and a third would find what it has
# read no longer in its core's cache when its turn comes to sum it.
_SCATTERING_THREADS = 2

# So much is copied at once where bytes are looked at more than once: what a core's own cache holds.
_CACHED_BYTES = 1024 * 1024

# Copies out of the page cache to a place a few bytes ahead, modulo the page, take four times as long on some CPUs (seen
# on AMD EPYC: 3 GB/s for a shift of 1 to 16 bytes, 12 GB/s for none or for one of half a page).
_FAR_SKEW = 2048


Located = dict[tuple[StoredItem, torch.dtype, tuple[int, ...]], LocatedTensor]
"""Where payloads lie whose headers were read: by the item, and by the dtype and sizes that the index says it has."""

_Stream = list[Span | SmallRead]


class TensorReads:
    """Carries out one plan. `ranks`: of this host, as `LoadPlan.times_wanted` takes them."""

    def __init__(
        self,
        files: OpenFiles,
        located: Located,
        stats: ReadStats,
        decoder: ItemDecoder,
        index: CheckpointIndex,
        ranks: int,
    ) -> None:
        self._files, self._policy, self._located, self._stats = files, files.policy, located, stats
        self._decoder, self._running, self._ranks = decoder, index.blocks, ranks
        self._times_wanted: Mapping[str, int] = {}  # by ranks of this host
        self._small_are_shared = False
        self._forms: Forms = {}
        self._unranged: dict[tuple[str, int, str], tuple[WantedItem, str]] = {}
        self._pinned = False
        self._threads = files.reads_at_once
        self._per_thread = threading.local()
        self._placing = threading.Lock()
        self._scattering = threading.BoundedSemaphore(_SCATTERING_THREADS)

    def run(self, plan: LoadPlan) -> None:
        """Fill all destinations of a plan."""
        items = [plan.items[key] for key in sorted(plan.items)]
        for wanted in items:
            if wanted.item.is_compressed:
                self._decode_later(wanted, "it is compressed")
        items = [wanted for wanted in items if not wanted.item.is_compressed]
        self._pinned = any(want.tensor.is_cuda for wanted in items[:64] for want in wanted.wants)
        if self._ranks > 1:
            self._times_wanted = plan.times_wanted(self._ranks)
            self._small_are_shared = plan.small.wanted_by_several(self._ranks)
        small = plan.small.reads()
        needed_bytes = sum(int(span.rows["payload"].sum()) for span in small)
        self._stats.add(bytes_needed=needed_bytes + sum(wanted.needed_bytes for wanted in items))
        is_packed = self._policy.is_packed
        ranged = [(w, is_packed(w.item.length, w.needed_bytes, has_sum=w.item.crc32 is not None)) for w in items]
        unlocated = [
            wanted
            for wanted, packed in ranged
            if not packed and wanted.own_start() is None and wanted.kind not in self._located
        ]
        in_parallel(unlocated, self._locate, self._threads)
        spans: Iterator[Span | SmallRead] = coalesce(self._extents(ranged), self._policy)
        try:
            in_order = heapq.merge(spans, small, key=attrgetter("file", "start"))
            names = {wanted.item.file for wanted in items} | {span.file for span in small}
            in_parallel(self._streams(in_order, sorted(names)), self._read, self._threads)
        finally:
            self._per_thread = threading.local()  # frees the buffers
        for wanted, reason in map(self._unranged.__getitem__, sorted(self._unranged)):
            loaded = self._decoder.tensor(wanted.fqn, wanted.chunk, wanted.dtype, reason)
            with torch.no_grad():
                for want in wanted.wants:
                    want.tensor.detach().copy_(narrow(loaded, want.box))

    def _extents(self, ranged: Iterable[tuple[WantedItem, bool]]) -> Iterator[Extent]:
        for wanted, packed in ranged:
            if packed:
                yield ItemRead(wanted).extent()
                continue
            start, crc = wanted.own_start(), wanted.item.crc32
            if start is None:
                located = self._located.get(wanted.kind)
                if located is None:  # it was found not to be rangeable
                    continue
                start, crc = wanted.item.offset + located.payload_offset, located.crc32
            yield from PayloadReads(wanted, start, crc, self._policy, self._running).extents()

    def _locate(self, wanted: WantedItem) -> None:
        """Read the headers of an item of which the index does not tell where its payload lies."""
        item = wanted.item

        def read(offset: int, length: int) -> bytes:
            self._stats.add(reads=1, bytes_read=length)
            return reader.read(item.offset + offset, length)

        try:
            with naming(lambda: wanted.where), self._files.reader(item.file) as reader:
                reader.check_range(item.offset, item.length)
                located = locate_tensor(read, item.length, wanted.where, wanted.expected, self._forms)
                wanted.check(located)
        except NotRangeable as reason:
            self._decode_later(wanted, str(reason).removeprefix(f"{wanted.where}: "))
        else:
            self._located[wanted.kind] = located

    def _decode_later(self, wanted: WantedItem, reason: str) -> None:
        self._unranged[wanted.key] = wanted, reason

    def _streams(self, spans: Iterable[Span | SmallRead], files: Iterable[str]) -> Iterator[_Stream | str]:
        """Spans by the stream that one thread reads in order; between them names of later files, to be opened ahead."""
        ahead = self._files.open_ahead
        later = iter(files if ahead else ())
        yield from islice(later, ahead)
        current = None
        for stream_bytes, some in groupby(spans, lambda span: self._policy.stream_bytes[self._is_shared(span)]):
            for stream in batches(some, lambda span: span.stop - span.start, stream_bytes):
                if stream[0].file != current:
                    current = stream[0].file
                    yield from islice(later, 1)
                yield stream

    def _is_shared(self, span: Span | SmallRead) -> bool:
        """Whether other ranks of this host are about to read the same, as far as the first tensor of a span tells."""
        if isinstance(span, SmallRead):
            return self._small_are_shared
        first = span.extents[0]
        has_gaps = first.wanted_bytes < first.stop - first.start  # requested by other ranks alone
        return self._policy.is_shared(self._times_wanted.get(first.owner.wanted.fqn, 0), has_gaps=has_gaps)

    def _read(self, stream: _Stream | str) -> None:
        """Read a stream, or open a file that is read later."""
        if isinstance(stream, str):
            with suppress(LoadError), self._files.reader(stream):
                pass  # (the read that needs the file reports the error, with its byte range)
            return
        for span in stream:
            if isinstance(span, SmallRead):
                self._read_small(span)
            else:
                self._read_span(span)

    def _read_span(self, span: Span) -> None:
        first = span.extents[0]
        read: ItemRead | PartRead = first.owner
        with naming(lambda: read.wanted.where), self._files.reader(span.file, keeps=self._is_shared(span)) as reader:
            reader.check_range(span.start, span.stop - span.start)
            if isinstance(read, PartRead) and read.address and first.alone:
                checked = read.read_straight(reader)
                self._stats.add(reads=1, bytes_read=span.stop - span.start, records_checked=checked)
                return
            buffer, shift = self._read_padded(reader, span, read.alignment)
        self._place(span.extents, buffer, shift)

    def _place(self, extents: Sequence[Extent], buffer: ReadBuffer, shift: int) -> None:
        """Check what lies in a buffer, where the file would begin at `shift`, and copy it to where it belongs."""
        checked = 0
        # Many small items are Python's work more than memory's: two threads at it would only wait for each other.
        with self._placing if len(extents) > _MANY_ITEMS else nullcontext():
            for extent in extents:
                try:
                    checked += extent.owner.place(buffer, extent.start + shift, self._forms)
                except NotRangeable as reason:
                    wanted = extent.owner.wanted
                    self._decode_later(wanted, str(reason).removeprefix(f"{wanted.fqn}: "))
        self._stats.add(records_checked=checked)

    def _read_small(self, span: SmallRead) -> None:
        start, nbytes, keeps = span.start, span.stop - span.start, self._is_shared(span)
        with naming(lambda: span.wanted()[0].where), self._files.reader(span.file, keeps=keeps) as reader:
            reader.check_range(start, nbytes)
            # What comes out of the page cache is summed while it is in the CPU's.
            parts = span.chunks.shorter(span, _CACHED_BYTES) if reader.is_cached(start, nbytes) else []
        with self._files.reader(span.file, keeps=keeps) as reader:
            if not parts:
                self._read_and_place(reader, span)
                return
            with self._scattering:
                for part in parts:
                    nbytes = part.stop - part.start
                    if scatter(part, reader, self._buffer(nbytes)):
                        self._stats.add(reads=1, bytes_read=nbytes, records_checked=len(part.rows))
                    else:
                        self._read_and_place(reader, part)

    def _read_and_place(self, reader: RangeReader, span: SmallRead) -> None:
        with naming(lambda: span.wanted()[0].where):
            buffer, shift = self._read_padded(reader, span)
        with self._placing:
            placed = place(span, buffer.view, buffer.address, shift)
        if placed:
            self._stats.add(records_checked=len(span.rows))
        else:  # each by itself: one of them is damaged, or not as this package writes it
            self._place([ItemRead(wanted).extent() for wanted in span.wanted()], buffer, shift)

    def _read_padded(self, reader: RangeReader, span: Span | SmallRead, alignment: int = 1) -> tuple[ReadBuffer, int]:
        """Read a span and the pages around it; the buffer, and where the file would begin in it, so aligned."""
        start, stop = padded_range(span.start, span.stop, reader.size_bytes)
        skew = -(span.start - start) % alignment
        skew += _FAR_SKEW if skew else 0
        buffer = self._buffer(span.stop - span.start)
        reader.read_into(start, buffer.view[skew : skew + stop - start])
        self._stats.add(reads=1, bytes_read=stop - start)
        return buffer, skew - start

    def _buffer(self, needed_bytes: int) -> ReadBuffer:
        buffer: ReadBuffer | None = getattr(self._per_thread, "buffer", None)
        size_bytes = max(needed_bytes, self._policy.window_bytes) + 3 * ALIGNMENT_BYTES
        if buffer is None or buffer.size_bytes < size_bytes:
            self._per_thread.buffer = None  # freed before the larger one is made
            buffer = self._per_thread.buffer = ReadBuffer(size_bytes, self._pinned)
        return buffer
