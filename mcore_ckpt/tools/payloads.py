"""The raw elements of stored chunks, by range, for the offline commands: no torch, unless an item has to be decoded.

A chunk's payload is located by the headers of its item and held against the index. What cannot be read by range
(stored through a transform, compressed, not contiguous) is decoded whole by the reader, which does need torch.

Any box of a stored tensor as bytes, whatever its chunks: only the ranges that it lies in are read. No torch.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from mcore_ckpt.core.boxes import Box, covers
from mcore_ckpt.core.errors import ChecksumError, CorruptCheckpointError
from mcore_ckpt.core.options import DirectIo
from mcore_ckpt.format.crc import crc32
from mcore_ckpt.format.index import CheckpointIndex, StoredChunk, TensorEntry
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.format.item_reading import LocatedTensor, locate_tensor
from mcore_ckpt.format.zip_records import NotRangeable
from mcore_ckpt.load.fetch import OpenFiles
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.local import LocalStorage

if TYPE_CHECKING:
    from mcore_ckpt.load.reader import FileSystemReader

__all__ = [
    "PayloadSource",
    "StoredPayload",
    "StoredPayloads",
    "check_elements",
    "check_located",
    "check_sum",
    "check_tiled",
    "chunk_name",
]

_MAX_LOCATED = 4096
_WINDOW_BYTES = 4 * 1024 * 1024
# More than any deflated record can grow: an item that is to hold more elements than this many times its bytes does not.
_MAX_INFLATION = 1100


class StoredPayload(NamedTuple):
    """The elements of one stored chunk: C order, little-endian.

    Attributes:
        where: key, file and bytes, for messages.
        file: that holds them.
        offset: of the first, in the file.
        nbytes: of all.
        crc32: of all; None if the item carries none.
        decoded: the elements themselves, where they cannot be read from the file by range.
    """

    where: str
    file: str
    offset: int
    nbytes: int
    crc32: int | None
    decoded: bytes | memoryview | None = None


def chunk_name(entry: TensorEntry, chunk: StoredChunk) -> str:
    """A chunk as messages name it."""
    item = chunk.item
    return f"{entry.fqn} at {list(chunk.offsets)} ({item.file}, bytes [{item.offset}, {item.offset + item.length}))"


class StoredPayloads:
    """Locates and reads payloads of one checkpoint; a context manager, for any number of threads.

    Args:
        index: of the checkpoint.
        storage: its files; by default those in the index's path.
        direct: past the page cache (`LoadOptions.direct_io`).
        stored_keys: where the index uses other keys than the checkpoint: the checkpoint's, by the index's.
    """

    def __init__(
        self,
        index: CheckpointIndex,
        storage: Storage | None = None,
        direct: DirectIo = "auto",
        stored_keys: Mapping[str, str] | None = None,
    ) -> None:
        self.index = index
        self._stored_keys = stored_keys or {}
        self.storage = LocalStorage(index.path) if storage is None else storage
        self.files = OpenFiles(self.storage, direct)
        self._located: OrderedDict[tuple[str, tuple[int, ...]], StoredPayload] = OrderedDict()
        self._lock = threading.Lock()
        self._reader: FileSystemReader | None = None

    def locate(self, entry: TensorEntry, chunk: StoredChunk) -> StoredPayload:
        """Find the elements of a chunk; asked again soon, it answers from memory.

        Raises:
            CorruptCheckpointError: the item is damaged, or is not what the index says.
            LoadError: it cannot be read.
        """
        key = entry.fqn, chunk.offsets
        with self._lock:
            known = self._located.get(key)
            if known is not None:
                self._located.move_to_end(key)
                return known
        found = self._locate(entry, chunk)
        with self._lock:
            self._located[key] = found
            # What had to be decoded holds all its elements: only the last few of those stay.
            while len(self._located) > (_MAX_LOCATED if found.decoded is None else 1):
                self._located.popitem(last=False)
        return found

    def _locate(self, entry: TensorEntry, chunk: StoredChunk) -> StoredPayload:
        item, where = chunk.item, chunk_name(entry, chunk)
        if item.transforms:
            return self._decode(entry, chunk, where)
        with self.files.reader(item.file) as reader:
            reader.check_range(item.offset, item.length)
            try:
                found = locate_tensor(
                    lambda offset, length: reader.read(item.offset + offset, length), item.length, where
                )
            except NotRangeable:
                return self._decode(entry, chunk, where)
        check_located(found, entry, chunk, where)
        return StoredPayload(where, item.file, item.offset + found.payload_offset, found.payload_bytes, found.crc32)

    def read_into(self, payload: StoredPayload, start: int, view: memoryview) -> None:
        """Fill `view` with the payload's bytes from `start` on; raises as `RangeReader.read_into`."""
        if payload.decoded is not None:
            view[:] = payload.decoded[start : start + len(view)]
            return
        with self.files.reader(payload.file) as reader:
            reader.read_into(payload.offset + start, view)

    def _decode(self, entry: TensorEntry, chunk: StoredChunk, where: str) -> StoredPayload:
        import torch

        from mcore_ckpt.load.read_requests import ReadRequest, stored_dtype
        from mcore_ckpt.load.reader import FileSystemReader

        tensor = torch.empty(chunk.sizes, dtype=stored_dtype(entry))
        with self._lock:
            # One for all items: it reads the index, which may take as long as an item.
            reader = self._reader = self._reader or FileSystemReader(self.index.path)
        key = self._stored_keys.get(entry.fqn, entry.fqn)
        reader.read_items([ReadRequest(key, tensor, chunk.offsets, chunk.sizes)])
        content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        return StoredPayload(where, chunk.item.file, 0, len(content), None, content)

    def close(self) -> None:
        """Close the files."""
        self.files.close()

    def __enter__(self) -> StoredPayloads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class PayloadSource:
    """A stored chunk as a source for `regrid`."""

    __slots__ = ("_payload", "_payloads")

    def __init__(self, payloads: StoredPayloads, payload: StoredPayload) -> None:
        self._payloads = payloads
        self._payload = payload

    def read_into(self, start: int, view: memoryview) -> None:
        """Bytes from `start` on."""
        self._payloads.read_into(self._payload, start, view)


