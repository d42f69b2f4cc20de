"""What is noted of a checkpoint that is to be copied to the second tier, in its local directory.

The name of the note carries the id of the save. So it is written before the checkpoint is published, and the note of
the one that is replaced counts until that moment.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt.core.errors import CheckpointError, CorruptCheckpointError
from mcore_ckpt.core.options import checkpoint_path, is_supported
from mcore_ckpt.directory.in_force import is_in_force, noted_saves
from mcore_ckpt.format.metadata_read import DRAIN_FILE, METADATA_FILE, read_small_file
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import storage_at

_MAX_NOTE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class DrainNote:
    """What is to be copied, and where to."""

    save: str  # its id, as file names show it
    to: str  # directory of the checkpoint in the second tier
    files: tuple[str, ...] | None = None  # names of the data files that lie here; None: all of the checkpoint's
    commits: bool = True  # the second tier is committed from here
    done: bool = False  # nothing is left to copy
    replaces: str | None = None  # what was there when the copy began, by `identity_of`; ""; None: it has not begun
    error: str = ""  # why the last attempt has failed, or why it is not copied

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{DRAIN_FILE}.{self.save}"

    @property
    def remedy(self) -> str:
        """What to do where files are lost here; empty unless the second tier has been committed from here."""
        if not (self.done and self.commits) or self.error:
            return ""
        run = checkpoint_path(self.to).parent
        return f"the second tier has a copy, {self.to}: with MCORE_CKPT_DRAIN_TO={run} a load reads missing files there"

    def write(self, directory: Path) -> None:
        """Write it durably, over an earlier one of the same save. Raises `SaveError`."""
        storage_at(directory).publish(self.name, json.dumps(asdict(self)).encode())

    def leads_back(self, storage: Storage) -> bool:
        """Whether `to` is the directory that holds this note, by another path. Raises `LoadError`.

        Two mounts of one file system may be two devices; the note has one inode, and is never copied.
        """
        return storage.version(self.name) == storage_at(self.to).version(self.name)

    @classmethod
    def read(cls, directory: Path, save: str) -> DrainNote:
        """The note of a save. Raises `CheckpointNotFoundError` if there is none, or another `LoadError`."""
        content = read_small_file(directory, f"{DRAIN_FILE}.{save}", _MAX_NOTE_BYTES)
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError, CheckpointError):
            fields: dict[str, Any] = json.loads(content)
            note = cls(**{**fields, "files": None if fields["files"] is None else tuple(fields["files"])})
            texts = (note.save, note.to, note.replaces or "", note.error, *(note.files or ()))
            if all(type(text) is str for text in texts) and note.save == save and is_supported(note.to):
                return note
        raise CorruptCheckpointError(
            f"{directory / DRAIN_FILE}.{save}: does not say what is to be copied to the second tier; remove the file, "
            "and copy the checkpoint by hand (`mcore-ckpt copy`)"
        )

    @classmethod
    def in_force(cls, directory: Path) -> DrainNote | None:
        """The note of the checkpoint that a directory holds; None if it has none. Raises `LoadError`."""
        storage = storage_at(directory)
        for save in noted_saves(storage.list()):
            if storage.exists(METADATA_FILE) and is_in_force(storage, bytes.fromhex(save)):
                return cls.read(directory, save)
        return None
