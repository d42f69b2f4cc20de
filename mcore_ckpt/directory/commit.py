"""Publishing a checkpoint so that a directory never holds a mix: the rules, in one place.

A save into a directory proceeds in this order; a crash between any two steps leaves either the old checkpoint whole or
the new one whole:

1. `open_target`: what is there already? New data files get numbers that no existing file has. The marker file
   `.mcore_ckpt_incomplete` is written: it names the number from which on data files belong to the save in progress,
   and the files of the checkpoint that is being replaced.
2. The ranks write and fsync their data files. If a checkpoint is being replaced, the new common state lies beside the
   old one as `common.pt.<number>.pending`.
3. `publish`: the new `.metadata` replaces the old one by a rename. This is the moment the new checkpoint exists.
4. The pending common state takes its place, and the files that only the old `.metadata` named are removed, then the
   marker. A crash before the end of this step is mended by the next save; a reader meanwhile looks up which common
   state is in force with `common_file_in_force`.

Only files named by the old `.metadata`, and those a failed save of ours left, are ever removed: other programs keep
files in the same directory.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass

from mcore_ckpt.core.errors import CheckpointExistsError, LoadError, SaveError
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.format.metadata_read import COMMON_FILE, INCOMPLETE_MARKER, METADATA_FILE, parse_index
from mcore_ckpt.storage.base import Storage

__all__ = [
    "PENDING_COMMON",
    "Target",
    "abandon",
    "common_file_in_force",
    "data_file_name",
    "discard",
    "index_files",
    "is_in_force",
    "open_target",
    "publish",
]

_logger = logging.getLogger(__name__)

PENDING_COMMON = COMMON_FILE + ".pending"
_INTEGRITY_FILE = "integrity.json"
_COMMON_STATE_KEY = "common_state/"
_DATA_FILE = re.compile(r"__(\d+)_(\d+)\.distcp$")
_PENDING_NUMBERED = re.compile(re.escape(COMMON_FILE) + r"\.(\d+)\.pending$")


@dataclass(frozen=True, slots=True)
class Target:
    """The directory of a save, as its coordinator found it.

    Attributes:
        first_file: number of the first data file of each rank; no file of that number or above exists.
        old_files: files that only the checkpoint being replaced needs.
        replaces: there is a checkpoint that is being replaced.
    """

    first_file: int
    old_files: tuple[str, ...]
    replaces: bool


def data_file_name(rank: int, number: int, prefix: str = "") -> str:
    """Name of a rank's data file. `prefix` is the separation hint: readers find hinted files by it."""
    return f"{prefix}__{rank}_{number}.distcp"


def _file_number(name: str) -> int | None:
    match = _DATA_FILE.search(name)
    return int(match.group(2)) if match else None


def index_files(index: CheckpointIndex) -> set[str]:
    """Names of the data files that a checkpoint consists of."""
    files = {chunk.item.file for entry in index.tensors.values() for chunk in entry.chunks}
    files.update(entry.item.file for entry in index.objects.values())
    return files


def open_target(storage: Storage, options: SaveOptions) -> Target:
    """Look at the directory of a save and mark it as being written; the coordinator calls this once.

    Raises:
        CheckpointExistsError: there is a checkpoint and `on_existing="error"`.
        OSError: the directory cannot be made or written.
    """
    storage.ensure_directory()
    names = storage.list()
    old: CheckpointIndex | None = None
    replaces = METADATA_FILE in names
    if replaces:
        if options.on_existing == "error":
            storage.delete(PENDING_COMMON)  # written ahead of this look, for the save that is refused here
            raise CheckpointExistsError(
                f'{storage}: there is a checkpoint already and on_existing="error"; choose another directory,'
                ' or on_existing="replace"'
            )
        old = _old_index(storage)
    _clean_up_after_failed_save(storage, names, old, replaces)
    names = storage.list()
    old_files = sorted(index_files(old)) if old else []
    # Numbers that the old `.metadata` names count although their files are gone: what it names is removed in the end.
    numbers = [number for number in map(_file_number, [*names, *old_files]) if number is not None]
    first_file = max(numbers, default=-1) + 1
    pending = PENDING_COMMON in names
    storage.publish(INCOMPLETE_MARKER, json.dumps({"first_file": first_file, "replaces": old_files}).encode())
    if pending:
        storage.rename(PENDING_COMMON, _numbered_pending(first_file))
    return Target(first_file, tuple(old_files), replaces)


def publish(storage: Storage, target: Target, metadata: bytes, *, has_common_state: bool) -> None:
    """Make the new checkpoint the one that the directory holds. All data files must be durable.

    Args:
        storage: the checkpoint's directory.
        target: what `open_target` found.
        metadata: the new `.metadata`.
        has_common_state: the common state is an object in the data files (megatron-core 0.19 and later), so that a
            `common.pt` of an older version must go: readers would prefer it.
    """
    storage.sync_directory()
    storage.publish(METADATA_FILE, metadata)
    try:
        _tidy_up(storage, target, has_common_state)
    except Exception as error:  # noqa: BLE001  (whatever it is, the checkpoint must not pass for a failed one)
        # The new checkpoint is whole and in force; what is left over is mended by the next save into the directory.
        _logger.warning("%s: the checkpoint is published, but not everything old could be removed: %s", storage, error)


