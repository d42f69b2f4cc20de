"""What a load wants -> which boxes of which stored items, checked before a byte is read.

A request names a box of a global tensor and the destination for it. The box may overlap many stored chunks; together
they have to hold all of it. Out come `WantedItem`s: each stored item once, with all destinations that want part of it.
"""

from __future__ import annotations

import bisect
import difflib
import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor

from mcore_ckpt.core.boxes import Box, covers, intersect, relative
from mcore_ckpt.core.errors import (
    CorruptCheckpointError,
    KindMismatchError,
    LoadError,
    MissingKeyError,
    ShapeMismatchError,
)
from mcore_ckpt.core.process import collector_paused
from mcore_ckpt.format.index import CheckpointIndex, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.format.item_reading import LocatedTensor
from mcore_ckpt.items.checks import check_located, chunk_name
from mcore_ckpt.layout.torch_classes import dtype_name, torch_dtype
from mcore_ckpt.load._placement import Want, address_of, narrow
from mcore_ckpt.load.dtype_conversions import DtypeConversions

__all__ = [
    "ReadRequest",
    "WantedItem",
    "WantedItems",
    "check_planned",
    "missing_key",
    "not_held",
    "only_chunk",
    "stored_dtype",
    "tensor_entry",
    "want_chunk",
    "wanted_items",
]

# Up to here a look at every chunk is cheaper than an index of them.
_FEW_CHUNKS = 8


class ReadRequest(NamedTuple):
    """A box of a global tensor, and where it goes.

    Attributes:
        fqn: key of the global tensor.
        tensor: destination of shape `sizes`; any strides, any device; written in place, without autograd.
        offsets: first element of the box in the global tensor.
        sizes: shape of the box, in elements.
        global_shape: shape that the global tensor must have; None: any that the box fits into.
        allow_partial: the box may reach past the stored global tensor; what it has in common with that is loaded, all
            of it, and the rest of the destination left alone (Megatron's `allow_shape_mismatch`: a vocabulary padded
            otherwise).
    """

    fqn: str
    tensor: torch.Tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    global_shape: tuple[int, ...] | None = None
    allow_partial: bool = False


@dataclass(slots=True, eq=False)
class WantedItem:
    """A stored chunk, and the boxes of it that are wanted.

    Attributes:
        fqn: key of the global tensor.
        dtype: stored dtype.
        chunk: the chunk and where it is stored.
        wants: boxes and destinations.
        payload_bytes: size of the chunk's elements.
    """

    fqn: str
    dtype: torch.dtype
    chunk: StoredChunk
    payload_bytes: int
    wants: list[Want] = field(default_factory=list)

    @property
    def needed_bytes(self) -> int:
        """How many bytes the destinations take; what several of them want counts several times."""
        wants = self.wants
        if len(wants) == 1 and wants[0].whole:
            return self.payload_bytes
        return sum(math.prod(want.box.sizes) for want in wants) * self.dtype.itemsize

    @property
    def item(self) -> StoredItem:
        """Where the chunk is stored."""
        return self.chunk.item

    @property
    def where(self) -> str:
        """The chunk, as an error message names it."""
        return chunk_name(self.fqn, self.chunk)

    def check(self, located: LocatedTensor) -> None:
        """Raise `CorruptCheckpointError` unless the item holds the tensor that the index says it does."""
        check_located(located, dtype_name(self.dtype), self.chunk.sizes, self.payload_bytes, self.item.crc32)


WantedItems = dict[tuple[str, int, str], WantedItem]
"""Wanted items by file, offset and key: what is wanted twice is one item, and sorted keys are in order of the files."""


def missing_key(fqn: str, index: CheckpointIndex) -> MissingKeyError:
    """The error for a key that a checkpoint does not have; names the keys most like it."""
    keys = [*index.tensors, *index.objects]
    close = difflib.get_close_matches(fqn, keys if len(keys) <= 5000 else keys[:5000], n=3, cutoff=0.6)
    hint = f"similar keys: {', '.join(close)}" if close else f"it has {len(keys)} keys, none of them similar"
    return MissingKeyError(f"{fqn}: the checkpoint {index.path} has no such key; {hint}")


def tensor_entry(fqn: str, index: CheckpointIndex) -> TensorEntry:
    """The index entry of a tensor.

    Raises:
        MissingKeyError: there is nothing under that key.
        KindMismatchError: it is an object.
    """
    entry = index.tensors.get(fqn)
    if entry is not None:
        return entry
    if fqn in index.objects:
        raise KindMismatchError(f"{fqn}: a tensor is wanted, but {index.path} holds an object under this key")
    raise missing_key(fqn, index)


