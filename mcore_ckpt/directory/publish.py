"""The directory of a save, on the coordinator, in the order of its steps:

1. `open_target` begins the save's `Commit`; so does `reserve`, ahead of it, where a common state is a file.
2. The ranks write and sync their data files.
3. `check_files` looks for every one of them.
4. `publish` replaces `.metadata`, if no other save has been published meanwhile.
5. `write_config` puts `metadata.json` next to it: never over that of another save.

A save that fails removes its data files (`discard`) and gives the directory up (`Commit.give_up`, or `give_back`).

Tensors are removed from a checkpoint as a save is published, in the place of the index that was read.
"""

from __future__ import annotations

import contextlib
import operator
import platform
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LoadError,
    SaveError,
)
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.core.process import in_parallel, run_concurrently
from mcore_ckpt.directory.commit import Commit
from mcore_ckpt.directory.in_force import index_files
from mcore_ckpt.format.integrity import ManifestFile
from mcore_ckpt.format.metadata_read import (
    COMMON_FILE,
    CONFIG_FILE,
    INTEGRITY_FILE,
    METADATA_FILE,
    read_index,
)
from mcore_ckpt.format.metadata_write import encode_metadata
from mcore_ckpt.storage.base import FileVersion, Storage
from mcore_ckpt.storage.resolve import storage_at

_logger = logger_of(__name__)


# Saves that have begun whose data are yet to come, by location.
_reserved: dict[str, Commit] = {}


def open_target(storage: Storage, options: SaveOptions) -> Commit:
    """Begin a save into a directory, on the coordinator. Raises `CheckpointExistsError`, or `SaveError`."""
    commit = _reserved.pop(storage.location, None)
    if commit is None:
        storage.ensure()
        commit = Commit.begin(storage)
    commit.storage = storage  # with the deadlines of this save
    if commit.base is not None and options.on_existing == "error":
        commit.give_up()
        raise CheckpointExistsError(
            # "Checkpoint already exists" is what DCP says, and callers look for.
            f'{storage}: Checkpoint already exists and on_existing="error" (overwrite=False); choose another directory,'
            ' or on_existing="replace"'
        )
    return commit


def reserve(storage: Storage, common: bytes) -> Commit:
    """Begin a save that is going to `open_target`, with its common state, which is to be a file."""
    give_back(storage)
    storage.ensure()
    commit = _reserved[storage.location] = Commit.begin(storage, common=common)
    return commit


def give_back(storage: Storage) -> None:
    """The save that has begun does not come; nothing of it stays."""
    commit = _reserved.pop(storage.location, None)
    if commit is not None:
        commit.give_up()


def discard(storage: Storage, files: Iterable[str]) -> None:
    """Remove the data files that a failed save has written, as far as that is still possible."""
    try:
        for name in files:
            storage.delete(name)
    except (SaveError, OSError) as error:
        _logger.warning("%s: could not remove the files of a failed save: %s", storage, error)


def sum_of_file(storage: Storage, save_id: bytes, name: str = COMMON_FILE) -> ManifestFile | None:
    """The entry of a file as it is now in the manifest of a save; None if there is no such file."""
    try:
        content = storage.read(name)
    except CheckpointNotFoundError:
        return None
    return ManifestFile(len(content), crc32(content), save_id)


# How long a file that another host has written may take to be seen on this one, and how often it is looked for.
_FILES_APPEAR_WITHIN_S = 10.0
_FIRST_PERIOD_S = 0.05
_LOOKERS = 16

# The `.metadata` that this process has published last, by location.
_published: dict[str, FileVersion] = {}


def publish(commit: Commit, metadata: bytes, *, has_common_state: bool, needed: Collection[str] = ()) -> None:
    """Put the new checkpoint in force, whose data files must be durable. `has_common_state`: it is an object, so a
    `common.pt` must go; `needed`: its data files, if their names show other ids. Raises as `Commit.publish`.
    """
    # Megatron sums up the files after the save: what is there now are the sums of another checkpoint.
    stale = (COMMON_FILE, INTEGRITY_FILE) if has_common_state else (INTEGRITY_FILE,)
    commit.publish(metadata, needed=needed, stale=stale)
    with contextlib.suppress(LoadError):
        published = commit.published or commit.storage.version(METADATA_FILE)
        if published is not None:
            _published[commit.storage.location] = published


