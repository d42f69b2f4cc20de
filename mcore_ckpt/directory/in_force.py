"""Which checkpoint a directory holds: the files of its index, and the note on its copy in the second tier.

Whether there is an index, and which, is asked of the file itself: the listing of a network file system may lag behind.
Next to `.metadata` there may be indexes of single ranks (`__<rank>.metadata`), which DCP has written without
collectives: no file that they may name is removed.

The name of a note for the second tier carries the id of the save. So it is written before the checkpoint is published,
and the note of the one that is replaced counts until that moment.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, LoadError
from mcore_ckpt.core.options import checkpoint_path, is_supported
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.format.integrity import data_file_of, id_in_data_names, id_in_names
from mcore_ckpt.format.metadata_read import (
    DRAIN_FILE,
    MAX_METADATA_BYTES,
    METADATA_FILE,
    TRACKER_FILE,
    parse_index,
    read_small_file,
)
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import storage_at

_logger = logger_of(__name__)


def index_files(index: CheckpointIndex) -> set[str]:
    """Names of the data files that a checkpoint consists of."""
    return {item.file for _, _, item in index.items()}


def read_in_force(storage: Storage) -> CheckpointIndex | None:
    """The index in force; None, and a warning, if it cannot be read."""
    try:
        return parse_index(storage.read(METADATA_FILE, MAX_METADATA_BYTES), str(storage))
    except CheckpointNotFoundError:
        return None
    except LoadError as error:
        _logger.warning(
            "%s: %s cannot be read, so that no file that it may name is removed: %s", storage, METADATA_FILE, error
        )
        return None


def is_in_force(storage: Storage, save_id: bytes) -> bool:
    """Whether the `.metadata` in force names files of that save, or cannot be read. (A coordinator that is interrupted
    right after it has published reports a failure; data files must stay then.)
    """
    try:
        content = storage.read(METADATA_FILE, MAX_METADATA_BYTES) if storage.exists(METADATA_FILE) else b""
    except (LoadError, OSError):
        return True
    return id_in_names(save_id).encode() in content or id_in_data_names(save_id).encode() in content


def saves_of(index: CheckpointIndex) -> set[str]:
    """Ids, as names show them, of the save that has made a checkpoint: of its manifest, and of its files."""
    entries = map(index.tensors.__getitem__, index.tensors)  # all together would take a load twice as long
    items = (chunk.item for entry in entries for chunk in entry.chunks)
    first = next(items, None) or next((entry.item for entry in index.objects.values()), None)
    named = None if first is None else data_file_of(first.file)
    saves = {id_in_names(index.manifest.save_id)} if index.manifest is not None else set()
    return saves | ({named.save} if named is not None and named.save is not None else set())


_NOTE = re.compile(re.escape(DRAIN_FILE) + r"\.([0-9a-f]{16})")


def noted_saves(names: Iterable[str]) -> list[str]:
    """Ids of the saves whose notes of the second tier (`DrainNote`) are among the files of a directory."""
    return [match[1] for name in names if (match := _NOTE.fullmatch(name))]


def is_drain_note(name: str) -> bool:
    """Whether a file of that name is a note."""
    return name.startswith(f"{DRAIN_FILE}.")


_ITERATION = re.compile(r"iter_(\d{7,18})")


RELEASE = "release"


def iteration_of(name: str) -> int | None:
    """The iteration that a directory is named after; None for other names."""
    found = _ITERATION.fullmatch(name)
    iteration = int(found.group(1)) if found and name.isascii() else None
    return iteration if iteration is not None and name == f"iter_{iteration:07d}" else None


def is_checkpoint_name(name: str) -> bool:
    """Whether a directory of that name is one of a run's checkpoints."""
    return name == RELEASE or iteration_of(name) is not None


def tracked_name(run: str | os.PathLike[str]) -> str | None:
    """The directory that the tracker file names; None without a tracker file. Raises `LoadError`."""
    storage = storage_at(run, follow_links=True)
    try:
        with storage.open_reader(TRACKER_FILE, direct="off") as reader:
            text = reader.read(0, min(64, reader.size_bytes)).strip()
    except CheckpointNotFoundError:
        return None
    if text == RELEASE.encode():
        return RELEASE
    if not text.isdigit() or len(text) > 18:
        raise CorruptCheckpointError(
            f"{storage.path(TRACKER_FILE)}: expected the number of an iteration or `{RELEASE}`, got {text!r:.80}; "
            "write the iteration into it that the run is to resume from"
        )
    return f"iter_{int(text):07d}"


# A list of files names a million of them at most.
MAX_NOTE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class DrainNote:
    """What is to be copied, and where to."""

    save: str  # its id, as file names show it
    to: str  # directory of the checkpoint in the second tier
    files: tuple[str, ...] | None = None  # names of the data files that lie here; None: all of the checkpoint's
    commits: bool = True  # the second tier is committed from here
    done: bool = False  # nothing is left to copy
    replaces: str | None = None  # what it replaces there, by `identity_of`; "": nothing; None: it has not begun
    error: str = ""  # why the last attempt has failed, or why it is not copied

    @property
    def name(self) -> str:
        """Name of its file."""
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
        """Whether `to` is the directory of this note, by another path: the note is one file, and is never copied."""
        return storage.version(self.name) == storage_at(self.to).version(self.name)

    @classmethod
    def read(cls, directory: Path, save: str) -> DrainNote:
        """The note of a save. Raises `CheckpointNotFoundError` if there is none, or another `LoadError`."""
        content = read_small_file(directory, f"{DRAIN_FILE}.{save}", MAX_NOTE_BYTES)
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
            if is_in_force(storage, bytes.fromhex(save)):
                return cls.read(directory, save)
        return None
