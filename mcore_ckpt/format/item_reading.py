"""Where the bytes of a stored tensor lie in its item, found from the ends of the item alone, and not trusted.

    locate_tensor(read, ...)      -> dtype, shape, place and CRC-32 of the payload, from headers
    form_of(item, ...)            -> what items of that dtype, shape and writer have in common
    verify_records(read, ...)     -> every record of any archive of `torch.save`, with its CRC-32

Any item can be parsed as the zip archive that it has to be (zip_records.py, tensor_pickle.py), and that decides. But a
checkpoint may hold 20,000 items that differ in a few numbers; so most are recognized by comparing bytes instead, which
takes a fifth of the time or less:

    an item of our own       with the template that dtype and shape lead to: all but the payload's CRC-32 is known
    an item of torch         with the directories that versions of torch write; the numbers in them are compared with
                             each other, with the local headers and the size of the item, as the parse does
    an item like another     with the bytes around the payload of an item that was found sound (`ItemForm`)

Not to fit is no verdict: the next way is tried, and the parse comes last. No files here, and no torch.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from mcore_ckpt.core.crc import crc32
from mcore_ckpt.format.item_layout import tensor_template
from mcore_ckpt.format.tensor_pickle import (
    MAX_PICKLE_BYTES,
    MalformedPickleError,
    NotPlainTensorError,
    PickledTensor,
    read_tensor_pickle,
)
from mcore_ckpt.format.zip_records import (
    DESCRIPTOR,
    DIRECTORY_ENTRY,
    END,
    END64,
    END64_LOCATOR,
    LOCAL_HEADER,
    Archive,
    ItemBytes,
    NotRangeable,
    ZipRecord,
)

DtypeAndShape = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class LocatedTensor:
    """Where the bytes of a stored tensor lie. The tensor is C-contiguous there, in little-endian order."""

    dtype: str  # torch's name without `torch.`
    shape: tuple[int, ...]  # sizes, in elements
    payload_offset: int  # first byte of the tensor, relative to the item
    payload_bytes: int  # size of the tensor
    # Of exactly these bytes; None if the item has no such checksum (a view that was saved with its whole storage, or an
    # item written with checksums switched off).
    crc32: int | None
    record_offset: int  # first byte of the record that the payload lies in, relative to the item
    record_bytes: int  # size of that record
    record_crc32: int | None  # of the whole record; None if the item has no checksums


def locate_tensor(
    read: Callable[[int, int], bytes], item_bytes: int, where: str, expected: DtypeAndShape | None = None
) -> LocatedTensor:
    """Find the payload of a tensor item, reading a kilobyte at either end; `expected` is what the index says.
    `NotRangeable`: it has to be decoded completely; `CorruptCheckpointError`: it cannot be such an item.
    """
    item = ItemBytes(read, item_bytes, where)
    ends = item.head, item.tail, item_bytes
    return _locate_own(*ends, expected) or _locate_stock(*ends) or _locate_any(item)


def locate_tensor_in(buffer: memoryview, where: str, expected: DtypeAndShape | None = None) -> LocatedTensor:
    """`locate_tensor` for an item that is in memory: `buffer` is the item and nothing else."""
    item_bytes = len(buffer)
    ends = bytes(buffer[:_EDGE_BYTES]), bytes(buffer[-_EDGE_BYTES:]), item_bytes
    found = _locate_own(*ends, expected) or _locate_stock(*ends)
    if found is not None:
        return found
    return _locate_any(ItemBytes(lambda offset, length: bytes(buffer[offset : offset + length]), item_bytes, where))


class RecordSpan(NamedTuple):
    """A record's content: bytes `[offset, offset + nbytes)` of the item, and their CRC-32 (None: there is none)."""

    name: str
    offset: int
    nbytes: int
    crc32: int | None


def verify_records(read: Callable[[int, int], bytes], item_bytes: int, where: str) -> Iterator[RecordSpan]:
    """Every record of an archive that `torch.save` wrote, with the CRC-32 to expect of its content.

    Arguments as in `locate_tensor`. Raises `CorruptCheckpointError` if headers contradict each other.
    """
    archive = Archive(ItemBytes(read, item_bytes, where))
    for record in archive.records.values():
        crc = record.crc32 if archive.has_checksums else None
        yield RecordSpan(record.name, archive.start(record), record.stored_bytes, crc)


# ---------------------------------------------------------------------------------------------------------- own items

_EDGE_BYTES = 1024  # head and tail of our own items are shorter, unless the tensor has dozens of axes
_OWN_START = tensor_template("uint8", ()).head[:14]  # up to the pickle's CRC-32


