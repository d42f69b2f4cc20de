"""Compressed records of a zip archive, held against their checksums. Nobody writes such items by default; some do.

The standard library inflates them, a piece at a time, and compares the CRC-32, which is that of the content.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable

from mcore_ckpt.errors import ChecksumError, CorruptCheckpointError

__all__ = ["verify_compressed"]


class _ItemStream(io.RawIOBase):
    """An item as a file that can be read and sought."""

    def __init__(self, read: Callable[[int, int], bytes], item_bytes: int) -> None:
        self._read, self._size, self._at = read, item_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        left = max(0, self._size - self._at)
        length = left if size < 0 else min(size, left)
        content = self._read(self._at, length) if length else b""
        self._at += len(content)
        return content


def verify_compressed(read: Callable[[int, int], bytes], item_bytes: int, where: str) -> int:
    """Compare the CRC-32 of every record of an archive, compressed or not, in bounded memory.

    Args:
        read: `(offset, length) -> bytes` of the item.
        item_bytes: its length.
        where: the item, for messages.

    Returns:
        How many records were compared.

    Raises:
        ChecksumError: a record is not what was written.
        CorruptCheckpointError: the archive cannot be read.
    """
    try:
        with zipfile.ZipFile(_ItemStream(read, item_bytes)) as archive:
            damaged, count = archive.testzip(), len(archive.infolist())
    except (zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError, ValueError, EOFError) as error:
        raise CorruptCheckpointError(f"{where}: its compressed records cannot be read ({error})") from error
    if damaged is not None:
        raise ChecksumError(
            f"{where}: record {damaged:.100}, compressed, does not have its CRC-32: the file was damaged after it was"
            " written; load another copy or an earlier checkpoint"
        )
    return count
