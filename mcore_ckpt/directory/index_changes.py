"""Changes of the index of a checkpoint that stays: the common state accepted as it is, tensors removed.

Each is published as a save is, in the place of the index that was read.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError
from mcore_ckpt.directory.commit import Commit
from mcore_ckpt.directory.in_force import common_file_in_force, index_files, with_common_files
from mcore_ckpt.directory.publish import sum_of_file
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.format.integrity import split_metadata, with_manifest
from mcore_ckpt.format.metadata_read import (
    COMMON_FILE,
    MAX_METADATA_BYTES,
    METADATA_FILE,
    parse_index,
    read_index,
    read_small_file,
)
from mcore_ckpt.format.metadata_write import encode_metadata
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import storage_at

_logger = logger_of(__name__)


def bind_common_file(content: bytes, directory: Path) -> bytes:
    """The content of `.metadata`; its manifest, if any, names the `common.pt` in `directory`, too, if there is one."""
    pickled, manifest = split_metadata(content, str(directory))
    found = None if manifest is None else sum_of_file(storage_at(directory), manifest.save_id)
    if manifest is None or found is None:
        return content
    return with_manifest(pickled, replace(manifest, files={**manifest.files, COMMON_FILE: found}))


def accept_common_file(path: Path) -> str | None:
    """Accept the common state as it is now: write a new manifest. Returns the name of its file; None if the manifest
    says the same of it already. Raises `CheckpointError`.
    """
    storage = storage_at(path)
    commit = Commit.begin(storage)
    try:
        content = read_small_file(path, METADATA_FILE, MAX_METADATA_BYTES)
        pickled, manifest = split_metadata(content, f"{path}/{METADATA_FILE}")
        if manifest is None:
            raise CorruptCheckpointError(
                f"{path}/{METADATA_FILE}: has no manifest that could say which common state is its own; any is loaded"
            )
        index = parse_index(content, str(path))
        name = common_file_in_force(with_common_files(storage, storage.list(), index), index)
        found = None if name is None else sum_of_file(storage, manifest.save_id, name)
        if name is None or found is None:
            raise CheckpointNotFoundError(f"{path}: holds no file of a common state ({COMMON_FILE}) to accept")
        if manifest.files.get(COMMON_FILE) == found:
            return None
        commit.publish(
            with_manifest(pickled, replace(manifest, files={**manifest.files, COMMON_FILE: found})),
            needed=index_files(index),
        )
        return name
    finally:
        commit.give_up()


def remove_tensors(path: Path, key_prefix: str) -> list[str]:
    """Remove all keys with this prefix, which must not be empty, then files that hold nothing else; returns these. The
    new index is published first. Raises `LoadError` or `SaveError`.
    """
    storage = storage_at(path)
    commit = Commit.begin(storage)
    try:
        return _remove_keys(storage, commit, read_index(path), key_prefix)
    finally:
        commit.give_up()


def _remove_keys(storage: Storage, commit: Commit, index: CheckpointIndex, key_prefix: str) -> list[str]:
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
