"""Files next to the data files of a checkpoint, which a reshard takes along where they stay valid."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from mcore_ckpt.core.errors import CorruptCheckpointError, LoadError, SaveError
from mcore_ckpt.core.paths import checkpoint_path
from mcore_ckpt.directory.common_file import read_common_file
from mcore_ckpt.directory.in_force import common_file_in_force, with_common_files
from mcore_ckpt.directory.lock import is_lock_file
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.format.metadata_read import COMMON_FILE, CONFIG_FILE, MAX_CONFIG_BYTES, METADATA_FILE, read_small_file
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.verify import check_file

# Directories in one another that files of others may lie in.
_MAX_FOLDERS = 32
_COPY_BYTES = 4 * 1024**2


def sidecar_files(index: CheckpointIndex) -> list[str]:
    """Files of others (ModelOpt) next to the data, also in directories, as names relative to the source. Raises
    `CorruptCheckpointError` for symbolic links, pipes and the like, and for directories too deep.
    """
    source = checkpoint_path(index.path)
    data_files = {chunk.item.file for entry in index.tensors.values() for chunk in entry.chunks}
    data_files |= {entry.item.file for entry in index.objects.values()}
    # integrity.json lists hashes of the source's files; the others are not parts of a finished checkpoint.
    left_out = {METADATA_FILE, CONFIG_FILE, COMMON_FILE, "integrity.json", *data_files}
    found: list[str] = []
    folders = [""]
    try:
        while folders:
            folder = folders.pop()
            with os.scandir(source / folder) as entries:
                for entry in entries:
                    name = f"{folder}/{entry.name}" if folder else entry.name
                    if not folder and (
                        name in left_out or is_lock_file(name) or name.endswith((".pending", ".tmp", ".distcp"))
                    ):
                        continue
                    if entry.is_file(follow_symlinks=False):
                        found.append(name)
                    elif entry.is_dir(follow_symlinks=False) and name.count("/") < _MAX_FOLDERS:
                        folders.append(name)
                    else:
                        raise _not_carried(source / name, entry.is_symlink(), entry.is_dir(follow_symlinks=False))
    except OSError as error:
        raise LoadError(f"{source}: what lies in it cannot be listed: {error}") from error
    return sorted(found)


def _not_carried(path: Path, is_link: bool, is_folder: bool) -> CorruptCheckpointError:
    kind = "a symbolic link" if is_link else "a pipe, a socket or a device"
    if is_folder:
        kind = f"a directory in {_MAX_FOLDERS} others"
    return CorruptCheckpointError(
        f"{path}: expected a regular file or a directory to take along, but it is {kind}; nothing has been written. "
        "Remove it, or, if you trust what links lead to, copy the checkpoint with its links resolved (cp -rL) and "
        "reshard the copy"
    )


def carry_sidecars(
    index: CheckpointIndex, sidecars: Iterable[str], partial: Path, common_content: bytes | None = None
) -> None:
    """Copy what lies next to the data and stays valid: common state, `metadata.json`, and `sidecar_files`.
    `common_content` replaces the content of `common.pt`.
    """
    source, storage = checkpoint_path(index.path), storage_at(partial)
    names = [path.name for path in source.iterdir()]
    common = common_file_in_force(with_common_files(storage_at(source), names, index), index)
    for name in sidecars:
        _carry_file(source, name, partial / name)
    if common is not None:
        content = read_common_file(storage_at(source), common, index.seal)
        check_file(storage_at(source), common)
        storage.publish(COMMON_FILE, content if common_content is None else common_content)
    if (source / CONFIG_FILE).exists():
        storage.publish(CONFIG_FILE, read_small_file(source, CONFIG_FILE, MAX_CONFIG_BYTES))


def _carry_file(source: Path, name: str, target: Path) -> None:
    """Copy a file of any size, durably; nothing else appears under that name before `.metadata` does."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with storage_at(source).open_reader(name, direct="off") as given, target.open("wb") as taken:
            for at in range(0, given.size_bytes, _COPY_BYTES):
                taken.write(given.read(at, min(_COPY_BYTES, given.size_bytes - at)))
            taken.flush()
            os.fsync(taken.fileno())
    except OSError as error:
        raise SaveError(f"{source / name}: cannot be copied to {target}: {error.strerror or error}") from error
