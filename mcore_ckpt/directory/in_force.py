"""Which checkpoint a directory holds: what its index names, and which file is the common state of the one in force.

Whether there is an index, and which, is asked of the file itself: the listing of a network file system may lag behind.
Next to `.metadata` there may be indexes of single ranks (`__<rank>.metadata`), which DCP has written without
collectives: no file that they may name is removed.

To megatron-core 0.18 the common state is a file of its own. The manifest names it next to the data files, by its length
and the CRC-32 of all its bytes, also where stock has written it: so that the file of another save, a damaged one, and
one that a save of stock had replaced before it was killed are told from the one that was saved. A file that a user has
changed on purpose cannot be told from those; it is refused until it is accepted (`index_changes.accept_common_file`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError, LoadError
from mcore_ckpt.format.index import COMMON_STATE_KEY, CheckpointIndex
from mcore_ckpt.format.integrity import data_file_of, id_in_names
from mcore_ckpt.format.metadata_read import (
    COMMON_FILE,
    DRAIN_FILE,
    MAX_METADATA_BYTES,
    METADATA_FILE,
    TRACKER_FILE,
    parse_index,
)
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import storage_at

_logger = logger_of(__name__)

_PENDING = re.compile(re.escape(COMMON_FILE) + r"\.(?P<id>[0-9a-f]{16})\.pending")


def index_files(index: CheckpointIndex) -> set[str]:
    """Names of the data files that a checkpoint consists of."""
    files = {chunk.item.file for entry in index.tensors.values() for chunk in entry.chunks}
    files.update(entry.item.file for entry in index.objects.values())
    return files


def read_in_force(storage: Storage) -> CheckpointIndex | None:
    """The index in force; None, and a warning, if it cannot be read."""
    try:
        return parse_index(_content(storage), str(storage))
    except CheckpointNotFoundError:
        return None
    except LoadError as error:
        _logger.warning(
            "%s: %s cannot be read, so that no file that it may name is removed: %s", storage, METADATA_FILE, error
        )
        return None


def _content(storage: Storage) -> bytes:
    """The content of `.metadata`, if it is not too large for one; raises as `Storage.read`."""
    with storage.open_reader(METADATA_FILE) as reader:
        if reader.size_bytes > MAX_METADATA_BYTES:
            raise CorruptCheckpointError(
                f"{storage}/{METADATA_FILE}: expected at most {MAX_METADATA_BYTES} bytes, the file has "
                f"{reader.size_bytes}"
            )
        return reader.read(0, reader.size_bytes)


def is_in_force(storage: Storage, save_id: bytes) -> bool:
    """Whether the `.metadata` in force names files of that save, or cannot be read. (A coordinator that is interrupted
    right after it has published reports a failure; data files must stay then.)
    """
    try:
        content = _content(storage) if storage.exists(METADATA_FILE) else b""
    except (LoadError, OSError):
        return True
    return id_in_names(save_id).encode() in content


def pending_name(save: str) -> str:
    """Where the common state of a save that replaces a checkpoint waits for being published."""
    return f"{COMMON_FILE}.{save}.pending"


def is_pending(name: str) -> bool:
    """Whether a file is a common state that waits, or has waited, for being published."""
    return name == f"{COMMON_FILE}.pending" or _PENDING.fullmatch(name) is not None


def saves_of(index: CheckpointIndex) -> set[str]:
    """Ids, as names show them, of the save that has made a checkpoint: of its manifest, and of its files."""
    entries = map(index.tensors.__getitem__, index.tensors)  # all together would take a load twice as long
    items = (chunk.item for entry in entries for chunk in entry.chunks)
    first = next(items, None) or next((entry.item for entry in index.objects.values()), None)
    named = None if first is None else data_file_of(first.file)
    saves = {id_in_names(index.manifest.save_id)} if index.manifest is not None else set()
    return saves | ({named.save} if named is not None and named.save is not None else set())


def common_file_in_force(names: Iterable[str], index: CheckpointIndex) -> str | None:
    """Which file holds the common state of the checkpoint that `.metadata` describes; None if none does.

    A crash right after the publish can leave the new common state under its pending name, which says of which save it
    is.
    """
    if COMMON_STATE_KEY in index.objects:
        return None
    names = list(names)
    pending = [(name, match["id"]) for name in names if (match := _PENDING.fullmatch(name))]
    saves = saves_of(index) if pending else set()
    in_force = next((name for name, save in pending if save in saves), None)
    return in_force or (COMMON_FILE if COMMON_FILE in names else None)


def with_common_files(storage: Storage, names: Iterable[str], index: CheckpointIndex) -> list[str]:
    """File names as listed, corrected for the common state of this index: a listing may lag behind."""
    asked = {COMMON_FILE, *map(pending_name, saves_of(index))}
    there = [name for name in sorted(asked) if storage.version(name) is not None]
    return [name for name in names if name not in asked] + there


_NOTE = re.compile(re.escape(DRAIN_FILE) + r"\.([0-9a-f]{16})")


def noted_saves(names: Iterable[str]) -> list[str]:
    """Ids of the saves whose notes of the second tier (`drain_note.py`) are among the files of a directory."""
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
