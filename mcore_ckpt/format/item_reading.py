"""Where the bytes of a stored tensor lie in its item, found from the ends of the item alone, and not trusted.

    locate_tensor(read, ...)      -> dtype, shape, place and CRC-32 of the payload, from headers
    verify_records(read, ...)     -> every record of any archive of `torch.save`, with its CRC-32

Any item can be parsed as the zip archive that it has to be (zip_records.py, tensor_pickle.py), and that decides. But a
checkpoint may hold 20,000 items that differ in a few numbers; so their ends are compared with an `ItemForm` first: the
one of this package's own items, known from dtype and shape, and the one of an item parsed before with the same dtype,
shape and length. Not to fit is no verdict: the item is parsed. No files here, and no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import CorruptCheckpointError
from mcore_ckpt.format.item_layout import tensor_template
from mcore_ckpt.format.tensor_pickle import (
    MAX_PICKLE_BYTES,
    FileTensor,
    NotPlainTensorError,
    WrongArgumentsError,
)
from mcore_ckpt.format.zip_records import (
    DIRECTORY_ENTRY,
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
    """Every record of an archive that `torch.save` wrote, with the CRC-32 to expect of its content.

    Arguments as in `locate_tensor`. Raises `CorruptCheckpointError` if headers contradict each other.
    """
    archive = Archive(ItemBytes(read, item_bytes, where))
    for record in archive.records.values():
        crc = record.crc32 if archive.has_checksums else None
        yield RecordSpan(record.name, archive.start(record), record.stored_bytes, crc)


_PAYLOAD_NAME = b"archive/data/0"
_DESCRIPTOR_MARK, _ENTRY_MARK = b"PK\x07\x08", b"PK\x01\x02"
_ID_NAME, _ID_BYTES = b"archive/.data/serialization_id", 40  # torch numbers its files; the id is of digits


class ItemForm(NamedTuple):
    """What items of one dtype, shape, length and writer share: all but the payload, its CRC-32, and the id of torch.

    An item of the form of a sound one is sound, too, and its payload lies at the same place.
    """

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
    entry = tail.rfind(_PAYLOAD_NAME) - DIRECTORY_ENTRY.size
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
