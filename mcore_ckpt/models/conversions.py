"""The front door: a checkpoint under another layout, checkpoints to the formats of others, and from them.

Each kind of source or target is thought through to a `Conversion` by a module of its own: those that know models
(`_huggingface`, `_megatron_named`, `_legacy_import`, `_legacy_export`), and here those that carry tensors under their
keys: safetensors, torch files, plain DCP checkpoints.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.core.paths import checkpoint_path
from mcore_ckpt.format.index import CheckpointIndex, parse_object_key
from mcore_ckpt.format.metadata_read import TRACKER_FILE, read_index
from mcore_ckpt.items.item_checks import check_file
from mcore_ckpt.models._flat_buckets import parameter_orders
from mcore_ckpt.models._huggingface import export_model, import_model
from mcore_ckpt.models._imports import import_conversion, layout_of
from mcore_ckpt.models._legacy_export import legacy_export
from mcore_ckpt.models._legacy_import import legacy_import
from mcore_ckpt.models._megatron_fsdp import FSDP_DTENSOR, fsdp_export
from mcore_ckpt.models._megatron_named import import_named
from mcore_ckpt.models._sources import open_model, open_source, universal_directory
from mcore_ckpt.models.options import ExportOptions, ImportOptions
from mcore_ckpt.reshard.conversion import Conversion, ConversionReport, KeyPlan, in_dtype, run_conversion, shadow_note
from mcore_ckpt.reshard.options import ConversionOptions, ReshardOptions, made_options, option_table
from mcore_ckpt.reshard.partition import Partitioner
from mcore_ckpt.reshard.plan import TargetLayout, make_plan
from mcore_ckpt.reshard.reshard import plan_reshard
from mcore_ckpt.reshard.rules import rename_keys
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.target.directory import refuse_target
from mcore_ckpt.target.safetensors import Exported, plan_safetensors
from mcore_ckpt.target.slots import TargetPlan
from mcore_ckpt.target.state_pickle import encode_state
from mcore_ckpt.target.torch_files import plan_torch_files
from mcore_ckpt.tools.inspection import checkpoint_directory
from mcore_ckpt.tools.keys import is_optimizer_key, key_filter
from mcore_ckpt.tools.payloads import StoredPayloads, check_tiled
from mcore_ckpt.view.source_files import SourceFiles

TargetKind = Literal["safetensors", "torch", "dcp", "hf", "fsdp_dtensor", "megatron-legacy"]
SourceKind = Literal["files", "hf", "dcp", "ucp", "megatron-legacy"]

_ITERATION = re.compile(r"iter_(\d{7,})")
_Path = str | os.PathLike[str]


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
        source: directory of the checkpoint, or one with a tracker file; never written to.
        target: directory to make, a path or a URL; it must not exist, or be empty. It appears when it is complete.
        dry_run: write nothing; the report has a row for each tensor.
        progress: show bars; None: if standard error is a terminal.
        options: by name:

    {options}

    Raises:
        OptionError: it cannot be done as asked; nothing has been written.
        CheckpointExistsError: there is something at `target`.
        CheckpointNotFoundError, CorruptCheckpointError: `source` is no readable checkpoint.
        ChecksumError: a damaged source, or a target that is not what was written; `target` does not appear.
        SaveError: the target cannot be written; in a file system what is done is kept for the next run.
        LoadError: a save has replaced the checkpoint in `source` meanwhile; `target` does not appear.
    """
    chosen = made_options(ReshardOptions, options)
    directory, made = checkpoint_directory(source), checkpoint_path(target)
    if not dry_run:
        refuse_target(directory, made)
    conversion, _ = plan_reshard(directory, made, chosen, parameter_orders)
    return run_conversion(
        conversion, str(directory), made, chosen, dry_run=dry_run, progress=progress, move_files=chosen.file_copy
    )


