"""Mending a damaged checkpoint with the bytes of another copy: of the same save, or of one resharded from it.

Nothing is believed for coming from the copy: bytes of another iteration would make a mix of two, and look whole. Whole
items and files are put back only from a copy of the same save, and only if their own checksums hold there; from any
other copy, whatever its sharding, bytes that have the very checksums that the damaged item still carries. They are
written in place, made durable, and the checkpoint is verified again.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from mcore_ckpt.core.console import Progress
from mcore_ckpt.core.errors import CorruptCheckpointError, LoadError
from mcore_ckpt.directory.claim import Claim
from mcore_ckpt.directory.commit import index_files
from mcore_ckpt.directory.common_file import read_common_file
from mcore_ckpt.format.crc import crc32
from mcore_ckpt.format.index import CheckpointIndex, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.format.item_reading import locate_tensor, verify_records
from mcore_ckpt.format.metadata_read import COMMON_FILE, METADATA_FILE, read_index
from mcore_ckpt.format.seal import FOOTER_BYTES
from mcore_ckpt.format.zip_records import NotRangeable
from mcore_ckpt.load.file_seals import check_seal, read_table
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.local import LocalStorage, open_regular
from mcore_ckpt.tools.inspection import checkpoint_directory
from mcore_ckpt.tools.payloads import StoredPayloads, read_box
from mcore_ckpt.tools.verify import ItemCheck, Problem, VerifyReport, check_item, verify_checkpoint

__all__ = ["repair_checkpoint"]

_WINDOW_BYTES = 8 * 1024 * 1024
# Enough that tensors which happen to be equal in two iterations (masks, zeros) do not decide.
_COMPARED_ITEMS = 16


def repair_checkpoint(
    report: VerifyReport, other: str | os.PathLike[str], *, progress: bool | None = False
) -> VerifyReport:
    """Mend what `report` found, as far as the copy in `other` can, and verify again.

    Args:
        report: what `verify_checkpoint` returned; the checkpoint that it names is mended in place.
        other: directory of a copy under the same sharding or any other, or one with a tracker file.
        progress: show bars; None: if standard error is a terminal.

    Returns:
        The new report; `repaired` names what was put back, and its problems are those that are left.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError: `other` is no readable checkpoint, or its index does not
            describe the files that are to be mended.
        SaveError: a save, or another repair, holds the damaged checkpoint's directory.
        OSError: the damaged checkpoint cannot be written.
    """
    with Claim.take(LocalStorage(report.path)):
        return _repair(report, Path(report.path), checkpoint_directory(other), progress)


def _repair(report: VerifyReport, directory: Path, copy: Path, progress: bool | None) -> VerifyReport:
    repaired: list[str] = []
    good_index = read_index(copy)
    index_is_ours = True
    if any(problem.kind == "index" and problem.file == METADATA_FILE for problem in report.problems):
        # Without an index nothing else is known; the copy's fits only if every item is then found sound.
        try:
            index = read_index(directory)
        except CorruptCheckpointError:
            report = _take_index(directory, copy, progress)
            repaired.append(METADATA_FILE)
            index = read_index(directory)
            index_is_ours = False
    else:
        index = read_index(directory, strict=False)
    with StoredPayloads(good_index) as payloads, Progress("repair", _damaged_bytes(report), shown=progress) as bar:
        same_save = _is_same_save(index if index_is_ours else None, _checks(index), directory, payloads)
        if same_save:
            repaired += _replace_files(report.problems, directory, copy, index)
        checks = _checks(index)
        for problem in report.problems:
            if problem.fqn is None or problem.file is None or problem.offset is None:
                continue
            if problem.kind not in ("checksum", "item"):
                continue
            check = checks.get((problem.fqn, problem.file, problem.offset))
            if check is None:
                if same_save and _mend_file(problem, directory, copy):
                    repaired.append(problem.file)
            elif _mend(check, directory, payloads, same_save):
                repaired.append(check.where)
            bar.advance(problem.length or 0)
    repaired += _mend_seals(report.problems, directory, copy, index)
    again = verify_checkpoint(directory, progress=progress)
    still_wrong = {problem.message for problem in again.problems}
    return VerifyReport(
        again.path,
        again.problems,
        again.items,
        again.records,
        again.read_bytes,
        again.seconds,
        again.unchecked,
        tuple(name for name in repaired if not any(name in message for message in still_wrong)),
    )


def _take_index(directory: Path, copy: Path, progress: bool | None) -> VerifyReport:
    """Replace a damaged index by the copy's, if that describes the files here: a resharded copy's does not.

    Raises:
        CorruptCheckpointError: it does not; the damaged one is in its place again.
    """
    storage = LocalStorage(directory)
    damaged = storage.read(METADATA_FILE)
    storage.publish(METADATA_FILE, LocalStorage(copy).read(METADATA_FILE))
    report = verify_checkpoint(directory, progress=progress)
    wrong = sum(problem.kind in ("item", "structure") for problem in report.problems)
    files = index_files(read_index(copy)) & set(storage.list())
    strangers = {problem.file for problem in report.problems if problem.kind == "file"} & files
    if len(strangers) * 2 > len(files):
        wrong = 2 * report.items + 1
    if wrong * 2 > report.items:
        storage.publish(METADATA_FILE, damaged)
        raise CorruptCheckpointError(
            f"{copy}: its index does not describe the files of {directory}: {wrong} items are not where it says. Take "
            "a copy under the same sharding; nothing was changed"
        )
    return report


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
    """The seal of a file of the copy, and where it begins, if it is the one that the damaged checkpoint asks for."""
    try:
        with LocalStorage(copy).open_reader(name) as reader:
            footer = check_seal(index, name, reader)
            if footer is None:
                return None
            read_table(reader, footer)  # compares its CRC-32
            start = reader.size_bytes - footer.table_bytes - FOOTER_BYTES
            return start, reader.read(start, reader.size_bytes - start)
    except LoadError:
        return None


def _mend_seals(problems: tuple[Problem, ...], directory: Path, copy: Path, index: CheckpointIndex) -> list[str]:
    """Ends of files, and lengths, come back from a copy whose file is the very same by what `.metadata` says of it."""
    mended = []
    for problem in problems:
        name = problem.file
        if name is None or index.seal is None or problem.kind != "file" or name not in index.seal.files:
            continue
        end = _end_of_file(name, copy, index)
        if end is not None and _write(directory, name, *end, is_end=True):
            mended.append(name)
    return list(dict.fromkeys(mended))


def _replace_files(problems: tuple[Problem, ...], directory: Path, copy: Path, index: CheckpointIndex) -> list[str]:
    """Files that are missing altogether come back whole; their items are verified afterwards like all others. So does
    a common state that is not the one of the save, if the copy's is.

    A file that is not the one that `.metadata` speaks of stays where it is: the copy is of another layout.
    """
    repaired = []
    for problem in problems:
        if problem.kind != "file" or problem.fqn is not None or problem.file is None:
            continue
        if problem.file.startswith(COMMON_FILE) and index.seal is not None and COMMON_FILE in index.seal.files:
            try:
                content = read_common_file(LocalStorage(copy), COMMON_FILE, index.seal)
            except LoadError:
                continue
            LocalStorage(directory).publish(problem.file, content)
            repaired.append(problem.file)
            continue
        sealed = index.seal is not None and problem.file in index.seal.files
        if os.path.lexists(directory / problem.file) or (sealed and not _end_of_file(problem.file, copy, index)):
            continue
        try:
            given = open_regular(copy, problem.file)
        except (CorruptCheckpointError, OSError):
            continue
        with os.fdopen(given, "rb") as reading:
            _put_file(directory, problem.file, reading)
        repaired.append(problem.file)
    return repaired


def _put_file(directory: Path, name: str, content: BinaryIO) -> None:
    """A new file, whole and durable or not at all; whatever lies under its temporary name goes."""
    storage = LocalStorage(directory)
    folder, _, last = name.rpartition("/")
    temporary = f"{folder}/.{last}.repair" if folder else f".{last}.repair"
    storage.delete(temporary)
    writing = storage.open_writer(temporary)
    try:
        at = 0
        while piece := content.read(_WINDOW_BYTES):
            writing.write(at, memoryview(piece))
            at += len(piece)
        writing.finish(at)
    except BaseException:
        writing.abort()
        raise
    storage.rename(temporary, name)
    storage.sync_directory()


def _is_same_save(
    index: CheckpointIndex | None,
    checks: dict[tuple[str, str, int], ItemCheck],
    directory: Path,
    payloads: StoredPayloads,
) -> bool:
    """Whether the copy is one of the very same save: by the id that DCP gives each, else by checksums.

    Args:
        index: of the damaged checkpoint; None if it was taken from the copy, so that its id says nothing.
        checks: items of the damaged checkpoint.
        directory: of the damaged checkpoint.
        payloads: the copy.
    """
    own = ((index.storage_meta if index else None) or {}).get("save_id")
    theirs = (payloads.index.storage_meta or {}).get("save_id")
    if own and theirs:
        return bool(own == theirs)
    # Large tensors are weights and moments: those of two iterations differ, and so do their checksums.
    equal = different = 0
    for check in sorted(checks.values(), key=lambda check: check.item.length, reverse=True):
        item = _item_in_copy(check, payloads.index)
        if check.chunk is None or item is None:
            continue
        mine, other = _sums(directory, check.item, check.where), _sums(Path(payloads.index.path), item, check.where)
        if mine and other:
            equal, different = equal + (mine == other), different + (mine != other)
        if equal + different == _COMPARED_ITEMS:
            break
    return equal > different


def _sums(directory: Path, item: StoredItem, where: str) -> list[tuple[str, int, int | None]]:
    """Name, size and stated CRC-32 of each record of an item; empty if its headers cannot be read."""
    try:
        with LocalStorage(directory).open_reader(item.file) as reader:
            records = verify_records(lambda at, length: reader.read(item.offset + at, length), item.length, where)
            # The archive's own name, which torch takes from the file that is written, is no matter.
            return [(record.name.partition("/")[2], record.nbytes, record.crc32) for record in records]
    except (LoadError, NotRangeable):
        return []


def _mend_file(problem: Problem, directory: Path, copy: Path) -> bool:
    """Put back a file that is one item by itself, the common state's, if the copy's is sound."""
    assert problem.file is not None
    try:
        with LocalStorage(copy).open_reader(problem.file) as reader:
            content = reader.read(0, reader.size_bytes)
            check = ItemCheck(problem.fqn or problem.file, StoredItem(problem.file, 0, len(content)))
            sound = check_item(check, reader, memoryview(content))
    except LoadError:
        return False
    if sound:
        LocalStorage(directory).publish(problem.file, content)
    return bool(sound)


def _mend(check: ItemCheck, directory: Path, payloads: StoredPayloads, same_save: bool) -> bool:
    """Put one item back; False if the copy does not have it, or cannot prove that it is the same."""
    content = _same_item(check, payloads)
    if content is not None and (same_save or _carries_sums_of(check, directory, payloads)):
        return _write(directory, check.item.file, check.item.offset, content)
    if check.entry is None or check.chunk is None:
        return False
    found = _same_elements(check, check.entry, check.chunk, LocalStorage(directory), payloads)
    if found is None:
        return False
    offset, elements = found
    return _write(directory, check.item.file, offset, elements)


def _carries_sums_of(check: ItemCheck, directory: Path, payloads: StoredPayloads) -> bool:
    """Whether the damaged item still states the very checksums of the copy's."""
    item = _item_in_copy(check, payloads.index)
    if item is None:
        return False
    mine = _sums(directory, check.item, check.where)
    return bool(mine) and mine == _sums(Path(payloads.index.path), item, check.where)


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


def _write(directory: Path, name: str, offset: int, content: bytes, *, is_end: bool = False) -> bool:
    """Put bytes into a file, durably, and cut it behind them if they are its end; False if it is no file of its own."""
    try:
        fd = open_regular(directory, name, os.O_RDWR)
    except (CorruptCheckpointError, FileNotFoundError):
        return False
    with os.fdopen(fd, "r+b") as file:
        file.seek(offset)
        file.write(content)
        if is_end:
            file.truncate()
        file.flush()
        os.fsync(file.fileno())
    return True
