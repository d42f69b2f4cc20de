"""Rewriting a checkpoint for another parallel layout, offline: no model, no process group, no GPU.

    plan (which chunk goes where)  ->  copy  ->  check  ->  publish

All of it happens in `DST.partial`, which becomes `DST` by a rename when it is complete and proved; the source is only
read. An interrupted run leaves `DST.partial` with a journal, and the same call goes on from there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mcore_ckpt.convert._optimizer_layout import FULLY_RESHARDABLE, ConvertedOptimizer, convert_optimizer
from mcore_ckpt.convert._partition import Partitioner
from mcore_ckpt.convert._pieces import PiecePayloads
from mcore_ckpt.convert._reshard_target import (
    BuildOptions,
    build_target,
    carry_sidecars,
    refuse_target,
    replaced_error,
    sidecar_files,
)
from mcore_ckpt.convert.reshard_plan import ReshardPlan, TargetLayout, make_plan
from mcore_ckpt.convert.rules import PartitionRule, parse_partition_rules, rules_in
from mcore_ckpt.core.errors import LoadError, OptionError
from mcore_ckpt.core.paths import local_path
from mcore_ckpt.format.index import CheckpointIndex, object_key
from mcore_ckpt.format.metadata_read import MAX_TRACKER_BYTES, TRACKER_FILE, read_index, read_small_file
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.dtype_cast import floating_dtype
from mcore_ckpt.tools.inspection import checkpoint_directory, index_version
from mcore_ckpt.tools.keys import is_optimizer_key, key_filter
from mcore_ckpt.tools.parallel_layout import (
    ParallelLayout,
    data_file_rank,
    layout_of_arguments,
    layout_of_chunks,
    optimizer_layout,
)
from mcore_ckpt.tools.payloads import StoredPayloads, check_tiled
from mcore_ckpt.tools.plain_state import read_plain_state

__all__ = ["OPTIMIZER_LAYOUTS", "ReshardOptions", "ReshardReport", "plan_reshard", "reshard", "reshard_checkpoint"]

_GIB = 1024**3
_COMMON_OBJECT = object_key("common_state", (0,), (1,))
OPTIMIZER_LAYOUTS = (FULLY_RESHARDABLE,)
"""Layouts that the optimizer's state can be given."""

_FIXED_LAYOUTS = ("dp_reshardable", "dp_zero_gather_scatter")


@dataclass(frozen=True, slots=True)
class ReshardOptions:
    """What to make of a checkpoint.

    Attributes:
        layout: of the target; None takes the chunks and files of `like` over as they are.
        like: a checkpoint that shows the partition axes.
        rules: partition rules (`rules.parse_partition_rules`), after `like`.
        only: keys to carry, by pattern (`keys.key_filter`).
        drop_optimizer: leave the optimizer's state out.
        optimizer: the layout that the optimizer's state shall have (`OPTIMIZER_LAYOUTS`); None leaves it as it is.
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
    optimizer: str | None = None
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
    """Decide everything; reads indexes and the common state, and a few elements if the optimizer's layout is changed.

    Raises:
        OptionError: the layout cannot be, or the optimizer's state cannot follow it.
        CheckpointNotFoundError, CorruptCheckpointError: `like` is no readable checkpoint.
        CorruptCheckpointError: chunks of the source are missing, or overlap.
    """
    with _content(source, options) as (payloads, converted, common):
        return _plan(source, payloads.index, converted, common, options)


@contextmanager
def _content(
    source: CheckpointIndex, options: ReshardOptions
) -> Iterator[tuple[StoredPayloads, ConvertedOptimizer | None, dict[str, Any]]]:
    """What is resharded: the source, or a view of it in which the optimizer's state has the wanted layout."""
    common = read_plain_state(source)
    with StoredPayloads(source) as payloads:
        converted = None
        if options.optimizer is not None:
            if options.optimizer not in OPTIMIZER_LAYOUTS:
                raise OptionError(f"optimizer {options.optimizer}: expected one of {', '.join(OPTIMIZER_LAYOUTS)}")
            if options.drop_optimizer:
                raise OptionError("the optimizer's state can be left out or change its layout, not both")
            check_tiled(source, source.tensors)
            converted = convert_optimizer(payloads, common)
        if converted is None:
            yield payloads, None, common
        else:
            view = PiecePayloads(payloads, converted.wanted, converted.objects, converted.kept_objects)
            yield view, converted, common


