"""Where read bytes end up: destination tensors, one by one or in columns.

A destination that lies in host memory as the bytes lie in the file (same dtype, C-contiguous, a plain tensor) has an
*address*: bytes are read or copied straight there. Everything else (strided views, other dtypes, devices, tensor
subclasses) goes through torch, from a strided view of the buffer that the bytes were read into.

A load under the layout of the save requests complete small chunks, by the ten thousand. `Columns` hold their places and
addresses. The index says where each lies, which bytes stand before and behind its payload (those that this package
writes for such a tensor), and its CRC-32. So the items of a span are checked together: the bytes around their payloads,
and the sums of these. Only where something differs is each item of the span read by itself. The kernel scatters what
the page cache holds: payloads to where they belong, the bytes around them side by side into a buffer (`scatter`). What
comes from the device is read into a buffer and copied out of it (`place`).
"""

from __future__ import annotations

import ctypes
import math
import mmap
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import torch

from mcore_ckpt.core.boxes import Box, covers, intersect, relative, strides_of
from mcore_ckpt.core.crc import crc32s
from mcore_ckpt.format.index import CheckpointIndex, PackedTensors, StoredChunk, StoredItem, TensorForm
from mcore_ckpt.format.item_layout import tensor_template
from mcore_ckpt.format.item_reading import LocatedTensor
from mcore_ckpt.load.ranges import CHEAP_GAP_BYTES
from mcore_ckpt.load.records import check_located, chunk_name
from mcore_ckpt.state.torch_classes import PLAIN, dtype_name, torch_dtype
from mcore_ckpt.storage.base import RangeReader
from mcore_ckpt.storage.direct_io import aligned_buffer

# Same-dtype copies are done on integers of the same width: torch copies those for every dtype, and bit by bit.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Want(NamedTuple):
    """A box of a stored chunk, and the destination of the same shape that wants it."""

    box: Box  # relative to the chunk, in elements
    whole: bool  # the box is the whole chunk
    tensor: torch.Tensor  # the destination; written in place
    address: int  # where its bytes lie, when they lie exactly as stored (`address_of`); 0 otherwise


def address_of(tensor: torch.Tensor, stored_dtype: torch.dtype) -> int:
    """Where in host memory a box of the tensor's own shape, stored as `stored_dtype`, belongs byte for byte; else 0."""
    if (
        tensor.dtype is stored_dtype
        and tensor.is_cpu
        and tensor.is_contiguous()
        and type(tensor) in PLAIN
        and tensor.layout is torch.strided
        and not tensor.is_neg()
        and not (stored_dtype.is_complex and tensor.is_conj())
    ):
        return tensor.data_ptr()
    return 0


def can_be_filled(tensor: torch.Tensor) -> bool:
    """Whether what is written to a tensor stays anywhere: not in one that only describes a tensor, as fake ones do."""
    return not tensor.is_meta and (type(tensor) in PLAIN or tensor.untyped_storage().device.type != "meta")


