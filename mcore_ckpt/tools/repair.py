"""Repair of a damaged checkpoint with the bytes of another copy: of the same save, or of one resharded from it.

Nothing is believed for coming from the copy: bytes of another iteration would make a mix of two, and look whole. Whole
items and files are put back only from a copy of the same save, and only if their own checksums hold there; from any
other copy, whatever its sharding, bytes that have the checksums that the damaged item still carries. They are
written in place, made durable, and the checkpoint is verified again.

A repair that ends early has put nothing in force that was not judged before, and can be repeated.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mcore_ckpt.core.console import Progress
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import CorruptCheckpointError, LoadError, SaveError
from mcore_ckpt.core.paths import checkpoint_path
from mcore_ckpt.directory.common_file import read_common_file
from mcore_ckpt.directory.in_force import index_files
from mcore_ckpt.directory.lock import DirectoryLock
from mcore_ckpt.format.footer import FOOTER_BYTES
from mcore_ckpt.format.index import CheckpointIndex, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.format.item_reading import locate_tensor, verify_records
from mcore_ckpt.format.metadata_read import (
    COMMON_FILE,
    MAX_METADATA_BYTES,
    METADATA_FILE,
    checked_footer,
    parse_index,
    read_index,
    read_small_file,
)
from mcore_ckpt.format.zip_records import NotRangeable
from mcore_ckpt.items.file_footers import read_table
from mcore_ckpt.items.item_checks import ItemCheck, Problem, check_item
from mcore_ckpt.storage.base import RangeReader, Storage
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.inspection import checkpoint_directory
from mcore_ckpt.tools.payloads import StoredPayloads, read_box
from mcore_ckpt.tools.verify import VerifyReport, verify_checkpoint, verify_index

_WINDOW_BYTES = 8 * 1024 * 1024
# Enough that tensors which happen to be equal in two iterations (masks, zeros) do not decide.
_COMPARED_ITEMS = 16


def repair_checkpoint(
    report: VerifyReport, other: str | os.PathLike[str], *, dry_run: bool = False, progress: bool | None = False
) -> VerifyReport:
    """Repair what `report` found, as far as the copy in `other` can, and verify again.

    Args:
        report: what `verify_checkpoint` returned; the checkpoint that it names is repaired in place.
        other: directory of a copy under the same sharding or any other, or one with a tracker file.
        dry_run: read and compare only. The report that comes back has the same problems, and `would_repair` names what
            this function would put back.
        progress: show bars; None: if standard error is a terminal.

    Returns:
        The new report; `repaired` names what was put back, and its problems are those that are left. `unmatched` are
        problems for which the copy has nothing with the right checksums.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError: `other` is no readable checkpoint, or its index does not
            describe the files that are to be repaired.
        SaveError: a save, or another repair, holds the damaged checkpoint's directory, or it cannot be written.
    """
    if dry_run:
        return _repair(report, _Untouched(checkpoint_path(report.path)), checkpoint_directory(other), progress)
    with DirectoryLock.take(storage_at(report.path), common_ahead=True) as lock:
        lock.sweep(lock.storage.list(), notes=False)
        return _repair(report, _Damaged(checkpoint_path(report.path), lock), checkpoint_directory(other), progress)


class _Untouched:
    """The damaged checkpoint, of which nothing changes: what would be written counts as written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.storage = storage_at(path)
        self._last: tuple[str, int, bytes] = ("", 0, b"")

    def check_held(self) -> None:
        """Nothing is held."""

    def publish_index(self, content: bytes) -> None:
        """Do nothing."""

    def publish_common(self, name: str, content: bytes) -> bool:
        """Do nothing."""
        return True

    def put_file(self, name: str, content: RangeReader) -> bool:
        """Do nothing."""
        return True

    def write(self, name: str, offset: int, content: bytes, *, is_end: bool = False) -> bool:
        """Remember the bytes for the next `open_reader`; False if there is no such file."""
        self._last = (name, offset, content)
        return self.storage.exists(name)

    def open_reader(self, name: str) -> RangeReader:
        """The file as it would be after the last `write`."""
        written, offset, content = self._last
        reader = self.storage.open_reader(name)
        return _Overwritten(reader, offset, content) if name == written else reader


