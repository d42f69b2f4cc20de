"""Any box of a stored tensor as bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided

from mcore_ckpt.core.boxes import Box, covers, intersect
from mcore_ckpt.core.errors import CorruptCheckpointError
from mcore_ckpt.format.crc import crc32
from mcore_ckpt.format.index import TensorEntry
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.load.ranges import Piece, split_box
from mcore_ckpt.tools.payloads import StoredPayloads, check_sum
from mcore_ckpt.tools.regrid import carrier

__all__ = [
    "read_box",
]


_BOX_WINDOW_BYTES = 8 * 1024 * 1024


_MAX_GAP_BYTES = 256 * 1024


def read_box(
    payloads: StoredPayloads,
    entry: TensorEntry,
    offsets: Sequence[int],
    sizes: Sequence[int],
    out: memoryview | None = None,
) -> memoryview:
    """Bytes of a box of a tensor, C order, little-endian.

    Args:
        payloads: the checkpoint.
        entry: the tensor.
        offsets: first element of the box.
        sizes: shape of the box, in elements.
        out: memory to fill; by default new.

    Raises:
        ChecksumError: a chunk that is wanted as a whole is damaged.
        CorruptCheckpointError: the stored chunks do not hold every element of the box exactly once, or are damaged.
        LoadError: they cannot be read.
    """
    elem_bytes = element_bytes(entry.dtype)
    nbytes = math.prod(sizes) * elem_bytes
    memory = memoryview(bytearray(nbytes)) if out is None else out
    box = Box(tuple(offsets), tuple(sizes))
    parts = [
        (chunk, part) for chunk in entry.chunks if (part := intersect(Box(chunk.offsets, chunk.sizes), box)) is not None
    ]
    problem = covers(sizes, [_relative(part, box.offsets) for _, part in parts])
    if problem and nbytes:
        raise CorruptCheckpointError(
            f"{entry.fqn}: the stored chunks of {payloads.index.path} do not hold the box at {list(offsets)} of sizes "
            f"{list(sizes)} exactly once: relative to the box, {problem}. Run `mcore-ckpt verify {payloads.index.path}`"
        )
    target = np.frombuffer(memory, carrier(elem_bytes)).reshape(box.sizes) if nbytes else None
    for chunk, part in parts:
        payload = payloads.locate(entry, chunk)
        if part == box and part.sizes == chunk.sizes:
            payloads.read_into(payload, 0, memory)
            check_sum(payload, crc32(memory[:nbytes]))
            continue
        inside = _relative(part, chunk.offsets)
        whole, value = part.sizes == chunk.sizes, 0  # the pieces of a whole chunk follow one another without gaps
        for piece in split_box(
            chunk.sizes, inside, elem_bytes, window_bytes=_BOX_WINDOW_BYTES, max_gap_bytes=_MAX_GAP_BYTES
        ):
            content = memoryview(bytearray(piece.stop - piece.start))
            payloads.read_into(payload, piece.start, content)
            value = crc32(content, value) if whole else 0
            elements = _elements(content, piece, chunk.sizes, elem_bytes)
            start = [
                inner + base - first
                for inner, base, first in zip(piece.box.offsets, chunk.offsets, box.offsets, strict=True)
            ]
            assert target is not None
            target[tuple(slice(at, at + size) for at, size in zip(start, piece.box.sizes, strict=True))] = elements
        if whole:
            check_sum(payload, value)
    return memory


def _relative(box: Box, origin: Sequence[int]) -> Box:
    return Box(tuple(offset - base for offset, base in zip(box.offsets, origin, strict=True)), box.sizes)


def _elements(
    content: memoryview, piece: Piece, chunk_sizes: Sequence[int], elem_bytes: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    """The elements of a piece, as a strided view of the bytes from its first to its last element."""
    strides = [elem_bytes] * len(chunk_sizes)
    for axis in range(len(chunk_sizes) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * chunk_sizes[axis + 1]
    return as_strided(np.frombuffer(content, carrier(elem_bytes)), piece.box.sizes, strides)