@lru_cache(maxsize=4096)
def _whole_box(sizes: tuple[int, ...]) -> Box:
    return Box((0,) * len(sizes), sizes)


@lru_cache(maxsize=256)
def known_dtype(name: str) -> torch.dtype | None:
    """torch's dtype of that name; None if the installed torch has none."""
    return torch_dtype(name)


def stored_dtype(entry: TensorEntry) -> torch.dtype:
    """torch's dtype of a stored tensor.

    Raises:
        LoadError: the installed torch has no such dtype.
    """
    dtype = known_dtype(entry.dtype)
    if dtype is None:
        raise LoadError(f"{entry.fqn}: stored as {entry.dtype}, which torch {torch.__version__} does not have")
    return dtype


def wanted_items(requests: Iterable[ReadRequest], index: CheckpointIndex, conversions: DtypeConversions) -> WantedItems:
    """Find the stored chunks that hold what is requested.

    Returns:
        The items, each with its destinations.

    Raises:
        MissingKeyError, KindMismatchError: no tensor under that key.
        ShapeMismatchError: the global shape differs, the box does not lie in it, or the destination has another shape.
        DtypeMismatchError: the dtypes differ, and `conversions` refuses.
        CorruptCheckpointError: no stored chunk, or more than one, holds some element of the box that the global tensor
            has.
    """
    wanted: WantedItems = {}
    with collector_paused():
        _want_all(wanted, requests, index, conversions)
    return wanted


def _want_all(
    wanted: WantedItems, requests: Iterable[ReadRequest], index: CheckpointIndex, conversions: DtypeConversions
) -> None:
    lookups: dict[str, _ChunkLookup] = {}
    for request in requests:
        fqn, tensor, offsets, sizes = request[:4]
        entry = index.tensors.get(fqn) or tensor_entry(fqn, index)
        dtype = known_dtype(entry.dtype) or stored_dtype(entry)
        if tensor.dtype is not dtype:
            conversions.note(fqn, dtype, tensor.dtype)
        _check_shape(request, entry, index)
        chunks: Sequence[StoredChunk] = entry.chunks
        if len(chunks) <= _FEW_CHUNKS:
            chunk = only_chunk(chunks, offsets, sizes)
            if chunk is not None:
                want_chunk(wanted, entry, dtype, chunk, _whole_box(sizes), tensor)
                continue
        box = Box(tuple(offsets), tuple(sizes))
        if len(chunks) > _FEW_CHUNKS:
            lookup = lookups.get(fqn)
            if lookup is None:
                lookup = lookups[fqn] = _ChunkLookup(entry)
            chunks = lookup.overlapping(box)
        _want_box(wanted, request, box, entry, dtype, chunks, index)