def check_tiled(index: CheckpointIndex, keys: Iterable[str]) -> None:
    """Raise `CorruptCheckpointError` unless the stored chunks hold each element of these tensors exactly once.

    What copies tensors as a whole relies on it: where a chunk is missing there would be nothing to copy, and nothing
    afterwards that does not fit. Chunks that are too large for their items are refused here as well, before anything
    is planned for shapes that nobody has stored.
    """
    for key in keys:
        entry = index.tensors[key]
        problem = covers(entry.shape, [Box(chunk.offsets, chunk.sizes) for chunk in entry.chunks])
        if problem and (entry.chunks or math.prod(entry.shape)):
            raise CorruptCheckpointError(
                f"{key}: the chunks that {index.path} stores do not make up the tensor: {problem}. Its save did not "
                f"finish or its index is damaged; `mcore-ckpt verify {index.path}` lists all such tensors. Nothing was "
                "written"
            )
        for chunk in entry.chunks:
            nbytes, item = math.prod(chunk.sizes) * element_bytes(entry.dtype), chunk.item
            if not item.transforms and nbytes > _MAX_INFLATION * item.length:
                raise CorruptCheckpointError(
                    f"{chunk_name(entry, chunk)}: {nbytes} bytes of elements cannot lie in {item.length} bytes; the "
                    f"index of {index.path} is damaged. Nothing was written"
                )


def check_sum(payload: StoredPayload, value: int) -> None:
    """Raise `ChecksumError` unless `value` is the CRC-32 that was stored with the elements (if there was one)."""
    if payload.crc32 is not None and payload.crc32 != value:
        raise ChecksumError(
            f"{payload.where}: its elements have CRC-32 {value:#010x}, expected {payload.crc32:#010x}: the file was "
            "damaged after it was written; take another copy"
        )


def check_elements(payloads: StoredPayloads, entry: TensorEntry) -> None:
    """Read all chunks of a tensor and compare their checksums; raises as `check_sum`.

    For what reads tensors in slabs that cut through chunks, and has to know beforehand that they are as written.
    """
    for chunk in entry.chunks:
        payload = payloads.locate(entry, chunk)
        if payload.crc32 is None:
            continue
        value = 0
        window = memoryview(bytearray(min(_WINDOW_BYTES, payload.nbytes)))
        for start in range(0, payload.nbytes, _WINDOW_BYTES):
            view = window[: min(_WINDOW_BYTES, payload.nbytes - start)]
            payloads.read_into(payload, start, view)
            value = crc32(view, value)
        check_sum(payload, value)


def check_located(found: LocatedTensor, entry: TensorEntry, chunk: StoredChunk, where: str) -> None:
    """Hold what an item says about its tensor against the index; raises `CorruptCheckpointError`."""
    expected_bytes = math.prod(chunk.sizes) * element_bytes(entry.dtype)
    if (found.dtype, found.shape, found.payload_bytes) != (entry.dtype, tuple(chunk.sizes), expected_bytes):
        raise CorruptCheckpointError(
            f"{where}: the index says {entry.dtype} of shape {list(chunk.sizes)}, stored is {found.dtype} of shape "
            f"{list(found.shape)}; the index does not belong to this file"
        )
