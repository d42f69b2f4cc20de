"""The item on disk: one tensor as the zip archive that `torch.save(tensor)` makes of it, emitted by hand.

    head      local header + `archive/data.pkl`          dtype and shape (tensor_pickle.py)
              local header of `archive/data/0`, padded so that the payload starts on a 64-byte boundary of the item
    payload   the tensor's little-endian bytes, C order
    tail      data descriptor of the payload             carries its CRC-32
              `archive/version`, `archive/byteorder`     constant bytes
              central directory, end records             carries the payload's CRC-32 again

Head and tail follow from dtype and shape alone (`tensor_template`); the CRC-32 of the payload is the one thing to be
filled in afterwards, in place. `place` says where in a file such an item may start; `docs/format.md` has every field.

Where the bytes of a stored tensor lie is found from the ends of its item alone, which are not trusted:

    locate_tensor(read, ...)      -> dtype, shape, place and CRC-32 of the payload, from headers
    verify_records(read, ...)     -> every record of any archive of `torch.save`, with its CRC-32

Any item can be parsed as the zip archive that it has to be (zip_records.py, tensor_pickle.py), and that decides. But a
checkpoint may hold 20,000 items that differ in a few numbers; so their ends are compared with an `ItemForm` first: the
one of this package's own items, known from dtype and shape, and the one of an item parsed before with the same dtype,
shape and length. Not to fit is no verdict: the item is parsed. No files here, and no torch.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import CorruptCheckpointError
from mcore_ckpt.format.tensor_pickle import (
    MAX_PICKLE_BYTES,
    FileTensor,
    NotPlainTensorError,
    WrongArgumentsError,
    dtype_entry,
    tensor_pickle,
)
from mcore_ckpt.format.zip_records import (
    DESCRIPTOR,
    DESCRIPTOR64,
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

LARGE_TENSOR_BYTES: Final = 512 * 1024
"""From this size on, a payload starts on a page of the file; below, a page of padding each would cost too much."""

ITEM_ALIGNMENT: Final = 64
"""Items start, and payloads of small tensors lie, on multiples of this: torch's storage alignment."""

PAGE_BYTES: Final = 4096
"""Alignment of large payloads in the file: what O_DIRECT and mmap ask for."""


class TensorTemplate(NamedTuple):
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

_PICKLE_NAME, _PAYLOAD_NAME = b"archive/data.pkl", b"archive/data/%d"


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


class _Constant(NamedTuple):
    """A record that is the same in all archives."""

    fields: tuple[bytes, int, int, int, int]  # what the headers say of it
    record: bytes  # its bytes
    entry: bytes  # in the directory, if it is at 0

    @classmethod
    def of(cls, name: bytes, content: bytes) -> _Constant:
        fields = (name, _VERSION_20, _UTF8, zlib.crc32(content), len(content))
        return cls(fields, _local_header(*fields) + content, _central_entry(*fields, 0))

    def entry_at(self, offset: int, zip64: bool) -> bytes:
        """Its entry in the directory."""
        if zip64:
            return _central_entry(*self.fields, _MAX_32, _zip64_extra(offset))
        return self.entry[:_CENTRAL_OFFSET] + offset.to_bytes(4, "little") + self.entry[_CENTRAL_OFFSET + 4 :]


# Where a CRC-32 stands in a data descriptor and in an entry of the directory, and a record's offset there.
_DESCRIPTOR_CRC, _CENTRAL_CRC, _CENTRAL_OFFSET = 4, 16, 42

_CONSTANTS = (_Constant.of(b"archive/version", b"3\n"), _Constant.of(b"archive/byteorder", b"little"))
_CONSTANT_RECORDS = b"".join(constant.record for constant in _CONSTANTS)


# ---------------------------------------------------------------------------------------------------------- archives

# The end of an archive may pass 4 GiB although no payload does.
_ZIP64_FROM_BYTES = _MAX_32 - 64 * 1024
_MAX_PAYLOAD_BYTES = (1 << 63) - 1024 * 1024
_MOST_OF_AN_ENTRY = 128  # of the directory, in bytes


class PayloadFrame(NamedTuple):
    """What is around one payload of an archive: its local header, and its data descriptor."""

    head: bytes
    payload_bytes: int
    zip64: bool

    @classmethod
    def of(cls, number: int, nbytes: int, offset: int) -> PayloadFrame:
        """Frame of a payload whose header is at `offset`; padding at its end moves the payload to a multiple of 64."""
        zip64 = nbytes >= _ZIP64_FROM_BYTES
        return cls(_payload_header(number, nbytes if zip64 else 0, offset), nbytes, zip64)

    @property
    def tail_bytes(self) -> int:
        """Length of the descriptor."""
        return (DESCRIPTOR64 if self.zip64 else DESCRIPTOR).size

    def tail_with(self, payload_crc32: int) -> bytes:
        """The descriptor of a payload that has this CRC-32."""
        descriptor = DESCRIPTOR64 if self.zip64 else DESCRIPTOR
        return descriptor.pack(_DESCRIPTOR_MARK, payload_crc32, self.payload_bytes, self.payload_bytes)


