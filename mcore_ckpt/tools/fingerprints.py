"""The fingerprint of a stored state: that of what was in memory when it was saved, whatever its chunks. No torch.

A chunk that is one run of its tensor adds the CRC-32 that is stored with its elements; others are read, and compared
with theirs.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mcore_ckpt.core.boxes import Box, flat_boxes
from mcore_ckpt.core.console import Progress
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import CorruptCheckpointError
from mcore_ckpt.core.fingerprints import StateFingerprint, TensorFingerprint, part_of, part_of_run, state_of
from mcore_ckpt.core.threads import in_parallel
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.items.checksums import checksum_error
from mcore_ckpt.tools.inspection import checkpoint_directory
from mcore_ckpt.tools.keys import is_optimizer_key, key_filter
from mcore_ckpt.tools.payloads import StoredPayloads, check_tiled

if TYPE_CHECKING:
    from mcore_ckpt.format.index import CheckpointIndex, StoredChunk, TensorEntry

_WINDOW_BYTES = 8 * 1024 * 1024
_NOTE = "nd_reformulated_orig_global_shape"


def checkpoint_fingerprint(
    path: str | os.PathLike[str], *, only: str | None = None, workers: int = 2, progress: bool | None = False
) -> StateFingerprint:
    """The fingerprint of the tensors in a checkpoint: `mcore_ckpt.fingerprint` of the state that was saved.

    Args:
        path: directory of the checkpoint, or one with a tracker file.
        only: keys to take: with any of `*?[` a shell pattern for the complete key, otherwise a part of it.
        workers: threads that read and sum.
        progress: show a bar; None: if standard error is a terminal.

    Returns:
        With the fingerprint of each tensor. Shadow copies and objects have no part in it.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError: there is none, or its chunks do not make up a tensor.
        ChecksumError: elements that had to be read are damaged. Stored sums are taken as they are: `verify_checkpoint`
            compares those with the elements.
    """
    index = read_index(checkpoint_directory(path)).without_shadow_copies()
    wanted = key_filter(only)
    keys = [key for key in index.tensors if wanted(key)]
    check_tiled(index, keys)
    with StoredPayloads(index) as payloads:
        return payloads_fingerprint(payloads, keys, workers=workers, progress=progress)


def model_and_optimizer(found: StateFingerprint) -> tuple[StateFingerprint, StateFingerprint]:
    """Those of the model's and of the optimizer's tensors, of a fingerprint with names."""
    tensors = found.tensors or {}
    return (
        state_of({key: tensor for key, tensor in tensors.items() if not is_optimizer_key(key)}),
        state_of({key: tensor for key, tensor in tensors.items() if is_optimizer_key(key)}),
    )


def payloads_fingerprint(
    payloads: StoredPayloads, keys: list[str], *, workers: int = 2, progress: bool | None = False
) -> StateFingerprint:
    """As `checkpoint_fingerprint`, of open payloads, which may be views. Their chunks have to make up the tensors."""
    index = payloads.index
    found: dict[str, TensorFingerprint] = {}
    total = sum(math.prod(index.tensors[key].shape) * element_bytes(index.tensors[key].dtype) for key in keys)

    with Progress("fingerprint", total, shown=progress) as bar:

        def take(key: str) -> None:
            entry = index.tensors[key]
            shape = _global_shape(index, entry)
            crc = 0
            for chunk in entry.chunks:
                crc ^= _part_of_chunk(payloads, entry, chunk, shape)
                bar.advance(math.prod(chunk.sizes) * element_bytes(entry.dtype))
            found[key] = TensorFingerprint(entry.dtype, shape, crc)

        in_parallel(keys, take, workers)
    return state_of({key: found[key] for key in keys})


def _global_shape(index: CheckpointIndex, entry: TensorEntry) -> tuple[int, ...]:
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


def _boxes(entry: TensorEntry, chunk: StoredChunk, shape: tuple[int, ...], first: int, count: int) -> Iterator[Box]:
    """Elements `[first, first + count)` of a chunk as slices of the tensor, in order."""
    base, sizes = chunk.offsets, chunk.sizes
    if shape != entry.shape:
        sizes = tuple(map(operator.floordiv, shape, entry.shape[:-1]))
        base = tuple(map(operator.mul, chunk.offsets[:-1], sizes))
        first += chunk.offsets[-1]
    for box in flat_boxes(sizes, first, first + count):
        yield Box(tuple(map(operator.add, base, box.offsets)), box.sizes)


def _part_of_chunk(payloads: StoredPayloads, entry: TensorEntry, chunk: StoredChunk, shape: tuple[int, ...]) -> int:
    elem_bytes, count = element_bytes(entry.dtype), math.prod(chunk.sizes)
    if not count:
        return 0
    payload = payloads.locate(entry, chunk)
    boxes = list(_boxes(entry, chunk, shape, 0, count))
    if len(boxes) == 1 and payload.crc32 is not None:
        part = part_of_run(payload.crc32, shape, boxes[0], elem_bytes)
        if part is not None:
            return part
    step = max(1, _WINDOW_BYTES // elem_bytes)
    window = memoryview(bytearray(min(count, step) * elem_bytes))
    part = value = 0
    for at in range(0, count, step):
        view = window[: min(step, count - at) * elem_bytes]
        payloads.read_into(payload, at * elem_bytes, view)
        value = crc32(view, value)
        done = 0
        for box in _boxes(entry, chunk, shape, at, len(view) // elem_bytes):
            nbytes = math.prod(box.sizes) * elem_bytes
            part ^= part_of(view[done : done + nbytes], shape, box, elem_bytes)
            done += nbytes
    if payload.crc32 is not None and payload.crc32 != value:
        raise checksum_error(payload.where, "its elements have", value, payload.crc32)
    return part
