"""Checkpoints to the formats of others, and from them: which kinds there are, and one way through all of them.

    export: checkpoint -> index -> `Export` of the target's kind -> DIR, which appears when it is complete
    import: SRC -> `Import` of the source's kind -> a `torch_dist` checkpoint, which appears when it is proved

The kinds that know models are in modules of their own (`_huggingface`, `_megatron_named`, `_legacy_import`,
`_legacy_export`). Here are those that carry tensors under their keys: safetensors or torch files, sharded by size and
named as the Hugging Face libraries name them, and a plain DCP checkpoint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from mcore_ckpt.convert._huggingface import export_model, import_model
from mcore_ckpt.convert._legacy_export import legacy_export
from mcore_ckpt.convert._legacy_import import legacy_import
from mcore_ckpt.convert._megatron_named import import_named
from mcore_ckpt.convert._partition import Partitioner
from mcore_ckpt.convert._reshard_copy import Journal
from mcore_ckpt.convert._reshard_target import BuildOptions, build_target, file_states, refuse_target
from mcore_ckpt.convert._shard_files import Exported, FileFormat, export_fingerprint, write_files
from mcore_ckpt.convert._sources import open_model, open_source, universal_directory
from mcore_ckpt.convert.conversion import (
    ConversionPlan,
    ConversionReport,
    Export,
    ExportOptions,
    Import,
    ImportOptions,
    KeyPlan,
    Made,
    make_import,
    saved,
    write_directory,
)
from mcore_ckpt.convert.reshard_plan import TargetLayout, make_plan, target_dtype
from mcore_ckpt.convert.rules import (
    PartitionRule,
    RenameRule,
    parse_partition_rules,
    parse_rename_rules,
    rename_keys,
    rules_in,
)
from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.core.paths import local_path
from mcore_ckpt.families.table import Implementation
from mcore_ckpt.format.index import CheckpointIndex, parse_object_key
from mcore_ckpt.format.metadata_read import TRACKER_FILE, read_index
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.dtype_cast import floating_dtype
from mcore_ckpt.tools.inspection import checkpoint_directory
from mcore_ckpt.tools.keys import is_optimizer_key, key_filter
from mcore_ckpt.tools.payloads import StoredPayloads, check_tiled
from mcore_ckpt.tools.verify import check_file

__all__ = [
    "Format",
    "SourceKind",
    "TargetKind",
    "export_as",
    "export_checkpoint",
    "export_huggingface",
    "export_legacy",
    "import_as",
    "import_checkpoint",
    "import_huggingface",
    "import_legacy",
    "import_megatron",
    "plan_export",
    "plan_import",
]

Format = Literal["safetensors", "torch", "dcp"]
TargetKind = Literal["safetensors", "torch", "dcp", "hf", "megatron-legacy"]
SourceKind = Literal["files", "hf", "megatron", "megatron-legacy"]
"""`hf` and `megatron` say by whose names parameters are called, whatever format they are stored in."""

_ITERATION = re.compile(r"iter_(\d{7,})")


# --- one way through all kinds


def export_as(
    kind: TargetKind,
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    options: ExportOptions,
    *,
    progress: bool | None = False,
) -> ConversionReport:
    """Make a target of some kind of a checkpoint; the functions for each kind say what is raised."""
    index, directory = read_index(checkpoint_directory(source)), local_path(target)
    refuse_target(Path(index.path), directory)
    conversion = _export(kind, index, options)
    with conversion.payloads:
        return conversion.report(index.path, directory, conversion.make(directory, progress))


def plan_export(kind: TargetKind, source: str | os.PathLike[str], options: ExportOptions) -> ConversionPlan:
    """What an export would do; reads indexes and small files only, and raises what it would raise for them."""
    conversion = _export(kind, read_index(checkpoint_directory(source)), options)
    with conversion.payloads:
        return conversion.plan()


def _export(kind: TargetKind, index: CheckpointIndex, options: ExportOptions) -> Export:
    if kind == "hf":
        return export_model(index, options)
    if kind == "megatron-legacy":
        return legacy_export(index, options)
    return _export_tensors(kind, index, options)


def import_as(
    kind: SourceKind,
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    options: ImportOptions,
    *,
    progress: bool | None = False,
) -> ConversionReport:
    """Make a checkpoint of a source of some kind; the functions for each kind say what is raised."""
    src, dst = Path(checkpoint_directory(source)), local_path(target)
    directory = src if kind in ("files", "megatron-legacy") else universal_directory(src)
    refuse_target(directory if directory.is_dir() or kind != "files" else directory.parent / "-", dst)
    report = make_import(_import(kind, directory, options), directory, dst, options, progress)
    if kind != "files":
        _write_tracker(dst)
    return report


def plan_import(kind: SourceKind, source: str | os.PathLike[str], options: ImportOptions) -> ConversionPlan:
    """What an import would do; reads headers, small files, and of ranks' files what has to be the same; raises what an
    import would raise for them."""
    directory = Path(checkpoint_directory(source))
    conversion = _import(kind, directory if kind == "megatron-legacy" else universal_directory(directory), options)
    with conversion.payloads:
        return conversion.plan()


def _import(kind: SourceKind, directory: Path, options: ImportOptions) -> Import:
    if kind == "files":
        return _import_tensors(directory, options)
    if kind == "megatron-legacy":
        return legacy_import(directory, options)
    opened = open_model(directory, options.rename)
    try:
        return (import_model if kind == "hf" else import_named)(opened, options)
    except BaseException:
        opened.payloads.close()
        raise


def _write_tracker(target: Path) -> None:
    """The tracker file beside a checkpoint that is named as a launch names them, if there is none."""
    found = _ITERATION.fullmatch(target.name)
    text = "release" if target.name == "release" else str(int(found.group(1))) if found else None
    if text is not None and not (target.parent / TRACKER_FILE).exists():
        storage_at(target.parent).publish(TRACKER_FILE, text.encode())


# --- tensors under their keys


def _export_tensors(kind: Format, index: CheckpointIndex, options: ExportOptions) -> Export:
    wanted = key_filter(options.only)
    keys = [key for key in index.tensors if wanted(key) and not (options.drop_optimizer and is_optimizer_key(key))]
    names = rename_keys(keys, options.rename)
    if not names:
        raise OptionError(f"{index.path}: no tensor is left to export; `mcore-ckpt inspect --tensors` lists the keys")
    check_tiled(index, names)
    seen = file_states(index, names)
    exported = [
        Exported(name, index.tensors[key], target_dtype(index.tensors[key], options.dtype))
        for key, name in names.items()
    ]
    payloads = StoredPayloads(index)
    if kind == "dcp":
        return _export_dcp(payloads, names, options.dtype)
    files: FileFormat = kind

    def make(target: Path, progress: bool | None) -> Made:
        shard = options.max_shard_bytes
        # A torch file is written from its beginning: half of one is nothing to go on with.
        fingerprint = export_fingerprint(payloads, exported, shard, seen) if files == "safetensors" else None

        def write(folder: Path, journal: Journal | None) -> list[str]:
            return write_files(payloads, folder, files, exported, shard, progress, journal)

        written = write_directory(target, index, seen, payloads, write, keys=list(names), fingerprint=fingerprint)
        return Made(written, len(exported), sum(tensor.nbytes for tensor in exported))

    return Export(
        format=kind,
        keys=lambda: _plain_rows(names, index, options.dtype),
        left_out=tuple(index.objects),
        payloads=payloads,
        make=make,
    )


def _plain_rows(names: dict[str, str], index: CheckpointIndex, dtype: str | None) -> Iterable[KeyPlan]:
    for key, name in names.items():
        entry = index.tensors[key]
        yield KeyPlan(key, 1, "as it is", name, entry.shape, target_dtype(entry, dtype))


def _export_dcp(payloads: StoredPayloads, names: dict[str, str], dtype: str | None) -> Export:
    """A reshard to one rank, under plain keys: each tensor one chunk, and none of Megatron's sidecars or objects."""
    index = payloads.index
    objects = [key for key in index.objects if parse_object_key(key) is None]

    def make(target: Path, progress: bool | None) -> Made:
        plan = make_plan(
            index,
            TargetLayout(1, 1),
            Partitioner(index),
            keys=list(names),
            object_keys=objects,
            dtype=dtype,
            rename=names,
        )
        flat: CheckpointIndex = replace(
            plan.index, planner_data={key: (key,) for key in (*plan.index.tensors, *plan.index.objects)}, mcore_data={}
        )
        build_target(
            payloads, replace(plan, index=flat), target, BuildOptions(), carry=lambda _: None, progress=progress
        )
        return Made(sorted(plan.sizes), len(names), sum(move.payload_bytes for move in plan.moves))

    return Export(
        format="dcp",
        keys=lambda: _plain_rows(names, index, dtype),
        left_out=tuple(key for key in index.objects if parse_object_key(key) is not None),
        payloads=payloads,
        make=make,
    )


