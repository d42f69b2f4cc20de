"""A planned target from the first byte to the moment it appears: temporary directory, journal, copy, proof, name.

Everything happens in `TARGET.partial`. `.metadata` is written there last, and the rename to `TARGET` comes after all of
it is durable and proved, so that nothing ever looks like a checkpoint and is none. What an interrupted run leaves is
taken up by the next one with the same plan.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import threading
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from mcore_ckpt.convert._file_stream import TargetFile
from mcore_ckpt.convert._read_ahead import AheadSource, ReadAhead
from mcore_ckpt.convert._reshard_copy import JOURNAL_FILE, Journal, copy_all, expected_crcs
from mcore_ckpt.convert.reshard_plan import ReshardPlan, TensorMove
from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.console import Progress
from mcore_ckpt.core.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ChecksumError,
    CorruptCheckpointError,
    LoadError,
    OptionError,
    SaveError,
)
from mcore_ckpt.core.threads import in_parallel
from mcore_ckpt.directory.common_file import bind_common_file, read_common_file
from mcore_ckpt.directory.in_force import common_file_in_force, with_common_files
from mcore_ckpt.directory.lock import DirectoryLock, is_lock_file
from mcore_ckpt.format.crc import crc32
from mcore_ckpt.format.index import CheckpointIndex, TensorEntry
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.format.metadata_read import (
    COMMON_FILE,
    CONFIG_FILE,
    MAX_CONFIG_BYTES,
    METADATA_FILE,
    parse_index,
    read_small_file,
)
from mcore_ckpt.format.metadata_write import encode_metadata
from mcore_ckpt.format.seal import SAVE_ID_BYTES, MetadataSeal, SealedFile, seal_metadata, shown_id
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.payloads import MADE_HERE, StoredPayload, StoredPayloads
from mcore_ckpt.tools.regrid import CrcSink, Walk, reads_of
from mcore_ckpt.tools.tilings import Block, blocks
from mcore_ckpt.tools.verify import check_file

__all__ = [
    "EXPORT_FOLDER",
    "BuildOptions",
    "Built",
    "appear",
    "build_target",
    "carry_sidecars",
    "check_all",
    "claim_partial",
    "file_states",
    "partial_directory",
    "refuse_changed",
    "refuse_target",
    "replaced_error",
    "sidecar_files",
]

# Directories in one another that files of others may lie in.
_MAX_FOLDERS = 32

# In a target's temporary directory, the folder of an export: called by the id of its claim, or moved out of the way.
EXPORT_FOLDER = re.compile(r"[0-9a-f]{16}(?:\.gone\d*)?")

# What the interpreter, numpy and the index take before the first buffer.
_BASE_BYTES = 256 * 1024**2
_MIN_BUFFER_BYTES = 64 * 1024**2
_COPY_BYTES = 4 * 1024**2
_WINDOW_BYTES = 4 * 1024 * 1024
# Less is read where it is compared: threads and buffers would cost more than they save.
_MIN_AHEAD_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How to build; see `ReshardOptions`."""

    workers: int = 2
    verify: bool = True
    restart: bool = False
    move_files: bool = True
    memory_bytes: int = 1024**3


@dataclass(frozen=True, slots=True)
class Built:
    """What it took."""

    resumed: bool
    verified: bool
    copy_s: float
    verify_s: float


def refuse_target(source: Path, target: Path) -> None:
    """Raise unless `target` is free, and not inside the source."""
    _refuse_existing(target)
    here, there = source.resolve(), target.resolve()
    if here == there or here in there.parents:
        raise OptionError(f"{target}: lies inside the source {source}, which is never written to")


