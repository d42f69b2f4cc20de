"""Repair of a damaged checkpoint with the bytes of a copy of the same save, such as that in the second tier.

Nothing is believed for coming from the copy: bytes of another save would make a mix of two, and look whole. So the
copy's ids, or where there are none its checksums, have to be those of the damaged checkpoint. Items and files are put
back only if their own checksums hold in the copy. They are written in place, made durable, and the checkpoint is
verified again.

A repair that ends early has put nothing in force that was not judged before, and can be repeated.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from mcore_ckpt.core.errors import CorruptCheckpointError, LoadError, SaveError
from mcore_ckpt.core.options import checkpoint_path
from mcore_ckpt.core.progress import Progress
from mcore_ckpt.directory.commit import Commit
from mcore_ckpt.directory.copying import JudgedFiles
from mcore_ckpt.directory.in_force import index_files
from mcore_ckpt.directory.iterations import config_flaw, sync_folders
from mcore_ckpt.format.index import CheckpointIndex, StoredItem
from mcore_ckpt.format.integrity import FOOTER_BYTES
from mcore_ckpt.format.item_reading import verify_records
from mcore_ckpt.format.metadata_read import (
    COMMON_FILE,
    CONFIG_FILE,
    MAX_CONFIG_BYTES,
    MAX_METADATA_BYTES,
    METADATA_FILE,
    checked_footer,
    parse_index,
    read_common_file,
    read_index,
    read_small_file,
)
from mcore_ckpt.format.zip_records import NotRangeable
from mcore_ckpt.load.checks import ItemCheck, Problem, check_item, checks_of, read_table
from mcore_ckpt.storage.base import RangeReader
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.inspection import checkpoint_directory
from mcore_ckpt.tools.runs import copy_stream
from mcore_ckpt.tools.verify import VerifyReport, verify_checkpoint, verify_index

# Enough that tensors which happen to be equal in two iterations (masks, zeros) do not decide.
_COMPARED_ITEMS = 16


def repair_checkpoint(
    report: VerifyReport, other: str | os.PathLike[str], *, dry_run: bool = False, progress: bool | None = False
) -> VerifyReport:
    """Repair what `report` found, as far as the copy in `other` can, and verify again.

    Args:
        report: what `verify_checkpoint` returned; the checkpoint that it names is repaired in place.
        other: directory of a copy of the same save, or one with a tracker file that names it.
        dry_run: read and compare only. The report that comes back has the same problems, and `would_repair` names what
            this function would put back.
        progress: show bars; None: if standard error is a terminal.

    Returns:
        The new report; `repaired` names what was put back, and its problems are those that are left. `unmatched` are
        problems for which the copy has nothing that is sound, which of another save are all.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError: `other` is no readable checkpoint, or its index does not
            describe the files that are to be repaired.
        LoadError: another save has replaced the copy meanwhile.
        SaveError: a save, or another repair, holds the damaged checkpoint's directory, or it cannot be written.
    """
    copy = checkpoint_directory(other)
    damaged = _Damaged(checkpoint_path(report.path), JudgedFiles(storage_at(copy)), dry_run=dry_run)
    try:
        return _repair(report, damaged, copy, progress)
    finally:
        damaged.end()


class _Damaged:
    """The damaged checkpoint; all writes to it (in a dry run none) are here. Its note keeps saves out, as a rule; what
    is written in place is written only while the checkpoint is still in force.
    """

    def __init__(self, path: Path, judged: JudgedFiles, *, dry_run: bool) -> None:
        self.path, self.dry_run = path, dry_run
        self.storage = storage_at(path)
        self.judged = judged  # of the copy
        self._commit = None if dry_run else Commit.begin(self.storage)
        self._published: set[str] = set()

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
        if self._commit is not None:
            self._commit.publish(content, needed=self.storage.list())
            self._commit = Commit.begin(self.storage)

    def publish(self, name: str, content: bytes) -> bool:
        """Put a common state or `metadata.json` in force; False if that was done before."""
        self.check_held()
        if name in self._published:
            return False
        if not self.dry_run:
            self.storage.publish(name, content)
            self._published.add(name)
        return True

    def put_file(self, name: str, content: RangeReader) -> bool:
        """Make a file that is missing, whole and durable or not at all; False if there is one by now."""
        if self._commit is None:
            return True
        self.check_held()
        folder, _, last = name.rpartition("/")
        begins = f"{folder}/.{last}." if folder else f".{last}."
        for left in self.storage.list():
            # By a repair that was killed, or was thought to be: it cannot give its file the name any more.
            if left.startswith(begins) and left.endswith("repair"):
                self.storage.delete(left)
        temporary = f"{begins}{self._commit.id}.repair"
        try:
            copy_stream(content, self.storage.open_writer(temporary, size_bytes=content.size_bytes))
            self.check_held()
            self.judged.check(name)
            if self.storage.exists(name):
                return False
            self.storage.move(temporary, name)
            sync_folders(checkpoint_path(self.storage.location), [name])
            self.storage.sync()
        except SaveError:
            self.check_held()  # says better what has happened, if the directory was lost meanwhile
            raise
        finally:
            self.storage.delete(temporary)
        return True

    def write(self, name: str, offset: int, content: bytes, *, is_end: bool = False) -> bool:
        """Overwrite bytes durably; `is_end` truncates the file behind them. False if the file lies elsewhere."""
        if self.dry_run:
            return self.storage.exists(name)
        self.check_held()
        return self.storage.overwrite(name, offset, content, is_end=is_end)


# What was put back, and of which problem.
_Repaired = list[tuple[Problem, str]]
# By key, file and offset.
_Checks = dict[tuple[str, str, int], ItemCheck]


def _repair(report: VerifyReport, damaged: _Damaged, copy: Path, progress: bool | None) -> VerifyReport:
    directory, found = damaged.path, report
    repaired: _Repaired = []
    good_index = read_index(copy)
    damaged.judged.add(index_files(good_index))
    if any(problem.kind == "index" and problem.file == METADATA_FILE for problem in report.problems):
        # Without an index nothing else is known; the copy's fits only if every item is then found sound.
        try:
            index = read_index(directory)
        except CorruptCheckpointError:
            repaired += [(problem, METADATA_FILE) for problem in report.problems if problem.file == METADATA_FILE]
            report, index = _take_index(damaged, copy, progress)
            found = replace(found, problems=(*found.problems, *report.problems))
    else:
        index = read_index(directory, strict=False)
    checks = {(check.fqn, check.item.file, check.item.offset): check for check in checks_of(index)}
    if _is_same_save(index, checks, good_index):
        repaired += _replace_files(report.problems, damaged, copy, index)
        with Progress("repair", sum(problem.length or 0 for problem in report.problems), shown=progress) as bar:
            for problem in report.problems:
                repaired += _restore(problem, checks, damaged, good_index)
                bar.advance(problem.length or 0)
        repaired += _restore_footers(report.problems, damaged, copy, index)
    names = tuple(dict.fromkeys(name for _, name in repaired))
    if damaged.dry_run:
        covered = {problem for problem, _ in repaired}
        left = [one for one in found.problems if one not in covered and not (one.kind == "file" and one.file in names)]
        return replace(found, would_repair=names, unmatched=tuple(left))
    again = verify_checkpoint(directory, progress=progress)
    damaged.check_held()  # otherwise it was another save's checkpoint that was verified
    still_wrong = {problem.message for problem in again.problems}
    return replace(
        again,
        repaired=tuple(name for name in names if not any(name in message for message in still_wrong)),
        unmatched=again.problems,
    )


def _take_index(damaged: _Damaged, copy: Path, progress: bool | None) -> tuple[VerifyReport, CheckpointIndex]:
    """Put the copy's index in force, if it describes the files here, and what is wrong under it. Until then nothing
    changes.
    """
    content = read_small_file(copy, METADATA_FILE, MAX_METADATA_BYTES)
    index = parse_index(content, str(damaged.path), strict=False)
    report = verify_index(index, progress=progress)
    wrong = sum(problem.kind in ("item", "structure") for problem in report.problems)
    named = index_files(index)
    there = {name for name in named if damaged.storage.version(name) is not None}
    own = there - {problem.file for problem in report.problems if problem.kind == "file"}
    if ((len(own) * 2 < len(there) or not there) and named) or wrong * 2 > report.items:
        raise CorruptCheckpointError(
            f"{copy}: its index does not describe the files of {damaged.path}: {len(own)} of the {len(named)} files "
            f"that it names are there as it says, {wrong} items are not. Take a copy of this very save; nothing was "
            "changed"
        )
    index = parse_index(content, str(damaged.path))
    damaged.judged.check(METADATA_FILE)
    damaged.publish_index(content)
    return report, index


def _end_of_file(name: str, copy: Path, index: CheckpointIndex) -> tuple[int, bytes] | None:
    """The footer of a file of the copy, and where it begins, if it is the one that the damaged checkpoint asks for."""
    try:
        with storage_at(copy).open_reader(name) as reader:
            footer = checked_footer(index, name, reader)
            if footer is None:
                return None
            read_table(reader, footer)  # compares its CRC-32
            start = reader.size_bytes - footer.table_bytes - FOOTER_BYTES
            return start, reader.read(start, reader.size_bytes - start)
    except LoadError:
        return None


def _restore_footers(problems: tuple[Problem, ...], damaged: _Damaged, copy: Path, index: CheckpointIndex) -> _Repaired:
    """Ends of files, and lengths, come back from a copy whose file is the same by what `.metadata` says of it."""
    restored: _Repaired = []
    for problem in problems:
        name = problem.file
        if name is None or index.manifest is None or problem.kind != "file" or name not in index.manifest.files:
            continue
        end = _end_of_file(name, copy, index)
        if end is not None and damaged.write(name, *end, is_end=True):
            restored.append((problem, name))
    return restored


def _replace_files(problems: tuple[Problem, ...], damaged: _Damaged, copy: Path, index: CheckpointIndex) -> _Repaired:
    """Restore missing files, `metadata.json`, and a common state of another save."""
    repaired: _Repaired = []
    for problem in problems:
        if problem.file == CONFIG_FILE:
            if (config := _config_of(copy)) and damaged.publish(CONFIG_FILE, config):
                repaired.append((problem, CONFIG_FILE))
            continue
        if problem.kind != "file" or problem.fqn is not None or problem.file is None:
            continue
        if problem.file.startswith(COMMON_FILE) and index.manifest is not None and COMMON_FILE in index.manifest.files:
            try:
                content = read_common_file(storage_at(copy), COMMON_FILE, index.manifest)
            except LoadError:
                continue
            if damaged.publish(problem.file, content):
                repaired.append((problem, problem.file))
            continue
        listed = index.manifest is not None and problem.file in index.manifest.files
        if damaged.storage.exists(problem.file) or (listed and not _end_of_file(problem.file, copy, index)):
            continue
        try:
            source = storage_at(copy).open_reader(problem.file, direct="off")
        except LoadError:
            continue
        with source:
            if damaged.put_file(problem.file, source):
                repaired.append((problem, problem.file))
    return repaired


def _config_of(copy: Path) -> bytes | None:
    """The copy's `metadata.json`, if Megatron-Core can load by it."""
    try:
        return None if config_flaw(copy) else read_small_file(copy, CONFIG_FILE, MAX_CONFIG_BYTES)
    except LoadError:
        return None


