"""Is a data file the one that `.metadata` speaks of? Asked of each file before the first byte of it is used.

Where `.metadata` has a manifest, that takes one small read of a file. Where another program has rewritten `.metadata`,
but the files are of this package, what a file says that it holds is compared with the index item by item. Files of
other writers carry nothing to compare.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from mcore_ckpt.core.errors import CorruptCheckpointError
from mcore_ckpt.format.index import CheckpointIndex, StoredItem
from mcore_ckpt.format.integrity import FOOTER_BYTES, FileFooter, FileTable, decode_table
from mcore_ckpt.format.metadata_read import checked_footer
from mcore_ckpt.storage.base import RangeReader


class _Row(NamedTuple):
    """An item of a tensor as index and table both describe it."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class FileFooters:
    """Checks data files of one checkpoint, each once, for any number of threads; `index` is asked at the first file."""

    def __init__(self, index: Callable[[], CheckpointIndex]) -> None:
        self._index = index
        self._checked: set[str] = set()
        self._lock = threading.Lock()
        self._items: dict[str, dict[tuple[int, int], str | _Row]] | None = None

    def check(self, name: str, reader: RangeReader) -> None:
        """Compare a file with what `.metadata` says of it. Raises `CorruptCheckpointError`, or `LoadError`."""
        if reader.name in self._checked:
            return
        index = self._index()
        footer = checked_footer(index, name, reader)
        if index.manifest is None and footer is not None:
            self._check_table(index, name, read_table(reader, footer), reader.name)
        self._checked.add(reader.name)

    def _check_table(self, index: CheckpointIndex, name: str, table: FileTable, where: str) -> None:
        with self._lock:
            if self._items is None:
                self._items = items_by_file(index)
        for problem in table_problems(self._items.get(name, {}), table):
            raise CorruptCheckpointError(
                f"{where}: {problem}; .metadata and this file do not belong together: put the files of one save "
                "together again, or load another checkpoint"
            )


def read_table(reader: RangeReader, footer: FileFooter) -> FileTable:
    """What a data file says that it holds; raises `CorruptCheckpointError`."""
    start = reader.size_bytes - FOOTER_BYTES - footer.table_bytes
    if start < 0:
        raise CorruptCheckpointError(
            f"{reader.name}: its integrity footer states a table of {footer.table_bytes} bytes, the file has "
            f"{reader.size_bytes}"
        )
    return decode_table(reader.read(start, footer.table_bytes), footer, reader.name)


def items_by_file(index: CheckpointIndex) -> dict[str, dict[tuple[int, int], str | _Row]]:
    """The items of each file by offset and length: an object's key, or what a tensor's chunk is."""
    found: dict[str, dict[tuple[int, int], str | _Row]] = {}
    for item, row in _described(index):
        found.setdefault(item.file, {})[item.offset, item.length] = row
    return found


def _described(index: CheckpointIndex) -> Iterator[tuple[StoredItem, str | _Row]]:
    for fqn, entry in index.tensors.items():
        for chunk in entry.chunks:
            row = _Row(fqn, entry.dtype, entry.shape, chunk.offsets, chunk.sizes)
            yield chunk.item, fqn if chunk.item.transforms else row
    for fqn, stored in index.objects.items():
        yield stored.item, fqn


def table_problems(items: dict[tuple[int, int], str | _Row], table: FileTable) -> Iterator[str]:
    """In what an index and a file's table contradict each other; a table may list more than the index names."""
    stored: dict[tuple[int, int], str | _Row] = {(row.offset, row.length): row.key for row in table.objects}
    stored.update({(row.offset, row.length): _Row(*row[:5]) for row in table.tensors})
    for (offset, length), row in items.items():
        found = stored.get((offset, length))
        if found != row:
            yield (
                f"bytes [{offset}, {offset + length}) are {_shown(row)} for .metadata, and "
                f"{'no item' if found is None else _shown(found)} for the file"
            )


def _shown(row: str | _Row) -> str:
    if isinstance(row, str):
        return f"the object {row!r:.300}"
    box = f"box at {list(row.offsets)} of sizes {list(row.sizes)}"
    return f"{row.key!r:.300} ({row.dtype}, {box} of shape {list(row.shape)})"
