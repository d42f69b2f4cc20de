"""Items of one tensor as torch itself writes them, recognized without a general parse.

A checkpoint of stock writers may hold 20,000 of them. Between two such items of one torch version, only a few numbers
of the zip's directory differ; so the rest is compared in one step, against a picture of it with these numbers masked
out, and the numbers are held against each other, against the local headers and against the size of the item, as a
general parse does. Not to fit is no verdict: `zip_records.py` then finds out what the item is.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

__all__ = ["StockItem", "recognize"]


class StockItem(NamedTuple):
    """Records of a tensor item.

    Attributes:
        pickle: content of `data.pkl`; its CRC-32 has been checked.
        record_offset: first byte of `data/0`, relative to the item.
        record_bytes: its size.
        record_crc32: its CRC-32.
    """

    pickle: bytes
    record_offset: int
    record_bytes: int
    record_crc32: int


# The records that versions of torch write for a tensor, in order (torch 2.13, 2.6, 2.1, 2.0 and 1.13).
_ID, _VERSION, _ORDER = ".data/serialization_id", "version", "byteorder"
_RECORDS = (
    ("data.pkl", ".format_version", ".storage_alignment", _ORDER, "data/0", _VERSION, _ID),
    ("data.pkl", ".format_version", _ORDER, "data/0", _VERSION, _ID),
    ("data.pkl", _ORDER, "data/0", _VERSION, _ID),
    ("data.pkl", _ORDER, "data/0", _VERSION),
    ("data.pkl", "data/0", _VERSION),
)
_LITTLE = (zlib.crc32(b"little"), 6, 6)  # CRC-32 and sizes of the byte order record, which must say just this

_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END64, _LOCATOR, _END = struct.Struct("<4sQHHIIQQQQ"), struct.Struct("<4sIQI"), struct.Struct("<4sHHHHIIH")
_DESCRIPTOR = struct.Struct("<4sIII")
_END_BYTES = _END64.size + _LOCATOR.size + _END.size
_FLAGS = 0x0808  # UTF-8 names; CRC-32 and sizes follow the record
_MAX_32 = 0xFFFFFFFF


class _Picture(NamedTuple):
    """Directory and end records of an archive, little-endian ints as wide as they are long."""

    length: int
    mask: int  # ones where all archives agree
    constant: int
    numbers: struct.Struct  # the fields that are looked at


def _picture(records: tuple[str, ...]) -> _Picture:
    def image(fill: int, little: tuple[int, ...]) -> bytes:
        """The bytes with `fill` in each field that varies, and `little` for the byte order record."""
        parts = []
        for record in records:
            name = f"archive/{record}".encode()
            summary = little if record == _ORDER else (fill, fill, fill)
            offset = 0 if record == "data.pkl" else fill
            fixed = (b"PK\x01\x02", 0, 0, _FLAGS, 0, 0, 0, *summary, len(name), 0, 0, 0, 0, 0, offset)
            parts.append(_ENTRY.pack(*fixed) + name)
        count, directory_bytes = len(parts), sum(map(len, parts))
        wide = fill << 32 | fill
        parts.append(_END64.pack(b"PK\x06\x06", 44, 0x031E, 45, 0, 0, count, count, directory_bytes, wide))
        parts.append(_LOCATOR.pack(b"PK\x06\x07", 0, wide, 1))
        parts.append(_END.pack(b"PK\x05\x06", 0, 0, count, count, directory_bytes, fill, 0))
        return b"".join(parts)

    zeros, ones = image(0, _LITTLE), image(_MAX_32, _LITTLE)
    constant = int.from_bytes(zeros, "little")
    mask = (1 << 8 * len(zeros)) - 1 & ~(constant ^ int.from_bytes(ones, "little"))
    layout = []
    for record in records:
        entry_bytes = _ENTRY.size + len(f"archive/{record}")
        wanted = {"data.pkl": "16x3I", "data/0": "16x3I14xI"}.get(record, "")
        layout.append(f"{wanted}{entry_bytes - struct.calcsize('<' + wanted)}x")
    numbers = struct.Struct("<" + "".join(layout) + "48xQ8xQ4x16xI2x")
    assert numbers.size == len(zeros)
    return _Picture(len(zeros), mask, constant, numbers)


_PICTURES = tuple(_picture(records) for records in _RECORDS)


def _local_header_start(name: bytes) -> bytes:
    return _LOCAL_HEADER.pack(b"PK\x03\x04", 0, _FLAGS, 0, 0, 0, 0, 0, 0, len(name), 0)[:28]


_PICKLE_AT = 64
_HEAD = _local_header_start(b"archive/data.pkl") + b"\x12\x00archive/data.pklFB\x0e\x00" + b"Z" * 14
_PAYLOAD_NAME = b"archive/data/0"
_PAYLOAD_HEADER = _local_header_start(_PAYLOAD_NAME)


def recognize(head: bytes, tail: bytes, item_bytes: int) -> StockItem | None:
    """The records of an item, if torch wrote it for one tensor that is not empty; None if that is not evident.

    `head` and `tail` are the ends of the item, about a kilobyte of each.
    """
    if not head.startswith(_HEAD):
        return None
    for picture in _PICTURES:
        if int.from_bytes(tail[-picture.length :], "little") & picture.mask == picture.constant:
            break
    else:
        return None
    if len(tail) < picture.length:
        return None
    fields = picture.numbers.unpack_from(tail, len(tail) - picture.length)
    pickle_crc, pickle_bytes, pickle_size, crc, record_bytes, record_size, header_at = fields[:7]
    directory_at, end64_at, narrow_directory_at = fields[7:]

    pickle_stop = _PICKLE_AT + pickle_bytes
    pickle = head[_PICKLE_AT:pickle_stop]
    header = head[header_at : header_at + 44]
    record_at = header_at + 44 + int.from_bytes(header[28:30], "little")
    record_stop = record_at + record_bytes
    tail_at = item_bytes - len(tail)
    if (
        directory_at != item_bytes - picture.length
        or narrow_directory_at not in (directory_at, _MAX_32)
        or end64_at != item_bytes - _END_BYTES
        or pickle_bytes != pickle_size
        or zlib.crc32(pickle) != pickle_crc
        or head[pickle_stop : pickle_stop + 16]
        != _DESCRIPTOR.pack(b"PK\x07\x08", pickle_crc, pickle_bytes, pickle_bytes)
        or header[:28] != _PAYLOAD_HEADER
        or header[30:] != _PAYLOAD_NAME
        or record_bytes != record_size
        or not tail_at <= record_stop <= directory_at - _DESCRIPTOR.size
        or tail[record_stop - tail_at : record_stop - tail_at + 16]
        != _DESCRIPTOR.pack(b"PK\x07\x08", crc, record_bytes, record_bytes)
    ):
        return None
    return StockItem(pickle, record_at, record_bytes, crc)
