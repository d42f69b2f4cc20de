"""Two tiers: a checkpoint that was saved on fast local storage is copied to a second place, and committed there.

A note in the local directory says where to, which data files lie here, and how far it is. Where each node has its own
disk, each has such a note, and copies its own files. The node of the coordinator commits: when all files of the
checkpoint have arrived, it publishes `.metadata` in the second tier, under the lock of that directory. The names of
data files carry the id of their save, so no file of another save is ever taken for one of these. Until that moment the
second tier holds what it held before, but for files of other programs that it had not. Those that it had, whose names
carry no id, are replaced one by one right after it: cut off there, a copy has to be resumed.

What is on the way when a process ends is resumed from the note: what has arrived is compared, not sent again. That may
be long after: so a checkpoint of the second tier is replaced only by one that was saved later. The note tells there
when that was: it is copied just before `.metadata` and again, as done, last of all.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator
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
from mcore_ckpt.directory.copying import (
    ARRIVED,
    COPYING,
    CheckpointFiles,
    copy_data_file,
    copy_file,
    files_of,
    is_copied,
    refuse_changed,
    refuse_replaced,
)
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
    INTEGRITY_FILE,
    METADATA_FILE,
    TRACKER_FILE,
)
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import storage_at

# Of a file of others that is read completely, and replaced at once.
_MAX_REPLACED_BYTES: Final = 64 * 1024**2


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
        held = look(writes)
        if _holds(held, note):
            arrived(note.total_bytes)
            if note.commits:
                _commit(reads, writes, found, note)
            return True
        _refuse_older(note, held)
        writes.ensure()
        if not own_are_there:
            check(found.index, own)
            for name in own:
                if copy_data_file(reads, name, writes, note.save, arrived) is None:
                    arrived(writes.size(name))
        if not note.commits:
            content = json.dumps(list(note.files or ())).encode()
            writes.publish(f"{ARRIVED}{note.save}.{_short(note.files or ())}", content)
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
        if name.startswith(f"{ARRIVED}{note.save}."):
            arrived.update(json.loads(writes.read(name)))
    return arrived >= set(found.data)


def _holds(held: InForce, note: DrainNote) -> bool:
    """Whether the checkpoint in force is that of the note."""
    return held.index is not None and note.save in saves_of(held.index)


def _refuse_older(note: DrainNote, held: InForce) -> None:
    """Raise `SupersededError` if the second tier holds in that place what was saved later."""
    if held.version is None:
        return
    there = _note_there(checkpoint_path(note.to))
    if there is not None:
        there = None if held.index is None else there.among(saves_of(held.index))
    there_s = there.saved_s if there is not None and there.saved_s else held.version.modified_ns / 1e9
    if there_s > note.saved_s:
        raise SupersededError(
            f"{note.to} holds a checkpoint that was saved later ({_shown(there_s)}) than this one "
            f"({_shown(note.saved_s)}), which does not replace it"
        )


def _shown(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _saved_s(directory: Path) -> float | None:
    """When the checkpoint that a directory of the second tier holds was saved; None if it holds none.

    Without a note of it, the time of `.metadata` counts.
    """
    storage = storage_at(directory)
    published, noted = storage.version(METADATA_FILE), storage.version(DRAIN_FILE)
    if published is None:
        return None
    note = _note_there(directory)
    if note is not None and (note.state != "copied" or noted is None or noted.modified_ns < published.modified_ns):
        note = DrainNote.in_force(directory)  # of which save `.metadata` is; it may be large
    return note.saved_s if note is not None and note.saved_s else published.modified_ns / 1e9


def _note_there(directory: Path) -> DrainNote | None:
    try:
        return DrainNote.read(directory)
    except CorruptCheckpointError:
        return None


@contextlib.contextmanager
def _locked(writes: Storage, note: DrainNote) -> Iterator[tuple[DirectoryLock, InForce]]:
    """The lock of the second tier's directory, where this checkpoint, or nothing that was saved later, is in force."""
    with DirectoryLock.take(writes, common_ahead=True) as lock:
        held = look(writes)
        if not _holds(held, note):
            _refuse_older(note, held)
        lock.sweep(held.names, notes=False)
        yield lock, held


