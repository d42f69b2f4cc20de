"""The item on disk: one tensor as the zip archive that `torch.save(tensor)` makes of it, emitted by hand.

    head      local header + `archive/data.pkl`          dtype and shape (tensor_pickle.py)
              local header of `archive/data/0`, padded so that the payload starts on a 64-byte boundary of the item
    payload   the tensor's little-endian bytes, C order
    tail      data descriptor of the payload             carries its CRC-32
              `archive/version`, `archive/byteorder`     constant bytes
              central directory, end records             carries the payload's CRC-32 again

Head and tail follow from dtype and shape alone (`tensor_template`); the CRC-32 of the payload is the one thing to be
filled in afterwards, in place. `place` says where in a file such an item may start; `docs/format.md` has every field.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from mcore_ckpt.format.tensor_pickle import dtype_entry, tensor_pickle
from mcore_ckpt.format.zip_records import (
    DESCRIPTOR,
    DESCRIPTOR64,
    DIRECTORY_ENTRY,
    END,
    END64,
    END64_LOCATOR,
    LOCAL_HEADER,
)

LARGE_TENSOR_BYTES: Final = 512 * 1024
"""From this size on, a payload starts on a page of the file; below, a page of padding each would cost too much."""

ITEM_ALIGNMENT: Final = 64
"""Items start, and payloads of small tensors lie, on multiples of this: torch's storage alignment."""

PAGE_BYTES: Final = 4096
"""Alignment of large payloads in the file: what O_DIRECT and mmap ask for."""


@dataclass(frozen=True, slots=True)
class TensorTemplate:
    """The bytes around a tensor's payload."""

    head: bytes  # bytes before the payload; a multiple of 64 of them
    payload_bytes: int  # size of the payload
    tail: bytes  # bytes after the payload, with zeros where its CRC-32 belongs
    crc_positions: tuple[int, ...]  # offsets in `tail` of those places (little-endian uint32 each)
    alignment: int  # the payload starts on a multiple of this in the file (see `place`)
    item_bytes: int  # size of the whole item


def element_bytes(dtype: str) -> int:
    """Bytes of one element of `dtype` (torch's name without `torch.`); raises `UnsupportedDtypeError`."""
    return dtype_entry(dtype).element_bytes


def place(pos: int, template: TensorTemplate) -> int:
    """The first file offset >= `pos` at which an item of that template may start."""
    if template.alignment == PAGE_BYTES:
        head_bytes = len(template.head)
        return (pos + head_bytes + PAGE_BYTES - 1) // PAGE_BYTES * PAGE_BYTES - head_bytes
    return (pos + ITEM_ALIGNMENT - 1) // ITEM_ALIGNMENT * ITEM_ALIGNMENT


# -------------------------------------------------------------------------------------------------------- zip fields

_LOCAL_MARK, _DESCRIPTOR_MARK, _ENTRY_MARK = b"PK\x03\x04", b"PK\x07\x08", b"PK\x01\x02"
_END64_MARK, _LOCATOR_MARK, _END_MARK = b"PK\x06\x06", b"PK\x06\x07", b"PK\x05\x06"

_ZIP64_EXTRA = 0x0001
_PADDING_EXTRA = int.from_bytes(b"FB", "little")  # torch's own tag for padding; every reader skips it
_MAX_32 = 0xFFFFFFFF
_STORED = 0
_VERSION_20, _VERSION_45 = 20, 45  # zip version needed to extract: 2.0, or 4.5 where zip64 fields occur
_TIME, _DATE = 0, 0x0021  # 1980-01-01 00:00, the first moment that zip can name: equal tensors give equal bytes
_UTF8 = 0x0800
_UTF8_AND_DESCRIPTOR = 0x0808  # sizes and CRC of the payload follow it

_PICKLE_NAME = b"archive/data.pkl"


def _local_header(name: bytes, version: int, flags: int, crc: int, size: int, extra_bytes: int = 0) -> bytes:
    return (
        LOCAL_HEADER.pack(_LOCAL_MARK, version, flags, _STORED, _TIME, _DATE, crc, size, size, len(name), extra_bytes)
        + name
    )


def _central_entry(
    name: bytes, version: int, flags: int, crc: int, size: int, offset: int, extra: bytes = b""
) -> bytes:
    fixed = (_ENTRY_MARK, version, version, flags, _STORED, _TIME, _DATE, crc, size, size, len(name), len(extra))
    return DIRECTORY_ENTRY.pack(*fixed, 0, 0, 0, 0, offset) + name + extra