def _locate_own(head: bytes, tail: bytes, item_bytes: int, expected: DtypeAndShape | None) -> LocatedTensor | None:
    """Compare the ends of an item with the template of the expected tensor; None if it is not made by it."""
    if expected is None or not head.startswith(_OWN_START):
        return None
    try:
        template = tensor_template(*expected)
    except ValueError:
        return None
    if template.item_bytes != item_bytes or not head.startswith(template.head):
        return None
    # Templates differ, so that an image (`_Masked`) of each would cost 2 us more than to put the CRC-32 in and compare.
    own = template.tail
    first, second = template.crc_positions
    tail = tail[-len(own) :]
    crc = tail[first : first + 4]
    if tail != b"".join((own[:first], crc, own[first + 4 : second], crc, own[second + 4 :])):
        return None
    value = int.from_bytes(crc, "little")
    offset, nbytes = len(template.head), template.payload_bytes
    return LocatedTensor(*expected, offset, nbytes, value, offset, nbytes, value)


# --------------------------------------------------------------------------------------- bytes that fit a known image


class _Masked(NamedTuple):
    """An image of `length` bytes but for bits that may differ (zeros of `mask`), compared in one step as an int."""

    length: int
    mask: int
    constant: int

    def fit(self, content: bytes) -> bool:
        """Whether `content` is the image but for what is masked out."""
        return len(content) == self.length and int.from_bytes(content, "little") & self.mask == self.constant


@lru_cache(maxsize=256)
def _mask(length: int, vary: tuple[tuple[int, int], ...]) -> int:
    """Ones but for `vary`: positions and numbers of bytes."""
    mask = (1 << 8 * length) - 1
    for position, nbytes in vary:
        mask &= ~(((1 << 8 * nbytes) - 1) << 8 * position)
    return mask


# ------------------------------------------------------------------------------------------------------ items of torch

# The records that versions of torch write for a tensor, in order (torch 2.13, 2.6, 2.1, 2.0 and 1.13).
_ID, _VERSION, _ORDER = ".data/serialization_id", "version", "byteorder"
_RECORDS = (
    ("data.pkl", ".format_version", ".storage_alignment", _ORDER, "data/0", _VERSION, _ID),
    ("data.pkl", ".format_version", _ORDER, "data/0", _VERSION, _ID),
    ("data.pkl", _ORDER, "data/0", _VERSION, _ID),
    ("data.pkl", _ORDER, "data/0", _VERSION),
    ("data.pkl", "data/0", _VERSION),
)
_LITTLE_RECORD = (zlib.crc32(b"little"), 6, 6)  # CRC-32 and sizes of the byte order record, which must say just this

_FLAGS = 0x0808  # UTF-8 names; CRC-32 and sizes follow the record
_MAX_32 = 0xFFFFFFFF
_END_BYTES = END64.size + END64_LOCATOR.size + END.size


class _Directory(NamedTuple):
    """Directory and end records of an archive, and the fields in them that are looked at."""

    image: _Masked
    numbers: struct.Struct


def _directory(records: tuple[str, ...]) -> _Directory:
    def image(fill: int, little: tuple[int, ...]) -> bytes:
        """The bytes with `fill` in each field that varies, and `little` for the byte order record."""
        parts = []
        for record in records:
            name = f"archive/{record}".encode()
            summary = little if record == _ORDER else (fill, fill, fill)
            offset = 0 if record == "data.pkl" else fill
            fixed = (b"PK\x01\x02", 0, 0, _FLAGS, 0, 0, 0, *summary, len(name), 0, 0, 0, 0, 0, offset)
            parts.append(DIRECTORY_ENTRY.pack(*fixed) + name)
        count, directory_bytes = len(parts), sum(map(len, parts))
        wide = fill << 32 | fill
        parts.append(END64.pack(b"PK\x06\x06", 44, 0x031E, 45, 0, 0, count, count, directory_bytes, wide))
        parts.append(END64_LOCATOR.pack(b"PK\x06\x07", 0, wide, 1))
        parts.append(END.pack(b"PK\x05\x06", 0, 0, count, count, directory_bytes, fill, 0))
        return b"".join(parts)

    zeros, ones = image(0, _LITTLE_RECORD), image(_MAX_32, _LITTLE_RECORD)
    constant = int.from_bytes(zeros, "little")
    mask = (1 << 8 * len(zeros)) - 1 & ~(constant ^ int.from_bytes(ones, "little"))
    layout = []
    for record in records:
        entry_bytes = DIRECTORY_ENTRY.size + len(f"archive/{record}")
        wanted = {"data.pkl": "16x3I", "data/0": "16x3I14xI"}.get(record, "")
        layout.append(f"{wanted}{entry_bytes - struct.calcsize('<' + wanted)}x")
    numbers = struct.Struct("<" + "".join(layout) + "48xQ8xQ4x16xI2x")
    assert numbers.size == len(zeros)
    return _Directory(_Masked(len(zeros), mask, constant), numbers)


