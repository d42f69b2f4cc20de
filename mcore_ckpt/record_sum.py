"""The CRC-32 of a record that is read in pieces, and what is raised when it is not the one that was written."""

from __future__ import annotations

import threading

from mcore_ckpt.crc import crc32_combine
from mcore_ckpt.errors import ChecksumError
from mcore_ckpt.read_requests import WantedItem

__all__ = ["RecordSum", "checksum_error"]


class RecordSum:
    """The CRC-32 of a record whose pieces are read in any order."""

    __slots__ = ("_lock", "_parts", "_remaining_bytes", "expected", "length")

    def __init__(self, length: int, expected: int) -> None:
        self.length = length
        self.expected = expected
        self._remaining_bytes = length
        self._parts: list[tuple[int, int, int]] = []
        self._lock = threading.Lock()

    def add(self, start: int, length: int, crc: int) -> int | None:
        """Note a piece; returns the CRC-32 of the record when this was the last one."""
        with self._lock:
            self._parts.append((start, length, crc))
            self._remaining_bytes -= length
            if self._remaining_bytes:
                return None
        total = 0
        for _, part_bytes, part_crc in sorted(self._parts):
            total = crc32_combine(total, part_crc, part_bytes)
        return total


def checksum_error(wanted: WantedItem, offset: int, length: int, expected: int | None, got: int) -> ChecksumError:
    """For bytes `[offset, offset + length)` of an item, which do not have the CRC-32 that was written with them."""
    start = wanted.item.offset + offset
    return ChecksumError(
        f"{wanted.fqn} at {list(wanted.chunk.offsets)}: the bytes [{start}, {start + length}) of {wanted.item.file}"
        f" have CRC-32 {got:#010x}, expected {expected:#010x}: the file was damaged after it was written; load another"
        " copy or an earlier checkpoint"
    )