def memory_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """First byte and end of a tensor's memory, gaps included; None if it has none of its own."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return None
    try:
        start = tensor.data_ptr()
    except RuntimeError:  # a subclass that holds other tensors
        return None
    if not start:
        return None
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def narrow(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The view of `tensor` that `box` (in elements) names."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def memory_at(address: int, length: int) -> memoryview:
    """Writable bytes `[address, address + length)` of this process; their owner has to stay alive."""
    return memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")


class HostBytes:
    """Host memory that holds stored bytes, for copying out of; `tensor` has them as a flat uint8 tensor."""

    __slots__ = ("address", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.address = tensor.data_ptr()

    @classmethod
    def at(cls, address: int, length: int) -> HostBytes:
        """Bytes `[address, address + length)` of this process; their owner has to stay alive."""
        return cls(torch.frombuffer((ctypes.c_ubyte * length).from_address(address), dtype=torch.uint8))

    def strided(self, at: int, dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
        """Elements of `dtype` from byte `at` on, as a view of that shape and strides (in elements). A copy where they
        are not aligned, which torch requires: stock writers pack items at odd offsets.
        """
        span_elems = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        flat = self.tensor[at : at + span_elems * dtype.itemsize]
        if (self.address + at) % dtype.itemsize:
            flat = flat.clone()
        elif flat.storage_offset() % dtype.itemsize:
            flat = HostBytes.at(self.address + at, len(flat)).tensor
        return flat.view(dtype).as_strided(sizes, strides)


class ReadBuffer(HostBytes):
    """Page-aligned host memory that spans are read into; reused from span to span, freed when dropped. Pinned, it is
    copied to a device fast.
    """

    __slots__ = ("_keep", "size_bytes", "view")

    def __init__(self, size_bytes: int, pinned: bool = False) -> None:
        self.size_bytes = size_bytes
        if pinned:
            block = torch.empty(size_bytes + mmap.PAGESIZE, dtype=torch.uint8, pin_memory=True)
            skip = -block.data_ptr() % mmap.PAGESIZE
            super().__init__(block[skip : skip + size_bytes])
            self._keep: object = block
            self.view = memory_at(self.address, size_bytes)
        else:
            self.view = aligned_buffer(size_bytes)[:size_bytes]
            super().__init__(torch.frombuffer(self.view, dtype=torch.uint8))
            self._keep = self.view


def _takes_bits(tensor: torch.Tensor, stored_dtype: torch.dtype) -> bool:
    """True if stored elements can be put into the tensor bit by bit."""
    return tensor.dtype is stored_dtype and type(tensor) in PLAIN and not tensor.is_neg() and not tensor.is_conj()


def alignment_for(tensor: torch.Tensor, stored_dtype: torch.dtype) -> int:
    """The alignment at which `place_box` can use bytes in memory as they are. Whole rows are copied as bytes; single
    elements, and those that are converted, have to be aligned as such.
    """
    if tensor.dim() and tensor.stride(-1) == 1 and _takes_bits(tensor, stored_dtype):
        return 1
    return stored_dtype.itemsize


def place_box(
    memory: HostBytes,
    at: int,
    read_box: Box,
    chunk_sizes: Sequence[int],
    stored_dtype: torch.dtype,
    want: Want,
) -> None:
    """Copy what a destination requests of `read_box`, relative to the chunk, in elements. Its bytes lie at `at` of a
    buffer, from the first to the last element, gaps included.
    """
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


# Up to here a look at every chunk of a tensor is cheaper than an index of them.
FEW_CHUNKS = 8


@dataclass(slots=True, eq=False)
class WantedItem:
    """A stored chunk, and the slices of it that are requested."""

    fqn: str  # key of the global tensor
    dtype: torch.dtype  # stored dtype
    chunk: StoredChunk  # the chunk and where it is stored
    payload_bytes: int  # size of the chunk's elements
    wants: list[Want] = field(default_factory=list)  # slices and destinations

    @property
    def needed_bytes(self) -> int:
        """How many bytes the destinations take; what several of them request counts several times."""
        wants = self.wants
        if len(wants) == 1 and wants[0].whole:
            return self.payload_bytes
        return sum(math.prod(want.box.sizes) for want in wants) * self.dtype.itemsize

    @property
    def item(self) -> StoredItem:
        """Where the chunk is stored."""
        return self.chunk.item

    @property
    def key(self) -> tuple[str, int, str]:
        """File, offset and key: the order of the files."""
        return self.chunk.item.file, self.chunk.item.offset, self.fqn

    @property
    def where(self) -> str:
        """The chunk, as an error message names it."""
        return chunk_name(self.fqn, self.chunk)

    @property
    def expected(self) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape that the index says the item has."""
        return dtype_name(self.dtype), self.chunk.sizes

    def check(self, located: LocatedTensor) -> None:
        """Raise `CorruptCheckpointError` unless the item holds the tensor that the index says it does."""
        check_located(located, *self.expected, self.payload_bytes, self.item.crc32)


