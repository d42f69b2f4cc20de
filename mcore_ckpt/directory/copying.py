"""What a checkpoint consists of that is to be copied, and one file of it after the other, compared by CRC-32.

A file that is there already is compared, not sent again: so a copy that was interrupted is resumed.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mcore_ckpt.core.crc import crc32, crc32_combine
from mcore_ckpt.core.errors import CheckpointExistsError, LoadError, SaveError
from mcore_ckpt.core.threads import in_parallel
from mcore_ckpt.directory.folders import files_below
from mcore_ckpt.directory.in_force import common_file_in_force, index_files, is_pending, look, with_common_files
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

ARRIVED: Final = ".mcore_ckpt_arrived."
"""With the id of a save behind it: what a node has copied of that, as it tells the node that commits."""

COPYING: Final = ".mcore_ckpt_copying."
"""With the id of a save behind it: a data file on its way to the second tier."""

_OF_THIS_PACKAGE: Final = ".mcore_ckpt_"
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


def own_files(directory: Path) -> list[str]:
    """Names of the files in a directory itself, but not in folders, that a copy of the checkpoint has, too. Raises
    `LoadError`.
    """
    index = parse_index(read_small_file(directory, METADATA_FILE, MAX_METADATA_BYTES), str(directory))
    data = index_files(index)
    return [
        name
        for name in storage_at(directory).list()
        if name in data or name == METADATA_FILE or not (_is_left_out(name) or name.startswith(_OF_THIS_PACKAGE))
    ]


def _is_left_out(name: str) -> bool:
    """Whether an entry of the directory is copied otherwise, or not at all."""
    if name in (METADATA_FILE, COMMON_FILE, DRAIN_FILE) or is_checkpoint_name(name):
        return True
    return _is_passing(name) or is_pending(name) or data_file_of(name) is not None


def _is_passing(name: str) -> bool:
    """Whether a file is of a lock, or is just being published or copied, or was when its process ended."""
    return is_lock_file(name) or name.startswith((ARRIVED, COPYING)) or (name.startswith(".") and name.endswith(".tmp"))


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
    """Whether an entry of the directory is no part of the checkpoint in it; a note tells of which save it is."""
    return _is_passing(name) or is_checkpoint_name(name) or name == DRAIN_FILE


def copy_file(
    reads: Storage,
    name: str,
    writes: Storage,
    own_name: str,
    *,
    lock: DirectoryLock,
) -> int | None:
    """Copy a file under the lock of the whole directory, and compare; returns its length, or None if it was there.

    No file is made or removed after another process has taken the directory over. Raises `LoadError` if it cannot be
    read, `SaveError` if it cannot be written, or does not hold what was written.
    """
    version = reads.version(name)
    with reads.open_reader(name) as reader:
        is_same = _is_same(reader, writes, own_name)
        if is_same:
            return None
        if is_same is not None:
            lock.delete(own_name)
        writer = lock.open_writer(own_name, size_bytes=reader.size_bytes)
        expected = _written(reads, name, version, reader, writer)
    got = _crc_of(writes, own_name)
    if got != expected:
        lock.delete(own_name)
        raise _differs(reads, name, writes, own_name, got, expected)
    return reader.size_bytes


def copy_data_file(reads: Storage, name: str, writes: Storage, save: str, arrived: Callable[[int], None]) -> int | None:
    """Copy a file whose name carries the id of a save, without a lock; otherwise as `copy_file`. `arrived` is called
    with lengths written.

    Other processes may be copying the same file. It has its name when it is complete and compared, where it could be
    read before (an object is there when it is complete). A damaged one of that name goes under the lock only.
    """
    version = reads.version(name)
    private = writes.made_by(renamed=f"{COPYING}{save}.{secrets.token_hex(8)}", in_place=name)
    with reads.open_reader(name) as reader:
        is_same = _is_same(reader, writes, name)
        if is_same:
            return None
        if is_same is not None:
            _remove_damaged(writes, name)
        writer = writes.open_writer(private, size_bytes=reader.size_bytes)
        expected = _written(reads, name, version, reader, writer, arrived)
    try:
        got = _crc_of(writes, private)
        if got != expected:
            if private == name:
                _remove_damaged(writes, name)
            raise _differs(reads, name, writes, name, got, expected)
        if private != name and not _named(writes, private, name) and _crc_of(writes, name) != expected:
            raise SaveError(f"{writes.path(name)}: another process has copied something else there; copy again")
    finally:
        if private != name:
            with contextlib.suppress(SaveError):  # what is left is swept when the checkpoint is committed
                writes.delete(private)
    return reader.size_bytes


def _named(writes: Storage, private: str, name: str) -> bool:
    """Give a copy its name; False if another process was faster, which may have committed the checkpoint, and swept."""
    try:
        return writes.move_new(private, name)
    except SaveError:
        if not writes.exists(name):
            raise
        return False


def _remove_damaged(writes: Storage, name: str) -> None:
    """Remove a data file that is not what it should be, unless a checkpoint needs it that is in force by now."""
    with DirectoryLock.take(writes) as lock:
        needed = look(writes).needed
        if needed is None or name in needed:
            raise SaveError(
                f"{writes.path(name)}: is not what it is a copy of, and the checkpoint that is in force there needs "
                "it. It stays. `mcore-ckpt verify` says whether it is damaged"
            )
        lock.delete(name)


def _is_same(reader: RangeReader, writes: Storage, name: str) -> bool | None:
    """Whether a file of that name holds what is read; None if there is none."""
    there = writes.version(name)
    if there is None:
        return None
    return there.size_bytes == reader.size_bytes and _crc(reader) == _crc_of(writes, name)


def _written(
    reads: Storage,
    name: str,
    version: FileVersion | None,
    reader: RangeReader,
    writer: RangeWriter,
    arrived: Callable[[int], None] = lambda nbytes: None,
) -> int:
    """Write what is read; returns the CRC-32 of it."""
    try:
        expected = _crc(reader, writer, arrived)
        refuse_changed(reads, name, version)
        writer.finish(reader.size_bytes)
    except BaseException:
        writer.abort()
        raise
    return expected


def _differs(reads: Storage, name: str, writes: Storage, own_name: str, got: int, expected: int) -> SaveError:
    return SaveError(
        f"{writes.path(own_name)}: the copy has CRC-32 {got:#010x}, expected {expected:#010x}, as read from "
        f"{reads.path(name)}; it was deleted. Check the device, and copy again"
    )


def is_copied(reads: Storage, name: str, writes: Storage) -> bool:
    """Whether a file is in both, with the same content. Raises `LoadError` or `SaveError`."""
    with reads.open_reader(name) as reader:
        return bool(_is_same(reader, writes, name))


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