def _is_same_save(index: CheckpointIndex, checks: _Checks, other: CheckpointIndex) -> bool:
    """Whether the copy is of the same save: by the ids of their manifests, which are in the files, too, else by
    checksums. DCP's id may have come from this copy, by a repair that ended early, so it counts where no sums differ.
    """
    if index.manifest is not None and other.manifest is not None:
        return index.manifest.save_id == other.manifest.save_id
    # Large tensors are weights and moments: those of two iterations differ, and so do their checksums.
    equal = different = 0
    for check in sorted(checks.values(), key=lambda check: check.item.length, reverse=True):
        item = _item_in_copy(check, other)
        if check.chunk is None or item is None:
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


def _restore_file(problem: Problem, damaged: _Damaged, copy: Path) -> bool:
    """Put back a file that is one item by itself, the common state's, if the copy's is sound."""
    assert problem.file is not None
    try:
        with storage_at(copy).open_reader(problem.file) as reader:
            content = reader.read(0, reader.size_bytes)
            check = ItemCheck(problem.fqn or problem.file, StoredItem(problem.file, 0, len(content)))
            sound = check_item(check, reader, memoryview(content))
    except LoadError:
        return False
    damaged.judged.check(problem.file)
    return bool(sound) and damaged.publish(problem.file, content)