def _import_tensors(source: Path, options: ImportOptions) -> Import:
    """The same keys and tensors; what Megatron-Core wants besides is added, with a common state that may be empty."""
    kind, payloads, left_out = open_source(source, options.rename)
    return Import(
        format=kind,
        target_layout=str(options.layout),
        keys=lambda: _plain_rows({key: key for key in payloads.index.tensors}, payloads.index, options.dtype),
        left_out=tuple(left_out),
        payloads=payloads,
        layout=options.layout,
        common=lambda _: _common_state(options.common),
        rules=options.rules,
    )


def _common_state(path: str | None) -> bytes:
    if path is None:
        return saved({})
    storage = storage_at(Path(path).parent, follow_links=True)
    check_file(storage, Path(path).name)
    return storage.read(Path(path).name)


# --- a function for each kind


def export_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: Format = "safetensors",
    max_shard_bytes: int = 5 * 1000**3,
    rename: str | os.PathLike[str] | Iterable[RenameRule] | None = None,
    only: str | None = None,
    drop_optimizer: bool = False,
    dtype: str | None = None,
    progress: bool | None = False,
) -> ConversionReport:
    """Write the tensors of a checkpoint in the format of others.

    Args:
        source: directory of the checkpoint, or one with a tracker file.
        target: directory to make; it must not exist, or be empty.
        to: `"safetensors"`, `"torch"` (files of `torch.save`) or `"dcp"` (one rank's plain DCP checkpoint).
        max_shard_bytes: no file holds more, unless one tensor is larger.
        rename: a file of rename rules: lines of a regular expression and what to put for it, or `-` to drop the key.
        only: keys to carry: with any of `*?[` a shell pattern for the whole key, otherwise a part of it.
        drop_optimizer: leave the optimizer's state out.
        dtype: convert floating-point tensors of the model: `"bf16"`, `"fp16"`, `"fp32"`, or torch's names for them.
        progress: show a bar; None: if standard error is a terminal.

    Returns:
        What was written; `left_out` are keys of objects, for which the format has no place.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError, ChecksumError: the source cannot be read, or is damaged.
        CheckpointExistsError: there is something at `target`.
        OptionError: nothing is left to export, names collide, or the format has no such dtype.
        SaveError: it cannot be written.
    """
    options = ExportOptions(
        dtype=floating_dtype(dtype),
        drop_optimizer=drop_optimizer,
        max_shard_bytes=max_shard_bytes,
        rename=rules_in(rename, parse_rename_rules),
        only=only,
    )
    return export_as(to, source, target, options, progress=progress)


