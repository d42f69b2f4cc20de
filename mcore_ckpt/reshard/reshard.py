"""Rewriting a checkpoint for another parallel layout, offline: no model, no process group, no GPU.

    plan (which chunk goes where)  ->  copy  ->  compare  ->  publish

The source is only read. An interrupted run is resumed by the same call.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mcore_ckpt.core.console import counted
from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.core.options import checkpoint_path
from mcore_ckpt.directory.commit import common_file_in_force, is_note
from mcore_ckpt.directory.in_force import index_files
from mcore_ckpt.directory.iterations import files_below, refuse_incomplete
from mcore_ckpt.format.index import COMMON_STATE_KEY, CheckpointIndex
from mcore_ckpt.format.metadata_read import (
    COMMON_FILE,
    CONFIG_FILE,
    INTEGRITY_FILE,
    METADATA_FILE,
    read_common_file,
    read_small_file,
)
from mcore_ckpt.load.checks import check_file
from mcore_ckpt.reshard.conversion import (
    Conversion,
    ConversionReport,
    KeyPlan,
    SourceFiles,
    arguments_of,
    convert,
    in_dtype,
    index_of_plan,
)
from mcore_ckpt.reshard.options import FULLY_RESHARDABLE, ReshardOptions
from mcore_ckpt.reshard.partition import Partitioner
from mcore_ckpt.reshard.plan import ReshardPlan, TargetLayout, make_plan
from mcore_ckpt.reshard.rewriting import Rewritten, convert_optimizer, in_other_model
from mcore_ckpt.reshard.target_directory import Target
from mcore_ckpt.reshard.view import ViewPayloads
from mcore_ckpt.storage.base import RangeReader, RangeWriter
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.keys import (
    is_optimizer_key,
    key_filter,
    layout_of_arguments,
    layout_of_chunks,
    optimizer_layout,
    read_plain_state,
)
from mcore_ckpt.tools.payloads import StoredPayloads, check_tiled
from mcore_ckpt.tools.runs import places_of

_FIXED_LAYOUTS = ("dp_reshardable", "dp_zero_gather_scatter")


def reshard_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dry_run: bool = False,
    progress: bool | None = False,
    **options: Any,
) -> ConversionReport:
    """Make `target`, the checkpoint in `source` under another parallel layout.

    Args:
        source: directory of a checkpoint, or of a run whose tracker file names one; never written to.
        target: directory to make, a path or a URL; it must not exist, or be empty. It appears when it is complete.
            If `source` is a run, `target` becomes one: the checkpoint is `target/iter_0001000`. A checkpoint called
            `iter_0001000` gets a tracker file next to it, unless one there names a later iteration.
        dry_run: write nothing; the report has a row for each tensor.
        progress: show bars; None: if standard error is a terminal.
        options: fields of `ReshardOptions`, such as `tp=4, pp=2`; `mcore-ckpt reshard --help` says what each does. With
            `optimizer_layout` or `convert_model` alone the parallel layout stays.

    Raises:
        OptionError: it cannot be done as asked; nothing has been written.
        CheckpointExistsError: there is something at the target.
        CheckpointNotFoundError, CorruptCheckpointError: `source` is no readable checkpoint.
        ChecksumError: a damaged source, or a target that is not what was written; the target does not appear.
        SaveError: the target cannot be written; in a file system what is done is kept for the next run.
        LoadError: a save has replaced the checkpoint in `source` meanwhile; the target does not appear.
        TypeError: there is no such option.
    """
    how, places = ReshardOptions(**options), places_of(source, target, same_format=True)
    return convert(partial(plan_reshard, places.source), places, how, dry_run=dry_run, progress=progress)


@dataclass(frozen=True, slots=True)
class Opened:
    """A source that a conversion is planned of."""

    index: CheckpointIndex
    files: SourceFiles  # as they are now
    common: Mapping[str, Any]  # its common state, as plain values
    payloads: StoredPayloads


@contextmanager
def opened(directory: Path) -> Iterator[Opened]:
    """Open a source; an error in the block closes it, and so does a save that has replaced it. Raises `LoadError`."""
    payloads: StoredPayloads | None = None
    try:
        with index_of_plan(directory) as index:
            files = SourceFiles(index)
            refuse_incomplete(directory, index)
            payloads = StoredPayloads(index)
            yield Opened(index, files, read_plain_state(index), payloads)
    except BaseException:
        if payloads is not None:
            payloads.close()
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """What is written in place of what a source stores."""

    payloads: StoredPayloads
    common: bytes | None = None  # the content of `common.pt`, if another
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def plan_reshard(directory: Path, options: ReshardOptions) -> Conversion:
    """Decide everything, by indexes, the common state, and a few elements, if the optimizer's layout is changed."""
    with opened(directory) as source:
        stays = options.optimizer_layout is not None or options.convert_model is not None
        layout = target_layout(options, source, stays=stays)
        return reshard_conversion(source, layout, options, _in_other_layout(source, options))


def _in_other_layout(source: Opened, options: ReshardOptions) -> Derived:
    if options.optimizer_layout is None and options.convert_model is None:
        return Derived(payloads=source.payloads)
    if options.optimizer_layout is not None and (options.drop_optimizer or options.convert_model is not None):
        raise OptionError("--optimizer-layout, and --drop-optimizer or --convert-model: not both in one command")
    check_tiled(source.index, source.index.tensors)
    if options.convert_model is not None:
        made: Rewritten | None = in_other_model(source.index, source.common, options)
    else:
        made = convert_optimizer(source.payloads, source.common)
    if made is None:
        return Derived(payloads=source.payloads)
    views = ViewPayloads(source.payloads, made.tensors, made.objects, made.kept_objects)
    return Derived(payloads=views, common=made.common, notes=made.notes, left_out=made.left_out)


