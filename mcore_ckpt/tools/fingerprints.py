"""The fingerprint of a stored state: that of what was in memory when it was saved, whatever its chunks. No torch.

What this package has saved says it of each tensor. For others, a chunk that is one run of its tensor adds the CRC-32
that is stored with its elements; the rest is read, and compared with theirs.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from mcore_ckpt.core.console import Progress
from mcore_ckpt.core.fingerprints import StateFingerprint, TensorFingerprint, state_of
from mcore_ckpt.core.threads import in_parallel
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.load.stored_fingerprints import global_shape, part_of_chunk
from mcore_ckpt.tools.inspection import checkpoint_directory
from mcore_ckpt.tools.keys import is_optimizer_key, key_filter
from mcore_ckpt.tools.payloads import StoredPayloads, check_tiled

if TYPE_CHECKING:
    from mcore_ckpt.format.index import StoredChunk, TensorEntry


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
        ChecksumError: elements that had to be read are damaged. What is stored is taken as it is: `mcore-ckpt verify
            --state` compares it with the elements.
    """
    index = read_index(checkpoint_directory(path)).without_shadow_copies()
    wanted = key_filter(only)
    keys = [key for key in index.tensors if wanted(key)]
    check_tiled(index, keys)
    with StoredPayloads(index) as payloads:
        return payloads_fingerprint(payloads, keys, workers=workers, progress=progress)


def checked_fingerprint(
    path: str | os.PathLike[str], *, workers: int = 2, progress: bool | None = False
) -> tuple[StateFingerprint, list[str]]:
    """As `checkpoint_fingerprint`, from the chunks alone; and keys of the tensors whose stored fingerprint is another:
    chunks lie where others should, or the fingerprint was not that of what was saved.
    """
    index = read_index(checkpoint_directory(path)).without_shadow_copies()
    check_tiled(index, list(index.tensors))
    stored, unaware = index.fingerprints, replace(index)
    with StoredPayloads(unaware) as payloads:
        found = payloads_fingerprint(payloads, list(index.tensors), workers=workers, progress=progress)
    taken = found.tensors or {}
    return found, [key for key, crc in stored.items() if key in taken and taken[key].crc32 != crc]


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
    unknown = [index.tensors[key] for key in keys if key not in index.fingerprints]
    total = sum(math.prod(entry.shape) * element_bytes(entry.dtype) for entry in unknown)

    with Progress("fingerprint", total, shown=progress) as bar:

        def take(key: str) -> None:
            entry = index.tensors[key]
            shape = global_shape(index, entry)
            crc = index.fingerprints.get(key)
            if crc is None:
                crc = 0
                for chunk in entry.chunks:
                    crc ^= _part_of_chunk(payloads, entry, chunk, shape)
                    bar.advance(math.prod(chunk.sizes) * element_bytes(entry.dtype))
            found[key] = TensorFingerprint(entry.dtype, shape, crc)

        in_parallel(keys, take, workers)
    return state_of({key: found[key] for key in keys})


def _part_of_chunk(payloads: StoredPayloads, entry: TensorEntry, chunk: StoredChunk, shape: tuple[int, ...]) -> int:
    payload, elem_bytes = payloads.locate(entry, chunk), element_bytes(entry.dtype)

    def read(first: int, count: int) -> memoryview:
        view = memoryview(bytearray(count * elem_bytes))
        payloads.read_into(payload, first * elem_bytes, view)
        return view

    return part_of_chunk(entry, chunk, shape, payload.crc32, read)
