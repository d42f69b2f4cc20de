"""Tensors that lie plainly in files of others: each alone, or several in one record that has a checksum for all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from mcore_ckpt.core.crc import crc32
from mcore_ckpt.format.index import CheckpointIndex, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.load.checks import chunk_name
from mcore_ckpt.reshard.part_sums import PartSums
from mcore_ckpt.storage.base import RangeReader, Storage
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.dtype_cast import carrier
from mcore_ckpt.tools.payloads import StoredPayload, StoredPayloads


class Record(NamedTuple):
    """Bytes of a file with one CRC-32 (None: none is stored); `name` is for messages."""

    name: str
    start: int
    nbytes: int
    crc32: int | None


class FileRange(NamedTuple):
    """Elements in a file, C order, little-endian: all of `record`, or a part of it.

    `strides` are in elements, for elements that do not follow one another; the first one lies at `offset`.
    """

    file: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    record: Record | None = None
    strides: tuple[int, ...] = ()


class FilePayloads(StoredPayloads):
    """Payloads of tensors by key, in files of `directory`; `storage` is given where links are followed."""

    def __init__(self, directory: Path, tensors: Mapping[str, FileRange], storage: Storage | None = None) -> None:
        entries = {}
        for key, at in tensors.items():
            chunk = StoredChunk((0,) * len(at.shape), at.shape, StoredItem(at.file, at.offset, at.nbytes))
            entries[key] = TensorEntry(key, at.dtype, at.shape, (chunk,))
        super().__init__(CheckpointIndex(str(directory), entries, {}), storage or storage_at(directory))
        self._tensors = tensors
        self._sums = PartSums(self.read_into)

    def _locate(self, entry: TensorEntry, chunk: StoredChunk) -> StoredPayload:
        at, where = self._tensors[entry.fqn], chunk_name(entry.fqn, chunk)
        with self.files.reader(at.file) as reader:
            if at.strides:
                return self._gathered(at, where, reader)
            reader.check_range(at.offset, at.nbytes)
        crc = None if at.record is None or at.record.nbytes != at.nbytes else at.record.crc32
        return StoredPayload(where, at.file, at.offset, at.nbytes, crc)

    def _gathered(self, at: FileRange, where: str, reader: RangeReader) -> StoredPayload:
        """The elements of a strided tensor, in memory."""
        elem_bytes = element_bytes(at.dtype)
        span = 1 + sum((size - 1) * stride for size, stride in zip(at.shape, at.strides, strict=True))
        content = reader.read(at.offset, span * elem_bytes)
        if at.record is not None:
            self._sums.note(self._record(at.file, at.record), at.offset - at.record.start, len(content), crc32(content))
        elements = np.frombuffer(content, carrier(elem_bytes))
        strided = as_strided(elements, at.shape, [stride * elem_bytes for stride in at.strides])
        gathered = np.ascontiguousarray(strided).reshape(-1).view(np.uint8).data
        return StoredPayload(where, at.file, 0, at.nbytes, None, gathered)

    def _record(self, file: str, record: Record) -> StoredPayload:
        name, start, nbytes, crc = record
        return StoredPayload(f"{Path(self.index.path) / file}: {name}", file, start, nbytes, crc)

    def was_read(self, entry: TensorEntry, chunk: StoredChunk, value: int) -> None:
        """As `StoredPayloads.was_read`: a tensor may be a part of its record."""
        at = self._tensors[entry.fqn]
        if at.record is not None and at.nbytes and at.nbytes != at.record.nbytes and not at.strides:
            self._sums.note(self._record(at.file, at.record), at.offset - at.record.start, at.nbytes, value)

    def check_rest(self) -> None:
        """Of records that were read in part, read and compare the rest (padding); raises `ChecksumError`."""
        self._sums.check_rest()

    def recipe(self) -> Iterable[str]:
        return (f"{key} {at.offset} {at.dtype} {at.shape}" for key, at in self._tensors.items())