def check_files(commit: Commit, planned: Mapping[str, int], *, at_least: bool = False) -> None:
    """Raise `SaveError` unless every planned file is there, of so many bytes, as this process sees it: the ranks may
    write to several places. Where one is not, the save may have lost already.
    """
    storage = commit.storage

    is_wrong = operator.lt if at_least else operator.ne
    left = dict(planned)
    until_s = time.monotonic() + _FILES_APPEAR_WITHIN_S
    period_s = _FIRST_PERIOD_S
    found: dict[str, FileVersion | None] = {}
    look = partial(in_parallel, work=lambda name: found.update({name: storage.version(name)}))
    while left:
        threads = _LOOKERS if len(left) > _LOOKERS else storage.asks_at_once
        run_concurrently(storage.asks_at_once, partial(look, left, threads=threads), commit.prepare)
        sizes = {name: -1 if (file := found[name]) is None else file.size_bytes for name in left}
        left = {name: size for name, size in left.items() if is_wrong(sizes[name], size)}
        if not left or time.monotonic() >= until_s:
            break
        commit.check()
        # A network file system may show what another host has written a little later.
        time.sleep(period_s)
        period_s *= 2
        storage.list()
    if left:
        name, size = min(left.items())
        file = found[name]
        raise SaveError(
            f"{storage}: {len(left)} of the files that the ranks have written cannot be seen by the coordinator, on "
            f"host {platform.node()}, as they were written: {name} was planned with {size} bytes, "
            + ("and is not there" if file is None else f"and has {file.size_bytes}")
            + ". Is this directory not shared between the hosts, but on a disk of each one's own, or has a store lost "
            "what it has confirmed? All ranks must save to one directory that all hosts share. Nothing was published"
        )


def settle(storage: Storage, config: bytes | None = None) -> None:
    """The checkpoint of a reserved directory was saved by other means: put its common state and `config` next to it."""
    commit = _reserved.pop(storage.location, None)
    if commit is not None:
        try:
            commit.have_common_wait()
            if commit.pending is not None:
                storage.move(commit.pending, COMMON_FILE)
            if config is not None and not _has_config(storage, config):
                storage.publish(CONFIG_FILE, config)
        finally:
            commit.give_up()


def write_config(storage: Storage, content: bytes) -> bool:
    """Write `metadata.json` of the checkpoint published last here; False if another save has replaced it."""
    settle(storage, content)  # another strategy saved next to the common state
    published = _published.get(storage.location)
    has_config, is_published = run_concurrently(
        storage.asks_at_once,
        partial(_has_config, storage, content),
        lambda: published is None or storage.version(METADATA_FILE) == published,
    )
    if not has_config and is_published:
        storage.publish(CONFIG_FILE, content)
    return has_config or is_published


def _has_config(storage: Storage, content: bytes) -> bool:
    try:
        return storage.read(CONFIG_FILE, len(content)) == content
    except (CheckpointNotFoundError, CorruptCheckpointError):  # longer
        return False


def remove_tensors(path: Path, key_prefix: str) -> list[str]:
    """Remove all keys with this prefix, then files that hold nothing else; returns these."""
    storage = storage_at(path)
    with Commit.begin(storage) as commit:
        index = read_index(path)
        tensors = {key: entry for key, entry in index.tensors.items() if not key.startswith(key_prefix)}
        objects = {key: entry for key, entry in index.objects.items() if not key.startswith(key_prefix)}
        if not key_prefix or len(tensors) + len(objects) == len(index.tensors) + len(index.objects):
            _logger.warning("%s: no key begins with %r, nothing is removed", storage, key_prefix)
            return []
        planner_data = index.planner_data
        if isinstance(planner_data, dict):
            planner_data = {key: value for key, value in planner_data.items() if not str(key).startswith(key_prefix)}
        kept = replace(index, tensors=tensors, objects=objects, planner_data=planner_data)
        kept = kept.with_fingerprints(index.fingerprints)
        needed = index_files(kept)
        commit.publish(encode_metadata(kept), needed=needed)
        return sorted(index_files(index) - needed)
