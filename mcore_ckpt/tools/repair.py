"""Repair of a damaged checkpoint with the files of a copy of the same save, such as that in the second tier.

Nothing is believed for coming from the copy: files of another save would make a mix of two, and look complete. So the
copy's ids, or where there are none its checksums, have to be those of the damaged checkpoint. A file is taken if all of
its checksums hold in the copy: it is copied under a name of its own, made durable, and renamed. Nothing is written in
place. The checkpoint is verified again then.

A repair that ends early has put nothing in force that was not judged before, and can be repeated.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from mcore_ckpt.core.console import Progress
from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError, LoadError, SaveError
from mcore_ckpt.core.options import checkpoint_path
from mcore_ckpt.directory.commit import Commit
from mcore_ckpt.directory.copying import JudgedFiles, copy_file, file_on_its_way
from mcore_ckpt.directory.in_force import index_files
from mcore_ckpt.directory.iterations import config_flaw, sync_folders
from mcore_ckpt.format.index import CheckpointIndex, StoredItem
from mcore_ckpt.format.item_reading import verify_records
from mcore_ckpt.format.metadata_read import (
    COMMON_FILE,
    CONFIG_FILE,
    MAX_CONFIG_BYTES,
    MAX_METADATA_BYTES,
    METADATA_FILE,
    parse_index,
    read_common_file,
    read_index,
    read_small_file,
)
from mcore_ckpt.format.zip_records import NotRangeable
from mcore_ckpt.load.checks import check_data_files, check_file, checks_of
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.inspection import checkpoint_directory
from mcore_ckpt.tools.verify import VerifyReport, verify_checkpoint, verify_index

# Enough that tensors which happen to be equal in two iterations (masks, zeros) do not decide.
_COMPARED_ITEMS = 16


def repair_checkpoint(
    report: VerifyReport, other: str | os.PathLike[str], *, dry_run: bool = False, progress: bool | None = False
) -> VerifyReport:
    """Repair what `report` found, as far as the copy in `other` can, and verify again.

    Args:
        report: what `verify_checkpoint` returned; the checkpoint that it names is repaired.
        other: directory of a copy of the same save, or one with a tracker file that names it.
        dry_run: read and compare only. The report that comes back has the same problems, and `would_repair` names what
            this function would put back.
        progress: show bars; None: if standard error is a terminal.

    Returns:
        The new report; `repaired` names the files that were put back, and its problems are the remaining ones.
        `unmatched` are problems for which the copy has no sound file, which of another save are all.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError: `other` is no readable checkpoint, or its index does not
            describe the files that are to be repaired.
        LoadError: another save has replaced the copy meanwhile.
        SaveError: a save, or another repair, holds the damaged checkpoint's directory, or it cannot be written.
    """
    copy = checkpoint_directory(other)
    damaged = _Damaged(checkpoint_path(report.path), copy, dry_run=dry_run)
    try:
        return _repair(report, damaged, copy, progress)
    finally:
        damaged.end()


class _Damaged:
    """The damaged checkpoint; all writes to it (in a dry run none) are here. Its note keeps saves out, as a rule; a
    file is put back only while the checkpoint is still in force.
    """

    def __init__(self, path: Path, copy: Path, *, dry_run: bool) -> None:
        self.path, self.copy, self.dry_run = path, copy, dry_run
        self.storage, self.reads = storage_at(path), storage_at(copy)
        self.judged = JudgedFiles(self.reads)
        self._commit = None if dry_run else Commit.begin(self.storage)

    def end(self) -> None:
        """Let saves in."""
        if self._commit is not None:
            self._commit.give_up()

    def check_held(self) -> None:
        """Raise `SaveError` if another save has been published by now."""
        if self._commit is not None:
            self._commit.check()

    def publish_index(self, content: bytes) -> None:
        """Put an index in force."""
        self.judged.check(METADATA_FILE)
        if self._commit is not None:
            self._commit.publish(content, needed=self.storage.list())
            self._commit = Commit.begin(self.storage)

    def publish(self, name: str, content: bytes) -> None:
        """Put a common state or `metadata.json` in force."""
        self.judged.check(name)
        self.check_held()
        if not self.dry_run:
            self.storage.publish(name, content)

    def put_file(self, name: str) -> None:
        """Put a data file in the place of the one that is damaged or missing: whole and durable, or not at all."""
        if self.dry_run:
            return
        self.check_held()
        for left in self.storage.list():
            if file_on_its_way(left) == name.rpartition("/")[2]:  # by a repair that was killed
                self.storage.delete(left)
        try:
            copy_file(self.reads, name, self.storage, name, self.judged, self.check_held)
            sync_folders(checkpoint_path(self.storage.location), [name])
            self.storage.sync()
        except SaveError:
            self.check_held()  # says better what has happened, if the directory was lost meanwhile
            raise


def _repair(report: VerifyReport, damaged: _Damaged, copy: Path, progress: bool | None) -> VerifyReport:
    directory, found = damaged.path, report
    repaired: list[str] = []
    good_index = read_index(copy)
    damaged.judged.add(index_files(good_index))
    if any(problem.kind == "index" and problem.file == METADATA_FILE for problem in report.problems):
        # Without an index nothing else is known; the copy's fits only if every item is then found sound.
        try:
            index = read_index(directory)
        except (CorruptCheckpointError, CheckpointNotFoundError):
            report, index = _take_index(damaged, good_index, progress)
            repaired.append(METADATA_FILE)
            found = replace(found, problems=(*found.problems, *report.problems))
    else:
        index = read_index(directory, strict=False)
    if _is_same_save(index, good_index):
        names = [name for name in dict.fromkeys(problem.file for problem in report.problems) if name is not None]
        there = {name: version for name in names if (version := damaged.reads.version(name)) is not None}
        with Progress("repair", sum(version.size_bytes for version in there.values()), shown=progress) as bar:
            for name in names:
                if _put_back(name, damaged, index):
                    repaired.append(name)
                bar.advance(there[name].size_bytes if name in there else 0)
    if damaged.dry_run:
        left = [problem for problem in found.problems if problem.file not in repaired]
        return replace(found, would_repair=tuple(repaired), unmatched=tuple(left))
    again = verify_checkpoint(directory, progress=progress)
    damaged.check_held()  # otherwise it was another save's checkpoint that was verified
    still_wrong = {problem.file for problem in again.problems}
    return replace(
        again,
        repaired=tuple(name for name in repaired if name not in still_wrong),
        unmatched=again.problems,
    )


def _put_back(name: str, damaged: _Damaged, index: CheckpointIndex) -> bool:
    """Put one file back, if the copy's is sound."""
    content: bytes | None = None
    try:
        if name == CONFIG_FILE:
            if config_flaw(damaged.copy):
                return False
            content = read_small_file(damaged.copy, CONFIG_FILE, MAX_CONFIG_BYTES)
        elif name.startswith(COMMON_FILE):
            content = read_common_file(damaged.reads, COMMON_FILE, index.manifest)
            check_file(damaged.reads, COMMON_FILE)
        elif name in index_files(index):
            check_data_files(damaged.reads, index, [name])
        else:
            return False
    except LoadError:
        return False
    if content is None:
        damaged.put_file(name)
    else:
        damaged.publish(name, content)
    return True