def export_huggingface(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    arch: str = "auto",
    hf_config: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 1000**3,
    progress: bool | None = False,
) -> ConversionReport:
    """Write the model in a checkpoint as a directory that `AutoModelForCausalLM.from_pretrained` loads.

    Args:
        source: directory of the checkpoint, or one with a tracker file.
        target: directory to make; it must not exist, or be empty. It appears when it is complete.
        arch: the model's family; `"auto"`: what `hf_config`, or else Megatron's stored arguments say.
        hf_config: directory with the model's `config.json`, which is taken over and held against the stored shapes;
            tokenizer files and `generation_config.json` beside it are taken along.
        dtype: convert floating-point tensors: `"bf16"`, `"fp16"`, `"fp32"`, or torch's names for them.
        max_shard_bytes: no file holds more, unless one tensor is larger.
        progress: show a bar; None: if standard error is a terminal.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError, ChecksumError: the source cannot be read, or is damaged.
        CheckpointExistsError: there is something at `target`.
        OptionError: the model is of no family known here, or keys or shapes are not what its family has.
        SaveError: it cannot be written.
    """
    options = ExportOptions(
        dtype=floating_dtype(dtype),
        max_shard_bytes=max_shard_bytes,
        arch=arch,
        hf_config=None if hf_config is None else os.fspath(hf_config),
    )
    return export_as("hf", source, target, options, progress=progress)


