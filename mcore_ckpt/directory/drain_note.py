"""How far a checkpoint is on its way to the second tier: a note in its local directory."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from mcore_ckpt.core.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from mcore_ckpt.core.paths import is_supported
from mcore_ckpt.format.metadata_read import DRAIN_FILE, read_small_file
from mcore_ckpt.storage.resolve import storage_at

_MAX_NOTE_BYTES: Final = 64 * 1024 * 1024
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
        saved_s: when the checkpoint was saved, in seconds since 1970. The second tier has this note, too, so that
            it can be told there which of two checkpoints was saved later.
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

    @property
    def is_open(self) -> bool:
        """Whether there is still something to copy."""
        return self.state not in ("copied", "superseded")

    def write(self, directory: Path) -> None:
        """Durably. Raises `SaveError`."""
        storage_at(directory).publish(DRAIN_FILE, json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, directory: Path) -> DrainNote | None:
        """The note of a directory; None if there is none. Raises `LoadError`."""
        try:
            content = read_small_file(directory, DRAIN_FILE, _MAX_NOTE_BYTES)
        except CheckpointNotFoundError:
            return None
        try:
            fields: dict[str, Any] = json.loads(content)
            note = cls(**{**fields, "files": None if fields["files"] is None else tuple(fields["files"])})
            texts = (note.save, note.to, note.state, note.error, *(note.files or ()))
            numbers = (note.copied_bytes, note.total_bytes, note.attempts, note.updated_s, note.saved_s)
            if (
                all(type(text) is str for text in texts)
                and all(type(number) in (int, float) for number in numbers)
                and note.state in _STATES
                and is_supported(note.to)
            ):
                return note
        except (ValueError, KeyError, TypeError, RecursionError, CheckpointError):
            pass
        raise CorruptCheckpointError(
            f"{directory / DRAIN_FILE}: does not say how far the copy to the second tier is; remove the file, and copy "
            "the checkpoint by hand (`mcore-ckpt copy`)"
        )