def _take_index(
    damaged: _Damaged, good: CheckpointIndex, progress: bool | None
) -> tuple[VerifyReport, CheckpointIndex]:
    """Put the copy's index in force, if it describes the files here, and what is wrong under it. Until then nothing
    changes.
    """
    content = read_small_file(damaged.copy, METADATA_FILE, MAX_METADATA_BYTES)
    index = parse_index(content, str(damaged.path), strict=False)
    report = verify_index(index, progress=progress)
    wrong = sum(problem.kind in ("item", "structure") for problem in report.problems)
    named = index_files(index)
    there = {name for name in named if damaged.storage.version(name) is not None}
    own = there - {problem.file for problem in report.problems if problem.kind == "file"}
    is_another = ((len(own) * 2 < len(there) or not there) and named) or wrong * 2 > report.items
    # Without an index, no save of these files may ever have ended: one of the same layout would describe a mix, too.
    if is_another or not (damaged.storage.exists(METADATA_FILE) or _is_same_save(index, good)):
        files = f"{len(own)} of the {len(named)} files that it names are there as it says, {wrong} items are not"
        raise CorruptCheckpointError(
            f"{damaged.copy}: its index does not describe the files of {damaged.path}: "
            f"{files if is_another else 'tensors have other checksums'}. Take a copy of this very save; nothing was "
            "changed"
        )
    index = parse_index(content, str(damaged.path))
    damaged.publish_index(content)
    return report, index


def _is_same_save(index: CheckpointIndex, other: CheckpointIndex) -> bool:
    """Whether the copy is of the same save: by the ids of their manifests, which are in the files, too, else by
    checksums. DCP's id may have come from this copy, by a repair that ended early, so it counts where no sums differ.
    """
    if index.manifest is not None and other.manifest is not None:
        return index.manifest.save_id == other.manifest.save_id
    # Large tensors are weights and moments: those of two iterations differ, and so do their checksums.
    copies = {(check.fqn, check.chunk[:2]): check.item for check in checks_of(other) if check.chunk is not None}
    equal = different = 0
    for check in sorted(checks_of(index), key=lambda check: check.item.length, reverse=True):
        item = None if check.chunk is None else copies.get((check.fqn, check.chunk[:2]))
        if item is None:
            continue
        here = _sums(checkpoint_path(index.path), check.item, check.where)
        there = _sums(checkpoint_path(other.path), item, check.where)
        if here and there:
            equal, different = equal + (here == there), different + (here != there)
        if equal + different == _COMPARED_ITEMS:
            break
    own, copied = ((each.storage_meta or {}).get("save_id") for each in (index, other))
    return equal > different or (own is not None and own == copied and not different)


def _sums(directory: Path, item: StoredItem, where: str) -> list[tuple[str, int, int | None]]:
    """Name, size and stated CRC-32 of each record of an item; empty if its headers cannot be read."""
    try:
        with storage_at(directory).open_reader(item.file) as reader:
            records = verify_records(lambda at, length: reader.read(item.offset + at, length), item.length, where)
            # The archive's own name, which torch takes from the file that is written, is no matter.
            return [(record.name.partition("/")[2], record.nbytes, record.crc32) for record in records]
    except (LoadError, NotRangeable):
        return []
