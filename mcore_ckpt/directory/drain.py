"""Two tiers: a checkpoint that was saved on fast local storage is copied to a second place, and committed there.

A note in the local directory says where to (`drain_note.py`). Where each node has its own disk, each has such a note,
and copies its own data files; the node of the coordinator commits when all are there. The names of data files carry
the id of their save, so no file of another save is taken for one of these.

What is on the way when a process ends is resumed from the note. That may be long after. So a copy replaces nothing but
the checkpoint that was there when it began.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from mcore_ckpt.core.errors import LoadError, SaveError
from mcore_ckpt.core.paths import checkpoint_path
from mcore_ckpt.directory.commit import Commit
from mcore_ckpt.directory.copying import (
    CheckpointFiles,
    Sent,
    copy_and_commit,
    file_on_its_way,
    files_of,
    identity_of,
    metadata_of,
)
from mcore_ckpt.directory.drain_note import DrainNote, noted_saves
from mcore_ckpt.directory.in_force import is_in_force, pending_name, saves_of
from mcore_ckpt.directory.iterations import iteration_directories
from mcore_ckpt.format.file_names import data_file_of
from mcore_ckpt.format.metadata_read import COMMON_FILE, CONFIG_FILE, INTEGRITY_FILE
from mcore_ckpt.storage.resolve import storage_at


class SupersededError(SaveError):
    """The second tier holds another checkpoint in that place than when the copy began."""


def there_now(note: DrainNote) -> str:
    """What the second tier holds in that place, as `DrainNote.replaces` has it. Raises `LoadError`."""
    return identity_of(metadata_of(storage_at(note.to)))


def drain(
    directory: Path,
    note: DrainNote,
    check: Callable[[CheckpointFiles, Collection[str]], None],
    go_on: Callable[[], None],
) -> Sent | None:
    """Copy what lies in a local directory to the second tier, and commit there if that is for this node to do.

    Args:
        directory: of the checkpoint.
        note: of it.
        check: called with the names of the data files that are copied: raises if they are damaged.
        go_on: called before each data file.

    Returns:
        None if something has not come yet: then nothing is committed, and the same call resumes.

    Raises:
        LoadError: it cannot be read, is damaged, or is of another save by now.
        SupersededError: the second tier holds another checkpoint there than when the copy began.
        SaveError: the second tier cannot be written, or a save holds the directory there.
    """
    reads, writes = storage_at(directory), storage_at(note.to)
    if reads.location == writes.location:
        return Sent()

    def check_own(found: CheckpointFiles) -> None:
        if note.save not in saves_of(found.index):
            raise LoadError(f"{directory}: another save has replaced the checkpoint before it was copied to {note.to}")
        check(found, found.data if note.files is None else note.files)

    if not note.commits:
        check_own(files_of(directory))
        writes.ensure()
        sent = Sent()
        for name in note.files or ():
            go_on()
            sent.copy(reads, name, writes)
        writes.sync(parents=True)
        return sent

    def accepts(_: CheckpointFiles, held: bytes | None) -> None:
        if held is not None and identity_of(held) != note.replaces:
            raise SupersededError(
                f"{note.to} holds another checkpoint than when this one was saved, which is not replaced. If this one "
                "is to be there, remove that one (`mcore-ckpt prune`), and copy it (`mcore-ckpt copy`)"
            )

    target = checkpoint_path(note.to)
    return copy_and_commit(directory, target, accepts=accepts, check=check_own, own=note.files, waits=True, go_on=go_on)


def give_up(note: DrainNote) -> None:
    """Remove from the second tier what was copied of a checkpoint that was not committed there, and is not going to be.

    Raises `LoadError` or `SaveError`.
    """
    storage, save_id = storage_at(note.to), bytes.fromhex(note.save)
    if is_in_force(storage, save_id) or not storage.list():
        return
    commit = Commit.begin(storage)
    try:
        if is_in_force(storage, save_id):  # by another process, meanwhile
            return
        for name in storage.list():
            file = data_file_of(file_on_its_way(name) or name)
            if name == pending_name(note.save) or (file is not None and file.save == note.save):
                storage.delete(name)
        if commit.base is None:  # of a checkpoint that is there, they are
            for name in (CONFIG_FILE, COMMON_FILE, INTEGRITY_FILE):
                commit.check()
                storage.delete(name)
            commit.remove_left()
    finally:
        commit.give_up()
    storage.remove()


def undrained(run: Path) -> tuple[list[Path], list[str]]:
    """Checkpoints of a run that are still to be copied to the second tier, by iteration; and those of which that cannot
    be told, and why. Raises `LoadError`.
    """
    found, untold = [], []
    for directory in iteration_directories(run):
        try:
            if noted_saves(storage_at(directory).list()):
                note = DrainNote.in_force(directory)
                if note is not None and not note.done:
                    found.append(directory)
        except LoadError as error:
            untold.append(f"{directory}: cannot be told whether it is still to be copied: {error}")
    return found, untold
