"""What a stored chunk adds to the fingerprint of its tensor: from its CRC-32, or its elements if they are many runs."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

from mcore_ckpt.core.boxes import Box, flat_boxes
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import CorruptCheckpointError
from mcore_ckpt.core.fingerprints import part_of, part_of_run
from mcore_ckpt.format.index import CheckpointIndex, StoredChunk, TensorEntry
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.items.checks import chunk_name
from mcore_ckpt.items.checksums import checksum_error

_WINDOW_BYTES = 8 * 1024 * 1024
_NOTE = "nd_reformulated_orig_global_shape"


def global_shape(index: CheckpointIndex, entry: TensorEntry) -> tuple[int, ...]:
    """The parameter's own shape, where its stretches are stored as rows of a grid (Megatron-Core 0.12 to 0.14)."""
    noted = index.mcore_data.get(entry.fqn, {}).get(_NOTE)
    if noted is None:
        return entry.shape
    shape, grid = tuple(noted), entry.shape[:-1]
    cell = [size // count for size, count in zip(shape, grid, strict=False) if count]
    if len(grid) != len(shape) or math.prod(cell) != entry.shape[-1] or math.prod(shape) != math.prod(entry.shape):
        raise CorruptCheckpointError(
            f"{entry.fqn}: {index.path} notes the global shape {list(shape)} for what is stored as {list(entry.shape)}"
        )
    return shape


def part_of_chunk(
    entry: TensorEntry, chunk: StoredChunk, shape: tuple[int, ...], crc: int | None, read: Callable[[int, int], Any]
) -> int:
    """What a chunk of a tensor of this global shape adds; `read(first, count)` gives the bytes of so many of its
    elements, `crc` is the stored CRC-32 of all, if any. `ChecksumError`: they were read, and do not have it.
    """
    elem_bytes, count = element_bytes(entry.dtype), math.prod(chunk.sizes)
    if not count:
        return 0
    boxes = list(_boxes(entry, chunk, shape, 0, count))
    if len(boxes) == 1 and crc is not None and (part := part_of_run(crc, shape, boxes[0], elem_bytes)) is not None:
        return part
    step = max(1, _WINDOW_BYTES // elem_bytes)
    total = value = 0
    for at in range(0, count, step):
        elements = min(step, count - at)
        view = memoryview(read(at, elements)).cast("B")
        value = crc32(view, value)
        done = 0
        for box in _boxes(entry, chunk, shape, at, elements):
            nbytes = math.prod(box.sizes) * elem_bytes
            total ^= part_of(view[done : done + nbytes], shape, box, elem_bytes)
            done += nbytes
    if crc is not None and crc != value:
        raise checksum_error(chunk_name(entry.fqn, chunk), "its elements have", value, crc)
    return total


def _boxes(entry: TensorEntry, chunk: StoredChunk, shape: tuple[int, ...], first: int, count: int) -> Iterator[Box]:
    """Elements `[first, first + count)` of a chunk as slices of the tensor, in order."""
    base, sizes = chunk.offsets, chunk.sizes
    if shape != entry.shape:
        sizes = tuple(map(operator.floordiv, shape, entry.shape[:-1]))
        base = tuple(map(operator.mul, chunk.offsets[:-1], sizes))
        first += chunk.offsets[-1]
    for box in flat_boxes(sizes, first, first + count):
        yield Box(tuple(map(operator.add, base, box.offsets)), box.sizes)