def _tidy_up(storage: Storage, target: Target, has_common_state: bool) -> None:
    names = storage.list()
    pending = _numbered_pending(target.first_file)
    # Megatron sums up the files after the save: what is there now are the sums of another checkpoint.
    stale = [_INTEGRITY_FILE]
    if has_common_state:
        # Left by an older version, or by a save of it that was killed; readers of 0.19 would prefer it.
        stale += [pending, COMMON_FILE]
    elif pending in names:
        storage.rename(pending, COMMON_FILE)
    for name in stale:
        if name in names:
            storage.delete(name)
    for name in target.old_files:
        storage.delete(name)
    storage.delete(INCOMPLETE_MARKER)
    storage.sync_directory()


def is_in_force(storage: Storage, files: Iterable[str]) -> bool:
    """Whether the `.metadata` in force names one of these files, or cannot be read so that nobody knows.

    What interrupts a coordinator that has just published makes it report a failure; data files must stay then.
    """
    try:
        content = storage.read(METADATA_FILE) if storage.exists(METADATA_FILE) else b""
    except (LoadError, OSError):
        return True
    return any(name.encode("utf-8", "surrogatepass") in content for name in files)


def discard(storage: Storage, files: Iterable[str]) -> None:
    """Remove the data files that a failed save has written, as far as that is still possible."""
    try:
        for name in files:
            storage.delete(name)
    except (SaveError, OSError) as error:
        _logger.warning("%s: could not remove the files of a failed save: %s", storage, error)


def abandon(storage: Storage, target: Target, *, others_clean_up: bool = True) -> None:
    """Coordinator: put the directory back as it was before `open_target`.

    Where there is no checkpoint the marker stays, and says that what lies there is not one.

    Args:
        storage: the checkpoint's directory.
        target: what `open_target` found.
        others_clean_up: every other rank is known to remove its files. If one may have been killed, the marker stays,
            by which the next save finds what is left.
    """
    try:
        storage.delete(_numbered_pending(target.first_file))
        if target.replaces and others_clean_up:
            storage.delete(INCOMPLETE_MARKER)
    except (SaveError, OSError) as error:
        _logger.warning("%s: could not clean up after a failed save: %s", storage, error)


def common_file_in_force(names: Iterable[str], index: CheckpointIndex) -> str | None:
    """Which file holds the common state of the checkpoint that `.metadata` describes; None if none does.

    A crash right after the publish can leave the new common state under its pending name.
    """
    if any(key.startswith(_COMMON_STATE_KEY) for key in index.objects):
        return None
    last = max((n for n in map(_file_number, index_files(index)) if n is not None), default=-1)
    names = list(names)
    for name in names:
        match = _PENDING_NUMBERED.match(name)
        if match and int(match.group(1)) <= last:
            return name
    return COMMON_FILE if COMMON_FILE in names else None


def _numbered_pending(first_file: int) -> str:
    return f"{COMMON_FILE}.{first_file}.pending"


def _old_index(storage: Storage) -> CheckpointIndex | None:
    try:
        return parse_index(storage.read(METADATA_FILE), f"{storage}/{METADATA_FILE}")
    except LoadError as error:
        _logger.warning("%s: the checkpoint that is being replaced cannot be read, its files stay: %s", storage, error)
        return None


def _clean_up_after_failed_save(
    storage: Storage, names: list[str], index: CheckpointIndex | None, replaces: bool
) -> None:
    """Finish or undo what a save that was killed has left; nothing that the old `.metadata` names is touched."""
    needed = index_files(index) if index else set()
    if index is not None:
        in_force = common_file_in_force(names, index)
        if in_force is not None and in_force != COMMON_FILE:
            storage.rename(in_force, COMMON_FILE)
    for name in names:
        if _PENDING_NUMBERED.match(name):
            storage.delete(name, missing_ok=True)
    if INCOMPLETE_MARKER not in names or (replaces and index is None):
        return
    try:
        marker = json.loads(storage.read(INCOMPLETE_MARKER))
        first_file = int(marker["first_file"])
        replaced = {str(name) for name in marker.get("replaces", ())}
    except (ValueError, KeyError, TypeError, AttributeError):
        return
    if not any((_file_number(name) or 0) >= first_file for name in needed):
        replaced = set()  # killed before it published: the old checkpoint is in force
    for name in names:
        # A save puts its files into the directory itself. In those below it lie other checkpoints.
        number = None if "/" in name else _file_number(name)
        unpublished = number is not None and number >= first_file
        if name not in needed and (unpublished or name in replaced):
            storage.delete(name)
