"""Checksums of stored payloads that are read in parts, in any order: compared when the last part was read."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

from mcore_ckpt.core.crc import crc32_combine
from mcore_ckpt.core.errors import ChecksumError
from mcore_ckpt.load.checksums import range_crc
from mcore_ckpt.tools.payloads import StoredPayload

_WINDOW_BYTES = 4 * 1024 * 1024
_ReadInto = Callable[[StoredPayload, int, memoryview], None]


def check_sum(payload: StoredPayload, value: int) -> None:
    """Raise `ChecksumError` unless a payload that was read completely has its stored CRC-32, if one is stored."""
    if payload.crc32 is not None and payload.crc32 != value:
        raise ChecksumError(
            f"{payload.where}: the source is damaged: its elements have CRC-32 {value:#010x}, expected "
            f"{payload.crc32:#010x}. Run `mcore-ckpt verify` on the source, and take a sound copy"
        )


class _Part(NamedTuple):
    """Bytes `[first, stop)` of a payload, and their CRC-32."""

    first: int
    stop: int
    crc32: int


class PartSums:
    """For any number of threads; `read_into` reads bytes of a payload."""

    def __init__(self, read_into: _ReadInto) -> None:
        self._read_into = read_into
        self._open: dict[str, tuple[StoredPayload, list[_Part]]] = {}
        self._crossing: set[str] = set()
        self._done: set[str] = set()
        self._lock = threading.Lock()

    def expect(self, payload: StoredPayload) -> None:
        """`check_rest` compares this payload, even if no part of it is noted."""
        key = payload.where
        with self._lock:
            if payload.crc32 is not None and key not in self._done:
                self._open.setdefault(key, (payload, []))

    def note(self, payload: StoredPayload, first: int, nbytes: int, value: int) -> int | None:
        """Note the CRC-32 of bytes that were read; bytes that were noted before do not count again.

        Returns the payload's CRC-32 when this part completes it, else None. Raises `ChecksumError` if it is damaged.
        """
        key = payload.where
        with self._lock:
            if key in self._done or key in self._crossing:
                return None
            _, parts = self._open.setdefault(key, (payload, []))
            part = _Part(first, first + nbytes, value)
            at = bisect_right(parts, part.first, key=lambda known: known.first)
            before = parts[at - 1] if at else None
            after = parts[at] if at < len(parts) else None
            if before is not None and part.stop <= before.stop:
                return None
            if (before is not None and part.first < before.stop) or (after is not None and part.stop > after.first):
                self._crossing.add(key)  # `check_rest` reads this payload again
                return None
            parts.insert(at, part)
            _join(parts, at)
            _join(parts, at - 1)
            if (parts[0].first, parts[0].stop) != (0, payload.nbytes):
                return None
            value = parts[0].crc32
            del self._open[key]
            self._done.add(key)
        check_sum(payload, value)
        return value

    def check_rest(self) -> None:
        """Read what was not read of payloads that were noted or expected, and compare; raises `ChecksumError`."""
        window = memoryview(bytearray(_WINDOW_BYTES)) if self._open else memoryview(b"")
        for key, (payload, parts) in self._open.items():
            if payload.crc32 is None:
                continue
            value = at = 0
            for part in (*(() if key in self._crossing else parts), _Part(payload.nbytes, payload.nbytes, 0)):
                value = range_crc(self._reader(payload), at, part.first - at, window, value)
                value = crc32_combine(value, part.crc32, part.stop - part.first)
                at = part.stop
            check_sum(payload, value)
            self._done.add(key)
        self._open.clear()

    def _reader(self, payload: StoredPayload) -> Callable[[int, memoryview], None]:
        return lambda start, view: self._read_into(payload, start, view)


def _join(parts: list[_Part], at: int) -> None:
    """Make one of a part and its neighbour, if the second begins where the first ends."""
    if 0 <= at < len(parts) - 1 and parts[at].stop == parts[at + 1].first:
        first, second = parts[at : at + 2]
        joined = crc32_combine(first.crc32, second.crc32, second.stop - second.first)
        parts[at : at + 2] = [_Part(first.first, second.stop, joined)]