def _restore(problem: Problem, checks: _Checks, damaged: _Damaged, other: CheckpointIndex) -> _Repaired:
    """Put one item back, if the copy's is as long and sound; a file that is one item is put back as a whole."""
    if problem.fqn is None or problem.file is None or problem.offset is None:
        return []
    if problem.kind not in ("checksum", "item"):
        return []
    copy = checkpoint_path(other.path)
    check = checks.get((problem.fqn, problem.file, problem.offset))
    if check is None:
        return [(problem, problem.file)] if _restore_file(problem, damaged, copy) else []
    item = _item_in_copy(check, other)
    if item is None or item.length != check.item.length:
        return []
    try:
        with storage_at(copy).open_reader(item.file) as reader:
            content = reader.read(item.offset, item.length)
            is_sound = check_item(check._replace(item=item), reader, memoryview(content))
    except LoadError:
        return []
    damaged.judged.check(item.file)
    if not is_sound or not damaged.write(check.item.file, check.item.offset, content):
        return []
    return [(problem, check.where)]


def _item_in_copy(check: ItemCheck, index: CheckpointIndex) -> StoredItem | None:
    if check.chunk is None:
        found = index.objects.get(check.fqn)
        return found.item if found else None
    entry = index.tensors.get(check.fqn)
    for chunk in entry.chunks if entry else ():
        if chunk.offsets == check.chunk.offsets and chunk.sizes == check.chunk.sizes:
            return chunk.item
    return None
