"""Files of `torch.save` with many tensors, read and written without holding any of them in memory.

Read: `torch.load` maps a file, and its bytes come as they are touched. Written: `torch.save` lays the archive out
around tensors that have no data (`skip_data`); the elements are then written to where they belong, and their CRC-32 to
the two places that state it. The file is like one that `torch.save` has written in one go.
"""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.convert._file_stream import Streams, StreamSink, TargetFile, WriteBehind
from mcore_ckpt.core.errors import CorruptCheckpointError, SaveError, UnsafePickleError
from mcore_ckpt.format.index import CheckpointIndex, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.load.stored_items import chunk_name
from mcore_ckpt.tools.payloads import StoredPayload, StoredPayloads
from mcore_ckpt.tools.regrid import Sink

__all__ = ["TorchPayloads", "read_torch_file", "torch_index", "write_torch_file"]

_BUFFER_BYTES = 4 * 1024 * 1024
_LOCAL_HEADER_BYTES, _ENTRY = 30, struct.Struct("<4sHHHHHHIIIHHHHHII")
_DESCRIPTOR = b"PK\x07\x08"


def read_torch_file(path: Path) -> tuple[dict[str, Any], int]:
    """The tensors of a torch file by key (nested dicts joined by dots), mapped, not read; how much else it holds."""
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = " ".join(str(error).split())[:300]
        raise UnsafePickleError(f"{path}: holds more than tensors and plain values: {reason}") from error
    except (RuntimeError, EOFError, ValueError) as error:
        raise CorruptCheckpointError(f"{path}: not a file of torch.save ({error})") from error
    tensors: dict[str, Any] = {}
    others = 0

    def walk(value: Any, prefix: str) -> None:
        nonlocal others
        if isinstance(value, torch.Tensor):
            tensors[prefix] = value
        elif isinstance(value, dict):
            for key, part in value.items():
                walk(part, f"{prefix}.{key}" if prefix else str(key))
        else:
            others += 1

    walk(loaded, "")
    return tensors, others


def torch_index(directory: Path, file: str, tensors: Mapping[str, Any]) -> CheckpointIndex:
    """An index of torch tensors that `torch.load(mmap=True)` gave for one file."""
    entries = {}
    for key, tensor in tensors.items():
        shape = tuple(tensor.shape)
        item = StoredItem(file, 0, tensor.numel() * tensor.element_size())
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries[key] = TensorEntry(key, dtype, shape, (StoredChunk((0,) * len(shape), shape, item),))
    return CheckpointIndex(str(directory), entries, {})


class TorchPayloads(StoredPayloads):
    """Payloads of a `torch_index`; the bytes come from the mapped file as they are touched."""

    def __init__(self, index: CheckpointIndex, tensors: Mapping[str, Any]) -> None:
        super().__init__(index)
        self._tensors = tensors

    def _locate(self, entry: TensorEntry, chunk: StoredChunk) -> StoredPayload:
        tensor = self._tensors[entry.fqn]
        if not isinstance(tensor, torch.Tensor):
            raise CorruptCheckpointError(f"{entry.fqn}: expected a tensor")
        content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        return StoredPayload(chunk_name(entry.fqn, chunk), chunk.item.file, 0, len(content), None, content)


def write_torch_file(
    path: Path, tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], fill: Callable[[int, Sink], None]
) -> None:
    """Write what `torch.save({name: tensor, ...}, path)` would, and make it durable.

    Args:
        path: of the file; its folder has to have room for it.
        tensors: name, dtype and shape of each.
        fill: called with the number of each tensor in turn, to put its elements into the sink.

    Raises:
        OSError, SaveError: it cannot be written.
        SaveError: this torch lays files out in some other way.
    """
    scratch = path.with_name(f"{path.name}.space.tmp")
    try:
        _lay_out(path, scratch, tensors)
    finally:
        scratch.unlink(missing_ok=True)
    file = TargetFile(str(path), path.stat().st_size)
    try:
        places = _places(file.fd, path)
        stated: list[tuple[str, int, int, int]] = []
        with WriteBehind() as writes:
            streams = Streams(writes, _BUFFER_BYTES, 4)
            for number, (name, dtype, shape) in enumerate(tensors):
                nbytes = torch.Size(shape).numel() * dtype.itemsize
                start, stated_bytes, entry_at = places[f"data/{number}"]
                if stated_bytes != nbytes:
                    raise SaveError(f"{path}: torch keeps {stated_bytes} bytes for {name}, expected {nbytes}")
                if not nbytes:
                    continue
                sink = StreamSink(streams.open(file, start))
                fill(number, sink)
                sink.stream.flush()
                got = sink.stream.position - start
                if got != nbytes:
                    raise SaveError(f"{path}: {got} bytes of {name} were given, expected {nbytes}")
                stated.append((name, sink.crc32, start + nbytes, entry_at))
        for name, value, stop, entry_at in stated:
            if os.pread(file.fd, 4, stop) != _DESCRIPTOR:
                raise SaveError(f"{path}: no descriptor follows {name}; this torch writes files of another form")
            for position in (stop + 4, entry_at + 16):
                file.write(position, memoryview(value.to_bytes(4, "little")))
        file.sync()
    finally:
        file.close()


def _lay_out(path: Path, scratch: Path, tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> None:
    """Let torch write the file around elements that it leaves out; the tensors lie in a file without any blocks."""
    largest = max((torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in tensors), default=0)
    with scratch.open("wb") as file:
        file.truncate(largest)
    content: dict[str, torch.Tensor] = {}
    for name, dtype, shape in tensors:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        flat = (
            torch.from_file(str(scratch), shared=True, size=nbytes, dtype=torch.uint8)
            if nbytes
            else torch.empty(0, dtype=torch.uint8)
        )
        content[name] = flat.view(dtype).view(shape)
    with torch.serialization.skip_data():
        torch.save(content, path)


def _places(fd: int, path: Path) -> dict[str, tuple[int, int, int]]:
    """Of each record, without the archive's name: first byte, size, and where its directory entry is."""
    with zipfile.ZipFile(path) as archive:
        entry_at = archive.start_dir
        infos = archive.infolist()
    places = {}
    for info in infos:
        entry = os.pread(fd, _ENTRY.size, entry_at)
        header = os.pread(fd, _LOCAL_HEADER_BYTES, info.header_offset)
        if entry[:4] != b"PK\x01\x02" or header[:4] != b"PK\x03\x04":
            raise SaveError(f"{path}: torch has written no archive that can be filled in")
        name_bytes, extra_bytes = struct.unpack("<HH", header[26:30])
        start = info.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
        places[info.filename.partition("/")[2]] = (start, info.file_size, entry_at)
        entry_at += _ENTRY.size + sum(_ENTRY.unpack(entry)[10:13])
    return places
