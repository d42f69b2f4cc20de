"""Where read bytes end up: destination tensors.

A destination that lies in host memory as the bytes lie in the file (same dtype, C-contiguous, a plain tensor) has an
*address*: bytes are read or copied straight there. Everything else (strided views, other dtypes, devices, tensor
subclasses) goes through torch, from a strided view of the buffer that the bytes were read into.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from mcore_ckpt.core.boxes import Box, intersect, relative, runs, strides_of
from mcore_ckpt.core.errors import ChecksumError
from mcore_ckpt.format.index import StoredChunk, StoredItem
from mcore_ckpt.format.item import LocatedTensor, tensor_template
from mcore_ckpt.load.records import check_located, checksum_error, chunk_name
from mcore_ckpt.state.torch_classes import PLAIN, dtype_name
from mcore_ckpt.storage.direct_io import aligned_buffer

# Same-dtype copies are done on integers of the same width: torch copies those for every dtype, and bit by bit.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Want(NamedTuple):
    """A box of a stored chunk, and the destination of the same shape that wants it."""

    box: Box  # relative to the chunk, in elements
    whole: bool  # the box is the whole chunk
    tensor: torch.Tensor  # the destination; written in place
    address: int  # where its bytes lie, when they lie exactly as stored (`address_of`); 0 otherwise

    def address_at(self, box: Box, elem_bytes: int) -> int:
        """Where the bytes of `box` (relative to the chunk) belong, if they are contiguous in host memory; else 0."""
        if not self.address:
            return 0
        destination = runs(self.box.sizes, relative(box, self.box.offsets), elem_bytes)
        return 0 if destination.counts else self.address + destination.first_byte


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


class ReadBuffer:
    """Page-aligned host memory that spans are read into; reused from span to span, freed when dropped. Pinned, it is
    copied to a device fast. It has its bytes as a `view`, and as a flat `tensor` for copying out of.
    """

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
    """The alignment at which `place_box` can use bytes in memory as they are. Whole rows are copied as bytes; single
    elements, and those that are converted, have to be aligned as such.
    """
    if tensor.dim() and tensor.stride(-1) == 1 and _takes_bits(tensor, stored_dtype):
        return 1
    return stored_dtype.itemsize


def place_box(
    memory: ReadBuffer,
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
    def kind(self) -> tuple[StoredItem, torch.dtype, tuple[int, ...]]:
        """The item, and what the index says that it is."""
        return self.chunk.item, self.dtype, self.chunk.sizes

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

    def own_start(self) -> int | None:
        """Where the payload begins in its file if this package wrote the item; None if the index does not tell. It
        tells the CRC-32 of each payload in a checkpoint with a manifest, with which its files are compared.
        """
        item = self.chunk.item
        if item.crc32 is None:
            return None
        try:
            template = tensor_template(*self.expected)
        except ValueError:
            return None
        if template.item_bytes != item.length or not template.payload_bytes:
            return None
        return item.offset + len(template.head)

    def damaged(self, offset: int, length: int, got: int, expected: int) -> ChecksumError:
        """The error for bytes `[offset, offset + length)` of the item, which hold its elements."""
        start = self.item.offset + offset
        return checksum_error(
            self.where, f"the bytes [{start}, {start + length}) of {self.item.file} have", got, expected
        )
