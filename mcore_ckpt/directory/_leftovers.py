"""What saves that are gone have left in a directory, taken up by the next save that has it.

Other programs keep files in the same directory. So only these are ever removed: data files whose name carries the id of
a save that nothing in the directory stands for any more, neither an index nor a lock; and those that a save has
noted, before it published, to be only of the checkpoint that it replaces. If an index is there and cannot be read,
nothing is removed.
"""

from __future__ import annotations

from mcore_ckpt.directory.in_force import InForce, common_file_in_force, index_name, is_pending, look, saves_of
from mcore_ckpt.directory.lock import DirectoryLock
from mcore_ckpt.format.file_names import data_file_of
from mcore_ckpt.format.metadata_read import COMMON_FILE
from mcore_ckpt.storage.base import Storage


def finish_earlier(storage: Storage, lock: DirectoryLock, held: InForce) -> None:
    """Finish what saves that are gone have published, and undo what they have not; nothing that an index needs goes."""
    needed = held.needed
    if needed is None:
        return
    if lock.part is None:
        in_force = None if held.index is None else common_file_in_force(held.names, held.index)
        # A listing that lags behind may still name what has been renamed since.
        if in_force not in (None, COMMON_FILE) and storage.version(in_force) is not None:
            storage.move(in_force, COMMON_FILE)
        for name in filter(is_pending, held.names):
            storage.delete(name)
    published = set() if held.index is None else saves_of(held.index)
    for save, replaced in lock.left_notes(held.names):
        for name in replaced if save in published else ():
            if name not in needed:
                storage.delete(name)
    lock.sweep(held.names)
    sweep(storage, lock, held)


def sweep(storage: Storage, lock: DirectoryLock, held: InForce) -> None:
    """Remove data files of saves that are gone, which no index names."""
    own = lock.owner.save_id
    for name in held.unfinished:
        begun = data_file_of(name)
        if begun is not None and begun.save not in (None, own) and not lock.is_locked_by(begun.save):
            storage.discard_unfinished(name)
    files = {name: found for name in held.names if "/" not in name and (found := data_file_of(name)) is not None}
    left = {
        name: found
        for name, found in files.items()
        if found.save not in (None, own) and lock.part in (None, found.rank)
    }
    # A listing that lags behind may not show the index of a rank that has saved alone.
    hidden = {found.rank for found in left.values() if index_name(found.rank) not in held.names} - {lock.part}
    hidden = {rank for rank in hidden if storage.version(index_name(rank)) is not None}
    needed = (look(storage, lock.part, hidden) if hidden else held).needed
    if needed is None:
        return
    gone = {found.save for found in left.values() if found.save is not None and not lock.is_locked_by(found.save)}
    for name, found in left.items():
        if found.save in gone and name not in needed:
            storage.delete(name)
