"""How far a checkpoint is on its way to the second tier: a note in its local directory."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Container, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from mcore_ckpt.core.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from mcore_ckpt.core.paths import is_local, is_supported
from mcore_ckpt.directory.in_force import is_in_force
from mcore_ckpt.format.metadata_read import DRAIN_FILE, METADATA_FILE, read_small_file
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import storage_at

_MAX_NOTE_BYTES: Final = 64 * 1024 * 1024
_SAVE: Final = re.compile(r"[0-9a-f]{16}")
# For so long a save waits for the process that is just noting how far the copy of an earlier one is.
_ALONE_WITHIN_S: Final = 5.0
# So old is what nobody is writing any more.
_LEFT_AFTER_S: Final = 60.0
# Far beyond all that a checkpoint can have, and still bytes and times that can be calculated with and shown.
_MOST_BYTES: Final = 2**63
_LATEST_S: Final = 2**37
_STATES: Final = ("waiting", "copying", "copied", "failed", "superseded")


@dataclass(frozen=True, slots=True)
class DrainNote:
    """How far a checkpoint is on its way to the second tier.

    Attributes:
        save: id of its save, as file names show it.
        to: its directory in the second tier.
        files: names of the data files that lie here; None: all of the checkpoint's.
        commits: the second tier is committed from here.
        state: `"waiting"`, `"copying"`, `"copied"` (and committed, if `commits`), `"failed"` and tried again, or
            `"superseded"`: not copied, since the second tier holds a checkpoint there that was saved later.
        copied_bytes: of the data files that lie here, how much is there.
        total_bytes: how much that is in all, as far as is known.
        error: why the last attempt has failed.
        attempts: how many there were.
        updated_s: when this was written, in seconds since 1970.
        saved_s: when the checkpoint was saved, in seconds since 1970; later than all saves before it that the job
            knows of, whatever the clocks of hosts say. The second tier has this note, too, so that it can be told
            there which of two checkpoints was saved later.
        begun_s: the time of the first save of its job, if that had loaded no checkpoint: the run has begun again, on
            purpose or because the local disk was lost; else 0.
        before: the note of the checkpoint that this save replaces. A note is written before its save is published:
            where that was killed in between, this one still counts.
    """

    save: str
    to: str
    files: tuple[str, ...] | None = None
    commits: bool = True
    state: str = "waiting"
    copied_bytes: int = 0
    total_bytes: int = 0
    error: str = ""
    attempts: int = 0
    updated_s: float = 0.0
    saved_s: float = 0.0
    begun_s: float = 0.0
    before: DrainNote | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is still something to copy."""
        return self.state not in ("copied", "superseded")

    def encode(self) -> bytes:
        """What the file holds."""
        return json.dumps(asdict(self)).encode()

    def write(self, directory: Path) -> None:
        """The note of a new save, durably; whatever is there. Raises `SaveError`."""
        with _alone(directory):
            storage_at(directory).publish(DRAIN_FILE, self.encode())

    def update(self, directory: Path) -> None:
        """Note how far it is; never over the note of another save, which another process may be writing at this moment.

        On local storage only a rename is done between the last look and the end of it, while no other process writes.
        Elsewhere, and without locks, one that writes at that very moment is overwritten. Raises `CheckpointError`.
        """
        storage = storage_at(directory)
        temporary = f".{DRAIN_FILE}.{secrets.token_hex(8)}.tmp"
        while (updated := self._within(there := self.read(directory))) is not None:
            if not is_local(directory):
                storage.publish(DRAIN_FILE, updated.encode())
                return
            storage.create(temporary, updated.encode())
            try:
                with _alone(directory):
                    is_same = self.read(directory) == there
                    if is_same:
                        storage.move(temporary, DRAIN_FILE)
            finally:
                storage.delete(temporary)
            if is_same:
                if self.state != "copying":
                    _remove_left(storage)
                storage.sync()
                return

    def _within(self, there: DrainNote | None) -> DrainNote | None:
        """What a note becomes with this one in it; None if it is of other saves."""
        if there is not None and there.save == self.save:
            return self
        if there is not None and there.before is not None and there.before.save == self.save:
            return replace(there, before=self)
        return None

    def among(self, saves: Container[str]) -> DrainNote | None:
        """This note, or the one before it, if it is of one of these saves."""
        notes = (replace(self, before=None), self.before)
        return next((note for note in notes if note is not None and note.save in saves), None)

    @classmethod
    def in_force(cls, directory: Path) -> DrainNote | None:
        """The note of the checkpoint that a directory holds; None if it has none. Raises `LoadError`."""
        note, storage = cls.read(directory), storage_at(directory)
        if note is None or not storage.exists(METADATA_FILE):
            return None
        saves = [each.save for each in (note, note.before) if each is not None]
        return note.among([save for save in saves if is_in_force(storage, bytes.fromhex(save))])

    @classmethod
    def read(cls, directory: Path) -> DrainNote | None:
        """The note of a directory; None if there is none. Raises `LoadError`."""
        try:
            content = read_small_file(directory, DRAIN_FILE, _MAX_NOTE_BYTES)
        except CheckpointNotFoundError:
            return None
        try:
            fields: dict[str, Any] = json.loads(content)
            before = fields.pop("before", None)
            note, note_before = cls._of(fields), None if before is None else cls._of({**before, "before": None})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, CheckpointError):
            pass
        else:
            return replace(note, before=note_before)
        raise CorruptCheckpointError(
            f"{directory / DRAIN_FILE}: does not say how far the copy to the second tier is; remove the file, and copy "
            "the checkpoint by hand (`mcore-ckpt copy`)"
        )

    @classmethod
    def _of(cls, fields: dict[str, Any]) -> DrainNote:
        """Raises `ValueError` and others for what is no note."""
        note = cls(**{**fields, "files": None if fields["files"] is None else tuple(fields["files"])})
        texts = (note.save, note.to, note.state, note.error, *(note.files or ()))
        counts = (note.copied_bytes, note.total_bytes, note.attempts)
        times_s = (note.updated_s, note.saved_s, note.begun_s)
        if (
            all(type(text) is str for text in texts)
            and all(type(number) in (int, float) for number in (*counts, *times_s))
            and all(0 <= count < _MOST_BYTES for count in counts)
            and all(0 <= time_s < _LATEST_S for time_s in times_s)
            and _SAVE.fullmatch(note.save) is not None
            and note.state in _STATES
            and is_supported(note.to)
        ):
            return note
        raise ValueError


def _remove_left(storage: Storage) -> None:
    """Notes that a process was writing when it was killed: they would stay when the checkpoint is removed."""
    noted = storage.version(DRAIN_FILE)
    for name in storage.list():
        if noted is not None and name.startswith(f".{DRAIN_FILE}.") and name.endswith(".tmp"):
            left = storage.version(name)
            if left is not None and noted.modified_ns - left.modified_ns > _LEFT_AFTER_S * 1e9:
                storage.delete(name)


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """While no other process does so, in a directory of a file system with locks; a save does not wait for ever."""
    if not is_local(directory):
        yield
        return
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield  # what follows says what is wrong
        return
    try:
        until_s = time.monotonic() + _ALONE_WITHIN_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < until_s:
                    time.sleep(0.002)
                    continue
            except OSError:
                pass  # a file system without locks
            break
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # a process forked meanwhile has the descriptor, too
        os.close(fd)
