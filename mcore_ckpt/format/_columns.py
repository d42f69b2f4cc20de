"""Columns of little-endian numbers and texts: written, and read front to back with every length checked."""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Final

from mcore_ckpt.core.errors import CorruptCheckpointError

# deflate could make a thousand times its size. Rows that differ in nothing but their place make it forty times that.
_MAX_INFLATED_BYTES: Final = 1024 * 1024
_MAX_INFLATION: Final = 100


def column_bytes(column: array[int]) -> bytes:
    """An array as little-endian numbers."""
    if sys.byteorder == "big":
        column = array(column.typecode, column)
        column.byteswap()
    return column.tobytes()


def text_bytes(value: str) -> bytes:
    """UTF-8; lone surrogates as three bytes each."""
    return value.encode("utf-8", "surrogatepass")


def deflated(parts: Iterable[bytes]) -> tuple[bytes, int]:
    """The parts as one zlib stream, which `Columns.inflated` takes, and their length before that."""
    body = b"".join(parts)
    packed = zlib.compress(body, 1)
    if len(body) > _MAX_INFLATED_BYTES + _MAX_INFLATION * len(packed):
        packed = zlib.compress(body, 0)
    return packed, len(body)


class Columns:
    """Reads columns front to back; `what`: where they lie, for messages."""

    def __init__(self, data: bytes | memoryview, what: str) -> None:
        self._data = memoryview(data)
        self._at = 0
        self._what = what

    @classmethod
    def inflated(cls, packed: bytes | memoryview, unpacked_bytes: int, what: str) -> Columns:
        """Those in a zlib stream; raises `CorruptCheckpointError` if it does not inflate to that length exactly."""
        columns = cls(b"", what)
        if unpacked_bytes > _MAX_INFLATED_BYTES + _MAX_INFLATION * len(packed):
            raise columns.wrong(f"{len(packed)} bytes would become {unpacked_bytes} when inflated")
        inflate = zlib.decompressobj()
        try:
            unpacked = inflate.decompress(packed, unpacked_bytes + 1)
        except zlib.error as error:
            raise columns.wrong(f"it cannot be inflated ({error})") from error
        if len(unpacked) != unpacked_bytes or not inflate.eof or inflate.unused_data:
            raise columns.wrong(f"it is not {unpacked_bytes} bytes long when inflated")
        return cls(unpacked, what)

    def wrong(self, what: str) -> CorruptCheckpointError:
        """The error to raise for a contradiction in them."""
        return CorruptCheckpointError(
            f"{self._what} is damaged: {what}. Restore it from another copy, or load an earlier checkpoint."
        )

    def bytes(self, nbytes: int) -> memoryview:
        """The next bytes; raises `CorruptCheckpointError` if there are fewer."""
        if nbytes > len(self._data) - self._at:
            raise self.wrong(f"{nbytes} bytes are to follow, {len(self._data) - self._at} do")
        self._at += nbytes
        return self._data[self._at - nbytes : self._at]

    def column(self, code: str, count: int) -> array[int]:
        """The next numbers, of the type that `array` knows by `code`."""
        column = array(code)
        column.frombytes(self.bytes(count * column.itemsize))
        if sys.byteorder == "big":
            column.byteswap()
        return column

    def texts(self, lengths: Sequence[int]) -> list[str]:
        """The next texts, of these lengths in bytes."""
        data = bytes(self.bytes(sum(lengths)))
        bounds = list(accumulate(lengths, initial=0))
        try:
            if data.isascii():
                whole = data.decode("ascii")
                return [whole[a:b] for a, b in pairwise(bounds)]
            return [str(data[a:b], "utf-8", "surrogatepass") for a, b in pairwise(bounds)]
        except UnicodeDecodeError as error:
            raise self.wrong(f"a name is not UTF-8 ({error})") from error

    def finish(self) -> None:
        """Raise `CorruptCheckpointError` if something follows."""
        if self._at != len(self._data):
            raise self.wrong(f"{len(self._data) - self._at} bytes follow its end")
