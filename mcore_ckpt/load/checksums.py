"""The checksums of what is read: of whole records, of payloads read in pieces, and of the blocks of a part.

A record that is read completely is compared with the CRC-32 that its archive states. A payload read in pieces, in
any order, is summed piece by piece and combined. Of a part of a payload, the blocks that it lies in are checked by the
cumulative CRCs of the manifest. A block is sound if its CRC-32, continued from the cumulative CRC before it, is the one
behind it. So a load reads whole blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.crc import crc32, crc32_combine
from mcore_ckpt.core.errors import IF_DAMAGED, ChecksumError
from mcore_ckpt.format.integrity import BLOCK_BYTES, inner_blocks
from mcore_ckpt.format.item_reading import verify_records


def contiguous_around(sizes: Sequence[int], box: Box) -> Box:
    """The smallest box around `box` whose elements follow one another without gaps in an array of `sizes`."""
    offsets, inner = list(box.offsets), list(box.sizes)
    first = next((axis for axis, size in enumerate(inner) if size > 1), len(inner))
    for axis in range(first + 1, len(inner)):
        offsets[axis], inner[axis] = 0, sizes[axis]
    return Box(tuple(offsets), tuple(inner))


def whole_blocks(start: int, stop: int, payload_bytes: int) -> tuple[int, int]:
    """Bytes `[start, stop)` of a payload, widened to the blocks that they lie in."""
    return start // BLOCK_BYTES * BLOCK_BYTES, min(-(-stop // BLOCK_BYTES) * BLOCK_BYTES, payload_bytes)


class BlockSums:
    """The sums of one payload, whose bytes are read in pieces, in any order and by any number of threads.

    `running` are its cumulative CRCs. `damaged(start, stop, got, expected)` makes the error for bytes of the payload.
    """

    def __init__(
        self,
        payload_bytes: int,
        running: Sequence[int],
        crc: int,
        damaged: Callable[[int, int, int, int], Exception],
    ) -> None:
        assert len(running) == inner_blocks(payload_bytes)
        self._payload_bytes = payload_bytes
        self._running = running
        self._crc = crc
        self._damaged = damaged
        self._parts: dict[int, list[tuple[int, int, int]]] = {}
        self._lock = threading.Lock()

    def stream(self, start: int) -> BlockStream:
        """Takes bytes from `start` on, front to back."""
        return BlockStream(self, start)

    def begin(self, position: int) -> int:
        """The sum that bytes from `position` on continue: the running one at the beginning of a block, 0 inside."""
        block, inside = divmod(position, BLOCK_BYTES)
        return self._running[block - 1] if block and not inside and block <= len(self._running) else 0

    def end_of_block(self, position: int) -> int:
        """Where the block ends that holds the byte at `position`."""
        return min((position // BLOCK_BYTES + 1) * BLOCK_BYTES, self._payload_bytes)

    def note(self, start: int, stop: int, value: int) -> None:
        """Bytes `[start, stop)` of one block have that sum; compared, and raised, as soon as all of the block
        is known.
        """
        block = start // BLOCK_BYTES
        first, last = block * BLOCK_BYTES, self.end_of_block(start)
        if (start, stop) != (first, last):
            with self._lock:
                parts = self._parts.setdefault(block, [])
                parts.append((start, stop, value))
                if sum(b - a for a, b, _ in parts) < last - first:
                    return
                del self._parts[block]
            parts.sort()
            value = parts[0][2]
            for a, b, part in parts[1:]:
                value = crc32_combine(value, part, b - a)
        expected = self._running[block] if block < len(self._running) else self._crc
        if value != expected:
            raise self._damaged(first, last, value, expected)


class BlockStream:
    """Bytes of a payload on their way, in order; see `BlockSums.stream`."""

    __slots__ = ("_begun", "_position", "_sums", "_value")

    def __init__(self, sums: BlockSums, start: int) -> None:
        self._sums = sums
        self._begun = self._position = start
        self._value = sums.begin(start)

    def feed(self, view: memoryview) -> None:
        """The next bytes. Raises as `BlockSums.note`."""
        sums, at = self._sums, 0
        while at < len(view):
            end = sums.end_of_block(self._position)
            taken = min(len(view) - at, end - self._position)
            self._value = crc32(view[at : at + taken], self._value)
            self._position += taken
            at += taken
            if self._position == end:
                sums.note(self._begun, end, self._value)
                self._begun, self._value = end, sums.begin(end)

    def finish(self) -> None:
        """There are no more bytes. Raises as `BlockSums.note`."""
        if self._position > self._begun:
            self._sums.note(self._begun, self._position, self._value)


def checksum_error(where: str, what: str, got: int, expected: int) -> ChecksumError:
    """The error for bytes that do not have the CRC-32 which was written with them; `what` is those bytes and a verb."""
    return ChecksumError(
        f"{where}: {what} CRC-32 {got:#010x}, expected {expected:#010x}: the file was damaged after it was written; "
        f"{IF_DAMAGED}"
    )


def check_records(
    read: Callable[[int, int], bytes], sum_up: Callable[[int, int], int], item_bytes: int, where: str
) -> int:
    """Compare the CRC-32 of every record of an item; returns how many (none of an item without checksums).

    `read` returns bytes of the item, for headers; `sum_up` the CRC-32 of bytes. Raises `CorruptCheckpointError`.
    """
    checked = 0
    for name, offset, nbytes, expected in verify_records(read, item_bytes, where):
        if expected is None:
            continue
        got = sum_up(offset, nbytes)
        if got != expected:
            what = f"record {name} (bytes [{offset}, {offset + nbytes}) of the item) has"
            raise checksum_error(where, what, got, expected)
        checked += 1
    return checked


class _ReadInto(Protocol):
    def __call__(self, offset: int, view: memoryview, /) -> None: ...


def range_crc(read_into: _ReadInto, start: int, nbytes: int, window: memoryview, value: int = 0) -> int:
    """CRC-32 of bytes `[start, start + nbytes)`, read through a window of memory from front to back; after `value`."""
    done = 0
    while done < nbytes:
        view = window[: min(len(window), nbytes - done)]
        read_into(start + done, view)
        value = crc32(view, value)
        done += len(view)
    return value


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
