"""Is the common state in `common.pt` the one that was saved with the checkpoint?

To megatron-core 0.18 the common state is a file of its own. The manifest names it next to the data files, by its length
and the CRC-32 of all its bytes, also where stock has written it: so that the file of another save, a damaged one, and
one that a save of stock had replaced before it was killed are told from the one that was saved. A file that a user has
changed on purpose cannot be told from those; it is refused until it is accepted (`accept_common_file`).
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Final

from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError
from mcore_ckpt.directory.commit import Commit
from mcore_ckpt.directory.in_force import common_file_in_force, index_files, with_common_files
from mcore_ckpt.directory.target import Target
from mcore_ckpt.format.footer import ManifestFile, shown_id
from mcore_ckpt.format.manifest import Manifest, split_metadata, with_manifest
from mcore_ckpt.format.metadata_read import COMMON_FILE, MAX_METADATA_BYTES, METADATA_FILE, parse_index, read_small_file
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import storage_at

# What is not sharded: arguments, schedules, at most a few tensors. Every rank reads all of it.
MAX_COMMON_BYTES: Final = 4 * 1024**3
_PIECE_BYTES = 16 * 1024 * 1024


def common_file_of_save(storage: Storage, target: Target, *, has_common_state: bool) -> ManifestFile | None:
    """The entry of the common state in a new manifest; None if no file holds it."""
    if has_common_state:
        return None
    if target.common_sum is not None:
        size_bytes, crc = target.common_sum
        return ManifestFile(size_bytes, crc, target.save_id)
    return _sum_of_file(storage, target.save_id)


def _sum_of_file(storage: Storage, save_id: bytes, name: str = COMMON_FILE) -> ManifestFile | None:
    try:
        opened = storage.open_reader(name, direct="off")
    except CheckpointNotFoundError:
        return None
    with opened as reader:
        value = 0
        for at in range(0, reader.size_bytes, _PIECE_BYTES):
            value = crc32(reader.read(at, min(_PIECE_BYTES, reader.size_bytes - at)), value)
        return ManifestFile(reader.size_bytes, value, save_id)


def read_common_file(storage: Storage, name: str, manifest: Manifest | None) -> bytes:
    """All bytes of the common state's file, compared with the manifest. Raises `LoadError`."""
    expected = None if manifest is None else manifest.files.get(COMMON_FILE)
    with storage.open_reader(name, direct="off") as reader:
        if expected is not None and reader.size_bytes != expected.size_bytes:
            raise _other_file(storage, name, expected, f"{reader.size_bytes} bytes")
        if expected is None and reader.size_bytes > MAX_COMMON_BYTES:
            raise CorruptCheckpointError(
                f"{storage}/{name}: expected at most {MAX_COMMON_BYTES} bytes, the file has {reader.size_bytes}"
            )
        content = reader.read(0, reader.size_bytes)
    if expected is not None and (got := crc32(content)) != expected.table_crc32:
        raise _other_file(storage, name, expected, f"CRC-32 {got:#010x}")
    return content


def _other_file(storage: Storage, name: str, expected: ManifestFile, got: str) -> CorruptCheckpointError:
    directory = storage.location
    return CorruptCheckpointError(
        f"{directory}/{name}: expected the common state of save {shown_id(expected.save_id)} ({expected.size_bytes} "
        f"bytes, CRC-32 {expected.table_crc32:#010x}), got {got}: it is of another save, damaged, or was changed "
        "since. Restore it from another copy, or load another checkpoint. If it was changed on purpose: `mcore-ckpt "
        f"repair --accept-common-state {shlex.quote(directory)}` takes it as it is"
    )


def bind_common_file(content: bytes, directory: Path) -> bytes:
    """The content of `.metadata`; its manifest, if any, names the `common.pt` in `directory`, too, if there is one."""
    pickled, manifest = split_metadata(content, str(directory))
    found = None if manifest is None else _sum_of_file(storage_at(directory), manifest.save_id)
    if manifest is None or found is None:
        return content
    return with_manifest(pickled, replace(manifest, files={**manifest.files, COMMON_FILE: found}))


def accept_common_file(path: Path) -> str | None:
    """Accept the common state as it is now, however it was changed: write a new manifest. Returns the name of its file;
    None if the manifest says the same of it already. Raises `CheckpointError`.
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
        found = None if name is None else _sum_of_file(storage, manifest.save_id, name)
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