def _zip64_extra(*values: int) -> bytes:
    """The values whose 32-bit fields hold 0xFFFFFFFF, in the order that the zip specification gives."""
    return struct.pack(f"<HH{len(values)}Q", _ZIP64_EXTRA, 8 * len(values), *values)


def _end_records(count: int, directory_bytes: int, directory_at: int, zip64: bool) -> bytes:
    if not zip64:
        return END.pack(_END_MARK, 0, 0, count, count, directory_bytes, directory_at, 0)
    record_bytes = END64.size - 12  # it does not count its first two fields
    fields = (record_bytes, _VERSION_45, _VERSION_45, 0, 0, count, count, directory_bytes, directory_at)
    short = min(count, 0xFFFF)
    return (
        END64.pack(_END64_MARK, *fields)
        + END64_LOCATOR.pack(_LOCATOR_MARK, 0, directory_at + directory_bytes, 1)
        + END.pack(_END_MARK, 0, 0, short, short, min(directory_bytes, _MAX_32), _MAX_32, 0)
    )


def _constant(name: bytes, content: bytes) -> tuple[tuple[bytes, int, int, int, int], bytes]:
    """A record that is the same in all archives: what the headers say of it, and its bytes."""
    fields = (name, _VERSION_20, _UTF8, zlib.crc32(content), len(content))
    return fields, _local_header(*fields) + content


_CONSTANTS = (_constant(b"archive/version", b"3\n"), _constant(b"archive/byteorder", b"little"))
_CONSTANT_RECORDS = b"".join(record for _, record in _CONSTANTS)

# Where a CRC-32 stands in a data descriptor, and in an entry of the directory.
_DESCRIPTOR_CRC, _CENTRAL_CRC = 4, 16


# ---------------------------------------------------------------------------------------------------------- archives

# The end of an archive may pass 4 GiB although no payload does.
_ZIP64_FROM_BYTES = _MAX_32 - 64 * 1024
_MAX_PAYLOAD_BYTES = (1 << 63) - 1024 * 1024
_MOST_OF_AN_ENTRY = 128  # of the directory, in bytes


@dataclass(frozen=True, slots=True)
class PayloadFrame:
    """What is around one payload of an archive: its local header, and its data descriptor."""

    head: bytes
    payload_bytes: int
    zip64: bool

    @classmethod
    def of(cls, number: int, nbytes: int, offset: int) -> PayloadFrame:
        """Frame of a payload whose header is at `offset`; padding at its end moves the payload to a multiple of 64."""
        name, zip64 = _payload_name(number), nbytes >= _ZIP64_FROM_BYTES
        # (This extra field is also what makes the data descriptor one of 8-byte sizes.)
        large = _zip64_extra(nbytes, nbytes) if zip64 else b""
        padding_bytes = -(offset + LOCAL_HEADER.size + len(name) + len(large) + 4) % ITEM_ALIGNMENT
        extra = large + struct.pack("<HH", _PADDING_EXTRA, padding_bytes) + b"Z" * padding_bytes
        version, size = (_VERSION_45, _MAX_32) if zip64 else (_VERSION_20, 0)
        return cls(_local_header(name, version, _UTF8_AND_DESCRIPTOR, 0, size, len(extra)) + extra, nbytes, zip64)

    def tail_with(self, payload_crc32: int) -> bytes:
        """The descriptor of a payload that has this CRC-32."""
        descriptor = DESCRIPTOR64 if self.zip64 else DESCRIPTOR
        return descriptor.pack(_DESCRIPTOR_MARK, payload_crc32, self.payload_bytes, self.payload_bytes)


