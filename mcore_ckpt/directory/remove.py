"""Remove tensors from a checkpoint by the prefix of their keys, without a moment in which it is damaged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.directory.commit import Commit
from mcore_ckpt.directory.in_force import index_files
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.format.metadata_write import encode_metadata
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import storage_at

_logger = logger_of(__name__)


def remove_tensors(path: Path, key_prefix: str) -> list[str]:
    """Remove all keys with this prefix, which must not be empty, then files that hold nothing else; returns these.

    The index without those keys is published first: an interruption leaves extra files, never an index that names a
    missing one. Raises `LoadError` or `SaveError`.
    """
    storage = storage_at(path)
    commit = Commit.begin(storage)
    try:
        return _remove(storage, commit, read_index(path), key_prefix)
    finally:
        commit.give_up()


def _remove(storage: Storage, commit: Commit, index: CheckpointIndex, key_prefix: str) -> list[str]:
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
