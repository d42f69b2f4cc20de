"""What a load requests -> the plan of what it reads, checked before a byte is read.

A request names a slice of a global tensor and the destination for it. The slice may overlap many stored chunks, which
have to hold all of it together. A `LoadPlan` holds each stored item once, with all destinations that request a part.

Where the stored dtype is not the destination's, elements are converted as `torch.Tensor.copy_` does, with one warning
for the load, or refused. Destinations that share memory (tied weights that were saved as several tensors, views of one
buffer) are found before anything is read, and are read one after the other, in the order of their requests.
"""

from __future__ import annotations

import bisect
import math
import operator
import warnings
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import ReadItem

from mcore_ckpt.core.boxes import Box, covers, intersect, relative
from mcore_ckpt.core.console import counted, logger_of
from mcore_ckpt.core.errors import (
    CorruptCheckpointError,
    DtypeMismatchError,
    KindMismatchError,
    LoadError,
    ShapeMismatchError,
)
from mcore_ckpt.format.index import CheckpointIndex, StoredChunk, TensorEntry
from mcore_ckpt.load.placement import (
    FEW_CHUNKS,
    Want,
    WantedItem,
    address_of,
    can_be_filled,
    memory_of,
    narrow,
    only_box,
)
from mcore_ckpt.load.policy import ReadPolicy
from mcore_ckpt.load.records import missing_key
from mcore_ckpt.load.small import SmallChunks
from mcore_ckpt.state.shards import local_chunks
from mcore_ckpt.state.torch_classes import dtype_name, torch_dtype

_logger = logger_of(__name__)


OnDtypeMismatch = Literal["convert", "raise"]


def check_dtype(fqn: str, where: str, stored: torch.dtype, requested: torch.dtype, policy: OnDtypeMismatch) -> None:
    """Raise `DtypeMismatchError` if a tensor may not be converted, by `LoadOptions.on_dtype_mismatch`, or cannot."""
    if stored is requested:
        return
    what = f"{fqn}: {where} holds {dtype_name(stored)}, the destination is {dtype_name(requested)}"
    if policy == "raise":
        raise DtypeMismatchError(f'{what}; LoadOptions(on_dtype_mismatch="convert") converts')
    if not _converts(stored, requested):
        raise DtypeMismatchError(f"{what}, and torch cannot convert between the two; load into {dtype_name(stored)}")


class DtypeConversions:
    """Collects the conversions of a load, by the policy `LoadOptions.on_dtype_mismatch`."""

    def __init__(self, policy: OnDtypeMismatch, path: str) -> None:
        self._policy: OnDtypeMismatch = policy
        self._path = path
        self._keys: dict[tuple[torch.dtype, torch.dtype], dict[str, None]] = {}
        self._nested = 0

    def note(self, fqn: str, stored: torch.dtype, requested: torch.dtype) -> None:
        """A tensor is about to be converted. Raises `DtypeMismatchError` as `check_dtype`."""
        check_dtype(fqn, f"the checkpoint {self._path}", stored, requested, self._policy)
        self._keys.setdefault((stored, requested), {})[fqn] = None

    @contextmanager
    def of_one_load(self) -> Iterator[None]:
        """Warn at the end of the outermost of these contexts of what was converted inside."""
        self._nested += 1
        try:
            yield
        except BaseException:
            self._keys.clear()
            raise
        finally:
            self._nested -= 1
        if self._nested == 0 and self._keys:
            self._warn()
            self._keys.clear()

    def _warn(self) -> None:
        pairs = []
        for (stored, requested), keys in self._keys.items():
            some = [*keys][:2] + ["..."] * (len(keys) > 2)
            pairs.append(f"{len(keys)} from {dtype_name(stored)} to {dtype_name(requested)} ({', '.join(some)})")
        count = len({key for keys in self._keys.values() for key in keys})
        text = (
            f"{self._path}: {counted(count, 'tensor')} converted to the destination's dtype: {'; '.join(pairs)}."
            ' LoadOptions(on_dtype_mismatch="raise") refuses'
        )
        if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
            _logger.info("%s", text)  # rank 0 warns for all
        else:
            _logger.warning("%s", text)


@lru_cache(maxsize=256)
def _converts(stored: torch.dtype, requested: torch.dtype) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of complex numbers that lose their imaginary part: the load itself warns
        try:
            torch.empty(1, dtype=requested).copy_(torch.empty(1, dtype=stored))
        except (RuntimeError, TypeError, NotImplementedError):
            return False
    return True


_Array = np.ndarray[Any, np.dtype[Any]]


def may_overlap(starts: _Array, stops: _Array) -> bool:
    """Whether any two of the ranges `[start, stop)` have a byte in common."""
    order = np.argsort(starts)
    reach = np.maximum.accumulate(stops[order])
    return bool((starts[order][1:] < reach[:-1]).any())


def overlapping(requests: Sequence[ReadRequest]) -> set[int]:
    """Numbers of those whose destinations may share memory with another one, and get other values there."""
    ranges = [(*found, number) for number, request in enumerate(requests) if (found := memory_of(request.tensor))]
    # (Parts of one destination get the same values, as a plan of many stored chunks has them.)
    return {
        number
        for group in _touching(ranges)
        if len({_global_tensor(requests[number]) for number in group}) > 1
        for number in group
    }


