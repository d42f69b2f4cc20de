"""The front door: checkpoints to the formats of others, and from them.

Each kind of source or target is thought through to a `Conversion` by a module of its own: those with knowledge of
models (`_huggingface`, `_megatron_formats`), and here conversions of tensors under their keys:
safetensors, torch files, plain DCP checkpoints.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from mcore_ckpt.core.errors import CheckpointError, ChecksumError, OptionError
from mcore_ckpt.core.options import checkpoint_path
from mcore_ckpt.core.process import in_parallel
from mcore_ckpt.core.team import Progress
from mcore_ckpt.format.index import CheckpointIndex, parse_object_key
from mcore_ckpt.format.metadata_read import HF_INDEX, METADATA_FILE
from mcore_ckpt.load.checks import Problem, check_file
from mcore_ckpt.models._foreign import (
    NO_INDEX,
    check_listed,
    check_numbered,
    import_conversion,
    layout_of,
    open_model,
    open_source,
    read_safetensors,
    read_weight_index,
)
from mcore_ckpt.models._huggingface import export_model, import_model
from mcore_ckpt.models._megatron_formats import import_fsdp, legacy_import
from mcore_ckpt.reshard.conversion import (
    Conversion,
    ConversionReport,
    KeyPlan,
    SourceFiles,
    convert,
    in_dtype,
    index_of_plan,
)
from mcore_ckpt.reshard.merge import merged
from mcore_ckpt.reshard.options import ExportOptions, ImportOptions, MergeOptions, ReshardOptions, rename_keys
from mcore_ckpt.reshard.partition import Partitioner
from mcore_ckpt.reshard.plan import TargetLayout, TargetPlan, make_plan
from mcore_ckpt.reshard.reshard import opened, reshard_conversion, target_layout
from mcore_ckpt.reshard.target_directory import begun_work, refuse_inside, remove_begun
from mcore_ckpt.reshard.view import FilePayloads, FileRange
from mcore_ckpt.reshard.weight_files import Exported, encode_state, plan_safetensors, plan_torch_files
from mcore_ckpt.save.jobs import work_for_trainer
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.inspection import checkpoint_directory
from mcore_ckpt.tools.keys import is_optimizer_key, key_filter
from mcore_ckpt.tools.payloads import StoredPayloads, check_elements, check_tiled
from mcore_ckpt.tools.runs import Places, places_of
from mcore_ckpt.tools.verify import VerifyReport

TargetKind = Literal["safetensors", "torch", "dcp", "hf"]
SourceKind = Literal["files", "hf", "dcp", "megatron-legacy"]
_Options = TypeVar("_Options", ExportOptions, ReshardOptions)


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
        source: directory of a checkpoint, or of a run whose tracker file names one; never written to.
        target: directory to make, a path or a URL; it must not exist, or be empty. It appears when it is complete.
        to: `"safetensors"`, `"torch"` (files of `torch.save`) and `"dcp"` (one rank's plain DCP checkpoint): all
            tensors under their keys. `"hf"`: the model, as `AutoModelForCausalLM.from_pretrained` loads it.
        dry_run: as for `reshard_checkpoint`.
        progress: as for `reshard_checkpoint`.
        options: fields of `ExportOptions`, such as `dtype="bf16"`; `mcore-ckpt export --help` says what each does, and
            which formats take it.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError, ChecksumError: the source cannot be read, or is damaged.
        CheckpointExistsError: there is something at the target.
        OptionError: the format, the family or the parallel sizes have no place for what is stored.
        SaveError: it cannot be written; what is done is kept for the next run.
        TypeError: there is no such option.
    """
    how = ExportOptions(**options)
    how.refuse_others(to, "--to")
    places = Places(checkpoint_directory(source), checkpoint_path(target))

    def plan(how: ExportOptions) -> Conversion:
        with index_of_plan(places.source) as index:
            return export_model(index, how) if to == "hf" else _export_tensors(to, index, how)

    return convert(plan, places, how, dry_run=dry_run, progress=progress)


