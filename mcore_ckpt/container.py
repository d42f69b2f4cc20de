"""The item on disk: one tensor as the zip archive that `torch.save` makes of it, encoded and located by hand.

    encode   `tensor_template(dtype, shape)` -> head, tail, and where the payload's CRC-32 goes   (item_template.py)
             `place(pos, template)`          -> where in a file such an item may start
    locate   `locate_tensor(read, ...)`      -> dtype, shape, and where the raw bytes are, from headers alone
             `verify_records(read, ...)`     -> every record of any archive of `torch.save`, with its CRC-32

An item of our own is recognized by making its template again and comparing every byte; whatever is not exactly that is
parsed as the zip it has to be (zip_records.py, tensor_unpickle.py), and not trusted. Bytes only: no files, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from mcore_ckpt.crc import crc32
from mcore_ckpt.errors import ChecksumError
from mcore_ckpt.item_template import (
    ITEM_ALIGNMENT,
    LARGE_TENSOR_BYTES,
    PAGE_BYTES,
    PICKLE_AT,
    TensorTemplate,
    element_bytes,
    place,
    tensor_template,
)
from mcore_ckpt.stock_item import recognize
from mcore_ckpt.tensor_pickle import DTYPES, UnsupportedDtypeError, own_dtype_and_shape
from mcore_ckpt.tensor_unpickle import (
    MAX_PICKLE_BYTES,
    MalformedPickleError,
    NotPlainTensorError,
    PickledTensor,
    read_tensor_pickle,
)
from mcore_ckpt.zip_records import ItemBytes, NotRangeable, ZipRecord, read_directory, record_start

__all__ = [
    "DTYPES",
    "ITEM_ALIGNMENT",
    "LARGE_TENSOR_BYTES",
    "PAGE_BYTES",
    "LocatedTensor",
    "NotRangeable",
    "RecordSpan",
    "TensorTemplate",
    "UnsupportedDtypeError",
    "element_bytes",
    "encode_tensor",
    "locate_tensor",
    "locate_tensor_in",
    "place",
    "tensor_template",
    "verify_records",
]


def encode_tensor(dtype: str, shape: tuple[int, ...], payload: Any) -> bytes:
    """A whole item in memory, from any bytes-like payload; `ValueError` if that has not the size of the tensor."""
    template = tensor_template(dtype, shape)
    payload = memoryview(payload).cast("B")
    if len(payload) != template.payload_bytes:
        raise ValueError(
            f"payload of a {dtype} tensor of shape {list(shape)}: expected {template.payload_bytes} bytes, "
            f"got {len(payload)}"
        )
    tail = bytearray(template.tail)
    for position in template.crc_positions:
        tail[position : position + 4] = crc32(payload).to_bytes(4, "little")
    return b"".join((template.head, payload, tail))


@dataclass(frozen=True, slots=True)
class LocatedTensor:
    """Where the bytes of a stored tensor lie. The tensor is C-contiguous there, in little-endian order.

    Attributes:
        dtype: torch's name without `torch.`.
        shape: sizes, in elements.
        payload_offset: first byte of the tensor, relative to the item.
        payload_bytes: size of the tensor.
        crc32: of exactly these bytes; None if the item has no such checksum (a view that was saved with its whole
            storage, or an item written with checksums switched off).
        record_offset: first byte of the record that the payload lies in, relative to the item.
        record_bytes: size of that record.
        record_crc32: of the whole record; None if the item has no checksums.
    """

    dtype: str
    shape: tuple[int, ...]
    payload_offset: int
    payload_bytes: int
    crc32: int | None
    record_offset: int
    record_bytes: int
    record_crc32: int | None


def locate_tensor(read: Callable[[int, int], bytes], item_bytes: int, where: str) -> LocatedTensor:
    """Find the payload of a tensor item, reading about a kilobyte at either end.

    Args:
        read: `read(offset, length)` returns exactly these bytes, offsets relative to the item.
        item_bytes: size of the item.
        where: key and file, for messages.

    Raises:
        CorruptCheckpointError: the bytes cannot be such an item.
        ChecksumError: the description of the tensor does not have its CRC-32.
        NotRangeable: a sound archive, but `torch.load` has to decode it: compressed, not contiguous, big-endian, a
            tensor subclass, quantized, or not one tensor at all.
    """
    item = ItemBytes(read, item_bytes, where)
    ends = item.head, item.tail, item_bytes
    return _locate_own(*ends) or _locate_stock(*ends) or _locate_any(item)


def locate_tensor_in(buffer: memoryview, where: str) -> LocatedTensor:
    """`locate_tensor` for an item that is in memory: `buffer` is the item and nothing else."""
    item_bytes = len(buffer)
    ends = bytes(buffer[:_EDGE_BYTES]), bytes(buffer[-_EDGE_BYTES:]), item_bytes
    found = _locate_own(*ends) or _locate_stock(*ends)
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
    """Every record of an archive that `torch.save` wrote, of a tensor or of any object, with the CRC-32 to expect.

    Headers are checked here; the content is for the caller to read. Arguments and errors as in `locate_tensor`;
    `NotRangeable` is raised for a record that is not stored plainly.
    """
    item = ItemBytes(read, item_bytes, where)
    records = read_directory(item)
    checksummed = _has_checksums(records)
    for record in records.values():
        start = _plain_record_start(item, record)
        yield RecordSpan(record.name, start, record.stored_bytes, record.crc32 if checksummed else None)


# ------------------------------------------------------------------------------------------------ own and stock items

_EDGE_BYTES = 1024  # head and tail of our own items are shorter, unless the tensor has dozens of axes
_OWN_START = tensor_template("uint8", ()).head[:14]  # up to the pickle's CRC-32
_PICKLE_BYTES_AT = 18


def _locate_own(head: bytes, tail: bytes, item_bytes: int) -> LocatedTensor | None:
    """Recognize an item that `tensor_template` made: every byte but payload and CRC-32 is as it would make it again.

    `head` and `tail` are the ends of the item. None if it is not, or not evidently, one of ours.
    """
    if not head.startswith(_OWN_START):
        return None
    pickle_bytes = int.from_bytes(head[_PICKLE_BYTES_AT : _PICKLE_BYTES_AT + 4], "little")
    own = own_dtype_and_shape(head[PICKLE_AT : PICKLE_AT + pickle_bytes])
    if own is None:
        return None
    dtype, shape = own
    try:
        template = tensor_template(dtype, shape)
    except ValueError:
        return None
    if template.item_bytes != item_bytes or not head.startswith(template.head):
        return None
    expected = template.tail
    first, second = template.crc_positions
    tail = tail[-len(expected) :]
    crc = tail[first : first + 4]
    if tail != b"".join((expected[:first], crc, expected[first + 4 : second], crc, expected[second + 4 :])):
        return None
    value = int.from_bytes(crc, "little")
    offset, nbytes = len(template.head), template.payload_bytes
    return LocatedTensor(dtype, shape, offset, nbytes, value, offset, nbytes, value)


def _locate_stock(head: bytes, tail: bytes, item_bytes: int) -> LocatedTensor | None:
    """Recognize what torch writes for a plain tensor; None if it is not, or not evidently, that."""
    stock = recognize(head, tail, item_bytes)
    if stock is None:
        return None
    try:
        tensor = read_tensor_pickle(stock.pickle)
    except (NotPlainTensorError, MalformedPickleError):
        return None
    if tensor.storage_key != "0" or tensor.storage_bytes != stock.record_bytes:
        return None
    return _located(tensor, stock.record_offset, stock.record_crc32)


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


# ------------------------------------------------------------------------------------------------- anybody's archives

_LEGACY_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # how torch.save began before it wrote zip archives
_LITTLE = (crc32(b"little"), 6)
_ENCRYPTED = 0x0001


def _locate_any(item: ItemBytes) -> LocatedTensor:
    """Parse an archive of `torch.save(tensor)`."""
    if item.head.startswith(_LEGACY_MAGIC):
        raise NotRangeable(f"{item.where}: written in torch's format from before zip archives")
    records = read_directory(item)
    checksummed = _has_checksums(records)
    archive = next(iter(records)).partition("/")[0]
    pickled = _read_pickle(item, _required(item, records, f"{archive}/data.pkl"), checksummed)
    byte_order = records.get(f"{archive}/byteorder")
    if byte_order is not None and (byte_order.crc32, byte_order.stored_bytes) != _LITTLE:
        order = _content(item, byte_order, checksummed)
        if order == b"big":
            raise NotRangeable(f"{item.where}: written on a big-endian machine")
        if order != b"little":
            raise item.corrupt("expected byte order little or big", repr(order))

    record = _required(item, records, f"{archive}/data/{pickled.storage_key}")
    record_offset = _plain_record_start(item, record)
    if record.stored_bytes != pickled.storage_bytes:
        raise item.corrupt(f"a storage of {pickled.storage_bytes} bytes", f"its record has {record.stored_bytes}")
    return _located(pickled, record_offset, record.crc32 if checksummed else None)


def _has_checksums(records: dict[str, ZipRecord]) -> bool:
    """False if torch wrote zeros instead (`torch.serialization.set_crc32_options(False)`)."""
    return any(record.crc32 for record in records.values())


def _required(item: ItemBytes, records: dict[str, ZipRecord], name: str) -> ZipRecord:
    record = records.get(name)
    if record is None:
        raise item.corrupt(f"expected a record {name[:100]!r}", f"got {', '.join(map(repr, list(records)[:8]))}")
    return record


def _plain_record_start(item: ItemBytes, record: ZipRecord) -> int:
    start = record_start(item, record)
    if record.method or record.flags & _ENCRYPTED:
        raise NotRangeable(f"{item.where}: record {record.name} is compressed or encrypted")
    return start


def _content(item: ItemBytes, record: ZipRecord, checksummed: bool) -> bytes:
    """The content of a small record, checked."""
    start = _plain_record_start(item, record)
    if record.stored_bytes > MAX_PICKLE_BYTES:
        raise NotRangeable(f"{item.where}: record {record.name} has {record.stored_bytes} bytes, too many for a tensor")
    content = item.get(start, record.stored_bytes)
    got = crc32(content)
    if checksummed and got != record.crc32:
        raise ChecksumError(
            f"{item.where}: record {record.name}, bytes [{start}, {start + len(content)}) of the item: expected CRC-32 "
            f"{record.crc32:#010x}, got {got:#010x}. The file is damaged; load another checkpoint"
        )
    return content


def _read_pickle(item: ItemBytes, record: ZipRecord, checksummed: bool) -> PickledTensor:
    try:
        return read_tensor_pickle(_content(item, record, checksummed))
    except NotPlainTensorError as error:
        raise NotRangeable(f"{item.where}: not the pickle of one plain tensor: {error}") from error
    except MalformedPickleError as error:
        raise item.corrupt("expected the pickle of a tensor", str(error)) from error