_DIRECTORIES = tuple(_directory(records) for records in _RECORDS)


def _local_header_start(name: bytes) -> bytes:
    return LOCAL_HEADER.pack(b"PK\x03\x04", 0, _FLAGS, 0, 0, 0, 0, 0, 0, len(name), 0)[:28]


_STOCK_PICKLE_AT = 64
_STOCK_START = _local_header_start(b"archive/data.pkl") + b"\x12\x00archive/data.pklFB\x0e\x00" + b"Z" * 14
_PAYLOAD_NAME = b"archive/data/0"
_DESCRIPTOR_MARK = b"PK\x07\x08"
_PAYLOAD_HEADER = _local_header_start(_PAYLOAD_NAME)


def _locate_stock(head: bytes, tail: bytes, item_bytes: int) -> LocatedTensor | None:
    """Recognize what torch writes for a plain tensor that is not empty, by the ends of the item; None if it is not
    that.
    """
    if not head.startswith(_STOCK_START):
        return None
    for directory in _DIRECTORIES:
        image = directory.image
        if image.fit(tail[-image.length :]):
            break
    else:
        return None
    fields = directory.numbers.unpack_from(tail, len(tail) - image.length)
    pickle_crc, pickle_bytes, pickle_size, crc, record_bytes, record_size, header_at = fields[:7]
    directory_at, end64_at, narrow_directory_at = fields[7:]

    pickle_stop = _STOCK_PICKLE_AT + pickle_bytes
    pickle = head[_STOCK_PICKLE_AT:pickle_stop]
    header = head[header_at : header_at + 44]
    record_at = header_at + 44 + int.from_bytes(header[28:30], "little")
    record_stop = record_at + record_bytes
    tail_at = item_bytes - len(tail)
    if (
        directory_at != item_bytes - image.length
        or narrow_directory_at not in (directory_at, _MAX_32)
        or end64_at != item_bytes - _END_BYTES
        or pickle_bytes != pickle_size
        or zlib.crc32(pickle) != pickle_crc
        or head[pickle_stop : pickle_stop + 16]
        != DESCRIPTOR.pack(_DESCRIPTOR_MARK, pickle_crc, pickle_bytes, pickle_bytes)
        or header[:28] != _PAYLOAD_HEADER
        or header[30:] != _PAYLOAD_NAME
        or record_bytes != record_size
        or not tail_at <= record_stop <= directory_at - DESCRIPTOR.size
        or tail[record_stop - tail_at : record_stop - tail_at + 16]
        != DESCRIPTOR.pack(_DESCRIPTOR_MARK, crc, record_bytes, record_bytes)
    ):
        return None
    try:
        tensor = read_tensor_pickle(pickle)
    except (NotPlainTensorError, MalformedPickleError):
        return None
    if tensor.storage_key != "0" or tensor.storage_bytes != record_bytes:
        return None
    return _located(tensor, record_at, crc)


def _located(tensor: PickledTensor, record_offset: int, record_crc32: int | None) -> LocatedTensor:
    return LocatedTensor(
        tensor.dtype,
        tensor.shape,
        record_offset + tensor.first_byte,
        tensor.payload_bytes,
        record_crc32 if tensor.payload_bytes == tensor.storage_bytes else None,
        record_offset,
        tensor.storage_bytes,
        record_crc32,
    )


# ----------------------------------------------------------------------------------------------- items like another

_ENTRY_MARK = b"PK\x01\x02"
_ID_NAME, _ID_BYTES = b"archive/.data/serialization_id", 40  # torch numbers its files; the id is of digits
_MAX_EDGE_BYTES = 4096  # items of dozens of axes are parsed each


