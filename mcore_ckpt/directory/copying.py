"""What a checkpoint consists of that is to be copied, and one file of it after the other, compared by CRC-32.

A file that is there already is compared, not sent again: so a copy that was interrupted is resumed.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mcore_ckpt.core.crc import crc32, crc32_combine
from mcore_ckpt.core.errors import CheckpointExistsError, LoadError, SaveError
from mcore_ckpt.core.threads import in_parallel
from mcore_ckpt.directory.folders import files_below
from mcore_ckpt.directory.in_force import common_file_in_force, index_files, is_pending, with_common_files
from mcore_ckpt.directory.iterations import is_checkpoint_name
from mcore_ckpt.directory.lock import DirectoryLock, is_lock_file
from mcore_ckpt.format.file_names import data_file_of
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.format.metadata_read import (
    COMMON_FILE,
    DRAIN_FILE,
    MAX_METADATA_BYTES,
    METADATA_FILE,
    parse_index,
    read_small_file,
)
from mcore_ckpt.storage.base import FileVersion, RangeReader, RangeWriter, Storage, align_up
from mcore_ckpt.storage.direct_io import aligned_buffer
from mcore_ckpt.storage.resolve import storage_at

_PIECE_BYTES: Final = 8 * 1024 * 1024
_THREADS: Final = 4
_MOST_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """A checkpoint, as it is copied.

    Attributes:
        metadata: content of `.metadata`.
        version: of that file, before it was read.
        index: what that says.
        data: names of the data files.
        others: names of all other files but `.metadata` and the common state, also of those in folders.
        common: name of the file that holds the common state; None if an object does, or nothing.
    """

    metadata: bytes
    version: FileVersion | None
    index: CheckpointIndex
    data: tuple[str, ...]
    others: tuple[str, ...]
    common: str | None


def files_of(directory: Path) -> CheckpointFiles:
    """What there is to copy. Raises `LoadError`."""
    storage = storage_at(directory)
    version = storage.version(METADATA_FILE)
    metadata = read_small_file(directory, METADATA_FILE, MAX_METADATA_BYTES)
    index = parse_index(metadata, str(directory))
    names = with_common_files(storage, storage.list(), index)
    data = index_files(index)
    others = files_below(directory, lambda name: name in data or _is_left_out(name))
    return CheckpointFiles(
        metadata,
        version,
        index,
        tuple(sorted(data)),
        tuple(sorted((name for name in others if not is_lock_file(Path(name).name)), key=_index_last)),
        common_file_in_force(names, index),
    )


def _is_left_out(name: str) -> bool:
    """Whether an entry of the directory is copied otherwise, or not at all."""
    if name in (METADATA_FILE, COMMON_FILE, DRAIN_FILE) or is_checkpoint_name(name):
        return True
    return _is_passing(name) or is_pending(name) or data_file_of(name) is not None


def _is_passing(name: str) -> bool:
    """Whether a file is of a lock, or is just being published, or was when its process ended."""
    return is_lock_file(name) or (name.startswith(".") and name.endswith(".tmp"))


def _index_last(name: str) -> tuple[bool, str]:
    """A folder may hold a checkpoint of its own (ModelOpt's): no index is there before what it names."""
    return Path(name).name == METADATA_FILE, name


def refuse_replaced(storage: Storage, found: CheckpointFiles) -> None:
    """Raise `LoadError` if files may have been read of another save than `.metadata`: that has been replaced since."""
    if storage.version(METADATA_FILE) != found.version or storage.read(METADATA_FILE) != found.metadata:
        raise LoadError(
            f"{storage.location}: the checkpoint was replaced while it was copied; the copy is not published. "
            "Copy again"
        )


def refuse_changed(storage: Storage, name: str, version: FileVersion | None) -> None:
    """Raise `LoadError` if a file has been written to since it had this version: what was read may be of both."""
    if storage.version(name) != version:
        raise LoadError(f"{storage.path(name)}: was replaced while it was copied; copy again")


def refuse_others(target: Path, names: Collection[str]) -> None:
    """Raise `CheckpointExistsError` if a directory without an index holds anything but files of these names: of another
    checkpoint, whose copy was interrupted, that would pass for part of this one.
    """
    found = (name for name in files_below(target, _is_apart) if name not in names)
    others = list(itertools.islice(found, _MOST_SHOWN + 1))
    if others:
        shown = ", ".join(others[:_MOST_SHOWN]) + (", ..." if len(others) > _MOST_SHOWN else "")
        raise CheckpointExistsError(
            f"{target}: holds files that are not of the checkpoint that is copied: {shown}. They may be of another, "
            "whose copy was interrupted, and are not published with this one; nothing has been written. Remove them if "
            "nobody needs them, or copy into another directory"
        )


def _is_apart(name: str) -> bool:
    """Whether an entry of the directory is no part of the checkpoint in it."""
    return _is_passing(name) or is_checkpoint_name(name)


def copy_file(
    reads: Storage,
    name: str,
    writes: Storage,
    own_name: str,
    arrived: Callable[[int], None] = lambda nbytes: None,
    lock: DirectoryLock | None = None,
) -> int | None:
    """Copy a file, and compare; returns its length, or None if it was there. `arrived` is called with lengths written.

    With the lock of the whole directory no file is made or removed after another process has taken that over. Raises
    `LoadError` if it cannot be read, `SaveError` if it cannot be written, or does not hold what was written.
    """
    delete = writes.delete if lock is None else lock.delete
    version = reads.version(name)
    with reads.open_reader(name) as reader:
        there = writes.version(own_name)
        if there is not None:
            if there.size_bytes == reader.size_bytes and _crc(reader) == _crc_of(writes, own_name):
                return None
            delete(own_name)
        open_writer = writes.open_writer if lock is None else lock.open_writer
        writer = open_writer(own_name, size_bytes=reader.size_bytes)
        try:
            expected = _crc(reader, writer, arrived)
            refuse_changed(reads, name, version)
            writer.finish(reader.size_bytes)
        except BaseException:
            writer.abort()
            raise
        size_bytes = reader.size_bytes
    got = _crc_of(writes, own_name)
    if got != expected:
        delete(own_name)
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


def _crc(
    reader: RangeReader, writer: RangeWriter | None = None, arrived: Callable[[int], None] = lambda nbytes: None
) -> int:
    """The CRC-32 of a file that is read, in several pieces at once, and with a writer also written there."""
    size_bytes = reader.size_bytes
    sums = [0] * -(-size_bytes // _PIECE_BYTES)
    buffers = threading.local()
    unreadable: list[BaseException] = []

    def piece(number: int) -> None:
        if not hasattr(buffers, "view"):
            buffers.view = aligned_buffer(_PIECE_BYTES)
        start = number * _PIECE_BYTES
        view = buffers.view[: min(_PIECE_BYTES, size_bytes - start)]
        try:
            reader.read_into(start, view)
        except BaseException as error:
            unreadable.append(error)
            if writer is not None:
                writer.abort()  # other threads may wait for this piece to be written before theirs
            raise
        sums[number] = crc32(view)
        if writer is not None:
            writer.write(start, buffers.view[: align_up(len(view))])
            arrived(len(view))

    try:
        in_parallel(range(len(sums)), piece, _THREADS, "mcore-ckpt-copy")
    except SaveError:
        if unreadable:  # by which the writing was ended
            raise unreadable[0] from None
        raise
    total = 0
    for number, value in enumerate(sums):
        total = crc32_combine(total, value, min(_PIECE_BYTES, size_bytes - number * _PIECE_BYTES))
    return total