def _commit(reads: Storage, writes: Storage, found: CheckpointFiles, note: DrainNote) -> None:
    """Publish a checkpoint whose data files are there, in the place of one that may be there already; or finish that,
    if it is published.

    Whatever is made or removed here, a process that has lost the directory cannot do any more: it may have been stopped
    for so long that another host has committed a later checkpoint. A lock gives the right to publish once. So each file
    that is replaced atomically is so under a lock of its own.
    """
    with _locked(writes, note) as (lock, held):
        if held.version is None:
            _remove_stale(writes, found, note, lock)
        for name in found.others:
            if held.version is None or not writes.exists(name):
                copy_file(reads, name, writes, name, lock=lock)
        sync_folders(checkpoint_path(note.to), found.others)
        if not _holds(held, note):
            if found.common is not None:
                own_name = COMMON_FILE if held.version is None else pending_name(note.save)
                read_common_file(reads, found.common, found.index.manifest)  # refuses a damaged one
                copy_file(reads, found.common, writes, own_name, lock=lock)
            _check_lengths(writes, found)
            writes.sync(parents=True)
            refuse_replaced(reads, found)
            there = None if held.index is None else _note_there(checkpoint_path(note.to))
            before = None if there is None or held.index is None else there.among(saves_of(held.index))
            # From the moment on when it is in force, it is known when it was saved.
            noted = replace(note, files=None, commits=True, state="copying", before=before)
            lock.publish(DRAIN_FILE, noted.encode(), common=True)
            lock.publish(METADATA_FILE, found.metadata)
    replaced = set() if held.index is None else index_files(held.index)
    # Only now: what is cut off before leaves the checkpoint that is replaced as it was.
    differing = [] if held.version is None else [name for name in found.others if not is_copied(reads, name, writes)]
    large = [name for name in differing if reads.size(name) > _MAX_REPLACED_BYTES]
    for name in differing:
        if name not in large:
            with _locked(writes, note) as (lock, held):
                _refuse_another(writes, held, note)
                version = reads.version(name)
                content = reads.read(name)
                refuse_changed(reads, name, version)
                lock.publish(name, content)
    with _locked(writes, note) as (lock, held):
        _refuse_another(writes, held, note)
        for name in large:
            copy_file(reads, name, writes, name, lock=lock)
        sync_folders(checkpoint_path(note.to), differing)
        pending = pending_name(note.save)
        if found.common is None:
            lock.delete(COMMON_FILE)
        elif writes.exists(pending):
            lock.publish(COMMON_FILE, writes.read(pending), common=True)
        _remove_replaced(writes, found, note, held, replaced, lock)
        done = replace(
            note,
            files=None,
            commits=True,
            state="copied",
            copied_bytes=note.total_bytes,
            error="",
            attempts=0,
            before=None,
        )
        lock.publish(DRAIN_FILE, done.encode())
        writes.sync()


def _refuse_another(writes: Storage, held: InForce, note: DrainNote) -> None:
    if not _holds(held, note):
        raise SaveError(f"{writes}: another checkpoint has replaced this one there as soon as it was published")


def _remove_stale(writes: Storage, found: CheckpointFiles, note: DrainNote, lock: DirectoryLock) -> None:
    """Remove what would pass for part of the checkpoint, of an attempt that was interrupted, or of a save that has
    failed: where there is no `.metadata`, all that a save of Megatron-Core makes is of such a one.
    """
    _remove_from_folders(writes, found, note, lock)
    for name in (COMMON_FILE, CONFIG_FILE, INTEGRITY_FILE):
        if name not in found.others:
            lock.delete(name)


def _remove_from_folders(writes: Storage, found: CheckpointFiles, note: DrainNote, lock: DirectoryLock) -> None:
    """Remove what a save of Megatron-Core has made there in folders, and this checkpoint has not."""
    directory = checkpoint_path(note.to)
    there = {*writes.folders()} - {*writes.links()}
    for folder in there.intersection(FOLDERS_OF_MEGATRON):
        with contextlib.suppress(CorruptCheckpointError):  # with links in it, all of it stays
            for name in [f"{folder}/{name}" for name in files_below(directory / folder)]:
                if name not in found.others:
                    lock.delete(name)


def copy_late_files(directory: Path, note: DrainNote) -> bool:
    """Copy what other programs have put into a checkpoint's directory since it was committed in the second tier, as
    Megatron-Core does with the files of the tokenizer; returns whether there was something. Raises as `drain`.
    """
    reads, writes = storage_at(directory), storage_at(note.to)
    with reads.in_use(METADATA_FILE):
        found = files_of(directory)
        if note.save not in saves_of(found.index) or not _holds(look(writes), note):
            return False
        if not any(_is_late(reads, name, writes, found) for name in found.others):
            return False
        _commit(reads, writes, found, note)
    return True


def _is_late(reads: Storage, name: str, writes: Storage, found: CheckpointFiles) -> bool:
    own, there = reads.version(name), writes.version(name)
    if own is None or (there is not None and there.size_bytes == own.size_bytes):
        # (older than `.metadata`, it was copied at the commit)
        is_newer = own is not None and found.version is not None and own.modified_ns >= found.version.modified_ns
        return is_newer and not is_copied(reads, name, writes)
    return True