def _refuse_existing(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointExistsError(
            f"{target}: there is something already, and nothing is ever overwritten: choose another name"
        )


def partial_directory(target: Path) -> Path:
    """Where a target is built."""
    return target.with_name(target.name + ".partial")


def build_target(
    payloads: StoredPayloads,
    plan: ReshardPlan,
    target: Path,
    options: BuildOptions,
    *,
    carry: Callable[[Path], None],
    progress: bool | None = False,
) -> Built:
    """Write, prove and publish a target.

    Args:
        payloads: the source.
        plan: what goes where.
        target: directory to make.
        options: how.
        carry: called with the temporary directory, to add what is not data, before `.metadata` is written.
        progress: show bars; None: if standard error is a terminal.

    Raises:
        ChecksumError, CorruptCheckpointError: a damaged source, or a target that is not what was written.
        OptionError: the temporary directory belongs to another plan.
        SaveError: the target cannot be written; what is done is kept for the next run.
        LoadError: the source cannot be read, or another program has changed its files meanwhile.
    """
    with claim_partial(target) as claim:
        if options.restart:
            _empty(partial_directory(target))
        _refuse_export(partial_directory(target))
        return _build(payloads, plan, target, options, claim, carry=carry, progress=progress)


@contextmanager
def claim_partial(target: Path) -> Iterator[DirectoryLock]:
    """Make the temporary directory of a target, and claim it, so that nobody else makes that target meanwhile.

    Raises:
        CheckpointExistsError: there is something at `target`; somebody else may have finished it just now.
        SaveError: somebody else is making it, or the directory cannot be made.
    """
    partial = partial_directory(target)
    try:
        partial.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SaveError(f"{partial}: the directory cannot be made: {error.strerror}") from error
    try:
        claim = DirectoryLock.take(storage_at(partial))
    except SaveError:
        _refuse_existing(target)  # who has held the directory has given it that name
        raise
    with claim:
        _refuse_existing(target)
        yield claim


def _build(
    payloads: StoredPayloads,
    plan: ReshardPlan,
    target: Path,
    options: BuildOptions,
    claim: DirectoryLock,
    *,
    carry: Callable[[Path], None],
    progress: bool | None,
) -> Built:
    """Build `target` in its temporary directory, which is claimed."""
    partial = partial_directory(target)
    total = sum(move.payload_bytes for moves in plan.work for move in moves)
    seen = file_states(payloads.index)
    with Journal(partial, _fingerprint(payloads, plan)) as journal:
        resumed = bool(journal.done)
        if not resumed:
            _check_space(partial, plan.sizes)
        started = time.monotonic()
        with Progress("copy", total, shown=progress) as bar:
            buffer_bytes = max(_MIN_BUFFER_BYTES, (options.memory_bytes - _BASE_BYTES) // 2)
            copy_all(
                plan,
                payloads,
                partial,
                journal,
                memory_bytes=buffer_bytes,
                advance=bar.advance,
                # What the kernel copies is not seen here: it is held against its checksum when the target is read back.
                move_files=options.move_files and options.verify,
            )
        payloads.check_rest()
        seal = _seal_files(plan, payloads, partial, journal)
        # Another checkpoint than the source, and than what the source was resharded to before: of another save.
        meta = {**(plan.index.storage_meta or {}), "save_id": shown_id(seal.save_id)}
        content = seal_metadata(encode_metadata(plan.index, storage_meta=meta), seal)
        copied = time.monotonic()
        verified = options.verify or journal.unproved  # an earlier run may have left that to the proof
        if verified:
            written = parse_index(content, str(partial))
            try:
                with Progress("verify", total, shown=progress) as bar:
                    check_all(plan, payloads, written, journal, workers=options.workers, advance=bar.advance)
            except CorruptCheckpointError:
                journal.forget()  # what was written is not to be taken up by the next run
                raise
        checked = time.monotonic()
        carry(partial)
        refuse_changed(payloads.index, seen)
        _publish(claim, partial, target, bind_common_file(content, partial))
    return Built(resumed, verified, copied - started, checked - copied)


def _seal_files(plan: ReshardPlan, payloads: StoredPayloads, partial: Path, journal: Journal) -> MetadataSeal:
    """Write the seal of each data file, durably; returns that of `.metadata`."""
    save_id = secrets.token_bytes(SAVE_ID_BYTES)
    places: dict[str, list[tuple[int, int]]] = {file: [] for file in plan.sizes}
    for stored in plan.index.objects.values():
        places[stored.item.file].append((stored.item.offset, stored.item.length))
    files = {}
    for name, size_bytes in sorted(plan.sizes.items()):
        end, table_crc = plan.seals[name].fill(save_id, size_bytes, sorted(places[name]))
        # A worker makes its files; what holds neither tensors nor objects has none.
        file = TargetFile(str(partial / name), size_bytes, direct=False)
        try:
            file.write(size_bytes - len(end), memoryview(end))
            file.sync()
        finally:
            file.close()
        files[name] = SealedFile(size_bytes, table_crc, save_id)
    sums = [known for fqn in plan.index.tensors for known in journal.sums[fqn]]
    crcs = array("I", [crc for crc, _ in sums])
    for fqn in plan.index.objects:
        item = payloads.index.objects[fqn].item
        with payloads.files.reader(item.file) as reader:
            crcs.append(crc32(reader.read(item.offset, item.length)))
    running = [(number, blocks) for number, (_, blocks) in enumerate(sums) if blocks]
    return MetadataSeal(
        save_id,
        files,
        crcs,
        array("Q", [number for number, _ in running]),
        array("I", [len(blocks) for _, blocks in running]),
        array("I", chain.from_iterable(blocks for _, blocks in running)),
    )


def _refuse_export(partial: Path) -> None:
    """Raise `OptionError` if an interrupted export is there: what lies in the directory becomes the target."""
    left = sorted(path.name for path in partial.iterdir() if EXPORT_FOLDER.fullmatch(path.name) and path.is_dir())
    if left:
        raise OptionError(
            f"{partial}: holds {left[0]}, which an interrupted export has left; go on with that export, or remove what "
            "it has left, or make the checkpoint under another name"
        )


def _empty(partial: Path) -> None:
    """Remove what an earlier run has left; first of all what would make it look like a checkpoint."""
    (partial / METADATA_FILE).unlink(missing_ok=True)
    for path in partial.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif not is_lock_file(path.name):
            path.unlink()


def _fingerprint(payloads: StoredPayloads, plan: ReshardPlan) -> str:
    """Of everything that the bytes of the target depend on: its layout, and the files that they come from."""
    found: dict[str, Any] = {
        "source": str(Path(payloads.index.path).resolve()),
        "target": hashlib.sha256(encode_metadata(plan.index)).hexdigest(),
        "keys": [[move.entry.fqn, move.target_fqn] for moves in plan.work for move in moves],
        **file_states(payloads.index),
    }
    recipe = "\n".join(payloads.recipe())
    if recipe:
        found["recipe"] = hashlib.sha256(recipe.encode()).hexdigest()
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def file_states(index: CheckpointIndex, keys: Collection[str] | None = None) -> dict[str, list[int]]:
    """Length and time of change, in nanoseconds, of each file that a source's tensors and objects lie in.

    Args:
        index: of the source.
        keys: of tensors; by default, all that there is.

    Raises:
        CheckpointNotFoundError: one is not there.
    """
    directory = Path(index.path)
    entries = index.tensors.values() if keys is None else (index.tensors[key] for key in keys)
    files = {chunk.item.file for entry in entries for chunk in entry.chunks}
    if keys is None:
        files |= {entry.item.file for entry in index.objects.values()}
    found = {}
    for file in sorted(files - {MADE_HERE}):
        try:
            stat = (directory / file).stat()
        except OSError as error:
            raise CheckpointNotFoundError(
                f"{directory / file}: the index names this file, but it cannot be found ({error.strerror}); the "
                f"checkpoint is incomplete, `mcore-ckpt verify {directory}` lists what is missing"
            ) from error
        found[file] = [stat.st_size, stat.st_mtime_ns]
    return found


def refuse_changed(index: CheckpointIndex, seen: Mapping[str, list[int]], keys: Collection[str] | None = None) -> None:
    """Raise `LoadError` if the files of a source are not those that they were when `file_states` gave `seen`.

    What was read of them may then be of two saves, each part of it sound.
    """
    try:
        if file_states(index, keys) == seen:
            return
    except CheckpointNotFoundError as error:
        raise replaced_error(index.path) from error
    raise replaced_error(index.path)


def replaced_error(source: str) -> LoadError:
    """That a source is not the checkpoint any more that it was at first."""
    return LoadError(
        f"{source}: another program has replaced the checkpoint, or changed its files, while it was read; what was "
        "read may be of two saves, and nothing of it was given the target's name. Run the command again when nothing "
        "saves there, to a target of another name, or (reshard) with --restart"
    )


def _check_space(directory: Path, sizes: Mapping[str, int]) -> None:
    """Raise `SaveError` unless the files fit; what an earlier run has reserved for them already counts for them."""
    needed_bytes = sum(sizes.values())
    for name, size in sizes.items():
        with contextlib.suppress(FileNotFoundError):
            needed_bytes -= min(size, (directory / name).stat().st_blocks * 512)
    stat = os.statvfs(directory)
    free = stat.f_bavail * stat.f_frsize
    if free < needed_bytes:
        raise SaveError(
            f"{directory}: {needed_bytes} bytes are needed, {free} are free: free space, or choose another disk"
        )


def check_all(
    plan: ReshardPlan,
    given: StoredPayloads,
    target: CheckpointIndex,
    journal: Journal,
    *,
    workers: int,
    advance: Callable[[int], None],
) -> None:
    """Is the target, as it lies on the disk, the source? Proved by checksum, without reading the source again.

    The target is read back and divided once more into the chunks of the source. Each must have the CRC-32 that the
    source's item carries (or, where the source carries none or the dtype was changed, the one that the copy found).
    That takes one pass over the target, and proves the data and the layout at once, from the target's own index.

    Args:
        plan: what was to be done.
        given: the source's tensors.
        target: index of the target, its path being where the files lie now.
        journal: holds CRC-32s that are stored nowhere else.
        workers: threads.
        advance: called with payload bytes that have been compared.

    Raises:
        ChecksumError, CorruptCheckpointError: the target is not what it should be.
    """
    # Objects keep their keys; tensors may have been renamed.
    names = {move.entry.fqn: move.target_fqn for moves in plan.work for move in moves}
    with StoredPayloads(target) as written:
        threads = threading.local()

        def check(move: TensorMove) -> None:
            if not hasattr(threads, "window"):
                threads.window = memoryview(bytearray(_WINDOW_BYTES))
            entry = written.index.tensors[names[move.entry.fqn]]
            _check_tensor(move, entry, given, written, journal, threads.window)
            advance(move.payload_bytes)

        moves = [move for moves in plan.work for move in moves]
        moves.sort(key=lambda move: (move.files[0], move.offsets[0]) if move.files else ("", 0))
        in_parallel(moves, check, workers)
        for fqn, entry in target.objects.items():
            item, origin = entry.item, given.index.objects[fqn].item
            with written.files.reader(item.file) as copy, given.files.reader(origin.file) as original:
                if copy.read(item.offset, item.length) != original.read(origin.offset, origin.length):
                    raise CorruptCheckpointError(
                        f"{fqn}: bytes [{item.offset}, {item.offset + item.length}) of {copy.name} differ from the "
                        "source's item; check the device, then run the command again"
                    )


def _check_tensor(
    move: TensorMove,
    entry: TensorEntry,
    given: StoredPayloads,
    written: StoredPayloads,
    journal: Journal,
    window: memoryview,
) -> None:
    stored = [Box(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
    expected = expected_crcs(given, move, journal)
    walk = Walk(element_bytes(entry.dtype))
    source_boxes = move.source_boxes

    def locate(block: Block) -> tuple[Block, list[StoredPayload]]:
        return block, [written.locate(entry, entry.chunks[n]) for n in block.sources]

    def reads(located: tuple[Block, list[StoredPayload]]) -> Iterator[tuple[StoredPayload, int, int]]:
        block, payloads = located
        targets = [source_boxes[n] for n in block.targets]
        for n, start, nbytes in reads_of([stored[n] for n in block.sources], targets, walk.elem_bytes):
            yield payloads[n], start, nbytes

    ahead = ReadAhead(written.files)
    with ahead if move.payload_bytes >= _MIN_AHEAD_BYTES else contextlib.nullcontext():
        for block, payloads in ahead.steps(map(locate, blocks(stored, source_boxes)), reads):
            sinks = [CrcSink(window) for _ in block.targets]
            read = walk.move(
                [stored[n] for n in block.sources],
                [AheadSource(ahead, written, payload) for payload in payloads],
                [source_boxes[n] for n in block.targets],
                sinks,
            )
            for payload, value in zip(payloads, read, strict=True):
                if payload.crc32 != value:
                    raise _wrong(payload.where, payload.crc32, value)
            for n, sink in zip(block.targets, sinks, strict=True):
                if sink.crc32 != expected[n]:
                    where = f"{entry.fqn}: the source's chunk at {list(source_boxes[n].offsets)}, put together from the"
                    raise _wrong(f"{where} target", expected[n], sink.crc32)


def _wrong(where: str, expected: int | None, got: int) -> ChecksumError:
    shown = "none" if expected is None else f"{expected:#010x}"
    return ChecksumError(
        f"{where}: has CRC-32 {got:#010x}, expected {shown}: what was written is not what is on the disk. Check the "
        "device and the source (`mcore-ckpt verify`), then run the command again"
    )


def sidecar_files(index: CheckpointIndex) -> list[str]:
    """Files of others (ModelOpt) beside the data, also in directories, as names relative to the source.

    Raises:
        CorruptCheckpointError: a symbolic link, a pipe or the like lies among them, or directories too deep.
        LoadError: a directory cannot be read.
    """
    source = Path(index.path)
    data_files = {chunk.item.file for entry in index.tensors.values() for chunk in entry.chunks}
    data_files |= {entry.item.file for entry in index.objects.values()}
    # integrity.json lists hashes of the source's files; the others are not parts of a finished checkpoint.
    left_out = {METADATA_FILE, CONFIG_FILE, COMMON_FILE, "integrity.json", JOURNAL_FILE, *data_files}
    found: list[str] = []
    folders = [""]
    try:
        while folders:
            folder = folders.pop()
            with os.scandir(source / folder) as entries:
                for entry in entries:
                    name = f"{folder}/{entry.name}" if folder else entry.name
                    if not folder and (
                        name in left_out or is_lock_file(name) or name.endswith((".pending", ".tmp", ".distcp"))
                    ):
                        continue
                    if entry.is_file(follow_symlinks=False):
                        found.append(name)
                    elif entry.is_dir(follow_symlinks=False) and name.count("/") < _MAX_FOLDERS:
                        folders.append(name)
                    else:
                        raise _not_carried(source / name, entry.is_symlink(), entry.is_dir(follow_symlinks=False))
    except OSError as error:
        raise LoadError(f"{source}: what lies in it cannot be listed: {error}") from error
    return sorted(found)


def _not_carried(path: Path, is_link: bool, is_folder: bool) -> CorruptCheckpointError:
    kind = "a symbolic link" if is_link else "a pipe, a socket or a device"
    if is_folder:
        kind = f"a directory in {_MAX_FOLDERS} others"
    return CorruptCheckpointError(
        f"{path}: expected a regular file or a directory to take along, but it is {kind}; nothing has been written. "
        "Remove it, or, if you trust what links lead to, copy the checkpoint with its links resolved (cp -rL) and "
        "reshard the copy"
    )


def carry_sidecars(
    index: CheckpointIndex, sidecars: Iterable[str], partial: Path, common_content: bytes | None = None
) -> None:
    """Copy what lies beside the data and stays valid: common state, `metadata.json`, and `sidecar_files`.

    Args:
        index: of the source.
        sidecars: names of files.
        partial: where they go.
        common_content: what `common.pt` is to hold instead of what it held.
    """
    source, storage = Path(index.path), storage_at(partial)
    names = [path.name for path in source.iterdir()]
    common = common_file_in_force(with_common_files(storage_at(source), names, index), index)
    for name in sidecars:
        _carry_file(source, name, partial / name)
    if common is not None:
        content = read_common_file(storage_at(source), common, index.seal)
        check_file(storage_at(source), common)
        storage.publish(COMMON_FILE, content if common_content is None else common_content)
    if (source / CONFIG_FILE).exists():
        storage.publish(CONFIG_FILE, read_small_file(source, CONFIG_FILE, MAX_CONFIG_BYTES))


def _carry_file(source: Path, name: str, target: Path) -> None:
    """Copy a file of any size, durably; nothing else appears under that name before `.metadata` does."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with storage_at(source).open_reader(name, direct="off") as given, target.open("wb") as taken:
            for at in range(0, given.size_bytes, _COPY_BYTES):
                taken.write(given.read(at, min(_COPY_BYTES, given.size_bytes - at)))
            taken.flush()
            os.fsync(taken.fileno())
    except OSError as error:
        raise SaveError(f"{source / name}: cannot be copied to {target}: {error.strerror or error}") from error


def _publish(claim: DirectoryLock, partial: Path, target: Path, content: bytes) -> None:
    storage = storage_at(partial)
    storage.sync()
    claim.publish(METADATA_FILE, content)
    storage.delete(JOURNAL_FILE)
    if not claim.is_still_held():
        claim.check()  # raises: whoever has taken over is at work there
    appear(partial, target)
    claim.moved_to(storage_at(target))
    claim.release()  # with the marker: what a run that is gone has left has been taken up


def appear(partial: Path, target: Path) -> None:
    """Give a complete directory its name, durably."""
    try:
        if target.is_dir():
            target.rmdir()
        partial.replace(target)
    except OSError as error:
        raise SaveError(f"{partial}: complete, but cannot be renamed to {target}: {error.strerror}") from error
    storage_at(target.parent).sync()
