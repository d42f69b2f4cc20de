"""What saves that are gone have left in a directory, taken up by the next save that has it.

Other programs keep files in the same directory. So only these are ever removed: data files whose name carries the id of
a save that nothing in the directory stands for any more, neither an index nor a lock; and those that a save has
noted, before it published, to be only of the checkpoint that it replaces. If an index is there and cannot be read,
nothing is removed. A save that was stopped in here, and has lost the directory meanwhile, removes nothing.
"""

from __future__ import annotations

from mcore_ckpt.directory.in_force import InForce, common_file_in_force, is_pending, look, saves_of
from mcore_ckpt.directory.lock import DirectoryLock
from mcore_ckpt.format.file_names import data_file_of
from mcore_ckpt.format.metadata_read import COMMON_FILE
from mcore_ckpt.storage.base import Storage


def finish_earlier(storage: Storage, lock: DirectoryLock, held: InForce) -> None:
    """Finish what saves that are gone have published, and undo what they have not; nothing that an index needs goes."""
    needed = held.needed
    if needed is None:
        return
    in_force = None if held.index is None else common_file_in_force(held.names, held.index)
    if in_force not in (None, COMMON_FILE):
        before = storage.version(COMMON_FILE)
        # A listing that lags behind may still name what has been renamed since.
        if storage.version(in_force) is not None:
            lock.check()  # so that no save which has taken over since has written what is replaced
            storage.move_over(in_force, COMMON_FILE, before)
    for name in filter(is_pending, held.names):
        lock.remove(name)
    published = set() if held.index is None else saves_of(held.index)
    for save, replaced in lock.left_notes(held.names):
        for name in replaced if save in published else ():
            if name not in needed:
                lock.remove(name)
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
    named = held.needed or set()
    left = {name: found for name, found in files.items() if found.save not in (None, own) and name not in named}
    gone = {found.save for found in left.values() if found.save is not None and not lock.is_locked_by(found.save)}
    left = {name: found for name, found in left.items() if found.save in gone}
    if not left:
        return
    # The index is read last: what a save that has ended since has published, it names. (This process may have been
    # stopped since it looked.)
    needed = look(storage).needed
    if needed is not None:
        for name in left:
            if name not in needed:
                lock.remove(name)