def main(parent_pid: int, page_fd: int, source: str, target: str, hf_config: str | None) -> None:
    """In the process that exports a model during training (`save.upkeep`): do it, or resume it, or if the checkpoint is
    gone remove what was begun; and print as JSON which, with the bytes of the files, or the error.
    """
    work_for_trainer(parent_pid, page_fd)
    options: dict[str, Any] = {"to": "hf", "hf_config": hf_config, "workers": 1}
    answer: dict[str, Any] = {"nbytes": 0, "is_gone": False, "is_removed": False}
    try:
        if not storage_at(source).exists(METADATA_FILE):
            answer["is_gone"] = True
            answer["is_removed"] = remove_begun(checkpoint_path(target), checkpoint_path(source))
        else:
            try:
                report = export_checkpoint(source, target, **options)
            except OptionError:
                if not begun_work(checkpoint_path(target)):
                    raise
                report = export_checkpoint(source, target, restart=True, **options)  # begun of an earlier save
            answer["nbytes"] = report.file_bytes
    except CheckpointError as error:
        answer = {"error": str(error)}
    sys.stdout.write(json.dumps(answer))


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
        source: directory of a model or of a checkpoint, one file, or a run whose tracker file names a checkpoint.
        target: directory to make, a path or a URL; it must not exist, or be empty. It appears when it is complete. A
            run becomes a run, as with `reshard_checkpoint`. One called `release` or `iter_0001000` gets a tracker file
            next to it, unless one there names a later iteration.
        kind: `"files"`: tensors of safetensors, torch files or a DCP checkpoint under their own keys. `"hf"`: a Hugging
            Face model. `"dcp"`: a checkpoint of FSDP2 with Hugging Face's names, where `hf_config` is given, otherwise
            one of Megatron-FSDP. `"megatron-legacy"`: the model that a job has saved with `--ckpt-format torch`.
        dry_run: as for `reshard_checkpoint`.
        progress: as for `reshard_checkpoint`.
        options: fields of `ImportOptions`, such as `tp=4`; `mcore-ckpt import --help` says what each does, and which
            kinds take it. Parallel sizes are those of the target's files, which a job loads under others, too.

    Raises:
        CheckpointNotFoundError: there is nothing to import.
        CorruptCheckpointError, ChecksumError: it contradicts itself, is damaged, or is not all there.
        UnsafePickleError: a file holds more than tensors and plain values.
        OptionError: it is of no family known here, or has settings, keys or shapes that Megatron-Core has not.
        CheckpointExistsError, SaveError, TypeError: as for `export_checkpoint`.
    """
    how = ImportOptions(**options)
    how.refuse_others(kind, "--from")
    places = places_of(source, target, same_format=False)
    return convert(lambda how: _import(kind, places.source, how), places, how, dry_run=dry_run, progress=progress)


def merge_checkpoints(
    sources: Sequence[str | os.PathLike[str]],
    target: str | os.PathLike[str],
    *,
    dry_run: bool = False,
    progress: bool | None = False,
    **options: Any,
) -> ConversionReport:
    """Make the weighted average of the models in several checkpoints, whatever the layout of each.

    Each element is summed in the order of `sources`, in float64 (in float32, if it has 16 bits), and rounded once, so
    its bits depend on no layout. Integers, extra states of modules and arguments are the last source's. Optimizer,
    random states and iteration are left out: a job starts from the target with `--finetune`.

    Args:
        sources: directories of checkpoints of one model, or of runs, whose tracker files name them; never written to.
        target: directory to make, a path or a URL, as for `import_checkpoint`.
        dry_run, progress: as for `reshard_checkpoint`.
        options: fields of `MergeOptions`, such as `weights=(1, 2)` or `to="hf"`; see `mcore-ckpt merge --help`.

    Raises:
        OptionError: the models differ in keys, shapes or dtypes, or have no average; nothing was written.
        CheckpointNotFoundError, CorruptCheckpointError, ChecksumError, LoadError, CheckpointExistsError, SaveError,
        TypeError: as for `reshard_checkpoint` and `export_checkpoint`.
    """
    how = MergeOptions(**options)
    how.refuse_others(how.to, "--to")
    directories = [checkpoint_directory(source) for source in sources]
    if not directories:
        raise OptionError("no checkpoint to merge: name at least one")
    places = Places(directories[-1], checkpoint_path(target))
    for directory in () if dry_run else directories:
        refuse_inside(directory, places.target)
    return convert(partial(_plan_merge, directories), places, how, dry_run=dry_run, progress=progress)


def verify_weights(path: str | os.PathLike[str], *, workers: int = 2, progress: bool | None = False) -> VerifyReport:
    """Check the safetensors files of a directory: their headers and lengths, and what their index says of them. Tensors
    are read where the index has their checksums, as that of an export has.

    Args and raises: as `verify_checkpoint`.
    """
    started, directory = time.monotonic(), checkpoint_path(path)
    storage = storage_at(directory, follow_links=True)
    problems: list[Problem] = []
    listed, found = NO_INDEX, dict[str, dict[str, FileRange]]()
    names = storage.list()
    with _noting(problems, HF_INDEX):
        listed = read_weight_index(directory / HF_INDEX) if HF_INDEX in names else NO_INDEX
    others = {name for name in names if name.endswith(".safetensors")} - {*listed.files.values()}
    for name in (*sorted(others), *sorted({*listed.files.values()})):
        with _noting(problems, name):
            found[name] = read_safetensors(directory, name, listed)
    if found.keys() >= {*listed.files.values()}:
        with _noting(problems, HF_INDEX):
            check_listed(listed, {key: name for name, tensors in found.items() for key in tensors}, directory)
    if not listed.files:
        with _noting(problems, HF_INDEX):
            check_numbered(directory, others)
    summed = {name: [key for key, at in tensors.items() if at.record is not None] for name, tensors in found.items()}
    nbytes = sum(found[name][key].nbytes for name, keys in summed.items() for key in keys)
    with Progress("verify", nbytes, shown=progress) as bar:
        for name, keys in summed.items():
            with FilePayloads(directory, found[name], storage) as payloads:
                in_parallel(keys, partial(_check_tensor, payloads, name, problems, bar), workers)
    items, records = sum(map(len, found.values())), sum(map(len, summed.values()))
    seconds = time.monotonic() - started
    return VerifyReport(str(directory), tuple(problems), items, records, nbytes, seconds, unchecked=items - records)


def _check_tensor(payloads: StoredPayloads, file: str, problems: list[Problem], bar: Progress, key: str) -> None:
    entry = payloads.index.tensors[key]
    with _noting(problems, file, key):
        check_elements(payloads, entry)
    bar.advance(entry.chunks[0].item.length)


@contextmanager
def _noting(problems: list[Problem], file: str, key: str | None = None) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        is_damage = isinstance(error, ChecksumError)
        problems.append(Problem("checksum" if is_damage else "file", str(error), fqn=key, file=file))


def _plan_merge(directories: Sequence[Path], options: MergeOptions) -> Conversion:
    def those_of(kind: type[_Options]) -> _Options:
        names = {field.name for field in fields(kind)} & {field.name for field in fields(options)}
        given = {name: getattr(options, name) for name in names}
        return kind(**{**given, "dtype": None, "drop_optimizer": True})  # the average has its dtype already

    with ExitStack() as stack:
        sources = [stack.enter_context(opened(directory)) for directory in directories]
        derived = merged(sources, options)
        if options.to == "hf":
            made = export_model(sources[-1].index, those_of(ExportOptions), derived.payloads)
            report = replace(
                made.report,
                notes=(*made.report.notes, *derived.notes[:-1]),
                left_out=tuple(dict.fromkeys((*derived.left_out, *made.report.left_out))),
            )
        else:
            how = those_of(ReshardOptions)
            made = reshard_conversion(sources[-1], target_layout(how, sources[-1], stays=True), how, derived)
            report = made.report
        files = SourceFiles(sources[-1].index, others=[source.files for source in sources[:-1]])
        return replace(made, source=files, report=report)


def _import(kind: SourceKind, directory: Path, options: ImportOptions) -> Conversion:
    if kind == "files":
        return _import_tensors(directory, options)
    if kind == "megatron-legacy":
        return legacy_import(directory, options)
    named = kind == "dcp" and options.hf_config is None
    usual = ImportOptions()
    for name in "arch transformer_impl numbered_layers vocabulary_multiple".split() if named else ():
        if getattr(options, name) != getattr(usual, name):
            raise OptionError(f"{name}: needs --hf-config with --from dcp: without it, names are Megatron's own")
    opened = open_model(directory, options.rename)
    try:
        return import_fsdp(opened, options) if named else import_model(opened, options)
    except BaseException:
        opened.payloads.close()
        raise


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
            plan = plan_torch_files(exported, options.max_shard_bytes)
        else:
            plan = plan_safetensors(exported, options.max_shard_bytes)
    return Conversion(
        payloads=payloads,
        source=SourceFiles(index, names),
        plan=plan,
        keys=lambda: (KeyPlan(e.fqn, 1, "as it is", name, e.shape, e.dtype) for name, e in tensors.items()),
        report=ConversionReport(format=kind, left_out=tuple(objects)),
    )


def _plan_dcp(index: CheckpointIndex, names: Mapping[str, str], objects: list[str]) -> TargetPlan:
    """A reshard to one rank, under plain keys: each tensor one chunk, and none of Megatron's sidecars or objects."""
    plan = make_plan(index, TargetLayout(1, 1), Partitioner(index), keys=names, object_keys=objects).target
    assert plan.index is not None
    keys = (*plan.index.tensors, *plan.index.objects)
    return replace(plan, index=replace(plan.index, planner_data={key: (key,) for key in keys}, mcore_data={}))


def _import_tensors(source: Path, options: ImportOptions) -> Conversion:
    """Keys and tensors as they are, and a common state that may be empty."""
    kind, payloads, *left_out = open_source(source, options.rename)
    try:
        return import_conversion(
            payloads,
            options,
            layout_of(options),
            lambda _: _common_state(options.common),
            ConversionReport(format=kind, left_out=(*left_out[0], *left_out[1])),
            keys=lambda: (
                KeyPlan(entry.fqn, 1, "as it is", key, entry.shape, entry.dtype)
                for key, entry in payloads.index.tensors.items()
            ),
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