def export_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: TargetKind = "safetensors",
    dry_run: bool = False,
    progress: bool | None = False,
    **options: Any,
) -> ConversionReport:
    """Write a checkpoint in the format of others.

    Args:
        source: directory of the checkpoint, or one with a tracker file.
        target: directory to make, a path or a URL; it must not exist, or be empty. It appears when it is complete.
        to: `"safetensors"`, `"torch"` (files of `torch.save`) and `"dcp"` (one rank's plain DCP checkpoint): all
            tensors under their keys. `"hf"`: the model, as `AutoModelForCausalLM.from_pretrained` loads it.
            `"fsdp_dtensor"`: model and optimizer, as a job with Megatron-FSDP and that `--ckpt-format` loads them; a
            directory called `iter_0001000` gets a tracker file next to it, if there is none. `"megatron-legacy"`: the
            model, as a job with `--ckpt-format torch` loads it.
        dry_run: write nothing; the report has a row for each tensor.
        progress: show a bar; None: if standard error is a terminal.
        options: by name:

    {options}

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError, ChecksumError: the source cannot be read, or is damaged.
        CheckpointExistsError: there is something at `target`.
        OptionError: the format, the family or the parallel sizes have no place for what is stored.
        SaveError: it cannot be written; what is done is kept for the next run.
    """
    chosen = _checked(ExportOptions, options, to, TargetKind, "--to")
    stored, made = read_index(checkpoint_directory(source)), checkpoint_path(target)
    index = stored.without_shadow_copies()
    if not dry_run:
        refuse_target(checkpoint_path(index.path), made)
    if to == "hf":
        conversion = export_model(index, chosen)
    elif to == "megatron-legacy":
        conversion = legacy_export(index, chosen)
    elif to == FSDP_DTENSOR:
        conversion = fsdp_export(index, chosen)
    else:
        conversion = _export_tensors(to, index, chosen)
    if notes := shadow_note(stored):
        report = conversion.report
        conversion = replace(conversion, report=replace(report, notes=(*report.notes, *notes)))
    report = run_conversion(conversion, index.path, made, chosen, dry_run=dry_run, progress=progress)
    if to == FSDP_DTENSOR and not dry_run:
        _write_tracker(made)
    return report


def import_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    kind: SourceKind = "files",
    dry_run: bool = False,
    progress: bool | None = False,
    **options: Any,
) -> ConversionReport:
    """Make a `torch_dist` checkpoint of what others have written.

    Args:
        source: directory of a model or of a checkpoint, one file, or a directory with a tracker file.
        target: directory to make, a path or a URL; it must not exist, or be empty. It appears when it is complete. For
            kinds that know the model, one called `release` or `iter_0001000` gets a tracker file next to it, if there
            is none.
        kind: `"files"`: tensors of safetensors, torch files or a DCP checkpoint under their own keys. `"hf"`: a Hugging
            Face model. `"dcp"`, `"ucp"`: a checkpoint of FSDP2, Megatron-FSDP, DeepSpeed or Megatron-DeepSpeed, with
            Hugging Face's names where `hf_config` is given, otherwise with Megatron's. `"megatron-legacy"`: what a
            job has saved with `--ckpt-format torch`.
        dry_run: write nothing; the report has a row for each tensor.
        progress: show bars; None: if standard error is a terminal.
        options: by name:

    {options}

    Raises:
        CheckpointNotFoundError: there is nothing to import.
        CorruptCheckpointError, ChecksumError: it contradicts itself, is damaged, or is not all there.
        UnsafePickleError: a file holds more than tensors and plain values.
        OptionError: it is of no family known here, or has settings, keys or shapes that Megatron-Core has not.
        CheckpointExistsError, SaveError: as for `reshard_checkpoint`.
    """
    chosen = _checked(ImportOptions, options, kind, SourceKind, "--from")
    directory, made = checkpoint_directory(source), checkpoint_path(target)
    if kind in ("hf", "dcp", "ucp"):
        directory = universal_directory(directory)
    if not dry_run:
        refuse_target(_folder_of(directory, kind), made)
    conversion = _import(kind, directory, chosen)
    report = run_conversion(conversion, str(directory), made, chosen, dry_run=dry_run, progress=progress)
    if kind != "files" and not dry_run:
        _write_tracker(made)
    return report


for _function, _options in (
    (reshard_checkpoint, ReshardOptions),
    (export_checkpoint, ExportOptions),
    (import_checkpoint, ImportOptions),
):
    _function.__doc__ = (_function.__doc__ or "").replace(
        "    {options}", option_table(_options).replace("\n", "\n        ").replace("    ", "            ", 1)
    )


def _checked(cls: Any, given: Mapping[str, Any], kind: str, kinds: Any, direction: str) -> Any:
    """Options of one kind of conversion; raises `OptionError`."""
    if kind not in get_args(kinds):
        raise OptionError(f"{direction} {kind}: expected one of {', '.join(get_args(kinds))}")
    chosen: ConversionOptions = made_options(cls, given)
    chosen.refuse_others(kind, direction)
    return chosen