def export_legacy(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    vpp: int = 1,
    drop_optimizer: bool = False,
    progress: bool | None = False,
) -> ConversionReport:
    """Write the files that a launch with `--ckpt-format torch` loads at these parallel sizes.

    Args:
        source: directory of the checkpoint, or one with a tracker file.
        target: directory to make (`iter_0001000`); it must not exist, or be empty. It appears when it is complete.
        tp: tensor parallel size.
        pp: pipeline parallel size.
        ep: expert parallel size.
        etp: tensor parallel size of experts, 1 or `tp`; by default `tp`.
        vpp: how many chunks of the model each pipeline stage has (a virtual pipeline).
        drop_optimizer: leave the optimizer's state out.
        progress: show a bar; None: if standard error is a terminal.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError, ChecksumError: the source cannot be read, or is damaged.
        CheckpointExistsError: there is something at `target`.
        OptionError: the model cannot be divided so, or it is not known how it is.
        SaveError: it cannot be written.
    """
    options = ExportOptions(tp=tp, pp=pp, ep=ep, etp=etp, vpp=vpp, drop_optimizer=drop_optimizer)
    return export_as("megatron-legacy", source, target, options, progress=progress)


def import_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    rename: str | os.PathLike[str] | Iterable[RenameRule] | None = None,
    rules: str | os.PathLike[str] | Iterable[PartitionRule] | None = None,
    dtype: str | None = None,
    common: str | os.PathLike[str] | None = None,
    workers: int = 2,
    verify: bool = True,
    memory_bytes: int = 1024**3,
    progress: bool | None = False,
) -> ConversionReport:
    """Make a `torch_dist` checkpoint of tensors in the format of others.

    Args:
        source: a directory of safetensors or torch files, one such file, or a DCP checkpoint.
        target: directory to make; it must not exist, or be empty.
        tp: tensor parallel size of the target.
        pp: pipeline parallel size.
        ep: expert parallel size.
        rename: a file of rename rules: lines of a regular expression and what to put for it, or `-` to drop the key.
        rules: a file of partition rules, as for a reshard; they see the new keys.
        dtype: convert floating-point tensors: `"bf16"`, `"fp16"`, `"fp32"`, or torch's names for them.
        common: a `common.pt` of another checkpoint to take along; an empty one without it.
        workers: threads, and files for each rank.
        verify: prove the target against the source before it appears.
        memory_bytes: for everything.
        progress: show bars; None: if standard error is a terminal.

    Returns:
        What was made; `left_out` are keys of objects of a DCP checkpoint, or of entries of a torch file, that are no
        tensors.

    Raises:
        CheckpointNotFoundError: there is nothing to import.
        CorruptCheckpointError: it contradicts itself.
        UnsafePickleError: a torch file holds more than tensors and plain values.
        CheckpointExistsError, OptionError, SaveError: as for `reshard_checkpoint`.
    """
    options = ImportOptions(
        tp=tp,
        pp=pp,
        ep=ep,
        dtype=floating_dtype(dtype),
        rename=rules_in(rename, parse_rename_rules),
        rules=rules_in(rules, parse_partition_rules),
        common=None if common is None else os.fspath(common),
        workers=workers,
        verify=verify,
        memory_bytes=memory_bytes,
    )
    return import_as("files", source, target, options, progress=progress)


