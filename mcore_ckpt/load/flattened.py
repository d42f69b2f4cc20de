"""Stretches of flattened tensors: how Megatron-Core 0.12 to 0.15 kept optimizer state, to be read by any version.

`state/shards.py` says how they are stored. Reading goes from any stored form to any wanted one: the same grid
directly; another grid, or none, through the parameter's own coordinates.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mcore_ckpt.core.boxes import Box, flat_boxes, intersect, relative, strides_of
from mcore_ckpt.core.errors import CorruptCheckpointError, ShapeMismatchError
from mcore_ckpt.core.process import collector_paused
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.load._placement import narrow
from mcore_ckpt.load.arrivals import noted_now, noting_nothing
from mcore_ckpt.load.read_requests import LoadPlan, ReadRequest
from mcore_ckpt.load.reader import FileSystemReader
from mcore_ckpt.state.shards import StoredForm, local_box, original_shape, stored_form

# Pieces of stored stretches that are held at once while they are spread over their destinations.
_BATCH_BYTES = 64 * 1024 * 1024
# What a piece takes besides its elements, as a request and with all that leads to it.
_PIECE_BYTES = 2048
# A chunk is saved for a cell or a part of one; some may have been made one chunk since, but never more than so many.
_MAX_CELLS_OF_A_CHUNK = 16384


def destination(shard: Any) -> torch.Tensor:
    """The memory that a `ShardedTensor` is loaded into, detached: its own, or new on the CPU. Zeros where the stored
    tensor may be smaller than the requested one.
    """
    if shard.data is None:
        shard.init_data("cpu", torch.zeros if shard.allow_shape_mismatch else torch.empty)
    elif shard.allow_shape_mismatch:
        shard.data.detach().zero_()
    tensor: torch.Tensor = shard.data.detach()
    return tensor


def read_shards(reader: FileSystemReader, shards: Iterable[Any]) -> None:
    """Fill the data of Megatron's `ShardedTensor`s, flattened or not, of any layout; those without data get some on the
    CPU. Raises as `FileSystemReader.read_items`.
    """
    with reader.conversions.of_one_load():
        plan, spread = _plan(reader, shards)
        noted = noted_now()
        if noted is not None:
            noted.expect(reader.index, (one.tensor for one in spread))
        reader.read(plan)
        with noting_nothing():
            _read_spread(reader, spread)


@collector_paused()
def _plan(reader: FileSystemReader, shards: Iterable[Any]) -> tuple[LoadPlan, list[_Wanted]]:
    """What is read of some shards as they are, and what is stored flattened and spread over several of them."""
    direct: list[ReadRequest] = []
    spread: list[_Wanted] = []
    shards = list(shards)
    usual, others = _usual(shards, reader.index.mcore_data)
    for shard in others:
        destination(shard)
        own_shape = original_shape(reader.index, shard.key)
        flattened = getattr(shard, "flattened_range", None) is not None
        if (not flattened and own_shape is None) or (
            flattened and own_shape == tuple(shard.global_shape) and _same_grid(reader.index, shard)
        ):
            direct.append(_request(shard, stored_form(shard)))
        elif own_shape is None:
            wanted_shape = None if shard.allow_shape_mismatch else tuple(shard.global_shape)
            direct += [
                ReadRequest(shard.key, tensor, box.offsets, box.sizes, wanted_shape, shard.allow_shape_mismatch)
                for box, tensor in _boxes(shard)
            ]
        else:
            _check_shape(reader, shard, own_shape)
            spread += [_Wanted(shard.key, own_shape, box, tensor) for box, tensor in _boxes(shard)]
    plan = reader.plan()
    plan.keys = [shard.key for shard in shards]
    plan.add_usual(map(_REQUEST, usual))
    plan.add(direct)
    return plan, spread


def _usual(shards: Iterable[Any], flat_keys: Container[str]) -> tuple[list[Any], list[Any]]:
    """Shards whose data are a slice of the global tensor as they are, and all others."""
    usual: list[Any] = []
    others: list[Any] = []
    for shard in shards:
        as_it_is = (
            shard.data is not None
            and not shard.prepend_axis_num
            and not shard.allow_shape_mismatch
            and getattr(shard, "flattened_range", None) is None
            and shard.key not in flat_keys
        )
        (usual if as_it_is else others).append(shard)
    return usual, others


# The first five fields of a `ReadRequest`.
_REQUEST = operator.attrgetter("key", "data", "global_offset", "local_shape", "global_shape")


def _request(shard: Any, form: StoredForm) -> ReadRequest:
    tensor = shard.data.detach()
    if tuple(tensor.shape) != form.sizes:
        tensor = tensor.view(form.sizes)
    shape = None if shard.allow_shape_mismatch else form.shape
    return ReadRequest(shard.key, tensor, form.offsets, form.sizes, shape, shard.allow_shape_mismatch)


def _same_grid(index: CheckpointIndex, shard: Any) -> bool:
    entry = index.tensors.get(shard.key)
    return entry is not None and tuple(entry.shape) == stored_form(shard).shape


def _check_shape(reader: FileSystemReader, shard: Any, own_shape: tuple[int, ...]) -> None:
    if not shard.allow_shape_mismatch and own_shape != tuple(shard.global_shape):
        raise ShapeMismatchError(
            f"{shard.key}: {reader.checkpoint_id} holds a tensor of global shape {list(own_shape)} (flattened), wanted "
            f"is {list(shard.global_shape)}; load into a model of the shape that was saved"
        )


def _boxes(shard: Any) -> list[tuple[Box, torch.Tensor]]:
    """What a shard holds, as boxes of the global parameter, each with the view of its data that has the box's shape."""
    data = shard.data.detach()
    stretch = getattr(shard, "flattened_range", None)
    if stretch is None:
        sizes = local_box(shard)
        return [(Box(tuple(shard.global_offset), sizes), data.view(sizes) if shard.prepend_axis_num else data)]
    found = []
    position = 0
    for box in flat_boxes(local_box(shard), stretch.start, stretch.stop):
        count = math.prod(box.sizes)
        offsets = tuple(own + base for own, base in zip(box.offsets, shard.global_offset, strict=True))
        found.append((Box(offsets, box.sizes), data[position : position + count].view(box.sizes)))
        position += count
    return found


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A box of a parameter that is stored flattened, in the parameter's own coordinates, and where it goes."""

    key: str
    own_shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class _FlatRange:
    """The elements `[first, stop)` of one flattened cell, which hold what is requested of `share`."""

    wanted: _Wanted
    cell: Box
    grid: tuple[int, ...]
    stored_shape: tuple[int, ...]
    share: Box
    first: int
    stop: int


