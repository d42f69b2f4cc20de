"""A directory of safetensors or torch files, sharded by size, as the Hugging Face libraries name them.

`model-00001-of-00004.safetensors` with `model.safetensors.index.json`, or one `model.safetensors`. Whoever
calls this gives the directory its name when it is complete.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mcore_ckpt.convert._file_stream import FileStream, Streams, TargetFile, WriteBehind
from mcore_ckpt.convert._read_ahead import ReadAhead
from mcore_ckpt.convert._reshard_copy import CastSource, Journal, check_chunks, chunk_sources
from mcore_ckpt.convert._safetensors_files import safetensors_header
from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.console import Progress
from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.core.threads import done_by
from mcore_ckpt.format.index import TensorEntry
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.payloads import StoredPayload, StoredPayloads
from mcore_ckpt.tools.regrid import Sink, Walk, reads_of

__all__ = ["MODEL_FILES", "Exported", "FileFormat", "export_fingerprint", "stream_tensor", "write_files"]

FileFormat = Literal["safetensors", "torch"]

MODEL_FILES = (
    "config.json generation_config.json tokenizer.json tokenizer.model tokenizer_config.json special_tokens_map.json "
    "added_tokens.json vocab.json vocab.txt merges.txt chat_template.json chat_template.jinja spiece.model"
).split()
"""What lies beside the weights of a model of the Hugging Face libraries."""

_BUFFER_BYTES = 8 * 1024**2
# While one waits for the disk, another puts together.
_THREADS = 2
_SYNC_BYTES = 1024**3


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


def export_fingerprint(
    payloads: StoredPayloads, tensors: Sequence[Exported], max_shard_bytes: int, files: Mapping[str, Sequence[int]]
) -> str:
    """Of everything that the bytes of safetensors files depend on.

    Args:
        payloads: the source.
        tensors: what is written, in this order.
        max_shard_bytes: no file holds more.
        files: length and time of change of each file of the source.
    """
    found: dict[str, Any] = {
        "source": str(Path(payloads.index.path).resolve()),
        "files": {name: list(state) for name, state in files.items()},
        "tensors": [[tensor.name, tensor.entry.fqn, tensor.dtype, *tensor.shape] for tensor in tensors],
        "shards": [max_shard_bytes, _THREADS],
        "recipe": hashlib.sha256("\n".join(payloads.recipe()).encode()).hexdigest(),
    }
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def write_files(
    payloads: StoredPayloads,
    directory: Path,
    to: FileFormat,
    tensors: Sequence[Exported],
    max_shard_bytes: int,
    progress: bool | None,
    journal: Journal | None = None,
) -> list[str]:
    """Write tensors, in their order, and where there are several files, their index.

    Args:
        payloads: what is stored.
        directory: an empty one, or one that an interrupted run has left.
        to: format of the files.
        tensors: what to write.
        max_shard_bytes: no file holds more, unless one tensor is larger.
        progress: show a bar; None: if standard error is a terminal.
        journal: of the directory; what is done already is not done again (safetensors only).

    Returns:
        Names of the files with tensors.

    Raises:
        ChecksumError, CorruptCheckpointError: what is stored is damaged.
        SaveError: a file cannot be written.
    """
    shards = _shards(tensors, max_shard_bytes)
    total = sum(tensor.nbytes for tensor in tensors)
    files = [_file_name(to, n, len(shards)) for n in range(1, len(shards) + 1)]
    with Progress("export", total, shown=progress) as bar:
        if to == "safetensors":
            _write_safetensors(payloads, directory, files, shards, bar.advance, journal)
        else:
            for name, shard in zip(files, shards, strict=True):
                _write_torch(payloads, directory, name, shard, bar.advance)
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
    storage_at(directory).publish(f"{stem}.{ending}.index.json", json.dumps(document, indent=2).encode() + b"\n")


@dataclass(frozen=True, slots=True)
class _Shard:
    """A safetensors file: its name, its header, where each tensor starts in it, and its size."""

    name: str
    header: bytes
    starts: dict[str, int]
    size_bytes: int


def _described(name: str, tensors: Sequence[Exported]) -> _Shard:
    header, starts = safetensors_header(
        [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors], {"format": "pt"}
    )
    return _Shard(name, header, starts, len(header) + sum(tensor.nbytes for tensor in tensors))


@dataclass(slots=True)
class _Writing:
    """What the threads share that write safetensors files: each has a stretch of the tensors, one after another."""

    payloads: StoredPayloads
    directory: Path
    work: list[list[tuple[_Shard, Exported]]]
    journal: Journal | None
    advance: Callable[[int], None]
    stop: threading.Event = field(default_factory=threading.Event)


def _write_safetensors(
    payloads: StoredPayloads,
    directory: Path,
    names: Sequence[str],
    shards: Sequence[Sequence[Exported]],
    advance: Callable[[int], None],
    journal: Journal | None,
) -> None:
    tensors: list[tuple[_Shard, Exported]] = []
    for name, content in zip(names, shards, strict=True):
        shard = _described(name, content)
        if not content:
            storage_at(directory).publish(name, shard.header)
        tensors += [(shard, tensor) for tensor in content]
    run = _Writing(payloads, directory, _stretches(tensors), journal, advance)
    with ThreadPoolExecutor(len(run.work), thread_name_prefix="mcore-ckpt-export") as pool:
        try:
            futures = [done_by(pool, _write_stretch, run, number) for number in range(len(run.work))]
            for future in futures:
                future.result()
        except BaseException:
            run.stop.set()
            raise


def _stretches(tensors: list[tuple[_Shard, Exported]]) -> list[list[tuple[_Shard, Exported]]]:
    """As many as there are threads, of about as many bytes."""
    total = sum(tensor.nbytes for _, tensor in tensors)
    found: list[list[tuple[_Shard, Exported]]] = [[] for _ in range(_THREADS)]
    done = 0
    for shard, tensor in tensors:
        found[min(_THREADS - 1, done * _THREADS // max(1, total))].append((shard, tensor))
        done += tensor.nbytes
    return found


def _write_stretch(run: _Writing, number: int) -> None:
    """Write what a thread has of the files; every gibibyte, and in the end, it is durable and noted in the journal."""
    work = run.work[number]
    done = 0 if run.journal is None else run.journal.done.get(number, 0)
    for _, tensor in work[:done]:
        run.advance(tensor.nbytes)
    files: dict[str, TargetFile] = {}
    unsynced_bytes = 0
    try:
        with WriteBehind() as writes, ReadAhead(run.payloads.files) as ahead:
            streams, walk = Streams(writes, _BUFFER_BYTES, 4), Walk()

            def locate(item: tuple[_Shard, Exported]) -> tuple[_Shard, Exported, list[StoredPayload]]:
                return *item, _located(run.payloads, item[1])

            def sync() -> None:
                streams.flush()
                writes.drain()
                for file in files.values():
                    file.sync()
                if run.journal is not None:
                    run.journal.record(number, done, {}, {})

            stream: FileStream | None = None
            try:
                for shard, tensor, located in ahead.steps(map(locate, work[done:]), lambda item: _reads(*item[1:])):
                    if run.stop.is_set():
                        break
                    start = shard.starts[tensor.name]
                    if shard.name not in files:
                        files[shard.name] = TargetFile(str(run.directory / shard.name), shard.size_bytes)
                    if stream is None or stream.file is not files[shard.name]:
                        if stream is not None:
                            stream.flush()
                        first = start == len(shard.header)
                        stream = streams.open(files[shard.name], 0 if first else start)
                        if first:
                            stream.write(shard.header)
                    assert stream.position == start
                    _stream(run.payloads, tensor, located, stream, walk, ahead)
                    run.advance(tensor.nbytes)
                    done += 1
                    unsynced_bytes += tensor.nbytes
                    if unsynced_bytes >= _SYNC_BYTES:
                        sync()
                        unsynced_bytes = 0
            except BaseException:
                run.stop.set()
                raise
            sync()
    finally:
        for file in files.values():
            file.close()


def _located(payloads: StoredPayloads, tensor: Exported) -> list[StoredPayload]:
    """Where the chunks of a tensor lie; of one without elements, none has to be found."""
    if 0 in tensor.entry.shape:
        return []
    return [payloads.locate(tensor.entry, chunk) for chunk in tensor.entry.chunks]


def _boxes(tensor: Exported) -> tuple[list[Box], list[Box]]:
    """What is read, and what is written of it."""
    shape = tensor.entry.shape
    return [Box(chunk.offsets, chunk.sizes) for chunk in tensor.entry.chunks], [Box((0,) * len(shape), shape)]


def _reads(tensor: Exported, located: Sequence[StoredPayload]) -> Iterator[tuple[StoredPayload, int, int]]:
    """What is going to be read of a tensor, in order."""
    if located and tensor.dtype == tensor.entry.dtype:
        for n, start, nbytes in reads_of(*_boxes(tensor), element_bytes(tensor.dtype)):
            yield located[n], start, nbytes


def stream_tensor(payloads: StoredPayloads, tensor: Exported, sink: Sink, walk: Walk) -> None:
    """One tensor, put together from its chunks in C order; each chunk is held against its checksum."""
    _stream(payloads, tensor, _located(payloads, tensor), sink, walk, None)


def _stream(
    payloads: StoredPayloads,
    tensor: Exported,
    located: Sequence[StoredPayload],
    sink: Sink,
    walk: Walk,
    ahead: ReadAhead | None,
) -> None:
    """The same, of a tensor that has been located, and may be being read."""
    entry = tensor.entry
    if 0 in entry.shape:
        return
    sources = chunk_sources(payloads, located, entry, tensor.dtype, ahead)
    walk.elem_bytes = element_bytes(tensor.dtype)
    boxes, whole = _boxes(tensor)
    read = walk.move(boxes, sources, whole, [sink])
    check_chunks(located, sources, read, payloads.index.path, "export")
    for chunk, source, given in zip(entry.chunks, sources, read, strict=True):
        payloads.was_read(entry, chunk, source.crc32 if isinstance(source, CastSource) else given)


def _write_torch(
    payloads: StoredPayloads, directory: Path, name: str, tensors: Sequence[Exported], advance: Callable[[int], None]
) -> None:
    import torch

    from mcore_ckpt.convert._torch_files import write_torch_file

    walk = Walk()

    def fill(number: int, sink: Sink) -> None:
        stream_tensor(payloads, tensors[number], sink, walk)
        advance(tensors[number].nbytes)

    lacking = next((tensor for tensor in tensors if not hasattr(torch, tensor.dtype)), None)
    if lacking is not None:
        raise OptionError(
            f"{lacking.name}: torch {torch.__version__} has no {lacking.dtype}; leave it out, or convert it"
        )
    described = [(tensor.name, getattr(torch, tensor.dtype), tensor.shape) for tensor in tensors]
    write_torch_file(directory / name, described, fill)
