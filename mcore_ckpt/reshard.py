"""Rewriting a checkpoint for another parallel layout, offline: no model, no process group, no GPU.

    plan (which chunk goes where)  ->  copy (reshard_copy)  ->  check (reshard_check)  ->  publish

All of it happens in `DST.partial`, which becomes `DST` by a rename when it is complete and proved; the source is only
read. An interrupted run leaves `DST.partial` with a journal, and the same call goes on from there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt.commit import common_file_in_force
from mcore_ckpt.errors import CheckpointExistsError, OptionError, SaveError
from mcore_ckpt.key_patterns import key_filter
from mcore_ckpt.metadata import (
    COMMON_FILE,
    CONFIG_FILE,
    INCOMPLETE_MARKER,
    METADATA_FILE,
    TRACKER_FILE,
    CheckpointIndex,
    parse_index,
    read_index,
)
from mcore_ckpt.metadata_write import encode_metadata
from mcore_ckpt.parallel_layout import (
    ParallelLayout,
    data_file_rank,
    is_optimizer_key,
    layout_of_arguments,
    layout_of_chunks,
    optimizer_layout,
)
from mcore_ckpt.partition import Partitioner, PartitionRule
from mcore_ckpt.plain_state import read_plain_state
from mcore_ckpt.progress import Progress
from mcore_ckpt.reshard_check import check_all
from mcore_ckpt.reshard_copy import copy_all
from mcore_ckpt.reshard_journal import JOURNAL_FILE, Journal
from mcore_ckpt.reshard_plan import ReshardPlan, TargetLayout, make_plan
from mcore_ckpt.storage.local import LocalStorage

__all__ = ["ReshardOptions", "ReshardReport", "plan_reshard", "reshard"]

_GIB = 1024**3
_FIXED_LAYOUTS = ("dp_reshardable", "dp_zero_gather_scatter")
# What the interpreter, numpy and the index take before the first buffer.
_BASE_BYTES = 256 * 1024**2


@dataclass(frozen=True, slots=True)
class ReshardOptions:
    """What to make of a checkpoint.

    Attributes:
        layout: of the target; None takes the chunks and files of `like` over as they are.
        like: a checkpoint that shows the partition axes.
        rules: partition rules (`partition.parse_rules`), after `like`.
        only: keys to carry, by pattern (`key_patterns`).
        drop_optimizer: leave the optimizer's state out.
        dtype: convert floating-point tensors of the model, to torch's name without `torch.`.
        merge: one file for each rank, instead of one for each rank and worker.
        workers: threads that move tensors.
        verify: prove the target against the source before it appears.
        restart: throw away what an earlier run of another kind has left.
        move_files: let the kernel copy payloads that stay as they are.
        memory_bytes: for everything.
    """

    layout: TargetLayout | None
    like: str | None = None
    rules: tuple[PartitionRule, ...] = ()
    only: str | None = None
    drop_optimizer: bool = False
    dtype: str | None = None
    merge: bool = False
    workers: int = 2
    verify: bool = True
    restart: bool = False
    move_files: bool = True
    memory_bytes: int = _GIB


@dataclass(frozen=True, slots=True)
class ReshardReport:
    """What was done; `resumed` says that an earlier run had begun it."""

    source: str
    target: str
    layout: str
    files: int
    file_bytes: int
    tensors: int
    chunks: int
    guesses: int
    verified: bool
    resumed: bool
    copy_s: float
    verify_s: float


def plan_reshard(source: CheckpointIndex, options: ReshardOptions) -> ReshardPlan:
    """Decide everything; reads nothing but indexes and the common state.

    Raises:
        OptionError: the layout cannot be, or the optimizer's state cannot follow it.
        CheckpointNotFoundError, CorruptCheckpointError: `like` is no readable checkpoint.
    """
    common = read_plain_state(source)
    arguments = common.get("args")
    arguments = arguments if isinstance(arguments, dict) else {}
    like = read_index(options.like) if options.like else None
    if options.layout is None and like is None:
        raise OptionError("no target layout: give the tensor and pipeline parallel sizes (--tp, --pp), or --like")
    exact = options.layout is None
    layout = options.layout or _layout_of(like)
    wanted = key_filter(options.only)
    keep = [key for key in source.tensors if wanted(key) and not (options.drop_optimizer and is_optimizer_key(key))]
    objects = [key for key in source.objects if wanted(key) and not (options.drop_optimizer and is_optimizer_key(key))]
    if not keep and not objects:
        raise OptionError(
            f"{source.path}: no key matches --only {options.only!r}; `mcore-ckpt inspect --tensors` lists them"
        )
    if any(is_optimizer_key(key) for key in keep):
        _refuse_fixed_optimizer(source, common, layout)
    partitioner = Partitioner(source, like=like, rules=options.rules, arguments=arguments, exact_like=exact)
    return make_plan(
        source,
        layout,
        partitioner,
        like=like if exact else None,
        keys=keep,
        object_keys=objects,
        dtype=options.dtype,
        workers=1 if options.merge else max(1, options.workers),
        arguments=arguments,
    )


def _layout_of(like: CheckpointIndex | None) -> TargetLayout:
    """Sizes of a checkpoint whose chunks are taken over: what its chunks show, and room for all its ranks."""
    assert like is not None
    shown = layout_of_chunks(like)
    files = {chunk.item.file for entry in like.tensors.values() for chunk in entry.chunks}
    ranks = 1 + max((data_file_rank(file) or 0 for file in files), default=0)
    tp, pp = shown.tp or 1, shown.pp or 1
    return TargetLayout(tp, pp, dp=max(1, -(-ranks // (tp * pp))))


def _refuse_fixed_optimizer(source: CheckpointIndex, common: Mapping[str, Any], layout: TargetLayout) -> None:
    """Flat buckets belong to one model-parallel layout: nothing in them says where one parameter ends."""
    kind = optimizer_layout(source, common)
    if kind not in _FIXED_LAYOUTS:
        return
    shown = layout_of_chunks(source)
    saved = layout_of_arguments(common) or shown
    if _same_model_parallel(saved, layout):
        return
    was = f"TP {saved.tp} PP {saved.pp} EP {saved.ep or 1}"
    raise OptionError(
        f"{source.path}: its optimizer state is {kind!r}, flat buckets of {was}, which cannot be divided for TP "
        f"{layout.tp} PP {layout.pp} EP {layout.ep}. Reshard the model alone with --drop optimizer, or load this "
        f"checkpoint once at {was} and save it with --dist-ckpt-optim-fully-reshardable. Nothing was written"
    )


def _same_model_parallel(saved: ParallelLayout, layout: TargetLayout) -> bool:
    same_experts = (saved.ep or 1) == layout.ep and (saved.etp is None or saved.etp == layout.expert_tp)
    return saved.tp == layout.tp and saved.pp == layout.pp and same_experts


def reshard(
    source: str | Path, target: str | Path, options: ReshardOptions, *, progress: bool | None = False
) -> ReshardReport:
    """Make `target`, the checkpoint in `source` under another layout.

    Args:
        source: directory of the checkpoint; never written to.
        target: directory to make; it must not exist, or be empty.
        options: what to make.
        progress: show bars; None: if standard error is a terminal.

    Raises:
        OptionError: it cannot be done as asked; nothing has been written.
        CheckpointExistsError: there is something at `target`.
        CheckpointNotFoundError, CorruptCheckpointError: `source` is no readable checkpoint.
        ChecksumError: a damaged source, or a target that is not what was written; `target` does not appear.
        SaveError: the target cannot be written; what is done is kept for the next run.
    """
    src, dst = Path(source), Path(target)
    index = read_index(src)
    _refuse_target(src, dst)
    plan = plan_reshard(index, options)
    content = encode_metadata(plan.index)
    partial = dst.with_name(dst.name + ".partial")
    if options.restart and partial.exists():
        shutil.rmtree(partial)
    _make_directory(partial)
    with Journal(partial, _fingerprint(src, index, content, options)) as journal:
        resumed = bool(journal.done)
        if not resumed:
            _check_space(partial, sum(plan.sizes.values()))
        total = sum(move.payload_bytes for moves in plan.work for move in moves)
        started = time.monotonic()
        with Progress("reshard", total, shown=progress) as bar:
            copy_all(
                plan,
                index,
                partial,
                journal,
                memory_bytes=max(64 * 1024**2, (options.memory_bytes - _BASE_BYTES) // 2),
                advance=bar.advance,
                move_files=options.move_files,
            )
        copied = time.monotonic()
        if options.verify:
            written = parse_index(content, str(partial))
            with Progress("verify", total, shown=progress) as bar:
                check_all(plan, index, written, journal, workers=options.workers, advance=bar.advance)
        checked = time.monotonic()
        _publish(src, index, dst, partial, plan, content)
    moves = plan.moves
    return ReshardReport(
        source=str(src),
        target=str(dst),
        layout=str(plan.layout),
        files=len(plan.sizes),
        file_bytes=sum(plan.sizes.values()),
        tensors=len(moves),
        chunks=sum(len(move.boxes) for move in moves),
        guesses=sum(move.partition.guess for move in moves),
        verified=options.verify,
        resumed=resumed,
        copy_s=copied - started,
        verify_s=checked - copied,
    )


def _refuse_target(source: Path, target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointExistsError(
            f"{target}: there is something already; reshard never overwrites, choose another name"
        )
    here, there = source.resolve(), target.resolve()
    if here == there or here in there.parents:
        raise OptionError(f"{target}: lies inside the source {source}, which is never written to")


def _make_directory(partial: Path) -> None:
    try:
        partial.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SaveError(f"{partial}: the directory cannot be made: {error.strerror}") from error


def _fingerprint(source: Path, index: CheckpointIndex, content: bytes, options: ReshardOptions) -> str:
    """Of everything that the bytes of the target depend on."""
    files = {chunk.item.file for entry in index.tensors.values() for chunk in entry.chunks}
    files |= {entry.item.file for entry in index.objects.values()}
    found: dict[str, Any] = {"source": str(source.resolve()), "target": hashlib.sha256(content).hexdigest()}
    for file in sorted(files):
        stat = (source / file).stat()
        found[file] = [stat.st_size, stat.st_mtime_ns]
    found["metadata"] = hashlib.sha256((source / METADATA_FILE).read_bytes()).hexdigest()
    layout = options.layout
    found["layout"] = None if layout is None else asdict(layout)
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def _check_space(directory: Path, needed_bytes: int) -> None:
    stat = os.statvfs(directory)
    free = stat.f_bavail * stat.f_frsize
    if free < needed_bytes:
        raise SaveError(
            f"{directory}: {needed_bytes} bytes are needed, {free} are free; free space, or choose another disk"
        )


def _publish(
    source: Path, index: CheckpointIndex, target: Path, partial: Path, plan: ReshardPlan, content: bytes
) -> None:
    """Carry what is not data, write the index last, and let the target appear."""
    storage = LocalStorage(partial)
    data_files = {chunk.item.file for entry in index.tensors.values() for chunk in entry.chunks}
    data_files |= {entry.item.file for entry in index.objects.values()}
    common = common_file_in_force([path.name for path in source.iterdir()], index)
    # integrity.json lists hashes of the source's files; the others are not parts of a finished checkpoint.
    left_out = {METADATA_FILE, COMMON_FILE, INCOMPLETE_MARKER, "integrity.json", JOURNAL_FILE, *data_files}
    for path in sorted(source.iterdir()):
        if path.name in left_out or path.name.endswith((".pending", ".tmp", ".distcp")):
            continue
        if path.is_dir():
            shutil.copytree(path, partial / path.name, dirs_exist_ok=True)
        elif path.name != CONFIG_FILE:
            storage.publish(path.name, path.read_bytes())
    if common is not None:
        storage.publish(COMMON_FILE, (source / common).read_bytes())
    if (source / CONFIG_FILE).is_file():
        storage.publish(CONFIG_FILE, (source / CONFIG_FILE).read_bytes())
    storage.publish(METADATA_FILE, content)
    storage.delete(JOURNAL_FILE)
    try:
        if target.is_dir():
            target.rmdir()
        partial.replace(target)
    except OSError as error:
        raise SaveError(f"{partial}: complete, but cannot be renamed to {target}: {error.strerror}") from error
    LocalStorage(target.parent).sync_directory()
    _carry_tracker(source, target)


def _carry_tracker(source: Path, target: Path) -> None:
    """The tracker file beside an iteration, if the target is the iteration that it names and has none beside it."""
    tracker, wanted = source.parent / TRACKER_FILE, target.parent / TRACKER_FILE
    if tracker.is_file() and not wanted.exists():
        text = tracker.read_text(errors="replace").strip()
        if text.isascii() and text.isdigit() and target.name == f"iter_{int(text):07d}":
            LocalStorage(target.parent).publish(TRACKER_FILE, text.encode())
