"""The directory of a save: locked, looked at, rid of what is left of other saves; or given up again.

What a directory passes through, from here to `publish`, so that it never holds a mix; a crash between any two steps
leaves either the old checkpoint whole or the new one whole:

1. `open_target` (or, ahead of it, `reserve`): the directory is locked (`lock.py`), what it holds is looked at, and
   what earlier saves have left is finished or undone. The names of all new data files carry the id of the lock, so no
   name is ever used twice. Files of the old checkpoint whose names carry none are noted next to the lock.
2. The ranks write and fsync their data files. If a checkpoint is being replaced, the new common state lies next to the
   old one as `common.pt.<id>.pending`.
3. `publish`: the coordinator sees every file that was planned, at its size. The new `.metadata` replaces the old one by
   a rename, which fails if the directory has been taken over by another save meanwhile. This is the moment the
   new checkpoint exists.
4. The pending common state takes its place, the files that only the old `.metadata` named are removed, and the
   lock is released. A crash before the end of this step is repaired by the next save; a reader meanwhile looks up
   which common state is in force with `common_file_in_force`.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import CheckpointExistsError, LoadError, SaveError
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.core.threads import together
from mcore_ckpt.directory._leftovers import finish_earlier
from mcore_ckpt.directory.in_force import look, pending_name
from mcore_ckpt.directory.lock import DirectoryLock
from mcore_ckpt.format.file_names import data_file_of
from mcore_ckpt.format.footer import SAVE_ID_BYTES
from mcore_ckpt.format.metadata_read import COMMON_FILE
from mcore_ckpt.storage.base import FileVersion, Storage

_logger = logger_of(__name__)

_LOCK_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class Target:
    """The directory of a save, as its coordinator found it."""

    lock: DirectoryLock  # by which the directory belongs to this save
    replaces: bool  # there is a checkpoint that is being replaced
    old_files: tuple[str, ...]  # files that only the checkpoint being replaced needs
    # The common state that was written ahead of all else, as it was then; None if none was.
    common: FileVersion | None = None
    common_sum: tuple[int, int] | None = None  # length in bytes and CRC-32 of that
    common_before: FileVersion | None = None  # the common state that it is going to replace; None if there is none
    nonce: bytes = field(default_factory=partial(secrets.token_bytes, SAVE_ID_BYTES - _LOCK_ID_BYTES))  # 8 bytes

    @property
    def save_id(self) -> bytes:
        """Of what is saved, for its manifest and, its first half, the names of its files; 16 bytes.

        It begins with the lock's id. Locks meet in one directory only, saves anywhere: hence eight random bytes more.
        """
        return bytes.fromhex(self.lock.owner.save_id) + self.nonce

    @property
    def pending_common(self) -> str:
        """Name under which the new common state waits for being published."""
        return pending_name(self.lock.owner.save_id)

    @property
    def common_file(self) -> str:
        """Where the new common state is to be written: one that is in force must not be touched."""
        return self.pending_common if self.replaces else COMMON_FILE


# Directories that were locked for a save that has yet to come, by location.
_reserved: dict[str, Target] = {}


def open_target(storage: Storage, options: SaveOptions) -> Target:
    """Lock the directory of a save, and look at it; the coordinator calls this once.

    Raises `CheckpointExistsError`, or `SaveError` if another save holds it or it cannot be written.
    """
    target = take_reserved(storage)
    if target is None or not target.lock.is_held:
        target = _locked(storage)
    elif not target.lock.is_still_held():
        # Locked again, it would be published next to the common state of another save.
        refuse_lost(storage, target)
    if target.replaces and options.on_existing == "error":
        abandon(storage, target)
        raise CheckpointExistsError(
            f'{storage}: there is a checkpoint already and on_existing="error"; choose another directory,'
            ' or on_existing="replace"'
        )
    return target


def _locked(storage: Storage, *, common_ahead: bool = False) -> Target:
    storage.ensure()
    lock = DirectoryLock.take(storage, common_ahead=common_ahead)
    try:
        found = look(storage)
        finish_earlier(storage, lock, found)
        old_files = tuple(sorted(found.replaced))
        lock.note([name for name in old_files if not _tells_its_save(name)])
        return Target(lock, found.version is not None, old_files)
    except BaseException:
        lock.release(remove_marker=not lock.after)
        raise


def _tells_its_save(name: str) -> bool:
    found = data_file_of(name)
    return found is not None and found.save is not None


def lock_late(storage: Storage, written: Collection[str]) -> Target:
    """Lock a directory into which these data files were written before any save had locked it. Raises `SaveError`."""
    lock = DirectoryLock.take(storage)
    try:
        found = look(storage)
        return Target(lock, found.version is not None, tuple(sorted(found.replaced - set(written))))
    except BaseException:
        lock.release(remove_marker=not lock.after)
        raise


def reserve(storage: Storage) -> Target:
    """Lock the directory for a save that is going to `open_target`, so that something can be written ahead of it."""
    give_back(storage)
    target = _locked(storage, common_ahead=True)
    _reserved[storage.location] = target
    return target


def take_reserved(storage: Storage) -> Target | None:
    """What `reserve` has locked, once; None if nothing is."""
    return _reserved.pop(storage.location, None)


def give_back(storage: Storage) -> None:
    """The save that the directory was reserved for does not come; nothing of it stays."""
    target = take_reserved(storage)
    if target is not None:
        abandon(storage, target)


def write_common(storage: Storage, content: bytes) -> None:
    """`reserve` the directory, and write the common state of the save that is going to `open_target`."""
    target = reserve(storage)
    try:
        target.lock.publish(target.common_file, content, common=True)
        asked = (target.common_file, COMMON_FILE) if target.replaces else (target.common_file,)
        _, written, *before = together(
            storage.asks_at_once, target.lock.check, *(partial(storage.version, name) for name in asked)
        )
        _reserved[storage.location] = replace(
            target,
            common=written,
            common_sum=(len(content), crc32(content)),
            common_before=before[0] if before else None,
        )
    except BaseException as error:
        if isinstance(error, SaveError) and not target.lock.is_still_held():
            refuse_lost(storage, take_reserved(storage) or target)
        give_back(storage)
        raise


def refuse_lost(storage: Storage, target: Target) -> NoReturn:
    """Raise `SaveError`, saying who has taken the directory over, and leave nothing there."""
    try:
        target.lock.check()
        raise SaveError(f"{storage}: this save lost the directory for a moment; save again")
    finally:
        abandon(storage, target)


def abandon(storage: Storage, target: Target) -> None:
    """Coordinator: put the directory back as it was before `open_target`, and let it go.

    If it may yet be published, all of it stays for the next save. Where there is no checkpoint the marker stays, and
    says that what lies there is not one. What other ranks have not removed, or are still writing, the next save finds
    by the id in its name.
    """
    if target.lock.is_undecided:
        target.lock.release()
        return
    try:
        storage.delete(target.pending_common)
        ours = target.common is not None and not target.replaces and target.lock.is_still_held()
        if ours and storage.version(COMMON_FILE) == target.common:
            storage.delete(COMMON_FILE)
    except (SaveError, LoadError, OSError) as error:
        _logger.warning("%s: could not clean up after a failed save: %s", storage, error)
    try:
        target.lock.release(remove_marker=target.replaces)
    except (SaveError, LoadError, OSError) as error:
        _logger.warning("%s: could not clean up after a failed save: %s", storage, error)


def discard(storage: Storage, files: Iterable[str]) -> None:
    """Remove the data files that a failed save has written, as far as that is still possible."""
    try:
        for name in files:
            storage.delete(name)
    except (SaveError, OSError) as error:
        _logger.warning("%s: could not remove the files of a failed save: %s", storage, error)