class _Overwritten(RangeReader):
    """A file with other bytes in one place, which are not in the file."""

    def __init__(self, reader: RangeReader, offset: int, content: bytes) -> None:
        self.name, self.size_bytes = reader.name, reader.size_bytes
        self._reader, self._offset, self._content = reader, offset, content

    def read_into(self, offset: int, view: memoryview, arrived: Callable[[memoryview], None] | None = None) -> None:
        self._reader.read_into(offset, view)
        start, end = max(offset, self._offset), min(offset + len(view), self._offset + len(self._content))
        if start < end:
            view[start - offset : end - offset] = self._content[start - self._offset : end - self._offset]
        if arrived is not None:
            arrived(view)

    def close(self) -> None:
        self._reader.close()


class _Damaged(_Untouched):
    """The damaged checkpoint, while the lock is held; all writes to it are here."""

    def __init__(self, path: Path, lock: DirectoryLock) -> None:
        super().__init__(path)
        self._lock = lock

    def check_held(self) -> None:
        """Raise `SaveError` if another save holds the directory by now."""
        self._lock.check()

    def publish_index(self, content: bytes) -> None:
        """Put an index in force; once."""
        self._lock.publish(METADATA_FILE, content)

    def publish_common(self, name: str, content: bytes) -> bool:
        """Put a common state in force; False if that was done before."""
        self.check_held()
        if self._lock.has_published_common():
            self.check_held()
            return False
        self._lock.publish(name, content, common=True)
        return True

    def put_file(self, name: str, content: RangeReader) -> bool:
        """Make a file that is missing, whole and durable or not at all; False if there is one by now."""
        self.check_held()
        folder, _, last = name.rpartition("/")
        begins = f"{folder}/.{last}." if folder else f".{last}."
        for left in self.storage.list():
            # By a repair that was killed, or was thought to be: it cannot give its file the name any more.
            if left.startswith(begins) and left.endswith("repair"):
                self.storage.delete(left)
        temporary = f"{begins}{self._lock.owner.save_id}.repair"
        writing = self.storage.open_writer(temporary)
        try:
            for at in range(0, content.size_bytes, _WINDOW_BYTES):
                piece = content.read(at, min(_WINDOW_BYTES, content.size_bytes - at))
                writing.write(at, memoryview(piece))
            writing.finish(content.size_bytes)
            self.check_held()
            if self.storage.move_new(temporary, name):
                return True
        except SaveError:
            writing.abort()
            self.check_held()  # says better what has happened, if the directory was lost meanwhile
            raise
        except BaseException:
            writing.abort()
            raise
        self.storage.delete(temporary)
        return False

    def write(self, name: str, offset: int, content: bytes, *, is_end: bool = False) -> bool:
        """Overwrite bytes durably; `is_end` truncates the file behind them. False if the file lies elsewhere."""
        self.check_held()
        return self.storage.overwrite(name, offset, content, is_end=is_end)


# What was put back, and of which problem.
_Repaired = list[tuple[Problem, str]]


def _repair(report: VerifyReport, damaged: _Untouched, copy: Path, progress: bool | None) -> VerifyReport:
    directory, found = damaged.path, report
    repaired: _Repaired = []
    good_index = read_index(copy)
    index_is_ours = True
    if any(problem.kind == "index" and problem.file == METADATA_FILE for problem in report.problems):
        # Without an index nothing else is known; the copy's fits only if every item is then found sound.
        try:
            index = read_index(directory)
        except CorruptCheckpointError:
            repaired += [(problem, METADATA_FILE) for problem in report.problems if problem.file == METADATA_FILE]
            report, index = _take_index(damaged, copy, progress)
            found = replace(found, problems=(*found.problems, *report.problems))
            index_is_ours = False
    else:
        index = read_index(directory, strict=False)
    with StoredPayloads(good_index) as payloads, Progress("repair", _damaged_bytes(report), shown=progress) as bar:
        same_save = _is_same_save(index if index_is_ours else None, _checks(index), directory, payloads)
        if same_save:
            repaired += _replace_files(report.problems, damaged, copy, index)
        checks = _checks(index)
        for problem in report.problems:
            if problem.fqn is None or problem.file is None or problem.offset is None:
                continue
            if problem.kind not in ("checksum", "item"):
                continue
            check = checks.get((problem.fqn, problem.file, problem.offset))
            if check is None:
                if same_save and _restore_file(problem, damaged, copy):
                    repaired.append((problem, problem.file))
            elif _restore(check, damaged, payloads, same_save):
                repaired.append((problem, check.where))
            bar.advance(problem.length or 0)
    repaired += _restore_footers(report.problems, damaged, copy, index)
    names = tuple(dict.fromkeys(name for _, name in repaired))
    if not isinstance(damaged, _Damaged):
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


