"""A checkpoint in the formats of others: safetensors or torch files, sharded by size, or a plain DCP checkpoint.

Files and their index are named as the Hugging Face libraries name them (`model-00001-of-00004.safetensors`,
`model.safetensors.index.json`). Everything is written below `DIR.partial`, to a directory that is renamed when it is
complete.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mcore_ckpt.convert._new_directory import new_directory
from mcore_ckpt.convert._partition import Partitioner
from mcore_ckpt.convert._reshard_target import BuildOptions, build_target, file_states, refuse_changed, refuse_target
from mcore_ckpt.convert._shard_files import Exported, export_fingerprint, is_exported, write_files
from mcore_ckpt.convert.reshard_plan import TargetLayout, make_plan, target_dtype
from mcore_ckpt.convert.rules import RenameRule, parse_rename_rules, rename_keys, rules_in
from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.core.paths import local_path
from mcore_ckpt.format.index import CheckpointIndex, parse_object_key
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.tools.dtype_cast import floating_dtype
from mcore_ckpt.tools.inspection import checkpoint_directory
from mcore_ckpt.tools.keys import is_optimizer_key, key_filter
from mcore_ckpt.tools.payloads import StoredPayloads, check_tiled

__all__ = ["ExportReport", "export_checkpoint"]

Format = Literal["safetensors", "torch", "dcp"]


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written.

    Attributes:
        left_out: how many objects there are for which the format has no place.
        left_out_keys: their keys.
    """

    target: str
    to: Format
    files: tuple[str, ...]
    tensors: int
    payload_bytes: int
    left_out: int
    left_out_keys: tuple[str, ...] = ()


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
) -> ExportReport:
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

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError, ChecksumError: the source cannot be read, or is damaged.
        CheckpointExistsError: there is something at `target`.
        OptionError: nothing is left to export, names collide, or the format has no such dtype.
        SaveError: it cannot be written.
    """
    index, directory, dtype = read_index(checkpoint_directory(source)), local_path(target), floating_dtype(dtype)
    refuse_target(Path(index.path), directory)
    wanted = key_filter(only)
    keys = [key for key in index.tensors if wanted(key) and not (drop_optimizer and is_optimizer_key(key))]
    names = rename_keys(keys, rules_in(rename, parse_rename_rules))
    if not names:
        raise OptionError(f"{index.path}: no tensor is left to export; `mcore-ckpt inspect --tensors` lists the keys")
    check_tiled(index, names)
    seen = file_states(index, names)
    exported = [
        Exported(name, index.tensors[key], target_dtype(index.tensors[key], dtype)) for key, name in names.items()
    ]
    with StoredPayloads(index) as payloads:
        if to == "dcp":
            return _export_dcp(payloads, directory, names, dtype, progress)
        fingerprint = export_fingerprint(payloads, exported, max_shard_bytes, seen) if to == "safetensors" else None
        with new_directory(directory, is_exported, fingerprint) as (folder, journal):
            files = write_files(payloads, folder, to, exported, max_shard_bytes, progress, journal)
            refuse_changed(index, seen, names)
        total = sum(tensor.nbytes for tensor in exported)
    return ExportReport(
        str(directory), to, tuple(files), len(exported), total, len(index.objects), tuple(index.objects)
    )


def _export_dcp(
    payloads: StoredPayloads, target: Path, names: dict[str, str], dtype: str | None, progress: bool | None
) -> ExportReport:
    """A reshard to one rank, under plain keys: each tensor one chunk, and none of Megatron's sidecars or objects."""
    index = payloads.index
    objects = [key for key in index.objects if parse_object_key(key) is None]
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
    build_target(payloads, replace(plan, index=flat), target, BuildOptions(), carry=lambda _: None, progress=progress)
    total = sum(move.payload_bytes for move in plan.moves)
    left_out = tuple(key for key in index.objects if parse_object_key(key) is not None)
    return ExportReport(str(target), "dcp", tuple(sorted(plan.sizes)), len(names), total, len(left_out), left_out)