def _folder_of(source: Path, kind: SourceKind) -> Path:
    """What must not contain the target: the source, but not the directory that one file lies in."""
    is_folder = kind != "files" or storage_at(source).is_directory()
    return source if is_folder else source.with_name(f"{source.name} (a file)")


def _import(kind: SourceKind, directory: Path, options: ImportOptions) -> Conversion:
    if kind == "files":
        return _import_tensors(directory, options)
    if kind == "megatron-legacy":
        return legacy_import(directory, options)
    named = kind != "hf" and options.hf_config is None
    if named and (options.arch, options.transformer_impl, options.numbered_layers, options.vocabulary_multiple) != (
        ImportOptions().arch,
        ImportOptions().transformer_impl,
        False,
        ImportOptions().vocabulary_multiple,
    ):
        raise OptionError(
            f"--arch, --transformer-impl, --numbered-layers and --make-vocab-size-divisible-by need --hf-config with "
            f"--from {kind}: without it, {directory} has Megatron's own names"
        )
    opened = open_model(directory, options.rename)
    try:
        return import_named(opened, options) if named else import_model(opened, options)
    except BaseException:
        opened.payloads.close()
        raise


def _write_tracker(target: Path) -> None:
    """The tracker file next to a checkpoint that is named as a job names them, if there is none."""
    found = _ITERATION.fullmatch(target.name)
    text = "release" if target.name == "release" else str(int(found.group(1))) if found else None
    storage = storage_at(target.parent)
    if text is not None and not storage.exists(TRACKER_FILE):
        storage.publish(TRACKER_FILE, text.encode())


# --- tensors under their keys


def _export_tensors(
    kind: Literal["safetensors", "torch", "dcp"], index: CheckpointIndex, options: ExportOptions
) -> Conversion:
    wanted = key_filter(options.only)
    keys = [key for key in index.tensors if wanted(key) and not (options.drop_optimizer and is_optimizer_key(key))]
    names = rename_keys(keys, options.rename)
    if not names:
        raise OptionError(f"{index.path}: no tensor is left to export; `mcore-ckpt inspect --tensors` lists the keys")
    check_tiled(index, names)
    payloads = in_dtype(StoredPayloads(index), options.dtype)
    tensors = {name: payloads.index.tensors[key] for key, name in names.items()}
    objects = index.objects
    if kind == "dcp":
        objects = {key: entry for key, entry in objects.items() if parse_object_key(key) is not None}
        plan = _plan_dcp(payloads.index, names, [key for key in index.objects if key not in objects])
    else:
        exported = [Exported(name, entry) for name, entry in tensors.items()]
        if kind == "torch":
            plan = plan_torch_files(exported, payloads.index, options.max_shard_bytes, options.workers)
        else:
            plan = plan_safetensors(exported, options.max_shard_bytes, options.workers)
    return Conversion(
        payloads=payloads,
        source=SourceFiles(index, names),
        plan=plan,
        keys=lambda: (KeyPlan(e.fqn, 1, "as it is", name, e.shape, e.dtype) for name, e in tensors.items()),
        report=ConversionReport(format=kind, left_out=tuple(objects)),
    )


def _plan_dcp(index: CheckpointIndex, names: Mapping[str, str], objects: list[str]) -> TargetPlan:
    """A reshard to one rank, under plain keys: each tensor one chunk, and none of Megatron's sidecars or objects."""
    plan = make_plan(
        index, TargetLayout(1, 1), Partitioner(index), keys=list(names), object_keys=objects, rename=names
    ).target
    assert plan.index is not None
    keys = (*plan.index.tensors, *plan.index.objects)
    return replace(plan, index=replace(plan.index, planner_data={key: (key,) for key in keys}, mcore_data={}))


def _import_tensors(source: Path, options: ImportOptions) -> Conversion:
    """The same keys and tensors, and a common state that may be empty."""
    kind, payloads, left_out = open_source(source, options.rename)
    try:
        return import_conversion(
            payloads,
            options,
            layout_of(options),
            {},
            lambda _: _common_state(options.common),
            format=kind,
            keys=lambda: (
                KeyPlan(entry.fqn, 1, "as it is", key, entry.shape, entry.dtype)
                for key, entry in payloads.index.tensors.items()
            ),
            rules=options.rules,
            left_out=tuple(left_out),
        )
    except BaseException:
        payloads.close()
        raise


def _common_state(path: str | None) -> bytes:
    if path is None:
        return encode_state({})
    storage = storage_at(Path(path).parent, follow_links=True)
    check_file(storage, Path(path).name)
    return storage.read(Path(path).name)
