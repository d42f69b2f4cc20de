"""What a stored chunk adds to the fingerprint of its tensor: from its CRC-32, or its elements if they are many runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from mcore_ckpt.core.boxes import Stretch
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import CorruptCheckpointError
from mcore_ckpt.core.fingerprints import part_of_elements, part_of_run
from mcore_ckpt.format.index import CheckpointIndex, StoredChunk, TensorEntry
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.load.checks import chunk_name
from mcore_ckpt.load.checksums import checksum_error

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


def stretch_of(entry: TensorEntry, chunk: StoredChunk, shape: tuple[int, ...]) -> Stretch:
    """Where a chunk lies in a tensor of this global shape (`global_shape`)."""
    return Stretch.of_chunk(entry.shape, chunk.offsets, chunk.sizes, element_bytes(entry.dtype), shape)


def fingerprint_from_sums(index: CheckpointIndex, entry: TensorEntry, crcs: Sequence[int | None]) -> int | None:
    """The CRC-32 of a tensor from those of its chunks; None if they do not tell."""
    shape, total = global_shape(index, entry), 0
    for chunk, crc in zip(entry.chunks, crcs, strict=True):
        part = None if crc is None else part_of_run(crc, stretch_of(entry, chunk, shape))
        if part is None:
            return None
        total ^= part
    return total


def part_of_chunk(
    entry: TensorEntry, chunk: StoredChunk, shape: tuple[int, ...], crc: int | None, read: Callable[[int, int], Any]
) -> int:
    """What a chunk of a tensor of this global shape adds; `read(first, count)` gives the bytes of so many of its
    elements, `crc` is the stored CRC-32 of all, if any. `ChecksumError`: they were read, and do not have it.
    """
    stretch = stretch_of(entry, chunk, shape)
    if not stretch.elems:
        return 0
    if crc is not None and (part := part_of_run(crc, stretch)) is not None:
        return part
    step = max(1, _WINDOW_BYTES // stretch.elem_bytes)
    total = value = 0
    for at in range(0, stretch.elems, step):
        view = memoryview(read(at, min(step, stretch.elems - at))).cast("B")
        value = crc32(view, value)
        total ^= part_of_elements(view, stretch, at)
    if crc is not None and crc != value:
        raise checksum_error(chunk_name(entry.fqn, chunk), "its elements have", value, crc)
    return total
