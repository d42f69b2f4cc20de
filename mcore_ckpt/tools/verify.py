"""Is a checkpoint complete and undamaged? Its structure, and the CRC-32 of every record in every file.

Structure: each chunk of each tensor is there once, chunks tile their tensor, items lie inside their files and do not
overlap, and say of themselves what the index says of them. Content: `torch.save` archives carry the CRC-32 of each
record (those of stock Megatron-Core and PyTorch too, where nothing ever compares them); here all are compared.

On request the optimizer is compared with the model: its float32 weights, rounded, are the model's.

A damaged checkpoint is repaired with the files of a copy of the same save, such as that in the second tier. Nothing is
believed for coming from the copy: files of another save would make a mix of two, and look complete. So the copy's ids,
or where there are none its checksums, have to be those of the damaged checkpoint. A file is taken if all of its
checksums hold in the copy: it is copied under a name of its own, made durable, and renamed. Nothing is written in
place. The checkpoint is verified again then.

A checkpoint without its optimizer's state gets it back from a full copy, which takes its place by a commit.

A repair that ends early has put nothing in force that was not judged before, and can be repeated.
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_ckpt.core.boxes import Box, strides_of
from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError, LoadError, OptionError, SaveError
from mcore_ckpt.core.options import checkpoint_path
from mcore_ckpt.core.team import Progress, current_team
from mcore_ckpt.directory.commit import (
    Commit,
    common_file_in_force,
    file_on_its_way,
    is_pending,
    refuse_decided,
    sum_of_file,
)
from mcore_ckpt.directory.copying import JudgedFiles, copy_file
from mcore_ckpt.directory.in_force import index_files
from mcore_ckpt.directory.iterations import common_state_flaw, config_flaw, is_megatrons, structure_flaws, sync_folders
from mcore_ckpt.format.index import CheckpointIndex, Removed, StoredItem, TensorEntry
from mcore_ckpt.format.integrity import split_metadata, with_manifest
from mcore_ckpt.format.item import element_bytes, verify_records
from mcore_ckpt.format.metadata_read import (
    COMMON_FILE,
    CONFIG_FILE,
    MAX_METADATA_BYTES,
    METADATA_FILE,
    checked_footer,
    parse_index,
    read_common_file,
    read_index,
    read_small_file,
)
from mcore_ckpt.format.zip_records import NotRangeable
from mcore_ckpt.load.checks import (
    ItemCheck,
    ItemChecker,
    Items,
    Problem,
    check_data_files,
    check_file,
    checks_of,
    item_problem,
    items_by_file,
    pickle_differs,
    read_table,
    spans_of,
    table_problems,
)
from mcore_ckpt.load.ranges import Span
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import is_same_directory, storage_at
from mcore_ckpt.tools.inspection import checkpoint_directory, in_force
from mcore_ckpt.tools.keys import is_optimizer_key
from mcore_ckpt.tools.runs import copy_into

if TYPE_CHECKING:
    from mcore_ckpt.tools.payloads import StoredPayloads

_WINDOW_BYTES = 8 * 1024 * 1024
# The optimizer's own copy of a parameter, by Megatron's name for it, and by the one that it had up to 0.14.
_MAIN_WEIGHT = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.(?:param|fp32_param)\.(?P<key>.+)$")
_ROUNDED = ("float32", "bfloat16", "float16")
_COMMON_STATE = "common_state"  # where it is no file of its own, the key of the object that holds it


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was checked, and what is wrong; `repaired` names files that were repaired meanwhile.

    Attributes:
        unchecked: items whose bytes carry no CRC-32.
        would_repair: files that a dry run of `repair_checkpoint` would put back.
        unmatched: after `repair_checkpoint`: problems for which the copy has nothing with the right checksums.
        refused: classes that loads refuse unless `allowed_classes` has them, each with one of the keys that hold it.
        compared: tensors of the model that the optimizer's were compared with; None: it was not asked for.
        removed: what the checkpoint had when it was saved, and has no longer.
    """

    path: str
    problems: tuple[Problem, ...]
    items: int
    records: int
    read_bytes: int
    seconds: float
    unchecked: int = 0
    repaired: tuple[str, ...] = ()
    compared: int | None = None
    would_repair: tuple[str, ...] = ()
    unmatched: tuple[Problem, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    removed: Removed | None = None

    @property
    def whole(self) -> bool:
        """Nothing is wrong."""
        return not self.problems


def verify_checkpoint(
    path: str | os.PathLike[str],
    *,
    workers: int = 2,
    optimizer: bool = False,
    lost_index: bool = False,
    progress: bool | None = False,
) -> VerifyReport:
    """Check structure and content of the checkpoint in `path`.

    Args:
        path: directory of the checkpoint, or one with a tracker file.
        workers: threads that read and sum; each takes one window (8 MiB) of memory.
        optimizer: compare the optimizer's float32 weights with the model's, too, if nothing else is wrong.
        lost_index: take a directory without `.metadata` for a damaged checkpoint, which a copy may repair.
        progress: show a bar; None: if standard error is a terminal.

    Raises:
        CheckpointNotFoundError: there is no checkpoint. Whatever else is wrong is in the report.
        NewerFormatError: something newer wrote its index, so that nothing can be said of it.
        LoadError: a save has replaced it meanwhile.
    """
    started = time.monotonic()
    directory = checkpoint_directory(path)
    with in_force(directory):
        verified = partial(_verify, directory, workers, progress, lost_index and storage_at(directory).is_directory())
        report = None
        with contextlib.suppress(CheckpointNotFoundError):
            report = verified()
        # The common state may just have got its name.
        if report is None or any(problem.file and is_pending(problem.file) for problem in report.problems):
            report = verified()
        if optimizer and report.whole:
            report = _verify_optimizer(report, progress)
    return replace(report, seconds=time.monotonic() - started)


def _verify(directory: Path, workers: int, progress: bool | None, lost_index: bool) -> VerifyReport:
    try:
        index = read_index(directory, strict=False)
        differs = pickle_differs(directory)
    except (CorruptCheckpointError, CheckpointNotFoundError) as error:
        if isinstance(error, CheckpointNotFoundError) and not lost_index:
            raise
        problem = Problem("index", str(error), file=METADATA_FILE)
        return VerifyReport(str(directory), (problem,), 0, 0, 0, 0.0)
    report = verify_index(index, workers=workers, progress=progress)
    if differs is None:
        return report
    message = (
        f"{directory / METADATA_FILE}: {differs}. This package reads the columns, Megatron-Core and DCP the pickle; "
        "restore the file from another copy"
    )
    return replace(report, problems=(Problem("index", message, file=METADATA_FILE), *report.problems))


def verify_index(index: CheckpointIndex, *, workers: int = 2, progress: bool | None = False) -> VerifyReport:
    """As `verify_checkpoint`, of an index that need not be the one in force: the files are those in its path."""
    started, directory = time.monotonic(), checkpoint_path(index.path)
    problems = [Problem("index", text, file=METADATA_FILE) for text in index.problems]
    storage = storage_at(directory)
    megatron, flaw = is_megatrons(directory, index)
    if flaw:
        problems.append(Problem("index", flaw, file=CONFIG_FILE))
    problems += [Problem("structure", flaw.message, fqn=flaw.key) for flaw in structure_flaws(index, megatron=megatron)]

    common, common_problems = _common_state(directory, index, storage, megatron)
    readable, file_problems = _items_in_files(index, storage, common)
    problems += common_problems + file_problems
    team, files = current_team(), items_by_file(index)
    footers = partial(_footer_problems, index, files, storage)
    for found in team.divide("read the footers", sorted(files), lambda _: 1, footers):
        problems += found
    spans = list(spans_of(readable))
    with Progress("verify", sum(map(_bytes_of, spans)), shown=progress) as bar:
        check = partial(ItemChecker(storage).run, workers=workers, advance=bar.advance)
        checked = team.divide("compare the checksums", spans, _bytes_of, check, bar.counter)
    order = {check.where: n for n, check in enumerate(readable)}
    of_items = [one for part in checked for one in part.problems]
    of_items.sort(key=lambda found: order.get(found[0], len(order)))
    refused = {name: key for part in reversed(checked) for name, key in part.refused.items()}
    return VerifyReport(
        path=str(directory),
        problems=(*problems, *(problem for _, problem in of_items)),
        items=sum(part.items for part in checked),
        records=sum(part.records for part in checked),
        read_bytes=sum(part.read_bytes for part in checked),
        seconds=time.monotonic() - started,
        unchecked=sum(part.unchecked for part in checked),
        refused=dict(sorted(refused.items())),
        removed=index.removed,
    )


def _verify_optimizer(report: VerifyReport, progress: bool | None) -> VerifyReport:
    """Compare the optimizer's float32 weights, rounded, with the model's: Megatron-Core to 0.19 may shift those of
    several padded buckets, which nothing else shows.
    """
    from mcore_ckpt.tools.payloads import StoredPayloads

    index = read_index(Path(report.path))
    pairs = []
    for fqn, main in index.tensors.items():
        found = _MAIN_WEIGHT.match(fqn)
        weight = index.tensors.get(found.group("key")) if found else None
        if weight is not None and weight.shape == main.shape and main.dtype == "float32" and weight.dtype in _ROUNDED:
            pairs.append((main, weight))

    def nbytes(pair: tuple[TensorEntry, TensorEntry]) -> int:
        return math.prod(pair[0].shape) * (4 + element_bytes(pair[1].dtype))

    total = sum(map(nbytes, pairs))
    with Progress("optimizer", total, shown=progress) as bar, StoredPayloads(index) as payloads:

        def compare(own: Sequence[tuple[TensorEntry, TensorEntry]]) -> list[tuple[str, str]]:
            return [(main.fqn, _other_elements(payloads, main, weight, bar)) for main, weight in own]

        compared = current_team().divide("compare the optimizer", pairs, nbytes, compare, bar.counter)
    problems = [Problem("optimizer", message, fqn=fqn) for part in compared for fqn, message in part if message]
    return replace(
        report, problems=(*report.problems, *problems), read_bytes=report.read_bytes + total, compared=len(pairs)
    )


def _other_elements(payloads: StoredPayloads, main: TensorEntry, weight: TensorEntry, bar: Progress) -> str:
    """What is wrong with an optimizer's weight, compared with the model's; empty if it rounds to that."""
    from mcore_ckpt.tools.payloads import read_box
    from mcore_ckpt.tools.regrid import rounding_mismatch, slabs

    differing, first = 0, ""
    for slab in slabs(Box((0,) * len(main.shape), main.shape), element_bytes(main.dtype), _WINDOW_BYTES):
        exact, stored = read_box(payloads, main, *slab), read_box(payloads, weight, *slab)
        wrong = rounding_mismatch(exact, main.dtype, stored, weight.dtype)
        if wrong is not None and not first:
            strides = zip(strides_of(slab.sizes), slab.sizes, strict=True)
            inside = (wrong.position // stride % size for stride, size in strides)
            where = list(map(operator.add, slab.offsets, inside))
            first = f"{where} rounds to {wrong.rounded:.6g}, and the model has {wrong.stored:.6g}"
        differing += 0 if wrong is None else wrong.differing
        bar.advance(len(exact) + len(stored))
    if not differing:
        return ""
    total = math.prod(main.shape)
    return f"{main.fqn}: {differing} of {total} elements do not round to the model's; the first at {first}"


def _common_state(
    directory: Path, index: CheckpointIndex, storage: Storage, megatron: bool
) -> tuple[list[ItemCheck], list[Problem]]:
    """The file of the common state, an archive like any item; only this package compares its checksums."""
    file = common_file_in_force(storage, index)
    if file is not None:
        try:
            read_common_file(storage, file, index.manifest)
            return [ItemCheck(_COMMON_STATE, StoredItem(file, 0, storage.size(file)))], []
        except LoadError as error:
            return [], [Problem("file", str(error), file=file)]
    listed = index.manifest is not None and COMMON_FILE in index.manifest.files
    flaw = common_state_flaw(directory, index) if megatron or listed else None
    return [], [Problem("file", flaw, file=COMMON_FILE)] if flaw else []


def _items_in_files(
    index: CheckpointIndex, storage: Storage, more: list[ItemCheck]
) -> tuple[list[ItemCheck], list[Problem]]:
    """Items that lie inside their files, by file and offset; and what is wrong with the others."""
    checks = sorted([*more, *checks_of(index)], key=lambda check: (check.item.file, check.item.offset))
    sizes: dict[str, int | None] = {}
    problems: list[Problem] = []
    readable: list[ItemCheck] = []
    previous: ItemCheck | None = None
    for check in checks:
        item = check.item
        if item.file not in sizes:
            previous = None
            try:
                sizes[item.file] = storage.size(item.file)
            except LoadError as error:
                sizes[item.file] = None
                problems.append(Problem("file", str(error), file=item.file))
        size = sizes[item.file]
        if size is None:
            problems.append(item_problem("file", check, f"{check.where}: its file is missing, or no regular file"))
            continue
        if item.offset + item.length > size:
            message = f"{check.where}: the file ends at byte {size}; it was truncated, or belongs to another save"
            problems.append(item_problem("item", check, message))
            continue
        if previous is not None and previous.item.offset + previous.item.length > item.offset:
            message = f"{check.where}: overlaps {previous.where}"
            problems.append(item_problem("structure", check, message))
        previous = check
        readable.append(check)
    return readable, problems


def _bytes_of(span: Span) -> int:
    return span.stop - span.start


def _footer_problems(
    index: CheckpointIndex, items: Mapping[str, Items], storage: Storage, names: Sequence[str]
) -> list[Problem]:
    """What data files say of themselves, compared with `.metadata`: save, name, size, and each item's description."""
    found = []
    for name in names:
        try:
            with storage.open_reader(name) as reader:
                footer = checked_footer(index, name, reader)
                table = None if footer is None else read_table(reader, footer)
        except CorruptCheckpointError as error:
            found.append(Problem("file", str(error), file=name))
            continue
        except LoadError:
            continue  # missing, which has been told
        said = () if table is None else table_problems(items[name], table)
        found += [Problem("structure", f"{storage}/{name}: {message}", file=name) for message in said]
    return found


# --- repair

# Enough that tensors which happen to be equal in two iterations (masks, zeros) do not decide.
_COMPARED_ITEMS = 16


def copy_of(directory: Path, other: str | os.PathLike[str]) -> Path:
    """The directory that `other` names, from which another one is to be repaired. Raises `OptionError` if it is that
    one, and `LoadError` if there is no index.
    """
    found = checkpoint_directory(other)
    if found == directory or is_same_directory(found, directory):
        raise OptionError(f"{found}: is the checkpoint to be repaired, {directory}; name a copy of it")
    read_small_file(found, METADATA_FILE, MAX_METADATA_BYTES)
    return found


def repair_checkpoint(
    report: VerifyReport, other: str | os.PathLike[str], *, dry_run: bool = False, progress: bool | None = False
) -> VerifyReport:
    """Repair what `report` found, as far as the copy in `other` can, and verify again. A model-only checkpoint becomes
    the full one that `other` has of the same save, or of the same iteration and model.

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
        OptionError: `other` is the checkpoint itself.
        CheckpointNotFoundError, CorruptCheckpointError: `other` is no readable checkpoint, or its index does not
            describe the files that are to be repaired.
        CheckpointExistsError: the checkpoint is model-only, and `other` is of another one, or model-only, too.
        LoadError: another save has replaced the copy meanwhile.
        SaveError: a save, or another repair, holds the damaged checkpoint's directory, or it cannot be written.
    """
    directory, team = checkpoint_path(report.path), current_team()
    copy = copy_of(directory, other)
    if report.removed is not None and (not report.problems or any(map(is_optimizer_key, read_index(copy).tensors))):
        names = copy_into(copy, directory, dry_run=dry_run).copied
        if dry_run:
            return replace(report, would_repair=names)
        again = verify_checkpoint(directory, progress=progress)
        return replace(again, repaired=names, unmatched=again.problems)
    damaged = _Damaged(directory, copy, dry_run=dry_run) if team.rank == 0 else None

    def repair() -> tuple[VerifyReport, list[str]]:
        assert damaged is not None
        return _repair(report, damaged, copy, progress)

    try:
        found, repaired = team.first("repair", repair)
        if dry_run:
            left = [problem for problem in found.problems if problem.file not in repaired]
            return replace(found, would_repair=tuple(repaired), unmatched=tuple(left))
        again = verify_checkpoint(directory, progress=progress)
        if damaged is not None:
            damaged.check_held()  # otherwise it was another save's checkpoint that was verified
        still_wrong = {problem.file for problem in again.problems}
        return replace(
            again, repaired=tuple(name for name in repaired if name not in still_wrong), unmatched=again.problems
        )
    finally:
        if damaged is not None:
            damaged.end()


class _Damaged:
    """The damaged checkpoint; all writes to it (in a dry run none) are here. Its note keeps saves out."""

    def __init__(self, path: Path, copy: Path, *, dry_run: bool) -> None:
        self.path, self.copy, self.dry_run = path, copy, dry_run
        self.storage, self.reads = storage_at(path), storage_at(copy)
        self.judged = JudgedFiles(self.reads)
        refuse_decided(self.storage)
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


def _repair(
    report: VerifyReport, damaged: _Damaged, copy: Path, progress: bool | None
) -> tuple[VerifyReport, list[str]]:
    """What is wrong, and the names of the files that were put back (in a dry run: could be)."""
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
    return found, repaired


def _put_back(name: str, damaged: _Damaged, index: CheckpointIndex) -> bool:
    """Put one file back, if the copy's is sound."""
    content: bytes | None = None
    try:
        if name == CONFIG_FILE:
            if config_flaw(damaged.copy):
                return False
            content = read_small_file(damaged.copy, CONFIG_FILE)
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
    """Put the copy's index in force, if it describes the files here, else raise; and what is wrong under it."""
    content = read_small_file(damaged.copy, METADATA_FILE)
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
    checksums. DCP's id may have come from this copy, by a repair that ended early, so that it is the same counts where
    no sums differ; that it is another is proof.
    """
    if index.manifest is not None and other.manifest is not None:
        return index.manifest.save_id == other.manifest.save_id
    own, copied = ((each.storage_meta or {}).get("save_id") for each in (index, other))
    if None not in (own, copied) and own != copied:
        return False
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


def accept_common_file(path: Path) -> str | None:
    """Accept the common state as it is, by a new manifest. Returns its file; None if that says so already."""
    storage = storage_at(path)
    refuse_decided(storage)
    with Commit.begin(storage) as commit:
        content = read_small_file(path, METADATA_FILE)
        pickled, manifest = split_metadata(content, f"{path}/{METADATA_FILE}")
        if manifest is None:
            raise CorruptCheckpointError(
                f"{path}/{METADATA_FILE}: has no manifest that could say which common state is its own; any is loaded"
            )
        index = parse_index(content, str(path))
        name = common_file_in_force(storage, index)
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
