"""Two tiers: a checkpoint that was saved on fast local storage is copied to a second place, and committed there.

A note in the local directory says where to, which data files lie here, and how far it is. Where each node has its own
disk, each has such a note, and copies its own files. The node of the coordinator commits: when all files of the
checkpoint have arrived, it publishes `.metadata` in the second tier, under the lock of that directory. The names of
data files carry the id of their save, so no file of another save is ever taken for one of these. Until that moment the
second tier holds what it held before.

What is on the way when a process ends is resumed from the note: what has arrived is compared, not sent again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

from mcore_ckpt.core.errors import (
    CorruptCheckpointError,
    LoadError,
    SaveError,
)
from mcore_ckpt.core.paths import checkpoint_path
from mcore_ckpt.directory.copying import CheckpointFiles, copy_file, files_of
from mcore_ckpt.directory.drain_note import DrainNote
from mcore_ckpt.directory.in_force import index_files, is_in_force, pending_name, saves_of
from mcore_ckpt.directory.iterations import iteration_directories, iteration_of, tracked_name
from mcore_ckpt.directory.lock import DirectoryLock
from mcore_ckpt.format.file_names import data_file_of
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.format.metadata_read import (
    COMMON_FILE,
    CONFIG_FILE,
    METADATA_FILE,
    TRACKER_FILE,
    parse_index,
)
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import storage_at

# What a node has copied of a checkpoint, as it tells the node that commits.
_ARRIVED: Final = ".mcore_ckpt_arrived."


def drain(directory: Path, note: DrainNote, arrived: Callable[[int], None], *, own_are_there: bool = False) -> bool:
    """Copy what lies in a local directory to the second tier, and commit there if that is for this node to do.

    Args:
        directory: of the checkpoint.
        note: what it says.
        arrived: called with the lengths of what has been copied, or was there.
        own_are_there: an earlier call of this process has copied what lies here.

    Returns:
        False if parts of other nodes have not arrived yet: then nothing is committed, and the same call resumes.

    Raises:
        LoadError: it cannot be read, or is of another save by now.
        SaveError: the second tier cannot be written, or another save holds the directory there.
    """
    reads, writes = storage_at(directory), storage_at(note.to)
    with reads.in_use(METADATA_FILE):
        found = files_of(directory)
        if note.save not in saves_of(found.index):
            raise LoadError(f"{directory}: another save has replaced the checkpoint before it was copied to {note.to}")
        writes.ensure()
        for name in () if own_are_there else found.data if note.files is None else note.files:
            if copy_file(reads, name, writes, name, arrived) is None:
                arrived(writes.size(name))
        if not note.commits:
            content = json.dumps(list(note.files or ())).encode()
            writes.publish(f"{_ARRIVED}{note.save}.{_short(note.files or ())}", content)
            return True
        if note.files is not None and not _have_arrived(writes, note, found):
            return False
        _commit(reads, writes, found, note.save)
    return True


def _short(names: tuple[str, ...]) -> str:
    """What tells the nodes of a save apart: the first of its files, which no other node has."""
    return names[0] if names else "none"


def _have_arrived(writes: Storage, note: DrainNote, found: CheckpointFiles) -> bool:
    arrived = set(note.files or ())
    for name in writes.list():
        if name.startswith(f"{_ARRIVED}{note.save}."):
            arrived.update(json.loads(writes.read(name)))
    return arrived >= set(found.data)


def _commit(reads: Storage, writes: Storage, found: CheckpointFiles, save: str) -> None:
    """Publish a checkpoint whose data files are there, in the place of one that may be there already."""
    with DirectoryLock.take(writes) as lock:
        there = writes.read(METADATA_FILE) if writes.exists(METADATA_FILE) else None
        if there == found.metadata:
            return
        replaced = None if there is None else _index_of(there, writes)
        for name in found.others:
            content = reads.read(name)
            if not (writes.exists(name) and writes.read(name) == content):
                writes.publish(name, content)
        pending = pending_name(save)
        if found.common is not None:
            if there is None and writes.exists(COMMON_FILE):
                writes.delete(COMMON_FILE)  # of an attempt that was interrupted, or of a save that has failed
            copy_file(reads, found.common, writes, COMMON_FILE if there is None else pending)
        _check_lengths(writes, found)
        writes.sync(parents=True)
        lock.publish(METADATA_FILE, found.metadata)
        if found.common is None:
            writes.delete(COMMON_FILE)
        elif there is not None:
            writes.move(pending, COMMON_FILE)
        for name in sorted(set() if replaced is None else index_files(replaced) - set(found.data)):
            writes.delete(name)
        for name in writes.list():
            if name.startswith(_ARRIVED):
                writes.delete(name)
        writes.sync()


def _index_of(metadata: bytes, storage: Storage) -> CheckpointIndex | None:
    try:
        return parse_index(metadata, storage.location)
    except LoadError:
        return None  # what nobody can read names no file that could be removed


def _check_lengths(writes: Storage, found: CheckpointFiles) -> None:
    """Ask for each data file again: other nodes have copied some, and others may have removed them since."""
    for name in found.data:
        version = writes.version(name)
        listed = None if found.index.manifest is None else found.index.manifest.files.get(name)
        if version is None or (listed is not None and listed.size_bytes != version.size_bytes):
            raise SaveError(
                f"{writes.path(name)}: "
                + ("is not there any more" if version is None else f"has {version.size_bytes} bytes")
                + (f", expected {listed.size_bytes}" if listed is not None else "")
                + "; the checkpoint is not committed, and copied again"
            )


def give_up(note: DrainNote) -> None:
    """Remove from the second tier what was copied of a checkpoint that is gone here, and was not committed there.

    Raises `LoadError` or `SaveError`.
    """
    storage = storage_at(note.to)
    if is_in_force(storage, bytes.fromhex(note.save)):
        return
    for name in (*storage.list(), *storage.unfinished()):
        found = data_file_of(name)
        if found is not None and found.save == note.save:
            storage.discard_unfinished(name)
            storage.delete(name)
        elif name.startswith(f"{_ARRIVED}{note.save}.") or name == pending_name(note.save):
            storage.delete(name)
    if not storage.exists(METADATA_FILE):  # of a checkpoint that is there, they are
        for name in (CONFIG_FILE, COMMON_FILE):
            storage.delete(name)
    storage.remove()


def undrained(run: Path) -> list[tuple[Path, DrainNote]]:
    """Checkpoints of a run that are still to be copied to the second tier, by iteration. Raises `LoadError`."""
    found = []
    for directory in iteration_directories(run):
        note = DrainNote.read(directory)
        if note is not None and note.state != "copied" and storage_at(directory).exists(METADATA_FILE):
            found.append((directory, note))
    return found


def track_drained(run: Path) -> str | None:
    """Let the tracker file of the second tier name the checkpoint that was saved last of those that it holds.

    Only if the run itself has a tracker file. Returns that checkpoint's name if the file did not name it before.

    Raises:
        LoadError: the run cannot be listed.
        SaveError: the tracker file cannot be written.
    """
    if tracked_name(run) is None:
        return None
    saved: list[tuple[int, Path, DrainNote]] = []
    for directory in iteration_directories(run):
        note = DrainNote.read(directory)
        version = storage_at(directory).version(METADATA_FILE)
        if note is not None and note.commits and note.state == "copied" and version is not None:
            saved.append((version.modified_ns, directory, note))
    if not saved:
        return None
    _, directory, note = max(saved, key=lambda found: found[0])
    iteration = iteration_of(directory.name)
    target = checkpoint_path(note.to).parent
    try:
        if iteration is None or tracked_name(target) == directory.name:
            return None
    except CorruptCheckpointError:
        pass  # it is written again
    storage_at(target).publish(TRACKER_FILE, str(iteration).encode())
    return directory.name
