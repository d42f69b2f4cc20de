"""The front door: checkpoints to the formats of others, and from them.

Each kind of source or target is thought through to a `Conversion` by a module of its own: those that know models
(`_huggingface`, `_megatron_named`, `_legacy_import`, `_legacy_files`), and here those that carry tensors under their
keys: safetensors, torch files, plain DCP checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, Literal, get_args

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.core.options import checkpoint_path
from mcore_ckpt.format.index import CheckpointIndex, parse_object_key
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.load.records import check_file
from mcore_ckpt.models._foreign import import_conversion, layout_of
from mcore_ckpt.models._huggingface import export_model, import_model
from mcore_ckpt.models._legacy_files import legacy_export
from mcore_ckpt.models._legacy_import import legacy_import
from mcore_ckpt.models._megatron_fsdp import FSDP_DTENSOR, fsdp_export
from mcore_ckpt.models._megatron_named import import_named
from mcore_ckpt.models._sources import open_model, open_source, universal_directory
from mcore_ckpt.models.options import ExportOptions, ImportOptions
from mcore_ckpt.reshard.conversion import (
    Conversion,
    ConversionReport,
    KeyPlan,
    SourceFiles,
    in_dtype,
    run_conversion,
    shadow_note,
)
from mcore_ckpt.reshard.options import ConversionOptions, PartitionRule, RenameRule, rename_keys
from mcore_ckpt.reshard.partition import Partitioner
from mcore_ckpt.reshard.plan import TargetLayout, TargetPlan, make_plan
from mcore_ckpt.reshard.target_directory import refuse_target
from mcore_ckpt.reshard.weight_files import Exported, encode_state, plan_safetensors, plan_torch_files
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.keys import is_optimizer_key, key_filter
from mcore_ckpt.tools.payloads import StoredPayloads, check_tiled
from mcore_ckpt.tools.runs import places_of

TargetKind = Literal["safetensors", "torch", "dcp", "hf", "fsdp_dtensor", "megatron-legacy"]
SourceKind = Literal["files", "hf", "dcp", "ucp", "megatron-legacy"]

_LOADED_BY_JOBS: Final = (FSDP_DTENSOR, "megatron-legacy")


def export_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: TargetKind = "safetensors",
    max_shard_bytes: int | str = 5 * 1000**3,
    rename: str | os.PathLike[str] | Sequence[RenameRule] = (),
    only: str | None = None,
    arch: str = "auto",
    hf_config: str | os.PathLike[str] | None = None,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    vpp: int = 1,
    dtype: str | None = None,
    drop_optimizer: bool = False,
    workers: int = 2,
    memory_bytes: int | str = 1024**3,
    verify: bool = True,
    restart: bool = False,
    dry_run: bool = False,
    progress: bool | None = False,
) -> ConversionReport:
    """Write a checkpoint in the format of others.

    Args:
        source: directory of a checkpoint, or of a run whose tracker file names one; never written to.
        target: directory to make, a path or a URL; it must not exist, or be empty. It appears when it is complete.
            For kinds that a job of Megatron loads, a run becomes a run, as with `reshard_checkpoint`.
        to: `"safetensors"`, `"torch"` (files of `torch.save`) and `"dcp"` (one rank's plain DCP checkpoint): all
            tensors under their keys. `"hf"`: the model, as `AutoModelForCausalLM.from_pretrained` loads it.
            `"fsdp_dtensor"`: model and optimizer, as a job with Megatron-FSDP and that `--ckpt-format` loads them.
            `"megatron-legacy"`: the model, as a job with `--ckpt-format torch` loads it.
        max_shard_bytes: no file holds more, unless one tensor is larger; also as text. `safetensors`, `torch`, `hf`.
        rename: rules, or a file of lines: key pattern (regular expression), replacement or `-` to drop the key.
            `safetensors`, `torch`, `dcp`.
        only: keys to carry (shell pattern, or a part of the key). `safetensors`, `torch`, `dcp`.
        arch: the model's family; `auto`: as arguments or `config.json` say. `hf`.
        hf_config: directory to take `config.json` and tokenizer files from; checked against shapes. `hf`.
        tp, pp, ep, etp, vpp: parallel sizes of the files; `etp` is 1 or as `tp` (None), `vpp` how many chunks of the
            model each pipeline stage has. `megatron-legacy`.
        dtype, drop_optimizer, workers, memory_bytes, verify, restart, dry_run, progress: as for `reshard_checkpoint`.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError, ChecksumError: the source cannot be read, or is damaged.
        CheckpointExistsError: there is something at the target.
        OptionError: the format, the family or the parallel sizes have no place for what is stored.
        SaveError: it cannot be written; what is done is kept for the next run.
    """
    given = locals()
    options = ExportOptions(**{option.name: given[option.name] for option in fields(ExportOptions)})
    _refuse_others(options, to, TargetKind, "--to")
    places = places_of(source, target, same_format=False)
    if to not in _LOADED_BY_JOBS:
        places = replace(places, target=checkpoint_path(target))
    stored = read_index(places.source)
    index = stored.without_shadow_copies()
    if not dry_run:
        refuse_target(places.source, places.target)
    if to == "hf":
        conversion = export_model(index, options)
    elif to == "megatron-legacy":
        conversion = legacy_export(index, options)
    elif to == FSDP_DTENSOR:
        conversion = fsdp_export(index, options)
    else:
        conversion = _export_tensors(to, index, options)
    if notes := shadow_note(stored):
        report = conversion.report
        conversion = replace(conversion, report=replace(report, notes=(*report.notes, *notes)))
    return run_conversion(conversion, places, options, dry_run=dry_run, progress=progress)


def import_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    kind: SourceKind = "files",
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
    etp: int | None = None,
    rename: str | os.PathLike[str] | Sequence[RenameRule] = (),
    rules: str | os.PathLike[str] | Sequence[PartitionRule] = (),
    common: str | os.PathLike[str] | None = None,
    hf_config: str | os.PathLike[str] | None = None,
    arch: str = "auto",
    transformer_impl: Literal["transformer_engine", "local"] = "transformer_engine",
    numbered_layers: bool = False,
    vocabulary_multiple: int = 128,
    global_batch_size: int | None = None,
    dtype: str | None = None,
    drop_optimizer: bool = False,
    workers: int = 2,
    memory_bytes: int | str = 1024**3,
    verify: bool = True,
    restart: bool = False,
    dry_run: bool = False,
    progress: bool | None = False,
) -> ConversionReport:
    """Make a `torch_dist` checkpoint of what others have written.

    Args:
        source: directory of a model or of a checkpoint, one file, or a run whose tracker file names a checkpoint.
        target: directory to make, a path or a URL; it must not exist, or be empty. It appears when it is complete. A
            run becomes a run, as with `reshard_checkpoint`. One called `release` or `iter_0001000` gets a tracker file
            next to it, unless one there names a later iteration.
        kind: `"files"`: tensors of safetensors, torch files or a DCP checkpoint under their own keys. `"hf"`: a Hugging
            Face model. `"dcp"`, `"ucp"`: a checkpoint of FSDP2, Megatron-FSDP, DeepSpeed or Megatron-DeepSpeed, with
            Hugging Face's names where `hf_config` is given, otherwise with Megatron's. `"megatron-legacy"`: what a
            job has saved with `--ckpt-format torch`.
        tp, pp, ep, etp: parallel sizes of the target's files, which a job loads under others, too. None: 1, of
            `megatron-legacy` those of the source; `etp` as `tp`, and not with `files`.
        rename: rules, or a file of lines: key pattern (regular expression), replacement or `-` to drop the key.
            `files`, `dcp`, `ucp`.
        rules: partition rules, as for `reshard_checkpoint`; they see the new keys. `files`.
        common: a `common.pt` to take along; None: an empty one. `files`.
        hf_config: directory with the model's `config.json`; None: `source`. `hf`, `dcp`, `ucp`, as all that follow:
        arch: the model's family; `auto`: as `config.json` says.
        transformer_impl: as of the job, whose layers call some parameters differently.
        numbered_layers: a tensor for each layer, where Megatron stacks layers.
        vocabulary_multiple: the job's `--make-vocab-size-divisible-by`.
        global_batch_size: of the job that resumes with the optimizer's state, where no samples are stored: it resumes
            at the optimizer's step, behind as many samples.
        dtype, drop_optimizer, workers, memory_bytes, verify, restart, dry_run, progress: as for `reshard_checkpoint`.

    Raises:
        CheckpointNotFoundError: there is nothing to import.
        CorruptCheckpointError, ChecksumError: it contradicts itself, is damaged, or is not all there.
        UnsafePickleError: a file holds more than tensors and plain values.
        OptionError: it is of no family known here, or has settings, keys or shapes that Megatron-Core has not.
        CheckpointExistsError, SaveError: as for `reshard_checkpoint`.
    """
    given = locals()
    options = ImportOptions(**{option.name: given[option.name] for option in fields(ImportOptions)})
    _refuse_others(options, kind, SourceKind, "--from")
    places = places_of(source, target, same_format=False)
    if kind in ("hf", "dcp", "ucp"):
        places = replace(places, source=universal_directory(places.source))
    if not dry_run:
        refuse_target(_folder_of(places.source, kind), places.target)
    conversion = _import(kind, places.source, options)
    return run_conversion(conversion, places, options, dry_run=dry_run, progress=progress)


def _refuse_others(options: ConversionOptions, kind: str, kinds: Any, direction: str) -> None:
    """Raise `OptionError` for a kind of conversion that there is not, or an option that it does not take."""
    if kind not in get_args(kinds):
        raise OptionError(f"{direction} {kind}: expected one of {', '.join(get_args(kinds))}")
    options.refuse_others(kind, direction)


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