def _plan(
    source: CheckpointIndex,
    index: CheckpointIndex,
    converted: ConvertedOptimizer | None,
    common: Mapping[str, Any],
    options: ReshardOptions,
) -> ReshardPlan:
    arguments = common.get("args")
    arguments = arguments if isinstance(arguments, dict) else {}
    like = read_index(options.like) if options.like else None
    if options.layout is None and like is None and converted is None:
        raise OptionError("no target layout: give the tensor and pipeline parallel sizes (--tp, --pp), or --like")
    exact = options.layout is None and like is not None
    layout = options.layout or (_layout_of(like) if like is not None else _saved_layout(source, common))
    wanted = key_filter(options.only)
    keep = [key for key in index.tensors if wanted(key) and not (options.drop_optimizer and is_optimizer_key(key))]
    objects = [key for key in index.objects if wanted(key) and not (options.drop_optimizer and is_optimizer_key(key))]
    if not keep and not objects:
        raise OptionError(
            f"{source.path}: no key matches --only {options.only!r}; `mcore-ckpt inspect --tensors` lists them"
        )
    # The common state is carried whatever the pattern, whether it is an object or a file of its own.
    objects += [key for key in index.objects if key == _COMMON_OBJECT and key not in objects]
    if converted is None:
        check_tiled(source, keep)
        if any(is_optimizer_key(key) for key in keep):
            _refuse_fixed_optimizer(source, common, layout)
    partitioner = Partitioner(index, like=like, rules=options.rules, arguments=arguments, exact_like=exact)
    plan = make_plan(
        index,
        layout,
        partitioner,
        like=like if exact else None,
        keys=keep,
        object_keys=objects,
        dtype=options.dtype,
        workers=1 if options.merge else max(1, options.workers),
        arguments=arguments,
    )
    return plan if converted is None else replace(plan, notes=(*plan.notes, *converted.notes))


def _saved_layout(source: CheckpointIndex, common: Mapping[str, Any]) -> TargetLayout:
    """The layout under which a checkpoint was saved, as far as it is known."""
    saved = layout_of_arguments(common) or layout_of_chunks(source)
    return TargetLayout(saved.tp or 1, saved.pp or 1, saved.ep or 1, saved.etp)


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
        f"{layout.tp} PP {layout.pp} EP {layout.ep}. "
        + (
            f"With --optimizer {FULLY_RESHARDABLE} they become tensors that can; or reshard"
            if kind == "dp_reshardable"
            else "Reshard"
        )
        + " the model alone with --drop optimizer. Nothing was written"
    )


def _same_model_parallel(saved: ParallelLayout, layout: TargetLayout) -> bool:
    same_experts = (saved.ep or 1) == layout.ep and (saved.etp is None or saved.etp == layout.expert_tp)
    return saved.tp == layout.tp and saved.pp == layout.pp and same_experts


