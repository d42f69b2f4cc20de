"""Files next to the data files of a checkpoint, which a reshard takes along where they stay valid."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mcore_ckpt.core.paths import checkpoint_path
from mcore_ckpt.directory.common_file import read_common_file
from mcore_ckpt.directory.folders import files_below
from mcore_ckpt.directory.in_force import common_file_in_force, with_common_files
from mcore_ckpt.directory.lock import is_lock_file
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.format.metadata_read import (
    COMMON_FILE,
    CONFIG_FILE,
    INTEGRITY_FILE,
    MAX_CONFIG_BYTES,
    METADATA_FILE,
    read_small_file,
)
from mcore_ckpt.items.item_checks import check_file
from mcore_ckpt.storage.base import RangeReader, RangeWriter
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.target.target_files import TargetFiles

_COPY_BYTES = 4 * 1024**2


def sidecar_files(index: CheckpointIndex) -> list[str]:
    """Files of others (ModelOpt) next to the data, also in directories, as names relative to the source. Raises
    `CorruptCheckpointError` for symbolic links, pipes and the like, and for directories too deep.
    """
    source = checkpoint_path(index.path)
    data_files = {chunk.item.file for entry in index.tensors.values() for chunk in entry.chunks}
    data_files |= {entry.item.file for entry in index.objects.values()}
    # integrity.json lists hashes of the source's files; the others are not parts of a finished checkpoint.
    left_out = {METADATA_FILE, CONFIG_FILE, COMMON_FILE, INTEGRITY_FILE, *data_files}

    def is_left_out(name: str) -> bool:
        return name in left_out or is_lock_file(name) or name.endswith((".pending", ".tmp", ".distcp"))

    return sorted(files_below(source, is_left_out))


def carry_sidecars(
    index: CheckpointIndex, sidecars: Iterable[str], target: TargetFiles, common_content: bytes | None = None
) -> None:
    """Copy what lies next to the data and stays valid: common state, `metadata.json`, and `sidecar_files`.
    `common_content` replaces the content of `common.pt`.
    """
    path = checkpoint_path(index.path)
    source = storage_at(path)
    common = common_file_in_force(with_common_files(source, source.list(), index), index)
    for name in sidecars:
        with source.open_reader(name, direct="off") as given:
            _copy(given, target.new_file(name, given.size_bytes))
    if common is not None:
        content = read_common_file(source, common, index.manifest)
        check_file(source, common)
        target.put(COMMON_FILE, content if common_content is None else common_content)
    if source.exists(CONFIG_FILE):
        target.put(CONFIG_FILE, read_small_file(path, CONFIG_FILE, MAX_CONFIG_BYTES))


def carry_folder(source: Path, target: Path) -> None:
    """Copy a directory that is no checkpoint, and what links in it lead to; raises `LoadError` and `SaveError`."""
    reads, writes = storage_at(source, follow_links=True), storage_at(target)
    names = sorted(files_below(source, follow_links=True))
    writes.ensure()
    for name in names:
        with reads.open_reader(name, direct="off") as given:
            _copy(given, writes.open_writer(name, size_bytes=given.size_bytes, direct="off"))


def _copy(given: RangeReader, writer: RangeWriter) -> None:
    """Copy a file of any size, durably."""
    try:
        for at in range(0, given.size_bytes, _COPY_BYTES):
            writer.write(at, memoryview(given.read(at, min(_COPY_BYTES, given.size_bytes - at))))
        writer.finish(given.size_bytes)
    except BaseException:
        writer.abort()
        raise
