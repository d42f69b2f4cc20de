"""Files of `torch.save` with many tensors, written without holding any of them in memory.

`torch.save` lays the archive out around tensors that have no data (`skip_data`); the elements are then written to where
they belong, and their CRC-32 to the two places that state it. The file is like one that `torch.save` has written in one
go.
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.format.crc import crc32

__all__ = ["ElementsSink", "write_torch_file"]

_BUFFER_BYTES = 4 * 1024 * 1024
_LOCAL_HEADER_BYTES, _ENTRY = 30, struct.Struct("<4sHHHHHHIIIHHHHHII")
_DESCRIPTOR = b"PK\x07\x08"


class ElementsSink:
    """Takes the elements of one tensor, in C order, and writes them to a file; a sink for `regrid.Walk`."""

    def __init__(self, fd: int, offset: int) -> None:
        self._fd = fd
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self.position = offset
        self.crc32 = 0

    def space(self, nbytes: int) -> memoryview:
        """Memory for the next bytes, as many of them as it has room for."""
        return self._buffer[: min(nbytes, _BUFFER_BYTES)]

    def filled(self, view: memoryview) -> None:
        """Write what `space` gave and the caller has filled."""
        self.crc32 = crc32(view, self.crc32)
        done = 0
        while done < len(view):
            done += os.pwrite(self._fd, view[done:], self.position + done)
        self.position += len(view)


def write_torch_file(
    path: Path, tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], fill: Callable[[int, ElementsSink], None]
) -> None:
    """Write what `torch.save({name: tensor, ...}, path)` would, and make it durable.

    Args:
        path: of the file; its folder has to have room for it.
        tensors: name, dtype and shape of each.
        fill: called with the number of each tensor in turn, to put its elements into the sink.

    Raises:
        OSError: it cannot be written.
        SaveError: this torch lays files out in some other way.
    """
    scratch = path.with_name(f"{path.name}.space.tmp")
    try:
        _lay_out(path, scratch, tensors)
    finally:
        scratch.unlink(missing_ok=True)
    with path.open("r+b") as file:
        places = _places(file, path)
        for number, (name, dtype, shape) in enumerate(tensors):
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            start, stated_bytes, entry_at = places[f"data/{number}"]
            if stated_bytes != nbytes:
                raise SaveError(f"{path}: torch keeps {stated_bytes} bytes for {name}, expected {nbytes}")
            if not nbytes:
                continue
            sink = ElementsSink(file.fileno(), start)
            fill(number, sink)
            if sink.position != start + nbytes:
                raise SaveError(f"{path}: {sink.position - start} bytes of {name} were given, expected {nbytes}")
            value = sink.crc32.to_bytes(4, "little")
            if os.pread(file.fileno(), 4, sink.position) != _DESCRIPTOR:
                raise SaveError(f"{path}: no descriptor follows {name}; this torch writes files of another form")
            os.pwrite(file.fileno(), value, sink.position + 4)
            os.pwrite(file.fileno(), value, entry_at + 16)
        os.fsync(file.fileno())


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


def _places(file: Any, path: Path) -> dict[str, tuple[int, int, int]]:
    """Of each record, without the archive's name: first byte, size, and where its directory entry is."""
    with zipfile.ZipFile(file) as archive:
        entry_at = archive.start_dir
        infos = archive.infolist()
    places = {}
    for info in infos:
        entry = os.pread(file.fileno(), _ENTRY.size, entry_at)
        header = os.pread(file.fileno(), _LOCAL_HEADER_BYTES, info.header_offset)
        if entry[:4] != b"PK\x01\x02" or header[:4] != b"PK\x03\x04":
            raise SaveError(f"{path}: torch has written no archive that can be filled in")
        name_bytes, extra_bytes = struct.unpack("<HH", header[26:30])
        start = info.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
        places[info.filename.partition("/")[2]] = (start, info.file_size, entry_at)
        entry_at += _ENTRY.size + sum(_ENTRY.unpack(entry)[10:13])
    return places