def reshard(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    options: ReshardOptions,
    *,
    progress: bool | None = False,
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
        LoadError: a save has replaced the checkpoint in `source` meanwhile; `target` does not appear.
    """
    src, dst = local_path(source), local_path(target)
    seen = index_version(src)
    index = read_index(src)
    refuse_target(src, dst)
    sidecars = sidecar_files(index)

    def carry(partial: Path) -> None:
        # What lies beside the data says of no save whose it is, but for a common state that is sealed.
        try:
            carry_sidecars(index, sidecars, partial, common_file)
        except LoadError as error:
            if index_version(src) != seen:
                raise replaced_error(index.path) from error
            raise
        if index_version(src) != seen:
            raise replaced_error(index.path)

    with _content(index, options) as (payloads, converted, common):
        plan = _plan(index, payloads.index, converted, common, options)
        common_file = None if converted is None else converted.common
        built = build_target(
            payloads,
            plan,
            dst,
            BuildOptions(
                workers=options.workers,
                verify=options.verify,
                restart=options.restart,
                move_files=options.move_files,
                memory_bytes=options.memory_bytes,
            ),
            carry=carry,
            progress=progress,
        )
    _carry_tracker(src, dst)
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
        verified=built.verified,
        resumed=built.resumed,
        copy_s=built.copy_s,
        verify_s=built.verify_s,
    )


def reshard_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    tp: int | None = None,
    pp: int | None = None,
    ep: int = 1,
    etp: int | None = None,
    dp: int | None = None,
    like: str | os.PathLike[str] | None = None,
    rules: str | os.PathLike[str] | Iterable[PartitionRule] | None = None,
    only: str | None = None,
    drop_optimizer: bool = False,
    optimizer: str | None = None,
    dtype: str | None = None,
    merge: bool = False,
    workers: int = 2,
    verify: bool = True,
    restart: bool = False,
    memory_bytes: int = _GIB,
    progress: bool | None = False,
) -> ReshardReport:
    """Make `target`, the checkpoint in `source` under another parallel layout.

    Args:
        source: directory of the checkpoint, or one with a tracker file; never written to.
        target: directory to make; it must not exist, or be empty. It appears when it is complete.
        tp: tensor parallel size; without it and `pp` the layout of `like` is taken over as it is.
        pp: pipeline parallel size.
        ep: expert parallel size.
        etp: tensor parallel size of experts; by default `tp`.
        dp: spread chunks over so many data parallel ranks.
        like: a checkpoint whose chunks show along which axes tensors are divided.
        rules: a file of partition rules: lines of a regular expression, an axis or `whole`, and `x2` for two halves.
        only: keys to carry: with any of `*?[` a shell pattern for the whole key, otherwise a part of it.
        drop_optimizer: leave the optimizer's state out.
        optimizer: `"fully_reshardable"`: give the optimizer's state this layout, which loads under any division of the
            model; without `tp`, `pp` and `like` all else keeps the layout that it has.
        dtype: convert floating-point tensors of the model: `"bf16"`, `"fp16"`, `"fp32"`, or torch's names for them.
        merge: one file for each rank, instead of one for each rank and worker.
        workers: threads that move tensors.
        verify: prove the target against the source before it appears.
        restart: throw away what an interrupted run has left, instead of going on from there.
        memory_bytes: for everything.
        progress: show bars; None: if standard error is a terminal.

    Raises:
        OptionError: it cannot be done as asked; nothing has been written.
        CheckpointExistsError: there is something at `target`.
        CheckpointNotFoundError, CorruptCheckpointError: `source` is no readable checkpoint.
        ChecksumError: a damaged source, or a target that is not what was written; `target` does not appear.
        SaveError: the target cannot be written; what is done is kept for the next run.
    """
    if (tp is None) != (pp is None):
        raise OptionError("tp and pp belong together: give both (1 is a size too)")
    if tp is None and like is not None and (ep != 1 or etp is not None or dp is not None):
        raise OptionError("ep, etp and dp need tp and pp: like alone takes its layout over as it is")
    options = ReshardOptions(
        layout=None if tp is None or pp is None else TargetLayout(tp, pp, ep, etp, dp),
        like=None if like is None else str(checkpoint_directory(like)),
        rules=rules_in(rules, parse_partition_rules),
        only=only,
        drop_optimizer=drop_optimizer,
        optimizer=optimizer,
        dtype=floating_dtype(dtype),
        merge=merge,
        workers=workers,
        verify=verify,
        restart=restart,
        memory_bytes=memory_bytes,
    )
    return reshard(checkpoint_directory(source), target, options, progress=progress)


def _carry_tracker(source: Path, target: Path) -> None:
    """The tracker file beside an iteration, if the target is the iteration that it names and has none beside it."""
    tracker, wanted = source.parent / TRACKER_FILE, target.parent / TRACKER_FILE
    if tracker.is_file() and not wanted.exists():
        text = read_small_file(source.parent, TRACKER_FILE, MAX_TRACKER_BYTES, follow_links=True).decode(
            errors="replace"
        )
        text = text.strip()
        if text.isascii() and text.isdigit() and len(text) < 20 and target.name == f"iter_{int(text):07d}":
            storage_at(target.parent).publish(TRACKER_FILE, text.encode())
