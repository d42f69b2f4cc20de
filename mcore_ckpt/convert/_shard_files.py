"""A directory of safetensors or torch files, sharded by size, as the Hugging Face libraries name them.

`model-00001-of-00004.safetensors` with `model.safetensors.index.json`, or one `model.safetensors`. Whoever
calls this gives the directory its name when it is complete.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mcore_ckpt.convert._file_stream import Streams, StreamSink, TargetFile, WriteBehind
from mcore_ckpt.convert._reshard_copy import CastSource, check_chunks, chunk_sources
from mcore_ckpt.convert._safetensors_files import safetensors_header
from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.console import Progress
from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.format.index import TensorEntry
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.storage.local import LocalStorage
from mcore_ckpt.tools.payloads import StoredPayloads
from mcore_ckpt.tools.regrid import Sink, Walk

__all__ = ["MODEL_FILES", "Exported", "FileFormat", "is_exported", "write_files"]

FileFormat = Literal["safetensors", "torch"]

MODEL_FILES = (
    "config.json generation_config.json tokenizer.json tokenizer.model tokenizer_config.json special_tokens_map.json "
    "added_tokens.json vocab.json vocab.txt merges.txt chat_template.json chat_template.jinja spiece.model"
).split()
"""What lies beside the weights of a model of the Hugging Face libraries."""

_BUFFER_BYTES = 8 * 1024**2
_EXPORTED_FILE = re.compile(r"(?:model|pytorch_model)[-.].*(?:safetensors|bin|index\.json|tmp)")


@dataclass(frozen=True, slots=True)
class Exported:
    """A tensor on its way out.

    Attributes:
        joined: its shape there, where that is another for the same elements in the same order.
    """

    name: str
    entry: TensorEntry
    dtype: str
    joined: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape if self.joined is None else self.joined

    @property
    def nbytes(self) -> int:
        return math.prod(self.entry.shape) * element_bytes(self.dtype)


def is_exported(name: str) -> bool:
    """Whether a file is one that an export of an older version may have left, when it was killed."""
    return _EXPORTED_FILE.fullmatch(name) is not None


def write_files(
    payloads: StoredPayloads,
    directory: Path,
    to: FileFormat,
    tensors: Sequence[Exported],
    max_shard_bytes: int,
    progress: bool | None,
) -> list[str]:
    """Write tensors, in their order, and where there are several files, their index.

    Args:
        payloads: what is stored.
        directory: an empty one.
        to: format of the files.
        tensors: what to write.
        max_shard_bytes: no file holds more, unless one tensor is larger.
        progress: show a bar; None: if standard error is a terminal.

    Returns:
        Names of the files with tensors.

    Raises:
        ChecksumError, CorruptCheckpointError: what is stored is damaged.
        SaveError: a file cannot be written.
    """
    shards = _shards(tensors, max_shard_bytes)
    total = sum(tensor.nbytes for tensor in tensors)
    with Progress("export", total, shown=progress) as bar:
        write = _write_safetensors if to == "safetensors" else _write_torch
        files = [
            write(payloads, directory, _file_name(to, n, len(shards)), shard, bar.advance)
            for n, shard in enumerate(shards, 1)
        ]
    if len(files) > 1:
        _write_weight_map(directory, to, files, shards, total)
    return files


def _shards(tensors: Sequence[Exported], limit: int) -> list[list[Exported]]:
    shards: list[list[Exported]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _stem(to: FileFormat) -> tuple[str, str]:
    return ("model", "safetensors") if to == "safetensors" else ("pytorch_model", "bin")


def _file_name(to: FileFormat, number: int, count: int) -> str:
    stem, ending = _stem(to)
    return f"{stem}.{ending}" if count == 1 else f"{stem}-{number:05d}-of-{count:05d}.{ending}"


def _write_weight_map(
    directory: Path, to: FileFormat, files: Sequence[str], shards: Sequence[Sequence[Exported]], total: int
) -> None:
    stem, ending = _stem(to)
    weights = {tensor.name: file for file, shard in zip(files, shards, strict=True) for tensor in shard}
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
    LocalStorage(directory).publish(f"{stem}.{ending}.index.json", json.dumps(document, indent=2).encode() + b"\n")


def _write_safetensors(
    payloads: StoredPayloads, directory: Path, name: str, tensors: Sequence[Exported], advance: Callable[[int], None]
) -> str:
    described = [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]
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


def _stream_tensor(payloads: StoredPayloads, tensor: Exported, sink: Sink) -> None:
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
    for chunk, source, given in zip(entry.chunks, sources, read, strict=True):
        payloads.was_read(entry, chunk, source.crc32 if isinstance(source, CastSource) else given)


def _write_torch(
    payloads: StoredPayloads, directory: Path, name: str, tensors: Sequence[Exported], advance: Callable[[int], None]
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
    described = [(tensor.name, getattr(torch, tensor.dtype), tensor.shape) for tensor in tensors]
    write_torch_file(directory / name, described, fill)
    return name