@lru_cache(maxsize=1024)
def _payload_header(number: int, large_bytes: int, offset: int) -> bytes:
    """Local header at `offset` of a payload. Only of one that needs zip64 does it say the size, `large_bytes`."""
    name = _PAYLOAD_NAME % number
    # (This extra field is also what makes the data descriptor one of 8-byte sizes.)
    large = _zip64_extra(large_bytes, large_bytes) if large_bytes else b""
    padding_bytes = -(offset + LOCAL_HEADER.size + len(name) + len(large) + 4) % ITEM_ALIGNMENT
    extra = large + struct.pack("<HH", _PADDING_EXTRA, padding_bytes) + b"Z" * padding_bytes
    version, size = (_VERSION_45, _MAX_32) if large_bytes else (_VERSION_20, 0)
    return _local_header(name, version, _UTF8_AND_DESCRIPTOR, 0, size, len(extra)) + extra


class ArchiveLayout:
    """Where all lies in what `torch.save` writes of an object, `pickled` with storages of its tensors by number."""

    def __init__(self, pickled: bytes, storage_bytes: Sequence[int]) -> None:
        self._pickle = (_PICKLE_NAME, _VERSION_20, _UTF8, zlib.crc32(pickled), len(pickled))
        self.begin = _local_header(*self._pickle) + pickled  # up to the header of the first storage
        self._storage_bytes = storage_bytes
        self.offsets: list[int] = []  # of each storage's header; payload and descriptor follow, then the next storage
        self.frames: list[PayloadFrame] = []  # around each payload
        position = len(self.begin)
        for number, nbytes in enumerate(storage_bytes):
            self.offsets.append(position)
            self.frames.append(frame := PayloadFrame.of(number, nbytes, position))
            position += len(frame.head) + nbytes + frame.tail_bytes
        self._end_at = position
        count = len(storage_bytes)
        end_at = position + _MOST_OF_AN_ENTRY * (count + 4)
        self._zip64 = max(storage_bytes, default=0) >= _ZIP64_FROM_BYTES or end_at >= _MAX_32 or count > 0xFFF0

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        return self._end_at + len(self.end([0] * len(self._storage_bytes)))

    def crc_positions(self) -> Iterator[tuple[int, int]]:
        """Where the CRC-32 of each storage stands in the file: in its descriptor, and in the directory."""
        at = self._end_at + len(_CONSTANT_RECORDS) + DIRECTORY_ENTRY.size + len(_PICKLE_NAME)
        entries = self._entries([0] * len(self._storage_bytes))
        for frame, offset in zip(self.frames, self.offsets, strict=True):
            yield offset + len(frame.head) + frame.payload_bytes + _DESCRIPTOR_CRC, at + _CENTRAL_CRC
            at += len(next(entries))

    def _entries(self, crcs: Sequence[int]) -> Iterator[bytes]:
        """The directory's entries of the storages."""
        for number, (nbytes, offset, crc) in enumerate(zip(self._storage_bytes, self.offsets, crcs, strict=True)):
            values = [nbytes, nbytes] if nbytes >= _ZIP64_FROM_BYTES else []
            size = _MAX_32 if values else nbytes
            if offset >= _MAX_32:
                values.append(offset)
            version, extra = (_VERSION_45, _zip64_extra(*values)) if values else (_VERSION_20, b"")
            entry = _PAYLOAD_NAME % number, version, _UTF8_AND_DESCRIPTOR, crc, size
            yield _central_entry(*entry, min(offset, _MAX_32), extra)

    def end(self, crcs: Sequence[int]) -> bytes:
        """The file behind the last storage, for payloads that have these CRC-32s."""
        directory = [_central_entry(*self._pickle, 0), *self._entries(crcs)]
        at = self._end_at
        for constant in _CONSTANTS:
            directory.append(constant.entry_at(at, self._zip64))
            at += len(constant.record)
        listed = b"".join(directory)
        return _CONSTANT_RECORDS + listed + _end_records(len(directory), len(listed), at, self._zip64)


# ---------------------------------------------------------------------------------------------------------- templates


