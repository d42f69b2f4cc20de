"""The directory of a save: begun, then published (`publish`), or given up again.

What it passes through; a crash between any two steps leaves the old checkpoint or the new one, never a mix:

1. `open_target` (or, ahead of it, `reserve`): what is in force is read, and the save's note is made (`commit`). The
   names of all new data files carry the save's id, so no name is ever used twice.
2. The ranks write and fsync their data files. The new common state waits as `common.pt.<id>.pending`.
3. `publish`: the coordinator sees every file that was planned, at its size. The new `.metadata` replaces the old one,
   if no other save has been published since step 1. This is the moment the new checkpoint exists.
4. The common state takes its place, and the files of the old checkpoint are removed.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import CheckpointExistsError, SaveError
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.directory.commit import Commit
from mcore_ckpt.format.footer import SAVE_ID_BYTES
from mcore_ckpt.storage.base import Storage

_logger = logger_of(__name__)

_NAMED_BYTES = 8


@dataclass(frozen=True, slots=True)
class Target:
    """The directory of a save, as its coordinator found it."""

    commit: Commit
    common_sum: tuple[int, int] | None = None  # length in bytes and CRC-32 of the common state, if that was written
    nonce: bytes = field(default_factory=partial(secrets.token_bytes, SAVE_ID_BYTES - _NAMED_BYTES))  # 8 bytes

    @property
    def replaces(self) -> bool:
        """Whether there is a checkpoint that is being replaced."""
        return self.commit.base is not None

    @property
    def save_id(self) -> bytes:
        """Of what is saved, for its manifest and, its first half, the names of its files; 16 bytes.

        It begins with the id of the commit. Those meet in one directory only, saves anywhere: hence eight random bytes
        more.
        """
        return bytes.fromhex(self.commit.id) + self.nonce


# Directories in which a save has begun whose data are yet to come, by location.
_reserved: dict[str, Target] = {}


def open_target(storage: Storage, options: SaveOptions) -> Target:
    """Begin a save into a directory; the coordinator calls this once.

    Raises `CheckpointExistsError`, or `SaveError` if another save is at work there or it cannot be written.
    """
    target = take_reserved(storage)
    if target is None:
        target = _begun(storage)
    else:
        try:
            target.commit.check()
        except BaseException:
            target.commit.give_up()
            raise
    if target.replaces and options.on_existing == "error":
        target.commit.give_up()
        raise CheckpointExistsError(
            f'{storage}: there is a checkpoint already and on_existing="error"; choose another directory,'
            ' or on_existing="replace"'
        )
    return target


def _begun(storage: Storage) -> Target:
    storage.ensure()
    return Target(Commit.begin(storage))


def reserve(storage: Storage) -> Target:
    """Begin a save that is going to `open_target`, so that something can be written ahead of it."""
    give_back(storage)
    target = _begun(storage)
    _reserved[storage.location] = target
    return target


def take_reserved(storage: Storage) -> Target | None:
    """What `reserve` has begun, once; None if nothing is."""
    return _reserved.pop(storage.location, None)


def give_back(storage: Storage) -> None:
    """The save that has begun does not come; nothing of it stays."""
    target = take_reserved(storage)
    if target is not None:
        target.commit.give_up()


def write_common(storage: Storage, content: bytes) -> None:
    """`reserve` the directory, and write the common state of the save that is going to `open_target`."""
    target = reserve(storage)
    try:
        storage.create(target.commit.pending, content)
        _reserved[storage.location] = replace(target, common_sum=(len(content), crc32(content)))
    except BaseException:
        give_back(storage)
        raise


def discard(storage: Storage, files: Iterable[str]) -> None:
    """Remove the data files that a failed save has written, as far as that is still possible."""
    try:
        for name in files:
            storage.delete(name)
    except (SaveError, OSError) as error:
        _logger.warning("%s: could not remove the files of a failed save: %s", storage, error)