def import_huggingface(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    arch: str = "auto",
    dtype: str | None = None,
    transformer_impl: Implementation = "transformer_engine",
    numbered_layers: bool = False,
    vocabulary_multiple: int = 128,
    workers: int = 2,
    verify: bool = True,
    memory_bytes: int = 1024**3,
    hf_config: str | os.PathLike[str] | None = None,
    rename: str | os.PathLike[str] | Iterable[RenameRule] | None = None,
    global_batch_size: int | None = None,
    progress: bool | None = False,
) -> ConversionReport:
    """Make a `torch_dist` checkpoint of a Hugging Face model, with which a launch of Megatron starts.

    Args:
        source: directory of the model: `config.json`, and safetensors or torch files; or a checkpoint that
            `torch.distributed.checkpoint` has saved of such a model (FSDP2, for one), and `hf_config`.
        target: directory to make; it must not exist, or be empty. It appears when it is complete. Called `release` or
            `iter_0000000`, it gets a tracker file beside it, if there is none, and the directory around it can be given
            to `--load`.
        tp: tensor parallel size of the files; a launch loads them under other layouts as well.
        pp: pipeline parallel size of the files.
        ep: expert parallel size of the files.
        etp: tensor parallel size of experts; by default `tp`.
        arch: the model's family; `"auto"`: what `config.json` says.
        dtype: convert floating-point tensors: `"bf16"`, `"fp16"`, `"fp32"`, or torch's names for them.
        transformer_impl: as `--transformer-impl` of the launch: the layers call some parameters differently.
        numbered_layers: a tensor for each layer, instead of one for all layers where they are alike.
        vocabulary_multiple: `--make-vocab-size-divisible-by` of the launch.
        workers: threads, and files for each rank.
        verify: prove the target against the source before it appears.
        memory_bytes: for everything.
        hf_config: directory with the model's `config.json`; by default `source`.
        rename: a file of rename rules for the stored keys, applied before they are held against the family's names.
        global_batch_size: of the launch that goes on with the optimizer's state, where nothing stored tells how many
            samples there were: it then goes on at the optimizer's step, behind as many samples.
        progress: show a bar; None: if standard error is a terminal.

    Raises:
        CheckpointNotFoundError: there is no such model.
        CorruptCheckpointError: its files contradict themselves.
        OptionError: it is of no family known here, or has settings, keys or shapes that Megatron-Core has not.
        CheckpointExistsError, SaveError, ChecksumError: as for `reshard_checkpoint`.
    """
    options = ImportOptions(
        tp=tp,
        pp=pp,
        ep=ep,
        etp=etp,
        dtype=floating_dtype(dtype),
        arch=arch,
        transformer_impl=transformer_impl,
        numbered_layers=numbered_layers,
        vocabulary_multiple=vocabulary_multiple,
        hf_config=None if hf_config is None else os.fspath(hf_config),
        rename=rules_in(rename, parse_rename_rules),
        global_batch_size=global_batch_size,
        workers=workers,
        verify=verify,
        memory_bytes=memory_bytes,
    )
    return import_as("hf", source, target, options, progress=progress)


