"""Items that are like one that was parsed before, told by comparing bytes.

A checkpoint of many small tensors holds thousands of items of the same dtype, shape and writer. All of their bytes are
the same but for the payload, the two places that repeat its CRC-32, and the serialization id by which torch numbers
its files (40 digits, and their CRC-32 twice). So an item that has all other bytes in common with one that a parser
found sound is sound itself, and its payload lies at the same place. An item that differs is no news: it has to be
parsed.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

__all__ = ["ItemForm", "form_of"]

_DESCRIPTOR, _ENTRY = b"PK\x07\x08", b"PK\x01\x02"
_ENTRY_BYTES, _LOCAL_HEADER_BYTES = 46, 30  # the fixed parts, which the record's name follows
_PAYLOAD_NAME, _ID_NAME = b"archive/data/0", b"archive/.data/serialization_id"
_ID_BYTES = 40
_MAX_EDGE_BYTES = 4096  # items of dozens of axes are parsed each


class ItemForm(NamedTuple):
    """What items have in common. The tail is what follows the payload, as a little-endian int of that many bytes.

    Attributes:
        head: bytes before the payload.
        payload_stop: where the payload ends, relative to the item.
        item_bytes: length of the item.
        mask: ones where all tails agree.
        constant: what is there.
        crc_positions: offsets in the tail of the two places that hold the payload's CRC-32.
    """

    head: bytes
    payload_stop: int
    item_bytes: int
    mask: int
    constant: int
    crc_positions: tuple[int, int]

    def payload_crc32(self, item: memoryview) -> int | None:
        """The CRC-32 that an item of this form states of its payload, `item[len(head):payload_stop]`; None if it is
        not of this form.
        """
        if len(item) != self.item_bytes or item[: len(self.head)].tobytes() != self.head:
            return None
        tail = item[self.payload_stop :].tobytes()
        if int.from_bytes(tail, "little") & self.mask != self.constant:
            return None
        first, second = self.crc_positions
        stated = tail[first : first + 4]
        return int.from_bytes(stated, "little") if stated == tail[second : second + 4] else None


def form_of(item: memoryview, payload_offset: int, payload_bytes: int, crc32: int) -> ItemForm | None:
    """The form of an item that was parsed; None if it is too unusual to have one.

    Args:
        item: the whole item.
        payload_offset: where its payload starts, which is its whole record `data/0`.
        payload_bytes: size of the payload.
        crc32: of the payload, as the item states it.
    """
    stop = payload_offset + payload_bytes
    if payload_offset > _MAX_EDGE_BYTES or len(item) - stop > _MAX_EDGE_BYTES:
        return None
    head, tail = item[:payload_offset].tobytes(), item[stop:].tobytes()
    entry = tail.rfind(_PAYLOAD_NAME) - _ENTRY_BYTES
    crc_positions = len(_DESCRIPTOR), entry + 16
    stated = crc32.to_bytes(4, "little")
    if (
        entry < 0
        or not tail.startswith(_DESCRIPTOR)
        or tail[entry : entry + 4] != _ENTRY
        or any(tail[position : position + 4] != stated for position in crc_positions)
    ):
        return None
    vary = [(position, 4) for position in crc_positions]
    if _ID_NAME in tail:
        fields = _id_fields(tail)
        if fields is None:
            return None
        vary += fields
    mask = _mask(len(tail), tuple(vary))
    return ItemForm(head, stop, len(item), mask, int.from_bytes(tail, "little") & mask, crc_positions)


def _id_fields(tail: bytes) -> list[tuple[int, int]] | None:
    """Position and length of the serialization id and of its CRC-32, in the record and in the directory."""
    header, entry = tail.find(_ID_NAME) - _LOCAL_HEADER_BYTES, tail.rfind(_ID_NAME) - _ENTRY_BYTES
    extra_bytes = int.from_bytes(tail[header + 28 : header + 30], "little")
    id_at = header + _LOCAL_HEADER_BYTES + len(_ID_NAME) + extra_bytes
    descriptor = id_at + _ID_BYTES
    if header < 0 or tail[descriptor : descriptor + 4] != _DESCRIPTOR or tail[entry : entry + 4] != _ENTRY:
        return None
    return [(id_at, _ID_BYTES), (descriptor + 4, 4), (entry + 16, 4)]


@lru_cache(maxsize=256)
def _mask(length: int, vary: tuple[tuple[int, int], ...]) -> int:
    mask = (1 << 8 * length) - 1
    for position, nbytes in vary:
        mask &= ~(((1 << 8 * nbytes) - 1) << 8 * position)
    return mask