def _touching(ranges: Iterable[tuple[int, int, int]]) -> Iterator[list[int]]:
    """Numbers of ranges (first, end, number) that touch, directly or by others; of those alone, nothing."""
    group: list[int] = []
    reach = 0
    for start, stop, number in sorted(ranges):
        if start >= reach:
            if len(group) > 1:
                yield group
            group = []
        group.append(number)
        reach = max(reach, stop)
    if len(group) > 1:
        yield group


def _global_tensor(request: ReadRequest) -> tuple[str, int, tuple[int, ...]]:
    """The key, and where all of the global tensor would lie if the memory went on: slices that have these alike get the
    same values where they overlap.
    """
    tensor, strides = request.tensor, request.tensor.stride()
    behind = sum(map(operator.mul, request.offsets, strides))
    return request.fqn, tensor.data_ptr() - behind * tensor.element_size(), strides


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


def tensor_entry(fqn: str, index: CheckpointIndex) -> TensorEntry:
    """The index entry of a tensor. `MissingKeyError`: there is nothing under that key. `KindMismatchError`: it is an
    object.
    """
    entry = index.tensors.get(fqn)
    if entry is not None:
        return entry
    if fqn in index.objects:
        raise KindMismatchError(f"{fqn}: a tensor is requested, but {index.path} holds an object under this key")
    raise missing_key(fqn, f"the checkpoint {index.path}", [*index.tensors, *index.objects])


@lru_cache(maxsize=4096)
def _whole_box(sizes: tuple[int, ...]) -> Box:
    return Box((0,) * len(sizes), sizes)


def stored_dtype(entry: TensorEntry) -> torch.dtype:
    """torch's dtype of a stored tensor. `LoadError`: the installed torch has no such dtype."""
    dtype = torch_dtype(entry.dtype)
    if dtype is None:
        raise LoadError(f"{entry.fqn}: stored as {entry.dtype}, which torch {torch.__version__} does not have")
    return dtype


class LoadPlan:
    """What one load reads, and where it goes: `small` chunks that are copied as they are, and all other
    `items`, by file, offset and key.
    """

    def __init__(self, index: CheckpointIndex, conversions: DtypeConversions, policy: ReadPolicy) -> None:
        self.small = SmallChunks(index, policy)
        self.items: dict[tuple[str, int, str], WantedItem] = {}
        self._index = index
        self._conversions = conversions
        self._policy = policy
        self._lookups: dict[str, ChunkLookup] = {}
        self._elems: dict[str, tuple[int, int]] = {}  # of each tensor: those that are requested, and all
        self._requests: list[ReadRequest] = []
        self._tensors: list[torch.Tensor] = []  # destinations of `items`

    def add(self, requests: Iterable[ReadRequest]) -> None:
        """Find the stored chunks that hold what is requested, and check it: raises as `CheckpointReader.read_items`."""
        requests = list(requests)
        self._requests += requests
        index = self._index
        for request in self.small.take(requests):
            fqn, tensor, offsets, sizes = request[:4]
            entry = index.tensors.get(fqn) or tensor_entry(fqn, index)
            dtype = self._dtype_of(entry, tensor)
            self._note(fqn, tensor)
            _check_shape(request, entry, index)
            chunks: Sequence[StoredChunk] = entry.chunks
            if len(chunks) <= FEW_CHUNKS:
                only = only_box([chunk.offsets for chunk in chunks], [chunk.sizes for chunk in chunks], offsets, sizes)
                if only is not None:
                    self._add_part(entry, dtype, chunks[only], _whole_box(sizes), tensor)
                    continue
            box = Box(tuple(offsets), tuple(sizes))
            self._add_parts(request, box, entry, dtype, self._chunks_at(box, entry))

    def _chunks_at(self, box: Box, entry: TensorEntry) -> Sequence[StoredChunk]:
        """Chunks that may overlap a slice."""
        if len(entry.chunks) <= FEW_CHUNKS:
            return entry.chunks
        lookup = self._lookups.get(entry.fqn)
        if lookup is None:
            lookup = self._lookups[entry.fqn] = ChunkLookup(entry.chunks)
        return lookup.overlapping(box)

    def _note(self, fqn: str, tensor: torch.Tensor) -> None:
        if not can_be_filled(tensor):
            raise LoadError(
                f"{fqn}: the destination ({type(tensor).__name__}) is on the meta device, and what is loaded would be "
                "lost; put it on a device first (`to_empty`), or leave it out of the load"
            )
        self._tensors.append(tensor)

    def times_wanted(self, ranks: int) -> dict[str, int]:
        """How often so many ranks of this host, if each requests as much of a tensor among `items` as this one, request
        each byte of it.

        No rank tells another what it requests. Where others request none of a tensor, as those of other pipeline stages
        do, it may be counted here all the same.
        """
        return {fqn: ranks * wanted // there for fqn, (wanted, there) in self._elems.items()}

    def turns(self) -> list[LoadPlan]:
        """This plan; or several to be carried out one after the other, if destinations share memory: others come one by
        one, after all the rest, and the last request stays.
        """
        ranges = [found for tensor in self._tensors if (found := memory_of(tensor)) is not None]
        starts, stops = np.array(ranges, dtype=np.int64).reshape(-1, 2).T
        of_small = self.small.memory()
        if not may_overlap(np.append(starts, of_small[0]), np.append(stops, of_small[1])):
            return [self]
        shared = overlapping(self._requests)
        if not shared:
            return [self]
        others = [request for number, request in enumerate(self._requests) if number not in shared]
        turns = []
        for requests in (others, *([self._requests[number]] for number in sorted(shared))):
            turn = LoadPlan(self._index, self._conversions, self._policy)
            turn.add(requests)
            turns.append(turn)
        return turns

    def _dtype_of(self, entry: TensorEntry, tensor: torch.Tensor) -> torch.dtype:
        dtype = torch_dtype(entry.dtype) or stored_dtype(entry)
        if tensor.dtype is not dtype:
            self._conversions.note(entry.fqn, dtype, tensor.dtype)
        return dtype

    def _add_parts(
        self, request: ReadRequest, box: Box, entry: TensorEntry, dtype: torch.dtype, chunks: Iterable[StoredChunk]
    ) -> None:
        found: list[Box] = []
        for chunk in chunks:
            overlap = intersect(box, Box(chunk.offsets, chunk.sizes))
            if overlap is None:
                continue
            inside = relative(overlap, box.offsets)
            found.append(inside)
            part = request.tensor if overlap == box else narrow(request.tensor.detach(), inside)
            self._add_part(entry, dtype, chunk, relative(overlap, chunk.offsets), part)
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
                f" {list(box.sizes)} exactly once: relative to the box, {problem}. The save of {self._index.path} did"
                " not finish or its index is damaged; load an earlier checkpoint"
            )

    def _add_part(
        self, entry: TensorEntry, dtype: torch.dtype, chunk: StoredChunk, box: Box, tensor: torch.Tensor
    ) -> None:
        if 0 in box.sizes:
            return
        key = (chunk.item.file, chunk.item.offset, entry.fqn)
        item = self.items.get(key)
        if item is None:
            item = self.items[key] = WantedItem(entry.fqn, dtype, chunk, math.prod(chunk.sizes) * dtype.itemsize)
        wanted, there = self._elems.get(entry.fqn) or (0, math.prod(entry.shape))
        self._elems[entry.fqn] = wanted + math.prod(box.sizes), there
        item.wants.append(Want(box, box.sizes == chunk.sizes, tensor, address_of(tensor, dtype)))