def _take_index(damaged: _Untouched, copy: Path, progress: bool | None) -> tuple[VerifyReport, CheckpointIndex]:
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
    damaged.publish_index(content)
    return report, index


def _damaged_bytes(report: VerifyReport) -> int:
    return sum(problem.length or 0 for problem in report.problems)


def _checks(index: CheckpointIndex) -> dict[tuple[str, str, int], ItemCheck]:
    found = {}
    for fqn, entry in index.tensors.items():
        for chunk in entry.chunks:
            found[fqn, chunk.item.file, chunk.item.offset] = ItemCheck(fqn, chunk.item, entry, chunk)
    for fqn, obj in index.objects.items():
        found[fqn, obj.item.file, obj.item.offset] = ItemCheck(fqn, obj.item)
    return found


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


def _restore_footers(
    problems: tuple[Problem, ...], damaged: _Untouched, copy: Path, index: CheckpointIndex
) -> _Repaired:
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


def _replace_files(problems: tuple[Problem, ...], damaged: _Untouched, copy: Path, index: CheckpointIndex) -> _Repaired:
    """Restore missing files, and a common state of another save. A file that the manifest does not name so stays: the
    copy has another layout.
    """
    repaired: _Repaired = []
    for problem in problems:
        if problem.kind != "file" or problem.fqn is not None or problem.file is None:
            continue
        if problem.file.startswith(COMMON_FILE) and index.manifest is not None and COMMON_FILE in index.manifest.files:
            try:
                content = read_common_file(storage_at(copy), COMMON_FILE, index.manifest)
            except LoadError:
                continue
            if damaged.publish_common(problem.file, content):
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


def _is_same_save(
    index: CheckpointIndex | None,
    checks: dict[tuple[str, str, int], ItemCheck],
    directory: Path,
    payloads: StoredPayloads,
) -> bool:
    """Whether the copy is of the same save, by the ids of both, else by checksums. `index` is None if it came from the
    copy. DCP's id may have come from this copy, too, by a repair that ended early; that of a manifest is in the files.
    """
    if index is not None and index.manifest is not None and payloads.index.manifest is not None:
        return index.manifest.save_id == payloads.index.manifest.save_id
    own = ((index.storage_meta if index else None) or {}).get("save_id")
    copy_id = (payloads.index.storage_meta or {}).get("save_id")
    same_id = bool(own and own == copy_id)
    if own and copy_id and (not same_id or (index is not None and index.manifest is not None)):
        return same_id
    # Large tensors are weights and moments: those of two iterations differ, and so do their checksums.
    equal = different = 0
    for check in sorted(checks.values(), key=lambda check: check.item.length, reverse=True):
        item = _item_in_copy(check, payloads.index)
        if check.chunk is None or item is None:
            continue
        mine, other = (
            _sums(directory, check.item, check.where),
            _sums(checkpoint_path(payloads.index.path), item, check.where),
        )
        if mine and other:
            equal, different = equal + (mine == other), different + (mine != other)
        if equal + different == _COMPARED_ITEMS:
            break
    return equal > different or (same_id and not different)


def _sums(directory: Path, item: StoredItem, where: str) -> list[tuple[str, int, int | None]]:
    """Name, size and stated CRC-32 of each record of an item; empty if its headers cannot be read."""
    try:
        with storage_at(directory).open_reader(item.file) as reader:
            records = verify_records(lambda at, length: reader.read(item.offset + at, length), item.length, where)
            # The archive's own name, which torch takes from the file that is written, is no matter.
            return [(record.name.partition("/")[2], record.nbytes, record.crc32) for record in records]
    except (LoadError, NotRangeable):
        return []


