"""Is a checkpoint complete and undamaged? Its structure, and the CRC-32 of every record in every file.

Structure: each chunk of each tensor is there once, chunks tile their tensor, items lie inside their files and do not
overlap, and say of themselves what the index says of them. Content: `torch.save` archives carry the CRC-32 of each
record (those of stock Megatron-Core and PyTorch too, where nothing ever compares them); here all are compared.

On request the optimizer is compared with the model: its float32 weights, rounded, are the model's.
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_ckpt.core.boxes import Box, strides_of
from mcore_ckpt.core.console import Progress
from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError, LoadError
from mcore_ckpt.core.options import checkpoint_path
from mcore_ckpt.directory.in_force import common_file_in_force, is_pending, with_common_files
from mcore_ckpt.directory.iterations import common_state_flaw, is_megatrons, structure_flaws
from mcore_ckpt.format.index import CheckpointIndex, StoredItem, TensorEntry
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.format.metadata_read import (
    COMMON_FILE,
    CONFIG_FILE,
    METADATA_FILE,
    checked_footer,
    read_common_file,
    read_index,
)
from mcore_ckpt.load.checks import (
    ItemCheck,
    ItemChecker,
    Problem,
    checks_of,
    item_problem,
    items_by_file,
    pickle_differs,
    read_table,
    spans_of,
    table_problems,
)
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.inspection import checkpoint_directory, in_force

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
    names = storage.list()
    megatron, flaw = is_megatrons(directory, index, names)
    if flaw:
        problems.append(Problem("index", flaw, file=CONFIG_FILE))
    problems += [Problem("structure", flaw.message, fqn=flaw.key) for flaw in structure_flaws(index, megatron=megatron)]

    common, common_problems = _common_state(directory, index, storage, names, megatron)
    readable, file_problems = _items_in_files(index, storage, common)
    problems += common_problems + file_problems
    problems += _footer_problems(index, storage)
    checker = ItemChecker(storage)
    spans = list(spans_of(readable))
    with Progress("verify", sum(span.stop - span.start for span in spans), shown=progress) as bar:
        checker.run(spans, workers, bar.advance)
    order = {check.where: n for n, check in enumerate(readable)}
    checker.problems.sort(key=lambda found: order.get(found[0], len(order)))
    return VerifyReport(
        path=str(directory),
        problems=(*problems, *(problem for _, problem in checker.problems)),
        items=checker.items,
        records=checker.records,
        read_bytes=checker.read_bytes,
        seconds=time.monotonic() - started,
        unchecked=checker.unchecked,
        refused=dict(sorted(checker.refused.items())),
    )


def _verify_optimizer(report: VerifyReport, progress: bool | None) -> VerifyReport:
    """Compare the optimizer's float32 weights with the model's in 16 bits: rounded, they are the same elements.

    Megatron-Core 0.16 saves a fully reshardable optimizer of several padded buckets shifted; nothing else shows it.
    """
    from mcore_ckpt.tools.payloads import StoredPayloads

    index = read_index(Path(report.path))
    pairs = []
    for fqn, main in index.tensors.items():
        found = _MAIN_WEIGHT.match(fqn)
        weight = index.tensors.get(found.group("key")) if found else None
        if weight is not None and weight.shape == main.shape and main.dtype == "float32" and weight.dtype in _ROUNDED:
            pairs.append((main, weight))
    total = sum(math.prod(main.shape) * (4 + element_bytes(weight.dtype)) for main, weight in pairs)
    problems = []
    with Progress("optimizer", total, shown=progress) as bar, StoredPayloads(index) as payloads:
        for main, weight in pairs:
            message = _other_elements(payloads, main, weight, bar)
            if message:
                problems.append(Problem("optimizer", message, fqn=main.fqn))
    return replace(
        report,
        problems=(*report.problems, *problems),
        read_bytes=report.read_bytes + total,
        compared=len(pairs),
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
    directory: Path, index: CheckpointIndex, storage: Storage, names: Sequence[str], megatron: bool
) -> tuple[list[ItemCheck], list[Problem]]:
    """The file of the common state, an archive like any item; only this package compares its checksums."""
    names = with_common_files(storage, names, index)
    file = common_file_in_force(names, index)
    if file is not None:
        try:
            read_common_file(storage, file, index.manifest)
            return [ItemCheck(_COMMON_STATE, StoredItem(file, 0, storage.size(file)))], []
        except LoadError as error:
            return [], [Problem("file", str(error), file=file)]
    listed = index.manifest is not None and COMMON_FILE in index.manifest.files
    flaw = common_state_flaw(directory, index, names) if megatron or listed else None
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
            problems.append(item_problem("file", check, f"{check.where}: its file is missing"))
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


def _footer_problems(index: CheckpointIndex, storage: Storage) -> Iterator[Problem]:
    """What data files say of themselves, compared with `.metadata`: save, name, size, and each item's description."""
    items = items_by_file(index)
    for name in sorted(items):
        try:
            with storage.open_reader(name) as reader:
                footer = checked_footer(index, name, reader)
                table = None if footer is None else read_table(reader, footer)
        except CorruptCheckpointError as error:
            yield Problem("file", str(error), file=name)
            continue
        except LoadError:
            continue  # missing, which has been told
        for message in () if table is None else table_problems(items[name], table):
            yield Problem("structure", f"{storage}/{name}: {message}", file=name)