def _check_shape(request: ReadRequest, entry: TensorEntry, index: CheckpointIndex) -> None:
    fqn, tensor, offsets, sizes, global_shape, allow_partial = request
    shape = entry.shape
    if tensor.shape != sizes:
        raise ShapeMismatchError(
            f"{fqn}: a box of sizes {list(sizes)} is requested in a destination of shape {list(tensor.shape)}"
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


def check_planned(items: Iterable[ReadItem], state_dict: Mapping[str, Any], stored: Container[str], where: str) -> None:
    """Raise `CorruptCheckpointError` unless DCP's read items fill the tensors of a flat state dict. DCP plans the
    overlaps that it finds, and leaves the rest of a tensor as it was, without a word.
    """
    planned: Counter[str] = Counter()
    for item in items:
        planned[item.storage_index.fqn] += math.prod(item.lengths)
    for key, value in state_dict.items():
        if isinstance(value, torch.Tensor) and key in stored:
            elems = sum(math.prod(chunk.sizes) for chunk in local_chunks(value))
            if planned[key] != elems:
                raise CorruptCheckpointError(
                    f"{key}: {elems} stored elements are requested, the chunks in {where} hold {planned[key]} of "
                    "them: the save did not finish or its index is damaged (load an earlier checkpoint), or it holds "
                    "the part of one rank alone (load under the layout of the save)"
                )


class ChunkLookup:
    """The chunks of one tensor that overlap a slice, sorted along the axis in which they differ most: of a regular grid
    of n along one axis, which is what sharding makes, O(log n) are looked at. Of each `offsets` and `sizes` are used.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        axes = range(len(chunks[0].offsets))
        self._axis = max(axes, key=lambda axis: len({chunk.offsets[axis] for chunk in chunks}), default=0)
        axis = self._axis
        self._chunks = sorted(chunks, key=lambda chunk: chunk.offsets[axis])
        self._starts = [chunk.offsets[axis] for chunk in self._chunks]
        self._longest = max(chunk.sizes[axis] for chunk in chunks)

    def overlapping(self, box: Box) -> list[Any]:
        """Chunks that may overlap `box`, and few others."""
        start = box.offsets[self._axis]
        first = bisect.bisect_left(self._starts, start - self._longest + 1)
        last = bisect.bisect_left(self._starts, start + box.sizes[self._axis])
        return self._chunks[first:last]