def only_box(
    starts: Sequence[tuple[int, ...]],
    lengths: Sequence[tuple[int, ...]],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
) -> int | None:
    """Number of the slice that is just this one, if no other one overlaps it; of slices at `starts` of `lengths`."""
    found = None
    for number, (start_of, length_of) in enumerate(zip(starts, lengths, strict=True)):
        if start_of == offsets and length_of == sizes:
            if found is not None:
                return None
            found = number
            continue
        for start, size, other_start, other_size in zip(offsets, sizes, start_of, length_of):  # noqa: B905
            if start + size <= other_start or other_start + other_size <= start:
                break
        else:
            return None
    return found


# Up to here, an item is read with its neighbours and copied out of the buffer: a copy at memory speed costs less than
# reads of its own for header and payload.
MAX_COLUMN_BYTES: Final = 1024 * 1024

# So many items can be scattered by one call: the kernel takes 1,024 places (UIO_MAXIOV), of which each wants four.
MAX_SCATTERED: Final = 256

# Holding the GIL, which another thread would take for a while: the copies are short.
_memmove = ctypes.PyDLL(None).memmove
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove.restype = None


class _Kind(NamedTuple):
    """What all items have in common that this package writes for a dtype and shape."""

    dtype: torch.dtype  # of the destination
    item_bytes: int  # length of an item
    head_bytes: int  # what stands before the payload
    payload_bytes: int  # length of the payload
    around: bytes  # what stands before and behind the payload, with zeros where its CRC-32 belongs
    first_crc: int  # where in `around` it belongs
    second_crc: int  # where in `around` it belongs


_Request = TypeVar("_Request", bound=tuple[Any, ...])  # `ReadRequest`
_Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


