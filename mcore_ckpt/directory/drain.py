"""Two tiers: a checkpoint that was saved on fast local storage is copied to a second place, and committed there.

A note in the local directory says where to, which data files lie here, and how far it is. Where each node has its own
disk, each has such a note, and copies its own files. The node of the coordinator commits: when all files of the
checkpoint have arrived, it publishes `.metadata` in the second tier, under the lock of that directory. The names of
data files carry the id of their save, so no file of another save is ever taken for one of these. Until that moment the
second tier holds what it held before.

What is on the way when a process ends is resumed from the note: what has arrived is compared, not sent again. That may
be long after: so a checkpoint of the second tier is replaced only by one that was saved later. The note is copied last
of all, and tells there when that was.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from mcore_ckpt.core.errors import (
    CorruptCheckpointError,
    LoadError,
    SaveError,
)
from mcore_ckpt.core.paths import checkpoint_path
from mcore_ckpt.directory.common_file import read_common_file
from mcore_ckpt.directory.copying import CheckpointFiles, copy_file, files_of, refuse_changed, refuse_replaced
from mcore_ckpt.directory.drain_note import DrainNote
from mcore_ckpt.directory.folders import FOLDERS_OF_MEGATRON, files_below, sync_folders
from mcore_ckpt.directory.in_force import (
    InForce,
    index_files,
    is_in_force,
    is_pending,
    look,
    pending_name,
    saves_of,
)
from mcore_ckpt.directory.iterations import iteration_directories, iteration_of, tracked_name
from mcore_ckpt.directory.lock import DirectoryLock
from mcore_ckpt.format.file_names import data_file_of
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.format.metadata_read import (
    COMMON_FILE,
    CONFIG_FILE,
    DRAIN_FILE,
    METADATA_FILE,
    TRACKER_FILE,
)
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import storage_at

# Of a file of others that is read completely, and replaced at once.
_MAX_REPLACED_BYTES: Final = 64 * 1024**2
# What a node has copied of a checkpoint, as it tells the node that commits.
_ARRIVED: Final = ".mcore_ckpt_arrived."


class SupersededError(SaveError):
    """The second tier holds a checkpoint in that place that was saved later."""


def drain(
    directory: Path,
    note: DrainNote,
    arrived: Callable[[int], None],
    check: Callable[[CheckpointIndex, Iterable[str]], None],
    *,
    own_are_there: bool = False,
) -> bool:
    """Copy what lies in a local directory to the second tier, and commit there if that is for this node to do.

    A checkpoint that is committed there already is complete: nothing of it is written again.

    Args:
        directory: of the checkpoint.
        note: what it says.
        arrived: called with the lengths of what has been copied, or was there.
        check: called with the index, and the names of the files that are copied next: raises if they are damaged.
        own_are_there: an earlier call of this process has copied what lies here.

    Returns:
        False if parts of other nodes have not arrived yet: then nothing is committed, and the same call resumes.

    Raises:
        LoadError: it cannot be read, is damaged, or is of another save by now.
        SupersededError: the second tier holds a checkpoint there that was saved later.
        SaveError: the second tier cannot be written, or another save holds the directory there.
    """
    reads, writes = storage_at(directory), storage_at(note.to)
    with reads.in_use(METADATA_FILE):
        found = files_of(directory)
        if note.save not in saves_of(found.index):
            raise LoadError(f"{directory}: another save has replaced the checkpoint before it was copied to {note.to}")
        own = found.data if note.files is None else note.files
        if _holds(look(writes), note):
            arrived(note.total_bytes)
            if note.commits:
                _commit(reads, writes, found, note)
            return True
        _refuse_older(note)
        writes.ensure()
        if not own_are_there:
            check(found.index, own)
            for name in own:
                if copy_file(reads, name, writes, name, arrived) is None:
                    arrived(writes.size(name))
        if not note.commits:
            content = json.dumps(list(note.files or ())).encode()
            writes.publish(f"{_ARRIVED}{note.save}.{_short(note.files or ())}", content)
            return True
        if note.files is not None and not _have_arrived(writes, note, found):
            return False
        _commit(reads, writes, found, note)
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


def _holds(held: InForce, note: DrainNote) -> bool:
    """Whether the checkpoint in force is that of the note."""
    return held.index is not None and note.save in saves_of(held.index)


def _refuse_older(note: DrainNote) -> None:
    """Raise `SupersededError` if the second tier holds in that place what was saved later."""
    there_s = _saved_s(checkpoint_path(note.to))
    if there_s is not None and there_s > note.saved_s:
        raise SupersededError(
            f"{note.to} holds a checkpoint that was saved later ({_shown(there_s)}) than this one "
            f"({_shown(note.saved_s)}), which does not replace it"
        )


def _shown(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _saved_s(directory: Path) -> float | None:
    """When the checkpoint that a directory of the second tier holds was saved; None if it holds none.

    A note that is older than `.metadata` is of an earlier checkpoint. Without one, the time of `.metadata` counts.
    """
    storage = storage_at(directory)
    published, noted = storage.version(METADATA_FILE), storage.version(DRAIN_FILE)
    if published is None:
        return None
    note = _note_there(directory) if noted is not None and noted.modified_ns >= published.modified_ns else None
    return note.saved_s if note is not None and note.saved_s else published.modified_ns / 1e9


def _note_there(directory: Path) -> DrainNote | None:
    try:
        return DrainNote.read(directory)
    except CorruptCheckpointError:
        return None


def _commit(reads: Storage, writes: Storage, found: CheckpointFiles, note: DrainNote) -> None:
    """Publish a checkpoint whose data files are there, in the place of one that may be there already; or finish that,
    if it is published.
    """
    with DirectoryLock.take(writes) as lock:
        held = look(writes)
        is_held = _holds(held, note)
        if not is_held:
            _refuse_older(note)
        if held.version is None:
            _remove_stale(writes, found, note, lock)
        _copy_others(reads, writes, found, note, lock)
        if not is_held:
            if found.common is not None:
                own_name = COMMON_FILE if held.version is None else pending_name(note.save)
                read_common_file(reads, found.common, found.index.manifest)  # refuses a damaged one
                copy_file(reads, found.common, writes, own_name, lock=lock)
            _check_lengths(writes, found)
            writes.sync(parents=True)
            refuse_replaced(reads, found)
            lock.publish(METADATA_FILE, found.metadata)
        pending = pending_name(note.save)
        if found.common is None:
            writes.delete(COMMON_FILE)
        elif writes.exists(pending):
            writes.move(pending, COMMON_FILE)
        _remove_replaced(writes, found, note, held)
        replace(
            note, files=None, commits=True, state="copied", copied_bytes=note.total_bytes, error="", attempts=0
        ).write(checkpoint_path(note.to))
        writes.sync()


def _remove_stale(writes: Storage, found: CheckpointFiles, note: DrainNote, lock: DirectoryLock) -> None:
    """Remove what would pass for part of the checkpoint, of an attempt that was interrupted, or of a save that has
    failed: where there is no `.metadata`, all that a save of Megatron-Core makes is of such a one.
    """
    directory = checkpoint_path(note.to)
    there = {*writes.folders()} - {*writes.links()}
    for folder in there.intersection(FOLDERS_OF_MEGATRON):
        with contextlib.suppress(CorruptCheckpointError):  # with links in it, all of it stays
            for name in [f"{folder}/{name}" for name in files_below(directory / folder)]:
                if name not in found.others:
                    lock.delete(name)
    for name in (COMMON_FILE, CONFIG_FILE):
        if name not in found.others:
            lock.delete(name)


def _copy_others(reads: Storage, writes: Storage, found: CheckpointFiles, note: DrainNote, lock: DirectoryLock) -> None:
    """Copy what other programs keep with a checkpoint; a file that is replaced is so atomically, but for large ones."""
    for name in found.others:
        if reads.size(name) > _MAX_REPLACED_BYTES:
            copy_file(reads, name, writes, name, lock=lock)
            continue
        version = reads.version(name)
        content = reads.read(name)
        refuse_changed(reads, name, version)
        if not (writes.exists(name) and writes.read(name) == content):
            writes.publish(name, content)
    sync_folders(checkpoint_path(note.to), found.others)


def copy_late_files(directory: Path, note: DrainNote) -> bool:
    """Copy what other programs have put into a checkpoint's directory since it was committed in the second tier, as
    Megatron-Core does with the files of the tokenizer; returns whether there was something. Raises as `drain`.
    """
    reads, writes = storage_at(directory), storage_at(note.to)
    with reads.in_use(METADATA_FILE):
        found = files_of(directory)
        if note.save not in saves_of(found.index) or not _holds(look(writes), note):
            return False
        versions = {name: writes.version(name) for name in found.others}
        if all(version is not None and version.size_bytes == reads.size(name) for name, version in versions.items()):
            return False
        _commit(reads, writes, found, note)
    return True


def _remove_replaced(writes: Storage, found: CheckpointFiles, note: DrainNote, held: InForce) -> None:
    """Remove what is of other saves, now that this one is in force, and what nodes have told each other of it.

    Where nodes copy parts, a part of a later save may have arrived: what is not known to be older stays then.
    """
    before = _note_there(checkpoint_path(note.to))
    old = {note.save} | (set() if before is None else {before.save})
    needed = None if held.others is None else held.others | set(found.data)

    def is_old(save: str | None) -> bool:
        return save in old or (note.files is None and save is not None)

    replaced = set() if held.index is None else index_files(held.index)
    for name in writes.list():
        data = data_file_of(name)
        if data is not None:
            goes = needed is not None and name not in needed and (name in replaced or is_old(data.save))
        else:
            goes = is_pending(name) or (name.startswith(_ARRIVED) and is_old(name.removeprefix(_ARRIVED).split(".")[0]))
        if goes:
            writes.delete(name)
    for name in writes.unfinished():
        data = data_file_of(name)
        if data is not None and is_old(data.save):
            writes.discard_unfinished(name)


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
    """Remove from the second tier what was copied of a checkpoint that was not committed there, and is not going to be.

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
    if storage.list() and not storage.exists(METADATA_FILE):
        with DirectoryLock.take(storage) as lock:
            if not storage.exists(METADATA_FILE):  # of a checkpoint that is there, they are
                for name in (CONFIG_FILE, COMMON_FILE):
                    lock.delete(name)
    storage.remove()