class ArchiveLayout:
    """Where everything lies in what `torch.save` writes of an object with tensors, `pickled` with storages by number.

    Attributes:
        begin: the file up to the header of the first storage.
        offsets: of each storage's header; header, payload and descriptor follow one another (`frame`), and so do all
            storages.
    """

    def __init__(self, pickled: bytes, storage_bytes: Sequence[int]) -> None:
        self._pickle = (_PICKLE_NAME, _VERSION_20, _UTF8, zlib.crc32(pickled), len(pickled))
        self.begin = _local_header(*self._pickle) + pickled
        self._storage_bytes = storage_bytes
        offsets, position = [], len(self.begin)
        for number, nbytes in enumerate(storage_bytes):
            offsets.append(position)
            frame = PayloadFrame.of(number, nbytes, position)
            position += len(frame.head) + nbytes + len(frame.tail_with(0))
        self.offsets = tuple(offsets)
        self._end_at = position
        end_at = position + _MOST_OF_AN_ENTRY * (len(offsets) + 4)
        self._zip64 = max(storage_bytes, default=0) >= _ZIP64_FROM_BYTES or end_at >= _MAX_32 or len(offsets) > 0xFFF0

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        return self._end_at + len(self.end([0] * len(self._storage_bytes)))

    def frame(self, number: int) -> PayloadFrame:
        """What is around the payload of a storage."""
        return PayloadFrame.of(number, self._storage_bytes[number], self.offsets[number])

    def crc_positions(self) -> Iterator[tuple[int, int]]:
        """Where the CRC-32 of each storage stands in the file: in its descriptor, and in the directory."""
        at = self._end_at + len(_CONSTANT_RECORDS) + len(_central_entry(*self._pickle, 0))
        entries = self._entries([0] * len(self._storage_bytes))
        for number, (nbytes, offset, entry) in enumerate(zip(self._storage_bytes, self.offsets, entries, strict=True)):
            yield offset + len(self.frame(number).head) + nbytes + _DESCRIPTOR_CRC, at + _CENTRAL_CRC
            at += len(entry)

    def _entries(self, crcs: Sequence[int]) -> Iterator[bytes]:
        """The directory's entries of the storages."""
        for number, (nbytes, offset, crc) in enumerate(zip(self._storage_bytes, self.offsets, crcs, strict=True)):
            values = [nbytes, nbytes] if nbytes >= _ZIP64_FROM_BYTES else []
            size = _MAX_32 if values else nbytes
            if offset >= _MAX_32:
                values.append(offset)
            version, extra = (_VERSION_45, _zip64_extra(*values)) if values else (_VERSION_20, b"")
            entry = _payload_name(number), version, _UTF8_AND_DESCRIPTOR, crc, size
            yield _central_entry(*entry, min(offset, _MAX_32), extra)

    def end(self, crcs: Sequence[int]) -> bytes:
        """The file behind the last storage, for payloads that have these CRC-32s."""
        directory = [_central_entry(*self._pickle, 0), *self._entries(crcs)]
        at = self._end_at
        for fields, record in _CONSTANTS:
            place = (_MAX_32, _zip64_extra(at)) if self._zip64 else (at, b"")
            directory.append(_central_entry(*fields, *place))
            at += len(record)
        listed = b"".join(directory)
        return _CONSTANT_RECORDS + listed + _end_records(len(directory), len(listed), at, self._zip64)


def _payload_name(number: int) -> bytes:
    return b"archive/data/%d" % number


# ---------------------------------------------------------------------------------------------------------- templates


# 4096 templates take about 5 MB; more would eat into what a save is allowed to take.
@lru_cache(maxsize=4096)
def tensor_template(dtype: str, shape: tuple[int, ...]) -> TensorTemplate:
    """The bytes around the payload of a C-contiguous tensor of `shape`, in elements.

    Raises `UnsupportedDtypeError`, or `ValueError` for a negative size or a tensor of 2**63 bytes.
    """
    element_count = math.prod(shape)
    payload_bytes = element_count * dtype_entry(dtype).element_bytes
    if payload_bytes > _MAX_PAYLOAD_BYTES or (shape and min(shape) < 0):
        raise ValueError(f"shape {list(shape)} of a {dtype} tensor: expected sizes >= 0 and less than 2**63 bytes")
    layout = ArchiveLayout(tensor_pickle(dtype, shape, element_count), (payload_bytes,))
    frame = layout.frame(0)
    alignment = PAGE_BYTES if payload_bytes >= LARGE_TENSOR_BYTES else ITEM_ALIGNMENT
    head, tail = layout.begin + frame.head, frame.tail_with(0) + layout.end((0,))
    (positions,) = layout.crc_positions()
    crc_positions = tuple(position - len(head) - payload_bytes for position in positions)
    item_bytes = len(head) + payload_bytes + len(tail)
    return TensorTemplate(head, payload_bytes, tail, crc_positions, alignment, item_bytes)