class ItemForm(NamedTuple):
    """What the items of one dtype, shape and writer have in common: all but the payload, its CRC-32, and torch's id.

    An item of the form of a sound one is sound, too, and its payload lies at the same place.
    """

    head: bytes  # bytes before the payload
    payload_stop: int  # where the payload ends, relative to the item
    item_bytes: int  # length of the item
    tail: _Masked  # what follows the payload
    crc_positions: tuple[int, int]  # offsets in the tail of the two places that hold the payload's CRC-32

    def payload_crc32(self, item: memoryview) -> int | None:
        """The CRC-32 that an item of this form states of its payload, `item[len(head):payload_stop]`; None if it is
        not of this form.
        """
        if len(item) != self.item_bytes or item[: len(self.head)].tobytes() != self.head:
            return None
        tail = item[self.payload_stop :].tobytes()
        if not self.tail.fit(tail):
            return None
        first, second = self.crc_positions
        stated = tail[first : first + 4]
        return int.from_bytes(stated, "little") if stated == tail[second : second + 4] else None


def form_of(item: memoryview, payload_offset: int, payload_bytes: int, crc32: int) -> ItemForm | None:
    """The form of an item whose payload, of that place and CRC-32, is its whole record `data/0`; None if it is too
    unusual.
    """
    stop = payload_offset + payload_bytes
    if payload_offset > _MAX_EDGE_BYTES or len(item) - stop > _MAX_EDGE_BYTES:
        return None
    head, tail = item[:payload_offset].tobytes(), item[stop:].tobytes()
    entry = tail.rfind(_PAYLOAD_NAME) - DIRECTORY_ENTRY.size
    crc_positions = len(_DESCRIPTOR_MARK), entry + 16
    stated = crc32.to_bytes(4, "little")
    if (
        entry < 0
        or not tail.startswith(_DESCRIPTOR_MARK)
        or tail[entry : entry + 4] != _ENTRY_MARK
        or any(tail[position : position + 4] != stated for position in crc_positions)
    ):
        return None
    fields = _id_fields(tail) if _ID_NAME in tail else ()
    if fields is None:
        return None
    mask = _mask(len(tail), (*((position, 4) for position in crc_positions), *fields))
    image = _Masked(len(tail), mask, int.from_bytes(tail, "little") & mask)
    return ItemForm(head, stop, len(item), image, crc_positions)


def _id_fields(tail: bytes) -> tuple[tuple[int, int], ...] | None:
    """Position and length of the serialization id and of its CRC-32, in the record and in the directory."""
    header, entry = tail.find(_ID_NAME) - LOCAL_HEADER.size, tail.rfind(_ID_NAME) - DIRECTORY_ENTRY.size
    extra_bytes = int.from_bytes(tail[header + 28 : header + 30], "little")
    id_at = header + LOCAL_HEADER.size + len(_ID_NAME) + extra_bytes
    descriptor = id_at + _ID_BYTES
    if header < 0 or tail[descriptor : descriptor + 4] != _DESCRIPTOR_MARK or tail[entry : entry + 4] != _ENTRY_MARK:
        return None
    return (id_at, _ID_BYTES), (descriptor + 4, 4), (entry + 16, 4)


# ------------------------------------------------------------------------------------------------- anybody's archives

_LITTLE = (crc32(b"little"), 6)


def _locate_any(item: ItemBytes) -> LocatedTensor:
    """Parse an archive of `torch.save(tensor)`."""
    archive = Archive(item)
    pickled = _read_pickle(archive, archive.record("data.pkl"))
    byte_order = archive.find("byteorder")
    if byte_order is not None and (byte_order.crc32, byte_order.stored_bytes) != _LITTLE:
        order = _content(archive, byte_order)
        if order == b"big":
            raise NotRangeable(f"{item.where}: written on a big-endian machine")
        if order != b"little":
            raise item.corrupt("expected byte order little or big", repr(order))
    record = archive.record(f"data/{pickled.storage_key}")
    record_offset = archive.start(record)
    if record.stored_bytes != pickled.storage_bytes:
        raise item.corrupt(f"a storage of {pickled.storage_bytes} bytes", f"its record has {record.stored_bytes}")
    return _located(pickled, record_offset, record.crc32 if archive.has_checksums else None)


def _content(archive: Archive, record: ZipRecord) -> bytes:
    if record.stored_bytes > MAX_PICKLE_BYTES:
        where = archive.item.where
        raise NotRangeable(f"{where}: record {record.name} has {record.stored_bytes} bytes, too many for a tensor")
    return archive.content(record)


def _read_pickle(archive: Archive, record: ZipRecord) -> PickledTensor:
    try:
        return read_tensor_pickle(_content(archive, record))
    except NotPlainTensorError as error:
        raise NotRangeable(f"{archive.item.where}: not the pickle of one plain tensor: {error}") from error
    except MalformedPickleError as error:
        raise archive.item.corrupt("expected the pickle of a tensor", str(error)) from error