def _remove_replaced(
    writes: Storage,
    found: CheckpointFiles,
    note: DrainNote,
    held: InForce,
    replaced: Collection[str],
    lock: DirectoryLock,
) -> None:
    """Remove what is of other saves, now that this one is in force, and what nodes have told each other of it.

    A part of a later save may have arrived: what is not known to be older stays.
    """
    there = _note_there(checkpoint_path(note.to))
    if there is None or there.save != note.save or there.state != "copied":
        _remove_from_folders(writes, found, note, lock)
        if INTEGRITY_FILE not in found.others:
            lock.delete(INTEGRITY_FILE)
    notes = () if there is None else (there, there.before)
    old = {note.save, *(each.save for each in notes if each is not None)}
    needed = None if held.has_others else set(found.data)

    def is_old(save: str | None, name: str) -> bool:
        if save is None or save in old:
            return save is not None
        arrived = writes.version(name)  # before this one was saved
        return arrived is not None and arrived.modified_ns / 1e9 < note.saved_s

    for name in writes.list():
        data = data_file_of(name)
        if data is not None:
            if needed is not None and name not in needed and (name in replaced or is_old(data.save, name)):
                lock.delete(name)
        elif is_pending(name) or is_old(_save_of_copy(name), name):
            lock.delete(name)
    for name in writes.unfinished():
        data = data_file_of(name)
        if data is not None and data.save in old:
            writes.discard_unfinished(name)


def _save_of_copy(name: str) -> str | None:
    """The save that a file is of which a copy to the second tier has made for itself; None for other files."""
    prefix = next((prefix for prefix in (ARRIVED, COPYING) if name.startswith(prefix)), None)
    return None if prefix is None else name.removeprefix(prefix).split(".")[0]


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
    storage, save_id = storage_at(note.to), bytes.fromhex(note.save)
    if not is_in_force(storage, save_id) and (storage.list() or storage.unfinished()):
        with DirectoryLock.take(storage) as lock:
            if is_in_force(storage, save_id):  # by another process, meanwhile
                return
            for name in storage.unfinished():
                found = data_file_of(name)
                if found is not None and found.save == note.save:
                    storage.discard_unfinished(name)
            names = storage.list()
            for name in names:
                found = data_file_of(name)
                save = _save_of_copy(name) if found is None else found.save
                if save == note.save or name == pending_name(note.save):
                    lock.delete(name)
            if not storage.exists(METADATA_FILE):  # of a checkpoint that is there, they are
                for name in (CONFIG_FILE, COMMON_FILE, INTEGRITY_FILE, DRAIN_FILE):
                    lock.delete(name)
            lock.sweep(names, notes=False)
        storage.remove()


def undrained(run: Path) -> tuple[list[tuple[Path, DrainNote]], list[str]]:
    """Checkpoints of a run that are still to be copied to the second tier, by iteration; and of which that cannot be
    told, and why. Raises `LoadError`.
    """
    found, untold = [], []
    for directory in iteration_directories(run):
        try:
            note = DrainNote.read(directory)
            if note is not None and (note.is_open or (note.before is not None and note.before.is_open)):
                note = DrainNote.in_force(directory)
                if note is not None and note.is_open:
                    found.append((directory, note))
        except LoadError as error:
            untold.append(f"{directory}: cannot be told whether it is still to be copied: {error}")
    return found, untold


def saved_last(run: Path) -> Path | None:
    """The checkpoint of a run that was saved last, by the notes; not that of the highest iteration, if the run has gone
    back. None if none has a note. Raises `LoadError`.
    """
    last, last_s = None, -1.0
    for directory in iteration_directories(run):
        with contextlib.suppress(LoadError):  # a damaged one is named where open notes are looked for
            note = DrainNote.read(directory)
            if note is not None and note.saved_s >= last_s:
                last, last_s = directory, note.saved_s
    return last


def track_drained(run: Path, note: DrainNote, tracker: str) -> str:
    """A checkpoint is committed in the second tier: let the tracker file there name it, unless that names one that was
    saved later. With `tracker="auto"` only if the run itself has a tracker file, with `"off"` never.

    A job that has loaded nothing turns no tracker file back to a lower iteration than another job's. Returns which one
    stays then, or "".

    Raises:
        LoadError: the run or the second tier cannot be listed.
        SaveError: the tracker file cannot be written.
    """
    if tracker == "off" or (tracker == "auto" and tracked_name(run) is None):
        return ""
    directory = checkpoint_path(note.to)
    target = directory.parent
    try:
        tracked = tracked_name(target)
    except CorruptCheckpointError:
        tracked = None  # it is written again
    if tracked == directory.name:
        return ""
    saved = {} if tracked is None else {tracked: _saved_s(target / tracked)}
    if not any(saved.values()):  # it names nothing that is there
        saved = {path.name: _saved_s(path) for path in iteration_directories(target)}
    of_others = {name: iteration_of(name) or 0 for name, at_s in saved.items() if 0 < (at_s or 0) < note.begun_s}
    highest = max(of_others, key=of_others.__getitem__, default=directory.name)
    if of_others.get(highest, 0) > (iteration_of(directory.name) or 0):
        return highest
    saved[directory.name] = note.saved_s
    last = max(saved, key=lambda name: saved[name] or 0.0)
    if last != tracked and (iteration := iteration_of(last)) is not None:
        storage_at(target).publish(TRACKER_FILE, str(iteration).encode())
    return ""
