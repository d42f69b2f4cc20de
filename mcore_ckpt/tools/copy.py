"""Copy a checkpoint between any two places: directories of file systems, and of object stores.

The copy is published as a save is: data files first, `.metadata` last, under the lock of the directory. So it is there
complete or not at all, and a copy that was interrupted is resumed: what arrived complete is compared, not sent again.
The source is compared with its own checksums before: a damaged one would else replace the last intact copy of it.
"""

from __future__ import annotations

import os
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.core.errors import CheckpointExistsError, CheckpointNotFoundError, CorruptCheckpointError, OptionError
from mcore_ckpt.directory.common_file import read_common_file
from mcore_ckpt.directory.copying import CheckpointFiles, copy_file, files_of, refuse_others, refuse_replaced
from mcore_ckpt.directory.folders import FOLDERS_OF_MEGATRON, folders_of, sync_folders
from mcore_ckpt.directory.lock import DirectoryLock
from mcore_ckpt.format.metadata_read import COMMON_FILE, METADATA_FILE
from mcore_ckpt.items.item_checks import check_data_files
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.run_folders import places_of


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
    """Copy one checkpoint that its own checksums say is intact; each file is read back, and its CRC-32 compared.

    Args:
        source: directory of a checkpoint, or of a run whose tracker file names one; a path or a URL.
        target: directory of the copy, a path or a URL. What an interrupted copy has left there is used. If `source` is
            a run, `target` becomes one: the copy is `target/iter_0001000`. A checkpoint called `iter_0001000` gets a
            tracker file next to it, unless one there names a later iteration.

    Raises:
        CheckpointExistsError: there is another checkpoint, or what an interrupted copy of another one has left.
        OptionError: the target lies inside the source.
        CorruptCheckpointError: the source is damaged. Nothing is written.
        LoadError: the checkpoint cannot be read.
        SaveError: the copy cannot be written, or does not hold what was written, or a save holds the directory.
    """
    started_s = time.monotonic()
    places = places_of(source, target, same_format=True)
    given, taken = places.source, places.target
    reads, writes = storage_at(given), storage_at(taken)
    if reads.holds(writes):
        raise OptionError(f"{taken}: lies inside the checkpoint that is to be copied, {given}; copy it elsewhere")
    with reads.in_use(METADATA_FILE):
        report = _copy(given, reads, taken, writes, started_s)
    places.finish()
    return report


def _copy(given: Path, reads: Storage, taken: Path, writes: Storage, started_s: float) -> CopyReport:
    found = files_of(given)
    files = {name: name for name in (*found.data, *found.others)}
    if found.common is not None:
        files[found.common] = COMMON_FILE
    for own_name in files.values():
        writes.path(own_name)  # refuses a name that there cannot be
    _refuse_another(writes, found.metadata)
    _refuse_damaged(given, found)
    writes.ensure()
    with DirectoryLock.take(writes) as lock:
        lock.sweep(writes.list(), notes=False)
        _refuse_another(writes, found.metadata)
        if not writes.exists(METADATA_FILE):
            refuse_others(taken, set(files.values()))
        for place in (writes, *(storage_at(taken / folder) for folder in folders_of(files))):
            for name in place.unfinished():
                place.discard_unfinished(name)
        copied: list[str] = []
        kept: list[str] = []
        copied_bytes = 0
        for name, own_name in files.items():
            lock.check()
            sent_bytes = copy_file(reads, name, writes, own_name, lock=lock)
            (kept if sent_bytes is None else copied).append(own_name)
            copied_bytes += sent_bytes or 0
        sync_folders(taken, files.values())
        writes.sync(parents=True)
        refuse_replaced(reads, found)
        lock.publish(METADATA_FILE, found.metadata)
    return CopyReport(
        str(given), str(taken), (*copied, METADATA_FILE), tuple(kept), copied_bytes, time.monotonic() - started_s
    )


def _refuse_damaged(given: Path, found: CheckpointFiles) -> None:
    """Raise `LoadError` if a file is not what the index says; also in folders that hold checkpoints of their own."""
    reads = storage_at(given)
    try:
        check_data_files(reads, found.index, found.data)
    except (CorruptCheckpointError, CheckpointNotFoundError) as error:
        raise CorruptCheckpointError(
            f"the checkpoint that is to be copied is damaged, and nothing is copied: {error} (mcore-ckpt repair "
            f"{shlex.quote(str(given))} --from COPY)"
        ) from error
    if found.common is not None:
        read_common_file(reads, found.common, found.index.manifest)
    for folder in FOLDERS_OF_MEGATRON:
        if f"{folder}/{METADATA_FILE}" in found.others:
            _refuse_damaged(given / folder, files_of(given / folder))


def _refuse_another(storage: Storage, metadata: bytes) -> None:
    if storage.exists(METADATA_FILE) and storage.read(METADATA_FILE) != metadata:
        raise CheckpointExistsError(
            f"{storage.location}: there is another checkpoint already; copy into another directory, or remove it first"
        )
