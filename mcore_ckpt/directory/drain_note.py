"""The note of a checkpoint that is to be copied to the second tier; it lies in the local directory.

Its name carries the id of the save. So it is written before the checkpoint is published, and the note of the one that
is replaced counts until that moment.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt.core.errors import CheckpointError, CorruptCheckpointError
from mcore_ckpt.core.paths import is_supported
from mcore_ckpt.directory.in_force import is_in_force
from mcore_ckpt.format.metadata_read import DRAIN_FILE, METADATA_FILE, read_small_file
from mcore_ckpt.storage.resolve import storage_at

_MAX_NOTE_BYTES = 64 * 1024 * 1024
_NOTE = re.compile(re.escape(DRAIN_FILE) + r"\.([0-9a-f]{16})")


@dataclass(frozen=True, slots=True)
class DrainNote:
    """What is to be copied, and where to.

    Attributes:
        save: id of the save, as file names show it.
        to: directory of the checkpoint in the second tier.
        files: names of the data files that lie here; None: all of the checkpoint's.
        commits: the second tier is committed from here.
        done: nothing is left to copy.
        replaces: what the second tier held there when the copy began, as `identity_of` tells it; "" for nothing; None
            if no copy has begun.
        error: why the last attempt has failed, or why it is not copied.
    """

    save: str
    to: str
    files: tuple[str, ...] | None = None
    commits: bool = True
    done: bool = False
    replaces: str | None = None
    error: str = ""

    def write(self, directory: Path) -> None:
        """Write it durably, over an earlier one of the same save. Raises `SaveError`."""
        storage_at(directory).publish(f"{DRAIN_FILE}.{self.save}", json.dumps(asdict(self)).encode())

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


def noted_saves(names: Iterable[str]) -> list[str]:
    """Ids of the saves whose notes are among the files of a directory."""
    return [match[1] for name in names if (match := _NOTE.fullmatch(name))]


def is_drain_note(name: str) -> bool:
    """Whether a file of that name is a note."""
    return name.startswith(f"{DRAIN_FILE}.")