class Columns:
    """Collects items all of which is requested, up to `max_bytes` each; where there is a manifest, with a checksum
    for each. Keeps the destinations alive. `numbers` are those of the index, `kind_numbers` which of `kinds`.
    """

    def __init__(self, index: CheckpointIndex, max_bytes: int) -> None:
        self.tensors: list[torch.Tensor] = []
        self.addresses: list[int] = []
        self.numbers: list[int] = []
        self.kind_numbers: list[int] = []
        self.kinds: list[_Kind] = []
        tensors = index.tensors
        self._packed = tensors if isinstance(tensors, PackedTensors) and tensors.places.crcs else None
        self._max_bytes = min(max_bytes, MAX_COLUMN_BYTES)
        self._taken = bytearray(0 if self._packed is None else len(self._packed.places.lengths))
        # By form of a global tensor (`id`: they belong to the index), slice, and shape: number of the chunk, number and
        # dtype of its kind, bytes of its item; None: it is left to others.
        self._places: dict[tuple[int, Any, Any, Any], tuple[int, int, torch.dtype, int] | None] = {}
        self._chunks: dict[int, dict[tuple[tuple[int, ...], tuple[int, ...]], int]] = {}  # of a form, by slice

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, requests: Iterable[_Request]) -> list[_Request]:
        """Add what is requested, where that is a small item that can be copied to its destination as it is. Returns all
        other requests, which may be wrong, or merely unusual.
        """
        packed = self._packed
        if packed is None:
            return list(requests)
        row_of, forms, firsts, lengths = packed.rows.get, packed.forms, packed.firsts, packed.places.lengths
        tensors, addresses, numbers, kinds = self.tensors, self.addresses, self.numbers, self.kind_numbers
        places, taken = self._places, self._taken
        others: list[_Request] = []
        for request in requests:
            fqn, tensor, offsets, sizes, shape, _ = request
            row = row_of(fqn)
            if row is not None and tensor.shape == sizes:
                form = forms[row]
                key = id(form), offsets, sizes, shape
                place = places[key] if key in places else self._find(form, offsets, sizes, shape)
                if place is not None:
                    chunk, kind, dtype, item_bytes = place
                    number, address = firsts[row] + chunk, address_of(tensor, dtype)
                    if address and lengths[number] == item_bytes and not taken[number]:
                        taken[number] = 1
                        tensors.append(tensor)
                        addresses.append(address)
                        numbers.append(number)
                        kinds.append(kind)
                        continue
            others.append(request)
        return others

    def memory(self) -> tuple[_Ints, _Ints]:
        """Where the destinations lie: first bytes and ends."""
        starts = np.array(self.addresses, dtype=np.int64)
        payloads = np.array([kind.payload_bytes for kind in self.kinds], dtype=np.int64)
        return starts, starts + payloads[self.kind_numbers] if self.kind_numbers else starts

    def _find(
        self, form: TensorForm, offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]
    ) -> tuple[int, int, torch.dtype, int] | None:
        place = None
        if form.shape == shape:
            chunk = self._chunk(form, offsets, sizes)
            dtype = torch_dtype(form.dtype)
            kind = None if chunk is None or dtype is None else _kind(form.dtype, sizes, dtype)
            if chunk is not None and kind is not None and kind.item_bytes <= self._max_bytes:
                place = chunk, len(self.kinds), kind.dtype, kind.item_bytes
                self.kinds.append(kind)
        self._places[id(form), offsets, sizes, shape] = place
        return place

    def _chunk(self, form: TensorForm, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> int | None:
        """As `only_box`. Of many chunks, as many ranks write them, it is looked once whether any overlap."""
        if len(form.offsets) <= FEW_CHUNKS:
            return only_box(form.offsets, form.sizes, offsets, sizes)
        chunks = self._chunks.get(id(form))
        if chunks is None:
            boxes = list(map(Box, form.offsets, form.sizes))
            apart = all(map(all, form.sizes)) and covers(form.shape, boxes) is None
            chunks = self._chunks[id(form)] = dict(zip(boxes, range(len(boxes)), strict=True)) if apart else {}
        return chunks.get((offsets, sizes))

    def wanted_by_several(self, ranks: int) -> bool:
        """Whether, as `LoadPlan.times_wanted` counts, all of them are requested twice."""
        if self._packed is None or not self.numbers:
            return False
        rows = np.searchsorted(self._packed.firsts, self.numbers, "right") - 1
        tensors = Counter(map(self._packed.forms.__getitem__, set(rows.tolist())))
        wanted = sum(self.kinds[number].payload_bytes * count for number, count in Counter(self.kind_numbers).items())
        there = sum(_tensor_bytes(form) * count for form, count in tensors.items())
        return ranks * wanted >= 2 * there

    def wanted(self, at: int) -> WantedItem:
        """One of them, as any other item that is requested."""
        assert self._packed is not None
        number = self.numbers[at]
        row = bisect_right(self._packed.firsts, number) - 1
        form, which = self._packed.forms[row], number - self._packed.firsts[row]
        chunk = StoredChunk(form.offsets[which], form.sizes[which], self._packed.places.item(number))
        kind, sizes = self.kinds[self.kind_numbers[at]], chunk.sizes
        want = Want(Box((0,) * len(sizes), sizes), True, self.tensors[at], self.addresses[at])
        return WantedItem(self._packed.names[row], kind.dtype, chunk, kind.payload_bytes, [want])

    def by_file(self) -> Iterator[tuple[str, FileColumns]]:
        """Of each file its name, and the items in it, in the order in which they lie there."""
        if self._packed is None or not self.numbers:
            return
        places = self._packed.places
        numbers = np.array(self.numbers, dtype=np.int64)
        starts = np.frombuffer(places.offsets, dtype=np.int64)[numbers]
        files = np.frombuffer(places.file_numbers, dtype=np.uint32)[numbers]
        ranks = np.empty(len(places.files), dtype=np.int64)
        by_name = sorted(range(len(places.files)), key=places.files.__getitem__)
        ranks[by_name] = np.arange(len(by_name))
        order = np.lexsort((starts, ranks[files]))
        ends = np.append(np.flatnonzero(np.diff(files[order])) + 1, len(order))
        table = np.array(list(map(_kind_numbers, self.kinds)), dtype=np.int64)
        kinds = np.array(self.kind_numbers, dtype=np.int64)
        addresses = np.array(self.addresses, dtype=np.int64)
        crcs = np.frombuffer(places.crcs, dtype=np.uint32)[numbers].astype("<u4")
        first = 0
        for end in ends.tolist():
            own = order[first:end]
            first = end
            lengths, heads, payloads, first_crcs, second_crcs = np.ascontiguousarray(table[kinds[own]].T)
            arounds = np.zeros(len(own) + 1, dtype=np.int64)
            np.cumsum(lengths - payloads, out=arounds[1:])
            lowest = int(addresses[own].min())
            memory = memory_at(lowest, int((addresses[own] + payloads).max()) - lowest)
            yield (
                places.files[files[own[0]]],
                FileColumns(
                    source=self,
                    members=own,
                    kinds=kinds[own],
                    starts=starts[own],
                    stops=starts[own] + lengths,
                    addresses=addresses[own],
                    heads=heads,
                    payloads=payloads,
                    tails=lengths - heads - payloads,
                    arounds=arounds,
                    first_crcs=arounds[:-1] + first_crcs,
                    second_crcs=arounds[:-1] + second_crcs,
                    crcs=crcs[own].view(np.uint8).reshape(-1, 4),
                    memory=memory,
                    lowest=lowest,
                ),
            )


def _tensor_bytes(form: TensorForm) -> int:
    dtype = torch_dtype(form.dtype)
    return 0 if dtype is None else math.prod(form.shape) * dtype.itemsize


def _kind(dtype: str, sizes: tuple[int, ...], own: torch.dtype) -> _Kind | None:
    try:
        template = tensor_template(dtype, sizes)
    except ValueError:
        return None
    if not template.payload_bytes:
        return None
    head_bytes, around = len(template.head), template.head + template.tail
    first, second = (head_bytes + position for position in template.crc_positions)
    return _Kind(own, template.item_bytes, head_bytes, template.payload_bytes, around, first, second)


_kind_numbers = attrgetter("item_bytes", "head_bytes", "payload_bytes", "first_crc", "second_crc")


class FileColumns(NamedTuple):
    """Items of one file in the order in which they lie there; arrays of n int64 each, if nothing else is said."""

    source: Columns  # they belong to
    members: _Ints  # which of its items they are
    kinds: _Ints  # number of the kind of each
    starts: _Ints  # where they lie in the file
    stops: _Ints  # where they lie in the file
    addresses: _Ints  # where their payloads belong
    heads: _Ints  # bytes before the payload, of it, and behind it
    payloads: _Ints  # bytes before the payload, of it, and behind it
    tails: _Ints  # bytes before the payload, of it, and behind it
    arounds: _Ints  # where what stands around each payload begins, if all of that lies side by side; n + 1 of them
    first_crcs: _Ints  # where in that the CRC-32 belongs
    second_crcs: _Ints  # where in that the CRC-32 belongs
    crcs: np.ndarray[Any, np.dtype[np.uint8]]  # CRC-32 of the payloads, little-endian: uint8 of (n, 4)
    memory: memoryview  # memory from the lowest of the addresses on to where the last payload ends
    lowest: int  # memory from the lowest of the addresses on to where the last payload ends

    def part(self, first: int, stop: int) -> FileColumns:
        """Items `first` to `stop` of them."""
        columns = {name: getattr(self, name)[first:stop] for name in _OF_EACH_ITEM}
        return self._replace(**columns, arounds=self.arounds[first : stop + 1])

    def wanted(self) -> list[WantedItem]:
        """Each by itself."""
        return list(map(self.source.wanted, self.members.tolist()))

    def expected_around(self) -> bytes:
        """What should stand around the payloads, side by side."""
        kinds = self.source.kinds
        expected = bytearray().join([kinds[number].around for number in self.kinds.tolist()])
        content = np.frombuffer(expected, dtype=np.uint8)
        for places in (self.first_crcs, self.second_crcs):
            content[(places - self.arounds[0])[:, None] + _FOUR] = self.crcs
        return bytes(expected)


_OF_EACH_ITEM = [name for name in FileColumns._fields if name not in ("source", "arounds", "memory", "lowest")]
_FOUR = np.arange(4)


class ColumnSpan(NamedTuple):
    """One read: bytes `[start, stop)` of a file, and the items that lie in it, in order."""

    file: str
    start: int
    stop: int
    items: FileColumns


def spans_of(items: Columns, *, window_bytes: int, max_gap_bytes: int, request_bytes: int = 0) -> list[ColumnSpan]:
    """Join items with cheap gaps between them into spans; in order of file and start."""
    spans: list[ColumnSpan] = []
    for file, columns in items.by_file():
        gaps = columns.starts[1:] - columns.stops[:-1]
        is_end = gaps > min(max(CHEAP_GAP_BYTES, request_bytes), max_gap_bytes)
        ends = np.append(np.flatnonzero(is_end) + 1, len(columns.starts))
        spans += _cut(file, columns, ends, window_bytes, len(columns.starts))
    return spans


def cut(span: ColumnSpan, window_bytes: int) -> list[ColumnSpan]:
    """The same in shorter spans, each of which can be scattered."""
    items = span.items
    return list(_cut(span.file, items, np.array([len(items.starts)]), window_bytes, MAX_SCATTERED))


def _cut(file: str, items: FileColumns, ends: _Ints, window_bytes: int, max_items: int) -> Iterator[ColumnSpan]:
    """Spans of at most `window_bytes` and `max_items`, or of one item, that end at `ends` at the latest."""
    at, starts, stops = 0, items.starts, items.stops
    while at < len(starts):
        fitting = min(int(np.searchsorted(stops, starts[at] + window_bytes, "right")), at + max_items)
        end = min(max(fitting, at + 1), int(ends[np.searchsorted(ends, at, "right")]))
        yield ColumnSpan(file, int(starts[at]), int(stops[end - 1]), items.part(at, end))
        at = end


def scatter(span: ColumnSpan, reader: RangeReader, buffer: ReadBuffer) -> bool:
    """Have the payloads of a span put where they belong, and what stands around them into a buffer, which has room for
    the span. False if the reader cannot do that, or one of the items is not just what is expected.
    """
    items = span.items
    count = len(items.starts)
    around_bytes = int(items.arounds[-1] - items.arounds[0])
    vectors = np.zeros((count, 4, 2), dtype=np.uint64)
    vectors[:, 0, 0] = items.arounds[:-1] + (buffer.address - items.arounds[0])
    vectors[:, 0, 1] = items.heads
    vectors[:, 1, 0] = items.addresses
    vectors[:, 1, 1] = items.payloads
    vectors[:, 2, 0] = vectors[:, 0, 0] + vectors[:, 0, 1]
    vectors[:, 2, 1] = items.tails
    vectors[:, 3, 0] = buffer.address + around_bytes
    vectors[:-1, 3, 1] = items.starts[1:] - items.stops[:-1]
    if not reader.scatter(span.start, vectors.ctypes.data, 4 * count, span.stop - span.start):
        return False
    if bytes(buffer.view[:around_bytes]) != items.expected_around():
        return False
    starts = items.addresses - items.lowest
    parts = map(slice, starts.tolist(), (starts + items.payloads).tolist())
    return _same_sums(map(items.memory.__getitem__, parts), items)


def place(span: ColumnSpan, view: memoryview, address: int, shift: int) -> bool:
    """Check items in memory, and copy their payloads to where they belong; their file would begin at `shift`. False if
    one of them is not as expected; then nothing has been copied.
    """
    items = span.items
    heads = items.starts + shift
    payloads = heads + items.heads
    tails = payloads + items.payloads
    sources, stops = payloads.tolist(), tails.tolist()
    parts = chain.from_iterable(
        zip(map(slice, heads.tolist(), sources), map(slice, stops, (items.stops + shift).tolist()), strict=True)
    )
    if b"".join(map(view.__getitem__, parts)) != items.expected_around():
        return False
    if not _same_sums(map(view.__getitem__, map(slice, sources, stops)), items):
        return False
    for target, source, nbytes in zip(
        items.addresses.tolist(), (payloads + address).tolist(), items.payloads.tolist(), strict=True
    ):
        _memmove(target, source, nbytes)
    return True


def _same_sums(payloads: Iterable[memoryview], items: FileColumns) -> bool:
    return np.fromiter(crc32s(payloads), "<u4", len(items.starts)).tobytes() == items.crcs.tobytes()
