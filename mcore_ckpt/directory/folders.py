"""Folders inside a checkpoint's directory, in which other programs keep what belongs to it: ModelOpt its state,
Megatron-Core the files of the tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError
from mcore_ckpt.storage.resolve import storage_at

FOLDERS_OF_MEGATRON: Final = ("modelopt_state", "tokenizer")
"""What a save of Megatron-Core makes in a checkpoint; all that is in there belongs to it."""

NO_NAMES: Final = frozenset({"/", ".", ".."})
"""What a part of a key in a store may be, and no file may be called; the first stands for an empty part."""

# Directories in one another that files of others may lie in.
_MAX_FOLDERS: Final = 32


def files_below(
    directory: Path, is_left_out: Callable[[str], bool] = lambda _: False, *, follow_links: bool = False
) -> Iterator[str]:
    """Names of all files in a directory and those in it; `is_left_out` is asked about its own entries. Raises
    `CorruptCheckpointError` for symbolic links, pipes and the like, and for directories too deep.
    """
    folders = [""]
    while folders:
        folder = folders.pop()
        storage = storage_at(directory / folder)
        try:
            links = {} if follow_links else storage.links()
            files, inner = storage.sizes(), storage.folders()
        except CheckpointNotFoundError:
            if folder:  # an empty one, which stores may list only where it lies
                continue
            raise
        for own_name in sorted({*storage.list(), *links, *inner}):
            name = f"{folder}/{own_name}" if folder else own_name
            if own_name in NO_NAMES:
                raise _not_nameable(f"{directory}/{name}{'/' if own_name in inner and own_name != '/' else ''}")
            if not folder and is_left_out(name):
                continue
            if own_name in files and own_name in inner:
                path = directory / name
                raise CorruptCheckpointError(
                    f"{path}: is an object, and others lie below {path}/: a directory cannot hold both; nothing has "
                    "been written. Remove or rename one of them"
                )
            if own_name in files and own_name not in links:
                yield name
            elif own_name in inner and own_name not in links and name.count("/") < _MAX_FOLDERS:
                folders.append(name)
            else:
                raise _not_carried(directory / name, own_name in links, own_name in inner)


def _not_nameable(key: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{key}: objects have keys that begin so, and no file can have such a name: a part is empty, '.' or '..'; "
        "nothing has been written. Remove or rename them"
    )


def _not_carried(path: Path, is_link: bool, is_folder: bool) -> CorruptCheckpointError:
    kind = f"a directory in {_MAX_FOLDERS} others" if is_folder else "a pipe, a socket or a device"
    if is_link:
        kind = "a symbolic link"
    return CorruptCheckpointError(
        f"{path}: expected a regular file or a directory to take along, but it is {kind}; nothing has been written. "
        "Remove it, or, if you trust what links lead to, copy the checkpoint with its links resolved (cp -rL) and "
        "use that copy"
    )


def folders_of(names: Iterable[str]) -> list[str]:
    """The folders that files of these names lie in, the innermost first; without the directory itself."""
    found = {str(parent) for name in names for parent in Path(name).parents if parent.name}
    return sorted(found, key=lambda folder: (-folder.count("/"), folder))


def sync_folders(directory: Path, names: Iterable[str]) -> None:
    """Make the names of files durable that lie in folders of a directory. Raises `SaveError`."""
    for folder in folders_of(names):
        storage_at(directory / folder).sync()
