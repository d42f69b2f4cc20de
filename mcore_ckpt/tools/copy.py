"""Copy a checkpoint between any two places: directories of file systems, and of object stores.

The copy is published as a save is: data files first, `.metadata` last, under the lock of the directory. So it is there
complete or not at all, and a copy that was interrupted is resumed: what arrived complete is compared, not sent again.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import Final

from mcore_ckpt.core.crc import crc32, crc32_combine
from mcore_ckpt.core.errors import CheckpointExistsError, LoadError, SaveError
from mcore_ckpt.core.paths import checkpoint_path
from mcore_ckpt.core.threads import in_parallel
from mcore_ckpt.directory.in_force import common_file_in_force, index_files, is_pending, with_common_files
from mcore_ckpt.directory.lock import DirectoryLock, is_lock_file
from mcore_ckpt.format.file_names import data_file_of
from mcore_ckpt.format.metadata_read import COMMON_FILE, MAX_METADATA_BYTES, METADATA_FILE, parse_index, read_small_file
from mcore_ckpt.storage.base import RangeReader, RangeWriter, Storage, align_up
from mcore_ckpt.storage.direct_io import aligned_buffer
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.inspection import checkpoint_directory

_PIECE_BYTES: Final = 8 * 1024 * 1024
_THREADS: Final = 4


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What a copy has done.

    Attributes:
        source: where the checkpoint is.
        target: where its copy is.
        copied: names of the files that were sent.
        kept: names of those that were there already, with the same content.
        copied_bytes: that were sent.
        seconds: it took.
    """

    source: str
    target: str
    copied: tuple[str, ...]
    kept: tuple[str, ...]
    copied_bytes: int
    seconds: float


def copy_checkpoint(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> CopyReport:
    """Copy one checkpoint; each file is read back, and its CRC-32 compared.

    Args:
        source: directory of a checkpoint, or of a run whose tracker file names one; a path or a URL.
        target: directory of the copy, a path or a URL. What an interrupted copy has left there is used.

    Raises:
        CheckpointExistsError: there is another checkpoint.
        LoadError: the checkpoint cannot be read.
        SaveError: the copy cannot be written, or does not hold what was written, or a save holds the directory.
    """
    started_s = time.monotonic()
    given, taken = checkpoint_directory(source), checkpoint_path(target)
    reads, writes = storage_at(given), storage_at(taken)
    metadata = read_small_file(given, METADATA_FILE, MAX_METADATA_BYTES)
    index = parse_index(metadata, str(given))
    names = with_common_files(reads, reads.list(), index)
    common = common_file_in_force(names, index)
    data = index_files(index)
    others = [name for name in names if not (is_lock_file(name) or is_pending(name) or data_file_of(name))]
    files = {name: name for name in (*sorted(data), *others) if name not in (METADATA_FILE, COMMON_FILE)}
    if common is not None:
        files[common] = COMMON_FILE
    writes.ensure()
    with DirectoryLock.take(writes) as lock:
        _refuse_another(writes, metadata)
        copied: list[str] = []
        kept: list[str] = []
        copied_bytes = 0
        for name, own_name in files.items():
            lock.check()
            sent_bytes = _copy_file(reads, name, writes, own_name)
            (kept if sent_bytes is None else copied).append(own_name)
            copied_bytes += sent_bytes or 0
        writes.sync(parents=True)
        lock.publish(METADATA_FILE, metadata)
    return CopyReport(
        str(given), str(taken), (*copied, METADATA_FILE), tuple(kept), copied_bytes, time.monotonic() - started_s
    )


def _refuse_another(storage: Storage, metadata: bytes) -> None:
    if storage.exists(METADATA_FILE) and storage.read(METADATA_FILE) != metadata:
        raise CheckpointExistsError(
            f"{storage.location}: there is another checkpoint already; copy into another directory, or remove it first"
        )


def _copy_file(reads: Storage, name: str, writes: Storage, own_name: str) -> int | None:
    """Copy a file, and compare; returns its length, or None if it was there."""
    with reads.open_reader(name) as reader:
        there = writes.version(own_name)
        if there is not None:
            if there.size_bytes == reader.size_bytes and _crc(reader) == _crc_of(writes, own_name):
                return None
            writes.delete(own_name)
        writer = writes.open_writer(own_name, size_bytes=reader.size_bytes)
        try:
            expected = _crc(reader, writer)
            writer.finish(reader.size_bytes)
        except BaseException:
            writer.abort()
            raise
        size_bytes = reader.size_bytes
    got = _crc_of(writes, own_name)
    if got != expected:
        writes.delete(own_name)
        raise SaveError(
            f"{writes.path(own_name)}: the copy has CRC-32 {got:#010x}, expected {expected:#010x}, as read from "
            f"{reads.path(name)}; it was deleted. Check the device, and copy again"
        )
    return size_bytes


def _crc_of(storage: Storage, name: str) -> int:
    try:
        with storage.open_reader(name) as reader:
            return _crc(reader)
    except LoadError as error:
        raise SaveError(f"{storage.path(name)}: what was written cannot be read back: {error}") from error


def _crc(reader: RangeReader, writer: RangeWriter | None = None) -> int:
    """The CRC-32 of a file that is read, in several pieces at once, and with a writer also written there."""
    size_bytes = reader.size_bytes
    sums = [0] * -(-size_bytes // _PIECE_BYTES)
    buffers = threading.local()

    def piece(number: int) -> None:
        if not hasattr(buffers, "view"):
            buffers.view = aligned_buffer(_PIECE_BYTES)
        start = number * _PIECE_BYTES
        view = buffers.view[: min(_PIECE_BYTES, size_bytes - start)]
        try:
            reader.read_into(start, view)
        except BaseException:
            if writer is not None:
                writer.abort()  # other threads may wait for this piece to be written before theirs
            raise
        sums[number] = crc32(view)
        if writer is not None:
            writer.write(start, buffers.view[: align_up(len(view))])

    in_parallel(range(len(sums)), piece, _THREADS, "mcore-ckpt-copy")
    total = 0
    for number, value in enumerate(sums):
        total = crc32_combine(total, value, min(_PIECE_BYTES, size_bytes - number * _PIECE_BYTES))
    return total