def import_megatron(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    dtype: str | None = None,
    workers: int = 2,
    verify: bool = True,
    memory_bytes: int = 1024**3,
    rename: str | os.PathLike[str] | Iterable[RenameRule] | None = None,
    global_batch_size: int | None = None,
    progress: bool | None = False,
) -> ConversionReport:
    """Make a `torch_dist` checkpoint of a model of Megatron's that was saved whole, under the names of its modules.

    Args:
        source: directory of a DCP checkpoint (of Megatron-FSDP) or of a universal one (of Megatron-DeepSpeed).
        target: directory to make; it must not exist, or be empty. It appears when it is complete. Called
            `iter_0001000`, it gets a tracker file beside it, if there is none.
        tp: tensor parallel size of the files; a launch loads them under other layouts as well.
        pp: pipeline parallel size of the files.
        ep: expert parallel size of the files.
        etp: tensor parallel size of experts; by default `tp`.
        dtype: convert floating-point tensors of the model: `"bf16"`, `"fp16"`, `"fp32"`, or torch's names for them.
        workers: threads, and files for each rank.
        verify: prove the target against the source before it appears.
        memory_bytes: for everything.
        rename: a file of rename rules for the stored keys.
        global_batch_size: of the launch that goes on with the optimizer's state, where nothing stored tells how many
            samples there were: it then goes on at the optimizer's step, behind as many samples.
        progress: show a bar; None: if standard error is a terminal.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError, ChecksumError: the source is not there, or damaged.
        OptionError: its keys are none of Megatron's.
        CheckpointExistsError, SaveError: as for `reshard_checkpoint`.
    """
    options = ImportOptions(
        tp=tp,
        pp=pp,
        ep=ep,
        etp=etp,
        dtype=floating_dtype(dtype),
        rename=rules_in(rename, parse_rename_rules),
        global_batch_size=global_batch_size,
        workers=workers,
        verify=verify,
        memory_bytes=memory_bytes,
    )
    return import_as("megatron", source, target, options, progress=progress)


def import_legacy(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
    etp: int | None = None,
    drop_optimizer: bool = False,
    dtype: str | None = None,
    workers: int = 2,
    verify: bool = True,
    memory_bytes: int = 1024**3,
    progress: bool | None = False,
) -> ConversionReport:
    """Make a `torch_dist` checkpoint of one that a launch has saved with `--ckpt-format torch`.

    Args:
        source: directory of an iteration (`iter_0001000`), or one with a tracker file.
        target: directory to make; it must not exist, or be empty. It appears when it is complete. Called
            `iter_0001000`, it gets a tracker file beside it, if there is none.
        tp: tensor parallel size of the files; by default, as the source.
        pp: pipeline parallel size of the files; by default, as the source.
        ep: expert parallel size of the files; by default, as the source.
        etp: tensor parallel size of experts; by default `tp`, or as the source.
        drop_optimizer: leave the optimizer's state out.
        dtype: convert floating-point tensors of the model: `"bf16"`, `"fp16"`, `"fp32"`, or torch's names for them.
        workers: threads, and files for each rank.
        verify: prove the target against the source before it appears.
        memory_bytes: for everything.
        progress: show bars; None: if standard error is a terminal.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        CorruptCheckpointError: its files are damaged, contradict one another, or are not all there.
        ChecksumError: a file is damaged.
        UnsafePickleError: a file was made to do harm.
        OptionError: it holds what is not known here.
        CheckpointExistsError, SaveError: as for `reshard_checkpoint`.
    """
    options = ImportOptions(
        tp=tp,
        pp=pp,
        ep=ep,
        etp=etp,
        drop_optimizer=drop_optimizer,
        dtype=floating_dtype(dtype),
        workers=workers,
        verify=verify,
        memory_bytes=memory_bytes,
    )
    return import_as("megatron-legacy", source, target, options, progress=progress)
