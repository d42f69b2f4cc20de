"""Rewriting a checkpoint for another parallel layout, offline: no model, no process group, no GPU.

    plan (which chunk goes where)  ->  copy  ->  compare  ->  publish

The source is only read. An interrupted run is resumed by the same call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mcore_ckpt.core.errors import LoadError, OptionError
from mcore_ckpt.format.index import COMMON_STATE_KEY, CheckpointIndex
from mcore_ckpt.format.metadata_read import (
    COMMON_FILE,
    CONFIG_FILE,
    MAX_TRACKER_BYTES,
    TRACKER_FILE,
    read_index,
    read_small_file,
)
from mcore_ckpt.reshard._optimizer_layout import convert_optimizer
from mcore_ckpt.reshard.buckets import ParameterOrders
from mcore_ckpt.reshard.conversion import Conversion, ConversionReport, KeyPlan, arguments_of, in_dtype, shadow_note
from mcore_ckpt.reshard.options import FULLY_RESHARDABLE, ReshardOptions
from mcore_ckpt.reshard.partition import Partitioner
from mcore_ckpt.reshard.plan import Decision, ReshardPlan, TargetLayout, make_plan
from mcore_ckpt.reshard.sidecars import carry_sidecars, sidecar_files
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.target.target_files import TargetFiles
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
from mcore_ckpt.view.payloads import ViewPayloads
from mcore_ckpt.view.source_files import SourceFiles, replaced_error

_FIXED_LAYOUTS = ("dp_reshardable", "dp_zero_gather_scatter")


def plan_reshard(
    directory: Path, target: Path, options: ReshardOptions, orders: ParameterOrders
) -> tuple[Conversion, ReshardPlan]:
    """Decide everything; reads indexes and the common state, and a few elements if the optimizer's layout is changed.

    `orders` gives the order of parameters in flat buckets, which only a model tells. Raises as `reshard_checkpoint`.
    """
    version = index_version(directory)
    stored = read_index(directory)
    source = stored.without_shadow_copies()
    files = SourceFiles(source)
    layout, common = _target_layout(options), read_plain_state(source)
    sidecars = sidecar_files(stored)
    payloads: StoredPayloads = StoredPayloads(source)
    try:
        converted = None
        if options.optimizer_layout is not None:
            if options.optimizer_layout != FULLY_RESHARDABLE:
                raise OptionError(f"optimizer {options.optimizer_layout}: expected {FULLY_RESHARDABLE}")
            if options.drop_optimizer:
                raise OptionError("the optimizer's state can be left out or change its layout, not both")
            check_tiled(source, source.tensors)
            converted = convert_optimizer(payloads, common, orders)
        if converted is not None:
            payloads = ViewPayloads(payloads, converted.tensors, converted.objects, converted.kept_objects)
        payloads = in_dtype(payloads, options.dtype)
        plan = _plan(source, payloads.index, common, options, layout, fixed=converted is None)
    except BaseException:
        payloads.close()
        raise

    def carry(target: TargetFiles) -> None:
        # Files next to the data do not say of which save they are, except a common state that the manifest names.
        try:
            carry_sidecars(source, sidecars, target, None if converted is None else converted.common)
        except LoadError as error:
            if index_version(directory) != version:
                raise replaced_error(source.path) from error
            raise
        if index_version(directory) != version:
            raise replaced_error(source.path)

    return Conversion(
        payloads=payloads,
        source=files,
        plan=plan.target,
        keys=lambda: _rows(plan),
        report=ConversionReport(
            format="torch_dist",
            target_layout=str(plan.layout),
            objects=len(plan.target.blobs),
            guesses=plan.guesses,
            notes=(*plan.notes, *(() if converted is None else converted.notes), *shadow_note(stored)),
        ),
        carry=carry,
        carried=(*sidecars, COMMON_FILE, CONFIG_FILE),
        after=lambda: _carry_tracker(directory, target),
    ), plan


def _target_layout(options: ReshardOptions) -> TargetLayout | None:
    """The sizes together; None if they are taken over. Raises `OptionError` where they cannot be."""
    tp, pp = options.tp, options.pp
    if (tp is None) != (pp is None):
        raise OptionError("--tp and --pp belong together: give both (1 is a size too)")
    if tp is not None and pp is not None:
        return TargetLayout(tp, pp, options.ep, options.etp, options.dp)
    if options.like is None and options.optimizer_layout is None:
        raise OptionError("no target layout: give --tp N --pp M, or --like CKPT")
    if options.ep != 1 or options.etp is not None or options.dp is not None:
        raise OptionError("--ep, --etp and --dp need --tp and --pp: --like alone takes its layout over as it is")
    return None


def _plan(
    source: CheckpointIndex,
    index: CheckpointIndex,
    common: Mapping[str, Any],
    options: ReshardOptions,
    layout: TargetLayout | None,
    *,
    fixed: bool,
) -> ReshardPlan:
    like = read_index(checkpoint_directory(options.like)).without_shadow_copies() if options.like else None
    exact = like if layout is None else None
    if layout is None:
        layout = _saved_layout(source, common) if like is None else _layout_of(like)
    wanted = key_filter(options.only)

    def kept(key: str) -> bool:
        return wanted(key) and not (options.drop_optimizer and is_optimizer_key(key))

    keys, objects = list(filter(kept, index.tensors)), list(filter(kept, index.objects))
    if not keys and not objects:
        raise OptionError(
            f"{source.path}: no key matches --only {options.only!r}; `mcore-ckpt inspect --tensors` lists them"
        )
    # The common state is carried whatever the pattern, whether it is an object or a file of its own.
    objects += [key for key in index.objects if key == COMMON_STATE_KEY and key not in objects]
    if fixed:
        check_tiled(source, keys)
        if any(map(is_optimizer_key, keys)):
            _refuse_fixed_optimizer(source, common, layout)
    arguments = arguments_of(common)
    partitioner = Partitioner(index, like=like, rules=options.rules, arguments=arguments, exact_like=exact is not None)
    return make_plan(
        index,
        layout,
        partitioner,
        like=exact,
        keys=keys,
        object_keys=objects,
        workers=1 if options.merge else options.workers,
        arguments=arguments,
    )


def _rows(plan: ReshardPlan) -> Iterator[KeyPlan]:
    for one in sorted(plan.decisions, key=lambda decision: decision.key):
        yield _row(one)


def _row(one: Decision) -> KeyPlan:
    partition, entry = one.partition, one.entry
    how = "whole" if partition.axis is None else f"axis {partition.axis}" + (" x2" if partition.parts == 2 else "")
    if partition.boxes is not None:
        how = "as stored"
    return KeyPlan(
        entry.fqn,
        1,
        f"{how}, {len(entry.chunks)} -> {len(one.slices)} chunks",
        one.key,
        entry.shape,
        entry.dtype,
        partition.decider,
        partition.guess,
        partition.note,
    )


def _saved_layout(source: CheckpointIndex, common: Mapping[str, Any]) -> TargetLayout:
    """The layout under which a checkpoint was saved, as far as it is known."""
    saved = layout_of_arguments(common) or layout_of_chunks(source)
    return TargetLayout(saved.tp or 1, saved.pp or 1, saved.ep or 1, saved.etp)


def _layout_of(like: CheckpointIndex) -> TargetLayout:
    """Sizes of a checkpoint whose chunks are taken over: what its chunks show, and room for all its ranks."""
    shown = layout_of_chunks(like)
    files = {chunk.item.file for entry in like.tensors.values() for chunk in entry.chunks}
    ranks = 1 + max((data_file_rank(file) or 0 for file in files), default=0)
    tp, pp = shown.tp or 1, shown.pp or 1
    return TargetLayout(tp, pp, dp=max(1, -(-ranks // (tp * pp))))


def _refuse_fixed_optimizer(source: CheckpointIndex, common: Mapping[str, Any], layout: TargetLayout) -> None:
    """Flat buckets belong to one model-parallel layout: they do not say where one parameter ends."""
    kind = optimizer_layout(source, common)
    if kind not in _FIXED_LAYOUTS:
        return
    saved = layout_of_arguments(common) or layout_of_chunks(source)
    if _same_model_parallel(saved, layout):
        return
    was = f"TP {saved.tp} PP {saved.pp} EP {saved.ep or 1}"
    raise OptionError(
        f"{source.path}: its optimizer state is {kind!r}, flat buckets of {was}, which cannot be divided for TP "
        f"{layout.tp} PP {layout.pp} EP {layout.ep}. "
        + (
            f"With --optimizer-layout {FULLY_RESHARDABLE} they become tensors that can; or reshard"
            if kind == "dp_reshardable"
            else "Reshard"
        )
        + " the model alone with --drop-optimizer. Nothing was written"
    )


def _same_model_parallel(saved: ParallelLayout, layout: TargetLayout) -> bool:
    same_experts = (saved.ep or 1) == layout.ep and (saved.etp is None or saved.etp == layout.expert_tp)
    return saved.tp == layout.tp and saved.pp == layout.pp and same_experts


def _carry_tracker(source: Path, target: Path) -> None:
    """The tracker file next to an iteration, if the target is the iteration that it names and has none."""
    given, taken = storage_at(source.parent, follow_links=True), storage_at(target.parent)
    if given.exists(TRACKER_FILE) and not taken.exists(TRACKER_FILE):
        content = read_small_file(source.parent, TRACKER_FILE, MAX_TRACKER_BYTES, follow_links=True)
        text = content.decode(errors="replace").strip()
        if text.isascii() and text.isdigit() and len(text) < 20 and target.name == f"iter_{int(text):07d}":
            taken.publish(TRACKER_FILE, text.encode())