def only_chunk(chunks: Sequence[StoredChunk], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> StoredChunk | None:
    """The chunk that is just this box, if no other one overlaps it: what a load under the layout of the save wants."""
    number = only_box([chunk.offsets for chunk in chunks], [chunk.sizes for chunk in chunks], offsets, sizes)
    return None if number is None else chunks[number]


def only_box(
    starts: Sequence[tuple[int, ...]],
    lengths: Sequence[tuple[int, ...]],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
) -> int | None:
    """Number of the box that is just this one, if no other one overlaps it; of boxes at `starts` of sizes `lengths`."""
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


def _want_box(
    wanted: WantedItems,
    request: ReadRequest,
    box: Box,
    entry: TensorEntry,
    dtype: torch.dtype,
    chunks: Iterable[StoredChunk],
    index: CheckpointIndex,
) -> None:
    found: list[Box] = []
    for chunk in chunks:
        overlap = intersect(box, Box(chunk.offsets, chunk.sizes))
        if overlap is None:
            continue
        inside = relative(overlap, box.offsets)
        found.append(inside)
        part = request.tensor if overlap == box else narrow(request.tensor.detach(), inside)
        want_chunk(wanted, entry, dtype, chunk, relative(overlap, chunk.offsets), part)
    expected = Box((0,) * len(box.sizes), box.sizes)
    if request.allow_partial:
        stored = intersect(box, Box((0,) * len(entry.shape), entry.shape))
        if stored is None:
            return
        expected = relative(stored, box.offsets)
    problem = covers(expected.sizes, [relative(part, expected.offsets) for part in found])
    if problem:
        raise CorruptCheckpointError(
            f"{entry.fqn}: the stored chunks do not hold the wanted box at {list(box.offsets)} of sizes"
            f" {list(box.sizes)} exactly once: relative to the box, {problem}. The save of {index.path} did not finish"
            " or its index is damaged; load an earlier checkpoint"
        )


def want_chunk(
    wanted: WantedItems,
    entry: TensorEntry,
    dtype: torch.dtype,
    chunk: StoredChunk,
    box: Box,
    tensor: torch.Tensor,
) -> None:
    """Add a box of a chunk (relative to it) and its destination to what is wanted; nothing for an empty box."""
    if 0 in box.sizes:
        return
    key = (chunk.item.file, chunk.item.offset, entry.fqn)
    item = wanted.get(key)
    if item is None:
        item = wanted[key] = WantedItem(entry.fqn, dtype, chunk, math.prod(chunk.sizes) * dtype.itemsize)
    item.wants.append(Want(box, box.sizes == chunk.sizes, tensor, address_of(tensor, dtype)))


def _check_shape(request: ReadRequest, entry: TensorEntry, index: CheckpointIndex) -> None:
    fqn, tensor, offsets, sizes, global_shape, allow_partial = request
    shape = entry.shape
    if tensor.shape != sizes:
        raise ShapeMismatchError(
            f"{fqn}: a box of sizes {list(sizes)} is wanted in a destination of shape {list(tensor.shape)}"
        )
    if len(offsets) != len(shape) or len(sizes) != len(shape):
        raise ShapeMismatchError(
            f"{fqn}: the checkpoint {index.path} holds global shape {list(shape)}, but a box of {len(sizes)} axes is"
            f" wanted (at {list(offsets)} of sizes {list(sizes)})"
        )
    if allow_partial:
        return
    if global_shape is not None and global_shape != shape:
        raise ShapeMismatchError(
            f"{fqn}: the checkpoint {index.path} holds global shape {list(shape)}, expected {list(global_shape)}"
        )
    for offset, size, whole in zip(offsets, sizes, shape, strict=True):
        if offset < 0 or offset + size > whole:
            raise ShapeMismatchError(
                f"{fqn}: the box at {list(offsets)} of sizes {list(sizes)} does not lie inside the global shape"
                f" {list(shape)} that the checkpoint {index.path} holds"
            )


def check_planned(
    items: Iterable[ReadItem],
    state_dict: Mapping[str, Any],
    stored: Container[str],
    where: str,
    flexible: Container[str] = (),
) -> None:
    """Raise `CorruptCheckpointError` unless DCP's read items fill the tensors of a state dict.

    DCP plans the overlaps that it finds, and leaves the rest of a tensor as it was, without a word.

    Args:
        items: of the plan.
        state_dict: flat; what is no tensor is not looked at.
        stored: keys of the checkpoint.
        where: the checkpoint, for messages.
        flexible: keys of tensors that need not be filled.
    """
    planned: Counter[str] = Counter()
    for item in items:
        planned[item.storage_index.fqn] += math.prod(item.lengths)
    for key, value in state_dict.items():
        if isinstance(value, torch.Tensor) and key in stored and key not in flexible:
            local = value.to_local() if isinstance(value, DTensor) else value
            if planned[key] != local.numel():
                raise not_held(key, local.numel(), planned[key], where)


def not_held(key: str, wanted_elems: int, planned_elems: int, where: str) -> CorruptCheckpointError:
    """The error for a tensor of which a checkpoint does not hold all that is requested."""
    return CorruptCheckpointError(
        f"{key}: {wanted_elems} stored elements are wanted, the chunks in {where} hold {planned_elems} of them: the"
        " save did not finish or its index is damaged (load an earlier checkpoint), or it holds the part of one rank"
        " alone (load under the layout of the save)"
    )


class _ChunkLookup:
    """The chunks of one tensor that overlap a box, without a look at each of them.

    Chunks are sorted along the axis in which they differ most; a box needs only those whose first element there lies
    within reach. Regular grids of n chunks along one axis, which is what sharding makes, so cost O(log n) a box.
    """

    def __init__(self, entry: TensorEntry) -> None:
        axes = range(len(entry.shape))
        self._axis = max(axes, key=lambda axis: len({chunk.offsets[axis] for chunk in entry.chunks}), default=0)
        axis = self._axis
        self._chunks = sorted(entry.chunks, key=lambda chunk: chunk.offsets[axis])
        self._starts = [chunk.offsets[axis] for chunk in self._chunks]
        self._longest = max(chunk.sizes[axis] for chunk in entry.chunks)

    def overlapping(self, box: Box) -> list[StoredChunk]:
        """Chunks that may overlap `box`, and few others."""
        start = box.offsets[self._axis]
        first = bisect.bisect_left(self._starts, start - self._longest + 1)
        last = bisect.bisect_left(self._starts, start + box.sizes[self._axis])
        return self._chunks[first:last]