def undrained(run: Path) -> list[tuple[Path, DrainNote]]:
    """Checkpoints of a run that are still to be copied to the second tier, by iteration. Raises `LoadError`."""
    found = []
    for directory in iteration_directories(run):
        note = DrainNote.read(directory)
        if note is not None and note.is_open and storage_at(directory).exists(METADATA_FILE):
            found.append((directory, note))
    return found


def track_drained(run: Path, note: DrainNote, tracker: str) -> None:
    """A checkpoint is committed in the second tier: let the tracker file there name it, unless that names one that was
    saved later. With `tracker="auto"` only if the run itself has a tracker file, with `"off"` never.

    Raises:
        LoadError: the run or the second tier cannot be listed.
        SaveError: the tracker file cannot be written.
    """
    if tracker == "off" or (tracker == "auto" and tracked_name(run) is None):
        return
    directory = checkpoint_path(note.to)
    target = directory.parent
    try:
        tracked = tracked_name(target)
    except CorruptCheckpointError:
        tracked = None  # it is written again
    if tracked == directory.name:
        return
    saved = {} if tracked is None else {tracked: _saved_s(target / tracked)}
    if not any(saved.values()):  # it names nothing that is there
        saved = {path.name: _saved_s(path) for path in iteration_directories(target)}
    saved[directory.name] = note.saved_s
    last = max(saved, key=lambda name: saved[name] or 0.0)
    if last != tracked and (iteration := iteration_of(last)) is not None:
        storage_at(target).publish(TRACKER_FILE, str(iteration).encode())
