"""Copy a checkpoint between any two places: directories of file systems, and of object stores.

The copy is published as a save is: data files first, `.metadata` last, by compare-and-swap. So it is there
complete or not at all, and a copy that was interrupted is resumed: what arrived complete is compared, not sent again.
The source is compared with its own checksums before: a damaged one would else replace the last intact copy of it.
"""

from __future__ import annotations

import os
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.core.errors import CheckpointExistsError, CheckpointNotFoundError, CorruptCheckpointError, OptionError
from mcore_ckpt.directory.copying import CheckpointFiles, copy_and_commit, files_of, refuse_others
from mcore_ckpt.directory.in_force import read_common_file
from mcore_ckpt.directory.iterations import FOLDERS_OF_MEGATRON
from mcore_ckpt.format.metadata_read import COMMON_FILE, METADATA_FILE
from mcore_ckpt.load.item_checks import check_data_files
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.run_folders import places_of


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What a copy has done.

    Attributes:
        source: where the checkpoint is.
        target: where its copy is.
        copied: names of the files that were sent.
        kept: names of those that were there already, with the same content.
        copied_bytes: that were sent.
        seconds: it took.
    """

    source: str
    target: str
    copied: tuple[str, ...]
    kept: tuple[str, ...]
    copied_bytes: int
    seconds: float


def copy_checkpoint(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> CopyReport:
    """Copy one checkpoint that its own checksums say is intact; each file is read back, and its CRC-32 compared.

    Args:
        source: directory of a checkpoint, or of a run whose tracker file names one; a path or a URL.
        target: directory of the copy, a path or a URL. What an interrupted copy has left there is used. If `source` is
            a run, `target` becomes one: the copy is `target/iter_0001000`. A checkpoint called `iter_0001000` gets a
            tracker file next to it, unless one there names a later iteration.

    Raises:
        CheckpointExistsError: there is another checkpoint, or what an interrupted copy of another one has left.
        OptionError: the target lies inside the source.
        CorruptCheckpointError: the source is damaged. Nothing is written.
        LoadError: the checkpoint cannot be read.
        SaveError: the copy cannot be written, or does not hold what was written, or a save holds the directory.
    """
    started_s = time.monotonic()
    places = places_of(source, target, same_format=True)
    given, taken = places.source, places.target
    reads, writes = storage_at(given), storage_at(taken)
    if reads.holds(writes):
        raise OptionError(f"{taken}: lies inside the checkpoint that is to be copied, {given}; copy it elsewhere")

    def accepts(found: CheckpointFiles, there: bytes | None) -> None:
        if there is not None:
            raise CheckpointExistsError(
                f"{taken}: there is another checkpoint already; copy into another directory, or remove it first"
            )
        if writes.is_directory():
            refuse_others(taken, {*found.data, *found.others, *({COMMON_FILE} if found.common else ())})

    def check(found: CheckpointFiles) -> None:
        for name in (*found.data, *found.others):
            writes.path(name)  # refuses a name that there cannot be
        _refuse_damaged(given, found)

    with reads.in_use(METADATA_FILE):
        sent = copy_and_commit(given, taken, accepts=accepts, check=check)
    assert sent is not None
    places.finish()
    return CopyReport(
        str(given),
        str(taken),
        (*sent.copied, METADATA_FILE),
        tuple(sent.kept),
        sent.nbytes,
        time.monotonic() - started_s,
    )


def _refuse_damaged(given: Path, found: CheckpointFiles) -> None:
    """Raise `LoadError` if a file is not what the index says; also in folders that hold checkpoints of their own."""
    reads = storage_at(given)
    try:
        check_data_files(reads, found.index, found.data)
    except (CorruptCheckpointError, CheckpointNotFoundError) as error:
        raise CorruptCheckpointError(
            f"the checkpoint that is to be copied is damaged, and nothing is copied: {error} (mcore-ckpt repair "
            f"{shlex.quote(str(given))} --from COPY)"
        ) from error
    if found.common is not None:
        read_common_file(reads, found.common, found.index.manifest)
    for folder in FOLDERS_OF_MEGATRON:
        if f"{folder}/{METADATA_FILE}" in found.others:
            _refuse_damaged(given / folder, files_of(given / folder))
