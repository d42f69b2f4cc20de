"""A checkpoint in the formats of others: safetensors or torch files, sharded by size, or a plain DCP checkpoint.

Files and their index are named as the Hugging Face libraries name them (`model-00001-of-00004.safetensors`,
`model.safetensors.index.json`). Everything is written below `DIR.partial`, to a directory that is renamed when it is
complete.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mcore_ckpt.convert._file_stream import Streams, StreamSink, TargetFile, WriteBehind
from mcore_ckpt.convert._new_directory import new_directory
from mcore_ckpt.convert._partition import Partitioner
from mcore_ckpt.convert._reshard_copy import check_chunks, chunk_sources
from mcore_ckpt.convert._reshard_target import BuildOptions, build_target, refuse_target
from mcore_ckpt.convert._safetensors_files import safetensors_header
from mcore_ckpt.convert.reshard_plan import TargetLayout, make_plan, target_dtype
from mcore_ckpt.convert.rules import RenameRule, parse_rename_rules, rename_keys, rules_in
from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.console import Progress
from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.core.paths import local_path
from mcore_ckpt.format.index import CheckpointIndex, TensorEntry, parse_object_key
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.storage.local import LocalStorage
from mcore_ckpt.tools.dtype_cast import floating_dtype
from mcore_ckpt.tools.inspection import checkpoint_directory
from mcore_ckpt.tools.keys import is_optimizer_key, key_filter
from mcore_ckpt.tools.payloads import StoredPayloads, check_tiled
from mcore_ckpt.tools.regrid import Sink, Walk

__all__ = ["ExportReport", "export_checkpoint"]

_BUFFER_BYTES = 8 * 1024**2
_EXPORTED_FILE = re.compile(r"(?:model|pytorch_model)[-.].*(?:safetensors|bin|index\.json|tmp)")

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


@dataclass(frozen=True, slots=True)
class _Exported:
    """A tensor on its way out."""

    name: str
    entry: TensorEntry
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.entry.shape) * element_bytes(self.dtype)


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
    exported = [
        _Exported(name, index.tensors[key], target_dtype(index.tensors[key], dtype)) for key, name in names.items()
    ]
    with StoredPayloads(index) as payloads:
        if to == "dcp":
            return _export_dcp(payloads, directory, names, dtype, progress)
        shards = _shards(exported, max_shard_bytes)
        total = sum(tensor.nbytes for tensor in exported)
        with new_directory(directory, _is_exported) as folder:
            with Progress("export", total, shown=progress) as bar:
                write = _write_safetensors if to == "safetensors" else _write_torch
                files = [
                    write(payloads, folder, _file_name(to, n, len(shards)), shard, bar.advance)
                    for n, shard in enumerate(shards, 1)
                ]
            if len(files) > 1:
                _write_weight_map(folder, to, files, shards, total)
    return ExportReport(
        str(directory), to, tuple(files), len(exported), total, len(index.objects), tuple(index.objects)
    )


def _is_exported(name: str) -> bool:
    """Whether a file is one that an export of an older version may have left, when it was killed."""
    return _EXPORTED_FILE.fullmatch(name) is not None


def _shards(tensors: Sequence[_Exported], limit: int) -> list[list[_Exported]]:
    shards: list[list[_Exported]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _stem(to: Format) -> tuple[str, str]:
    return ("model", "safetensors") if to == "safetensors" else ("pytorch_model", "bin")


def _file_name(to: Format, number: int, count: int) -> str:
    stem, ending = _stem(to)
    return f"{stem}.{ending}" if count == 1 else f"{stem}-{number:05d}-of-{count:05d}.{ending}"


def _write_weight_map(
    directory: Path, to: Format, files: Sequence[str], shards: Sequence[Sequence[_Exported]], total: int
) -> None:
    stem, ending = _stem(to)
    weights = {tensor.name: file for file, shard in zip(files, shards, strict=True) for tensor in shard}
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
    LocalStorage(directory).publish(f"{stem}.{ending}.index.json", json.dumps(document, indent=2).encode() + b"\n")


def _write_safetensors(
    payloads: StoredPayloads, directory: Path, name: str, tensors: Sequence[_Exported], advance: Callable[[int], None]
) -> str:
    described = [(tensor.name, tensor.dtype, tensor.entry.shape) for tensor in tensors]
    header, starts = safetensors_header(described, {"format": "pt"})
    size = len(header) + sum(tensor.nbytes for tensor in tensors)
    file = TargetFile(str(directory / name), size)
    try:
        with WriteBehind() as writes:
            streams = Streams(writes, _BUFFER_BYTES, 4)
            stream = streams.open(file, 0)
            stream.write(header)
            for tensor in tensors:
                assert stream.position == starts[tensor.name]
                _stream_tensor(payloads, tensor, StreamSink(stream))
                advance(tensor.nbytes)
            stream.flush()
        file.sync()
    finally:
        file.close()
    return name


def _stream_tensor(payloads: StoredPayloads, tensor: _Exported, sink: Sink) -> None:
    """One tensor, put together from its chunks in C order; each chunk is held against its checksum."""
    entry = tensor.entry
    if 0 in entry.shape:
        return
    located = [payloads.locate(entry, chunk) for chunk in entry.chunks]
    sources = chunk_sources(payloads, located, entry, tensor.dtype)
    whole = Box((0,) * len(entry.shape), entry.shape)
    boxes = [Box(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
    read = Walk(element_bytes(tensor.dtype)).move(boxes, sources, [whole], [sink])
    check_chunks(located, sources, read, payloads.index.path, "export")


def _write_torch(
    payloads: StoredPayloads, directory: Path, name: str, tensors: Sequence[_Exported], advance: Callable[[int], None]
) -> str:
    import torch

    from mcore_ckpt.convert._torch_files import write_torch_file

    def fill(number: int, sink: Sink) -> None:
        _stream_tensor(payloads, tensors[number], sink)
        advance(tensors[number].nbytes)

    lacking = next((tensor for tensor in tensors if not hasattr(torch, tensor.dtype)), None)
    if lacking is not None:
        raise OptionError(
            f"{lacking.name}: torch {torch.__version__} has no {lacking.dtype}; leave it out, or convert it"
        )
    described = [(tensor.name, getattr(torch, tensor.dtype), tuple(tensor.entry.shape)) for tensor in tensors]
    write_torch_file(directory / name, described, fill)
    return name


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