def _read_spread(reader: FileSystemReader, wanted: Iterable[_Wanted]) -> None:
    """Read the stretches that hold the wanted boxes, some at a time, and copy the boxes out of them."""
    batch: list[tuple[_FlatRange, torch.Tensor]] = []
    held_bytes = 0
    for one in wanted:
        for piece in _flat_ranges(reader, one):
            buffer = torch.empty(piece.stop - piece.first, dtype=one.tensor.dtype)
            batch.append((piece, buffer))
            held_bytes += buffer.nbytes + _PIECE_BYTES
            if held_bytes >= _BATCH_BYTES:
                _read_batch(reader, batch)
                batch, held_bytes = [], 0
    if batch:
        _read_batch(reader, batch)


def _flat_ranges(reader: FileSystemReader, wanted: _Wanted) -> Iterator[_FlatRange]:
    entry = reader.index.tensors.get(wanted.key)
    if entry is None:
        reader.read_items([ReadRequest(wanted.key, wanted.tensor, wanted.box.offsets, wanted.box.sizes)])  # raises
        return
    stored_shape = tuple(entry.shape)
    grid = stored_shape[:-1]
    own_shape = wanted.own_shape
    if len(grid) != len(own_shape) or any(n <= 0 or size % n for size, n in zip(own_shape, grid, strict=True)):
        raise CorruptCheckpointError(
            f"{wanted.key}: stored as a grid {list(grid)} of flattened boxes of a tensor {list(own_shape)}, which it "
            "does not divide; `.metadata` contradicts itself"
        )
    if math.prod(grid) > _MAX_CELLS_OF_A_CHUNK * max(1, len(entry.chunks)):
        raise CorruptCheckpointError(
            f"{wanted.key}: stored as a grid {list(grid)} of flattened boxes, in {len(entry.chunks)} chunks, each of "
            "which was one box or a part of it when it was saved; `.metadata` contradicts itself"
        )
    cell = tuple(size // n for size, n in zip(wanted.own_shape, grid, strict=True))
    ranges = [
        range(start // size, min(-(-(start + extent) // size), n))
        for start, extent, size, n in zip(wanted.box.offsets, wanted.box.sizes, cell, grid, strict=True)
    ]
    for place in itertools.product(*ranges):
        cell_box = Box(tuple(i * size for i, size in zip(place, cell, strict=True)), cell)
        share = intersect(cell_box, wanted.box)
        if share is None:
            continue
        strides = strides_of(cell)
        first = sum(map(operator.mul, relative(share, cell_box.offsets).offsets, strides))
        last = first + sum((n - 1) * stride for n, stride in zip(share.sizes, strides, strict=True))
        yield _FlatRange(wanted, cell_box, place, stored_shape, share, first, last + 1)


def _read_batch(reader: FileSystemReader, batch: list[tuple[_FlatRange, torch.Tensor]]) -> None:
    requests = []
    for piece, buffer in batch:
        sizes = (*(1 for _ in piece.grid), piece.stop - piece.first)
        requests.append(
            ReadRequest(piece.wanted.key, buffer.view(sizes), (*piece.grid, piece.first), sizes, piece.stored_shape)
        )
    reader.read_items(requests)
    for piece, buffer in batch:
        source = torch.as_strided(buffer, piece.share.sizes, strides_of(piece.cell.sizes), 0)
        narrow(piece.wanted.tensor, relative(piece.share, piece.wanted.box.offsets)).copy_(source)