def reshard_conversion(source: Opened, layout: TargetLayout, options: ReshardOptions, derived: Derived) -> Conversion:
    """Plan what is `derived` of a source for a layout."""
    sidecars = _sidecar_files(source.index)
    payloads = in_dtype(derived.payloads, options.dtype)
    is_stored = derived.payloads is source.payloads
    plan = _plan(source.index, payloads.index, source.common, options, layout, fixed=is_stored)
    return Conversion(
        payloads=payloads,
        source=source.files,
        plan=plan.target,
        keys=lambda: _rows(plan),
        report=ConversionReport(
            format="torch_dist",
            target_layout=str(plan),
            objects=len(plan.target.index.objects if plan.target.index else ()),
            guesses=plan.guesses,
            notes=(*plan.notes, *derived.notes),
            left_out=derived.left_out,
        ),
        carry=lambda target: _carry_sidecars(source.index, sidecars, target, derived.common),
        carried=(*sidecars, COMMON_FILE, CONFIG_FILE),
    )


def target_layout(options: ReshardOptions, source: Opened, *, stays: bool) -> TargetLayout:
    """The sizes as given, or, where they stay, those of the save, as far as known; raises `OptionError`."""
    if options.tp is not None and options.pp is not None:
        return TargetLayout(options.tp, options.pp, options.ep, options.etp)
    if not stays:
        raise OptionError("no target layout: give --tp N, --pp N or both; the other is 1 then")
    if options.ep != 1 or options.etp is not None:
        raise OptionError("--ep and --etp need --tp and --pp, or one of these: else the layout stays as it is")
    saved = layout_of_arguments(source.common) or layout_of_chunks(source.index)
    return TargetLayout(saved.tp or 1, saved.pp or 1, saved.ep or 1, saved.etp)


def _plan(
    source: CheckpointIndex,
    index: CheckpointIndex,
    common: Mapping[str, Any],
    options: ReshardOptions,
    layout: TargetLayout,
    *,
    fixed: bool,
) -> ReshardPlan:
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
    # Chunks of a view are not those of ranks; those of the source are.
    stored = {key: source.tensors.get(key, index.tensors[key]) for key in keys if not is_optimizer_key(key)}
    ranks = replace(index, tensors={**index.tensors, **stored})
    partitioner = Partitioner(ranks, rules=options.rules, arguments=arguments)
    return make_plan(
        index,
        layout,
        partitioner,
        keys={key: key for key in keys},
        object_keys=objects,
        workers=options.workers,
        arguments=arguments,
        allow_whole=options.allow_whole or options.tp is None,
    )


def _rows(plan: ReshardPlan) -> Iterator[KeyPlan]:
    for one in sorted(plan.decisions, key=lambda decision: decision.key):
        partition, entry = one.partition, one.entry
        how = "whole" if partition.axis is None else f"axis {partition.axis}" + (" x2" if partition.parts == 2 else "")
        if partition.boxes is not None:
            how = "as stored"
        transform = f"{how}, {len(entry.chunks)} -> {counted(len(one.slices), 'chunk')}"
        reason = partition.decider, partition.guess, partition.note
        yield KeyPlan(entry.fqn, 1, transform, one.key, entry.shape, entry.dtype, *reason)


def _refuse_fixed_optimizer(source: CheckpointIndex, common: Mapping[str, Any], layout: TargetLayout) -> None:
    """Flat buckets belong to one model-parallel layout: they do not say where one parameter ends."""
    kind = optimizer_layout(source, common)
    if kind not in _FIXED_LAYOUTS:
        return
    saved = layout_of_arguments(common) or layout_of_chunks(source)
    same_experts = (saved.ep or 1) == layout.ep and (saved.etp is None or saved.etp == layout.expert_tp)
    if saved.tp == layout.tp and saved.pp == layout.pp and same_experts:
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


def _sidecar_files(index: CheckpointIndex) -> list[str]:
    """Names of others' files (ModelOpt) next to the data, folders included. `CorruptCheckpointError`: links, pipes."""
    source = checkpoint_path(index.path)
    # integrity.json lists hashes of the source's files; the others are not parts of a finished checkpoint.
    left_out = {METADATA_FILE, CONFIG_FILE, COMMON_FILE, INTEGRITY_FILE, *index_files(index)}

    def is_left_out(name: str) -> bool:
        return name in left_out or is_note(name) or name.endswith((".pending", ".tmp", ".distcp"))

    return sorted(files_below(source, is_left_out))


def _carry_sidecars(
    index: CheckpointIndex, sidecars: Iterable[str], target: Target, common_content: bytes | None = None
) -> None:
    """Copy what stays valid next to the data; `common_content` replaces the content of `common.pt`."""
    path = checkpoint_path(index.path)
    source = storage_at(path)
    common = common_file_in_force(source, index)
    for name in sidecars:
        with source.open_reader(name, direct="off") as given:
            _copy_stream(given, target.new_file(name, given.size_bytes, direct="off"))
    if common is not None:
        content = read_common_file(source, common, index.manifest)
        check_file(source, common)
        target.put(COMMON_FILE, content if common_content is None else common_content)
    if source.exists(CONFIG_FILE):
        target.put(CONFIG_FILE, read_small_file(path, CONFIG_FILE))


def _copy_stream(given: RangeReader, writer: RangeWriter) -> None:
    """Copy a file of any size, durably."""
    at = 0
    try:
        for content in given.pieces():
            writer.write(at, memoryview(content))
            at += len(content)
        writer.finish()
    except BaseException:
        writer.abort()
        raise
