"""Megatron's shards, read: of any layout, flattened or not.

Stretches of flattened tensors, as Megatron-Core 0.12 to 0.15 stored optimizer state (`state/shards.py`), go from any
stored form to any requested one: the same grid directly; another grid, or none, through the coordinates of the
parameter.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from mcore_ckpt.core.boxes import Box, flat_boxes, intersect, relative, strides_of
from mcore_ckpt.core.errors import CorruptCheckpointError, ShapeMismatchError
from mcore_ckpt.core.process import collector_paused
from mcore_ckpt.load.placement import narrow
from mcore_ckpt.load.ranges import batches
from mcore_ckpt.load.reader import CheckpointReader
from mcore_ckpt.load.requests import ReadRequest, tensor_entry
from mcore_ckpt.state.shards import local_box, stored_form

# Bytes of stretches that are spread over their destinations at once.
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


@collector_paused()
def read_shards(reader: CheckpointReader, shards: Iterable[Any]) -> None:
    """Fill the data of Megatron's `ShardedTensor`s, flattened or not, of any layout; those without data get some on the
    CPU. Raises as `CheckpointReader.read_items`.
    """
    with reader.conversions.of_one_load():
        if (parameters := reader.parameters) is not None:
            shards = list(shards)
            parameters.read(reader, [shard for shard in shards if shard.key in parameters])
            shards = [shard for shard in shards if shard.key not in parameters]
        direct, spread = _requests(reader, shards)
        reader.read_items(direct)
        _read_spread(reader, spread)


# Fields of a shard whose data are a slice of the global tensor as they are.
_request_of = operator.attrgetter("key", "data", "global_offset", "local_shape", "global_shape")


def _requests(reader: CheckpointReader, shards: Iterable[Any]) -> tuple[list[ReadRequest], list[ReadRequest]]:
    """What is read of some shards as they are; and what is stored flattened in other stretches, as slices of the
    parameter, of its own shape.
    """
    index = reader.index
    direct: list[ReadRequest] = []
    spread: list[ReadRequest] = []
    for shard in shards:
        flattened = getattr(shard, "flattened_range", None) is not None
        own_shape = index.original_shape(shard.key) if index.mcore_data else None
        may_differ = shard.allow_shape_mismatch
        if not (flattened or own_shape or shard.prepend_axis_num or may_differ or shard.data is None):
            direct.append(ReadRequest(*_request_of(shard)))
            continue
        destination(shard)
        shape, entry = tuple(shard.global_shape), index.tensors.get(shard.key)
        if own_shape is None:
            wanted_shape = None if may_differ else shape
            direct += [ReadRequest(shard.key, part, *box, wanted_shape, may_differ) for box, part in _boxes(shard)]
        elif flattened and own_shape == shape and entry is not None and entry.shape == stored_form(shard).shape:
            form = stored_form(shard)
            tensor = shard.data.detach().view(form.sizes)
            direct.append(ReadRequest(shard.key, tensor, form.offsets, form.sizes, form.shape))
        elif own_shape != shape and not may_differ:
            raise ShapeMismatchError(
                f"{shard.key}: {reader.path} holds a tensor of global shape {list(own_shape)} (flattened), "
                f"wanted is {list(shape)}; load into a model of the shape that was saved"
            )
        else:
            spread += [ReadRequest(shard.key, part, *box, own_shape) for box, part in _boxes(shard)]
    return direct, spread


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


class _FlatRange(NamedTuple):
    """Some elements of one flattened cell, and where they go."""

    stored: tuple[str, tuple[int, ...], int, tuple[int, ...]]  # key, offsets, how many, shape of the stored tensor
    target: torch.Tensor
    strides: tuple[int, ...]  # in which the elements are those of `target`


def _read_spread(reader: CheckpointReader, wanted: Iterable[ReadRequest]) -> None:
    """Read the stretches that hold the wanted slices, some at a time, and copy the slices out of them."""
    ranges = itertools.chain.from_iterable(_flat_ranges(reader, one) for one in wanted)
    for batch in batches(ranges, _held_bytes, _BATCH_BYTES):
        requests = []
        for (key, offsets, count, shape), target, _ in batch:
            sizes = (*(1 for _ in offsets[1:]), count)
            requests.append(ReadRequest(key, torch.empty(sizes, dtype=target.dtype), offsets, sizes, shape))
        reader.read_items(requests)
        for request, piece in zip(requests, batch, strict=True):
            piece.target.copy_(torch.as_strided(request.tensor, piece.target.shape, piece.strides, 0))


def _held_bytes(piece: _FlatRange) -> int:
    return piece.stored[2] * piece.target.element_size() + _PIECE_BYTES


def _flat_ranges(reader: CheckpointReader, wanted: ReadRequest) -> Iterator[_FlatRange]:
    key, own_shape, box = wanted.fqn, wanted.global_shape or (), Box(wanted.offsets, wanted.sizes)
    entry = tensor_entry(key, reader.index)
    grid = entry.shape[:-1]
    if len(grid) != len(own_shape) or any(n <= 0 or size % n for size, n in zip(own_shape, grid, strict=True)):
        raise CorruptCheckpointError(
            f"{key}: stored as a grid {list(grid)} of flattened boxes of a tensor {list(own_shape)}, which it "
            "does not divide; `.metadata` contradicts itself"
        )
    if math.prod(grid) > _MAX_CELLS_OF_A_CHUNK * max(1, len(entry.chunks)):
        raise CorruptCheckpointError(
            f"{key}: stored as a grid {list(grid)} of flattened boxes, in {len(entry.chunks)} chunks, each of "
            "which was one box or a part of it when it was saved; `.metadata` contradicts itself"
        )
    cell = tuple(size // n for size, n in zip(own_shape, grid, strict=True))
    strides = strides_of(cell)
    ranges = [
        range(start // size, min(-(-(start + extent) // size), n))
        for start, extent, size, n in zip(*box, cell, grid, strict=True)
    ]
    for place in itertools.product(*ranges):
        cell_box = Box(tuple(map(operator.mul, place, cell)), cell)
        share = intersect(cell_box, box)
        if share is None:
            continue
        first = sum(map(operator.mul, relative(share, cell_box.offsets).offsets, strides))
        count = 1 + sum((n - 1) * stride for n, stride in zip(share.sizes, strides, strict=True))
        target = narrow(wanted.tensor, relative(share, box.offsets))
        yield _FlatRange((key, (*place, first), count, entry.shape), target, strides)