# 4096 templates take about 5 MB; more would eat into what a save is allowed to take.
@lru_cache(maxsize=4096)
def tensor_template(dtype: str, shape: tuple[int, ...]) -> TensorTemplate:
    """The bytes around the payload of a C-contiguous tensor. `UnsupportedDtypeError`, `ValueError`: there is none."""
    element_count = math.prod(shape)
    payload_bytes = element_count * dtype_entry(dtype).element_bytes
    if payload_bytes > _MAX_PAYLOAD_BYTES or (shape and min(shape) < 0):
        raise ValueError(f"shape {list(shape)} of a {dtype} tensor: expected sizes >= 0 and less than 2**63 bytes")
    layout = ArchiveLayout(tensor_pickle(dtype, shape, element_count), (payload_bytes,))
    (frame,) = layout.frames
    alignment = PAGE_BYTES if payload_bytes >= LARGE_TENSOR_BYTES else ITEM_ALIGNMENT
    head, tail = layout.begin + frame.head, frame.tail_with(0) + layout.end((0,))
    tail_at = len(head) + payload_bytes
    first, second = next(layout.crc_positions())
    crc_positions = first - tail_at, second - tail_at
    return TensorTemplate(head, payload_bytes, tail, crc_positions, alignment, tail_at + len(tail))


# ------------------------------------------------------------------------------------------------------------- located

DtypeAndShape = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class LocatedTensor:
    """Where the bytes of a stored tensor lie. The tensor is C-contiguous there, in little-endian order."""

    dtype: str  # torch's name without `torch.`
    shape: tuple[int, ...]  # sizes, in elements
    payload_offset: int  # first byte of the tensor, relative to the item
    payload_bytes: int  # size of the tensor
    # Checksum of exactly these bytes; None if the item has none (a view that was saved with its whole storage, or an
    # item written with checksums switched off).
    crc32: int | None
    record_offset: int  # first byte of the record that the payload lies in, relative to the item
    record_bytes: int  # size of that record
    record_crc32: int | None  # of the whole record; None if the item has no checksums


Forms = dict[tuple[DtypeAndShape, int], "ItemForm"]
"""Forms of items that were parsed, by what the index says of them and by their length."""

_MAX_FORMS = 2048  # each takes 1 to 4 KB


def locate_tensor(
    read: Callable[[int, int], bytes],
    item_bytes: int,
    where: str,
    expected: DtypeAndShape | None = None,
    forms: Forms | None = None,
) -> LocatedTensor:
    """Find the payload of a tensor item, reading a kilobyte at either end. `expected` is what the index says; `forms`
    remembers those of items that were parsed. `NotRangeable`: it has to be decoded completely;
    `CorruptCheckpointError`: it cannot be such an item.
    """
    item = ItemBytes(read, item_bytes, where)
    if expected is None:
        return _parsed(item)
    known = None if forms is None else forms.get((expected, item_bytes))
    for form in (_own_form(expected), known):
        if form is not None and (found := form.locate(item)) is not None:
            return found
    found = _parsed(item)
    if forms is not None and len(forms) < _MAX_FORMS and (form := _form_of(item, found)) is not None:
        forms[expected, item_bytes] = form
    return found


def locate_tensor_in(
    buffer: memoryview, where: str, expected: DtypeAndShape | None = None, forms: Forms | None = None
) -> LocatedTensor:
    """`locate_tensor` for an item that is in memory: `buffer` is the item and nothing else."""
    return locate_tensor(lambda at, length: bytes(buffer[at : at + length]), len(buffer), where, expected, forms)


class RecordSpan(NamedTuple):
    """A record's content: bytes `[offset, offset + nbytes)` of the item, and their CRC-32 (None: there is none)."""

    name: str
    offset: int
    nbytes: int
    crc32: int | None


def verify_records(read: Callable[[int, int], bytes], item_bytes: int, where: str) -> Iterator[RecordSpan]:
    """Every record of an archive, with the CRC-32 to expect. Raises `CorruptCheckpointError` for contradictions."""
    archive = Archive(ItemBytes(read, item_bytes, where))
    for record in archive.records.values():
        crc = record.crc32 if archive.has_checksums else None
        yield RecordSpan(record.name, archive.start(record), record.stored_bytes, crc)


_ID_NAME, _ID_BYTES = b"archive/.data/serialization_id", 40  # torch numbers its files; the id is of digits


