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
from mcore_ckpt.format.tensor_pickle import DTYPES
from mcore_ckpt.items.checks import chunk_name
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.payloads import StoredPayload, StoredPayloads
from mcore_ckpt.tools.regrid import Sink
from mcore_ckpt.tools.verify import check_file

__all__ = ["TorchPayloads", "read_torch_file", "torch_index", "write_torch_file"]

_BUFFER_BYTES = 4 * 1024 * 1024
_LOCAL_HEADER_BYTES, _ENTRY = 30, struct.Struct("<4sHHHHHHIIIHHHHHII")
_DESCRIPTOR = b"PK\x07\x08"
_MAX_DEPTH = 100
# A tensor may be expanded (a row that stands for many): so far beyond what lies in the file, it is let pass.
_MAX_EXPANDED_BYTES = 1024**3


def read_torch_file(path: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors of a torch file by key (nested dicts joined by dots), mapped, not read; and the keys of what is none.

    The checksums of all its records are compared before.

    Raises:
        CheckpointNotFoundError: there is no such file.
        UnsafePickleError: it holds more than tensors and plain values.
        CorruptCheckpointError: it is damaged, two of its tensors have the same key, or one is not stored plainly.
    """
    check_file(storage_at(path.parent, follow_links=True), path.name)
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = " ".join(str(error).split())[:300]
        raise UnsafePickleError(f"{path}: holds more than tensors and plain values: {reason}") from error
    except Exception as error:  # a pickle can fail in any way that building objects can
        raise CorruptCheckpointError(
            f"{path}: not a file of torch.save ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
        ) from error
    tensors: dict[str, torch.Tensor] = {}
    others: list[str] = []
    # Nested lists and dicts of a hostile file may contain one another: as many values as a file has bytes are enough.
    budget = max(100_000, path.stat().st_size)

    def walk(value: Any, prefix: str, depth: int) -> None:
        nonlocal budget
        budget -= 1 + len(prefix) // 64
        if budget < 0 or depth > _MAX_DEPTH:
            raise CorruptCheckpointError(f"{path}: {prefix[:80]}: dicts are nested in one another without an end")
        if isinstance(value, torch.Tensor):
            if prefix in tensors:
                raise CorruptCheckpointError(
                    f"{path}: two of its tensors would both be called {prefix}: of the keys of nested dicts, joined by "
                    "dots, each has to be another; one would be lost"
                )
            _check_plain(value, f"{path}: {prefix}", path.stat().st_size)
            tensors[prefix] = value
        elif isinstance(value, dict):
            for key, part in value.items():
                if not isinstance(key, (str, int, float, bool, type(None))):
                    raise CorruptCheckpointError(f"{path}: {prefix}: a key of type {type(key).__name__}; expected text")
                walk(part, f"{prefix}.{key}" if prefix else str(key), depth + 1)
        else:
            others.append(prefix)

    walk(loaded, "", 0)
    return tensors, others


def _check_plain(tensor: torch.Tensor, where: str, file_bytes: int) -> None:
    """Raise `CorruptCheckpointError` for what has no plain elements, or pretends to have more than the file holds."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu" or dtype not in DTYPES:
        kind = f"{tensor.device.type} {tensor.layout} {tensor.dtype}".replace("torch.", "")
        raise CorruptCheckpointError(f"{where}: expected a dense tensor of a plain dtype, got {kind}; convert it first")
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes > file_bytes + _MAX_EXPANDED_BYTES:
        raise CorruptCheckpointError(
            f"{where}: {nbytes} bytes of elements in a file of {file_bytes}: it is expanded from fewer; store a copy"
        )


def torch_index(directory: Path, file: str, tensors: Mapping[str, torch.Tensor]) -> CheckpointIndex:
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

    def __init__(self, index: CheckpointIndex, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(index)
        self._tensors = tensors
        self._mapped: dict[str, list[tuple[int, int, int]]] = {}

    def _locate(self, entry: TensorEntry, chunk: StoredChunk) -> StoredPayload:
        tensor = self._tensors[entry.fqn].detach().resolve_conj().resolve_neg()
        file, nbytes = chunk.item.file, tensor.numel() * tensor.element_size()
        if file not in self._mapped:
            self._mapped[file] = _mappings(Path(self.index.path) / file)
        if tensor.is_contiguous():
            # By range, where the file has it: of one that was cut meanwhile, mapped bytes would end in a signal.
            for start, stop, offset in self._mapped[file]:
                if start <= tensor.data_ptr() and tensor.data_ptr() + nbytes <= stop:
                    at = tensor.data_ptr() - start + offset
                    return StoredPayload(chunk_name(entry.fqn, chunk), file, at, nbytes, None)
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        return StoredPayload(chunk_name(entry.fqn, chunk), chunk.item.file, 0, len(content), None, content)


def _mappings(path: Path) -> list[tuple[int, int, int]]:
    """Where this process has mapped a file: first and last address, and which byte of the file is at the first."""
    found = []
    try:
        status = path.stat()
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
        for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
            span, _, offset, on_device, inode = line.split(maxsplit=5)[:5]
            if (on_device, int(inode)) == (device, status.st_ino):
                start, _, stop = span.partition("-")
                found.append((int(start, 16), int(stop, 16), int(offset, 16)))
    except (OSError, ValueError):
        return []
    return found


def write_torch_file(
    path: Path,
    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
    fill: Callable[[int, Sink], None],
    *,
    around: Callable[[Sequence[torch.Tensor]], Any] | None = None,
    pickle_module: Any = pickle,
) -> None:
    """Write what `torch.save({name: tensor, ...}, path)` would, and make it durable.

    Args:
        path: of the file; its folder has to have room for it.
        tensors: name, dtype and shape of each.
        fill: called with the number of each tensor in turn, to put its elements into the sink.
        around: what is saved, given the tensors; a pickle of it has to come by them in their order.
        pickle_module: as for `torch.save`.

    Raises:
        OSError, SaveError: it cannot be written.
        SaveError: this torch lays files out in some other way.
    """
    scratch = path.with_name(f"{path.name}.space.tmp")
    try:
        _lay_out(path, scratch, tensors, around, pickle_module)
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


def _lay_out(
    path: Path,
    scratch: Path,
    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
    around: Callable[[Sequence[torch.Tensor]], Any] | None,
    pickle_module: Any,
) -> None:
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
    try:
        with torch.serialization.skip_data():
            saved = content if around is None else around(list(content.values()))
            torch.save(saved, path, pickle_module=pickle_module)
    except RuntimeError as error:
        # Its writer says so of whatever the file system answers, a full disk or an I/O error alike.
        raise SaveError(
            f"{path}: torch could not write the file: {error}; look for a full disk (df) or a failing device (dmesg), "
            "then export again"
        ) from error


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