def _restore_file(problem: Problem, damaged: _Untouched, copy: Path) -> bool:
    """Put back a file that is one item by itself, the common state's, if the copy's is sound."""
    assert problem.file is not None
    try:
        with storage_at(copy).open_reader(problem.file) as reader:
            content = reader.read(0, reader.size_bytes)
            check = ItemCheck(problem.fqn or problem.file, StoredItem(problem.file, 0, len(content)))
            sound = check_item(check, reader, memoryview(content))
    except LoadError:
        return False
    return bool(sound) and damaged.publish_common(problem.file, content)


def _restore(check: ItemCheck, damaged: _Untouched, payloads: StoredPayloads, same_save: bool) -> bool:
    """Put one item back; False if the copy does not have it, or its checksums do not show that it is the same."""
    content = _same_item(check, payloads)
    if content is not None and same_save:
        return damaged.write(check.item.file, check.item.offset, content)
    # The elements alone first: what the item states of them stays, by which a repair that is killed can be repeated.
    if check.entry is not None and check.chunk is not None:
        found = _same_elements(check, check.entry, check.chunk, damaged.storage, payloads)
        if found is not None and damaged.write(check.item.file, *found) and _is_sound(check, damaged):
            return True
    if content is not None and _carries_sums_of(check, damaged.path, payloads):
        return damaged.write(check.item.file, check.item.offset, content)
    return False


def _is_sound(check: ItemCheck, damaged: _Untouched) -> bool:
    try:
        with damaged.open_reader(check.item.file) as reader:
            check_item(check, reader)
    except LoadError:
        return False
    return True


def _carries_sums_of(check: ItemCheck, directory: Path, payloads: StoredPayloads) -> bool:
    """Whether the damaged item still states the checksums of the copy's."""
    item = _item_in_copy(check, payloads.index)
    if item is None:
        return False
    mine = _sums(directory, check.item, check.where)
    return bool(mine) and mine == _sums(checkpoint_path(payloads.index.path), item, check.where)


def _same_item(check: ItemCheck, payloads: StoredPayloads) -> bytes | None:
    """The item of that key and box in the copy, if it is as long and sound; resharded copies rarely have it."""
    item = _item_in_copy(check, payloads.index)
    if item is None or item.length != check.item.length or item.transforms != check.item.transforms:
        return None
    try:
        with payloads.files.reader(item.file) as reader:
            content = reader.read(item.offset, item.length)
            sound = check_item(check._replace(item=item), reader, memoryview(content))
    except LoadError:
        return None
    return content if sound else None


def _item_in_copy(check: ItemCheck, index: CheckpointIndex) -> StoredItem | None:
    if check.chunk is None:
        found = index.objects.get(check.fqn)
        return found.item if found else None
    entry = index.tensors.get(check.fqn)
    for chunk in entry.chunks if entry else ():
        if chunk.offsets == check.chunk.offsets and chunk.sizes == check.chunk.sizes:
            return chunk.item
    return None


def _same_elements(
    check: ItemCheck, entry: TensorEntry, chunk: StoredChunk, storage: Storage, payloads: StoredPayloads
) -> tuple[int, bytes] | None:
    """The chunk's elements, put together from the copy, if they have the CRC-32 that the damaged item still carries."""
    other = payloads.index.tensors.get(check.fqn)
    if other is None or other.shape != entry.shape or other.dtype != entry.dtype:
        return None
    item = check.item
    try:
        with storage.open_reader(item.file) as reader:
            located = locate_tensor(lambda at, length: reader.read(item.offset + at, length), item.length, check.where)
        if located.crc32 is None or located.shape != tuple(chunk.sizes):
            return None
        elements = read_box(payloads, other, chunk.offsets, chunk.sizes)
    except (LoadError, NotRangeable):
        return None
    if crc32(elements) != located.crc32:
        return None
    return item.offset + located.payload_offset, bytes(elements)