class ItemForm(NamedTuple):
    """What items of one dtype, shape, length and writer share: with one that is sound, all of its form are."""

    kind: DtypeAndShape
    item_bytes: int
    head: bytes  # before the payload
    tail: bytes  # behind it, with zeros where items differ
    differing: tuple[tuple[int, int], ...]  # positions and lengths of that; first the two copies of the CRC-32

    def locate(self, item: ItemBytes) -> LocatedTensor | None:
        """The payload of an item; None if it is not of this form."""
        if item.item_bytes != self.item_bytes or not item.head.startswith(self.head) or len(item.tail) < len(self.tail):
            return None
        tail = bytearray(item.tail[-len(self.tail) :])
        (first, _), (second, _) = self.differing[:2]
        stated = tail[first : first + 4]
        if stated != tail[second : second + 4] or _without(tail, self.differing) != self.tail:
            return None
        crc, offset = int.from_bytes(stated, "little"), len(self.head)
        nbytes = self.item_bytes - offset - len(self.tail)
        return LocatedTensor(*self.kind, offset, nbytes, crc, offset, nbytes, crc)


def _without(tail: bytearray, differing: Iterable[tuple[int, int]]) -> bytearray:
    for position, nbytes in differing:
        tail[position : position + nbytes] = bytes(nbytes)
    return tail


@lru_cache(maxsize=4096)
def _own_form(kind: DtypeAndShape) -> ItemForm | None:
    """The form of this package's own items of that dtype and shape."""
    try:
        template = tensor_template(*kind)
    except ValueError:
        return None
    differing = tuple((position, 4) for position in template.crc_positions)
    return ItemForm(kind, template.item_bytes, template.head, template.tail, differing)


def _form_of(item: ItemBytes, located: LocatedTensor) -> ItemForm | None:
    """The form of an item whose payload is its whole record `data/0`; None if it is too unusual."""
    tail_bytes = item.item_bytes - located.payload_offset - located.payload_bytes
    if located.crc32 is None or located.payload_offset > len(item.head) or tail_bytes > len(item.tail):
        return None
    tail = item.tail[-tail_bytes:]
    entry = tail.rfind(_PAYLOAD_NAME % 0) - DIRECTORY_ENTRY.size
    crc_positions = len(_DESCRIPTOR_MARK), entry + 16
    stated = located.crc32.to_bytes(4, "little")
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
    differing = (*((position, 4) for position in crc_positions), *fields)
    kind, head = (located.dtype, located.shape), item.head[: located.payload_offset]
    return ItemForm(kind, item.item_bytes, head, bytes(_without(bytearray(tail), differing)), differing)


def _id_fields(tail: bytes) -> tuple[tuple[int, int], ...] | None:
    """Position and length of the serialization id and of its CRC-32, in the record and in the directory."""
    header, entry = tail.find(_ID_NAME) - LOCAL_HEADER.size, tail.rfind(_ID_NAME) - DIRECTORY_ENTRY.size
    extra_bytes = int.from_bytes(tail[header + 28 : header + 30], "little")
    id_at = header + LOCAL_HEADER.size + len(_ID_NAME) + extra_bytes
    descriptor = id_at + _ID_BYTES
    if header < 0 or tail[descriptor : descriptor + 4] != _DESCRIPTOR_MARK or tail[entry : entry + 4] != _ENTRY_MARK:
        return None
    return (id_at, _ID_BYTES), (descriptor + 4, 4), (entry + 16, 4)


_LITTLE = (crc32(b"little"), 6)


def _parsed(item: ItemBytes) -> LocatedTensor:
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
    record = archive.record(f"data/{pickled.record}")
    start = archive.start(record)
    if record.stored_bytes != pickled.storage_bytes:
        raise item.corrupt(f"a storage of {pickled.storage_bytes} bytes", f"its record has {record.stored_bytes}")
    record_crc32 = record.crc32 if archive.has_checksums else None
    crc = record_crc32 if pickled.nbytes == pickled.storage_bytes else None
    place = start + pickled.first_byte, pickled.nbytes, crc
    return LocatedTensor(pickled.dtype, pickled.shape, *place, start, pickled.storage_bytes, record_crc32)


def _content(archive: Archive, record: ZipRecord) -> bytes:
    if record.stored_bytes > MAX_PICKLE_BYTES:
        where = archive.item.where
        raise NotRangeable(f"{where}: record {record.name} has {record.stored_bytes} bytes, too many for a tensor")
    return archive.content(record)


def _read_pickle(archive: Archive, record: ZipRecord) -> FileTensor:
    from mcore_ckpt.format.state_file import tensor_of  # of others' items; ours are found by their form

    pickled = _content(archive, record)
    try:
        return tensor_of(pickled)
    except NotPlainTensorError as error:
        raise NotRangeable(f"{archive.item.where}: not the pickle of one plain tensor: {error}") from error
    except (WrongArgumentsError, CorruptCheckpointError) as error:
        raise archive.item.corrupt("expected the pickle of a tensor", str(error)) from error
