"""Where the payloads of large items lie: their headers are read once for each item and reader, several at a time, and
a little ahead of the payloads, so that nothing waits for all of them.

The CRC-32 of a record that is read in pieces, and what is raised when it is not the one that was written.

Stored items that are decoded rather than ranged: objects, and tensors that `torch.save` stored in an unusual way.

The whole item is read into memory, its stream transforms are undone, its checksums compared, and `torch.load` with
`weights_only=True` does the rest.
"""

from __future__ import annotations

import io
import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from mcore_ckpt.core.errors import ChecksumError, CorruptCheckpointError, LoadError
from mcore_ckpt.core.options import LoadOptions
from mcore_ckpt.format.crc import crc32, crc32_combine
from mcore_ckpt.format.index import ObjectEntry, StoredItem
from mcore_ckpt.format.item_reading import LocatedTensor, locate_tensor, verify_records
from mcore_ckpt.format.safe_pickle import load_object, refuse_zip_bomb
from mcore_ckpt.format.zip_records import NotRangeable, verify_compressed
from mcore_ckpt.layout.torch_classes import dtype_name
from mcore_ckpt.load._placement import narrow
from mcore_ckpt.load.fetch import OpenFiles, ReadStats, naming
from mcore_ckpt.load.ranges import Extent, coalesce
from mcore_ckpt.load.read_requests import WantedItem
from mcore_ckpt.storage.base import RangeReader, Storage

__all__ = [
    "ItemDecoder",
    "ItemLocations",
    "RecordSum",
    "check_located",
    "checksum_error",
]

# Items located by one task, with nine small reads where they lie side by side.
_BATCH = 8

# What is read of the next item together with the end of this one, and up to which distance: our own items have up to a
# page of padding between them.
_HEAD_BYTES = 1024
_NEAR_BYTES = 4096


class ItemLocations:
    """What is known of where payloads lie, by file and offset of the item; kept as long as a reader's checkpoint."""

    def __init__(self) -> None:
        self._located: dict[tuple[str, int], LocatedTensor] = {}

    def __contains__(self, wanted: WantedItem) -> bool:
        return (wanted.item.file, wanted.item.offset) in self._located

    def of(self, wanted: WantedItem) -> LocatedTensor | None:
        """Where the payload of an item lies; None if that is not known."""
        return self._located.get((wanted.item.file, wanted.item.offset))

    @contextmanager
    def ahead(
        self,
        items: Sequence[WantedItem],
        files: OpenFiles,
        stats: ReadStats,
        threads: int,
        unranged: Callable[[WantedItem, str], None],
    ) -> Iterator[Callable[[WantedItem], LocatedTensor | None]]:
        """Read the headers of items, in order, by threads that stay a few items ahead of whoever asks.

        Args:
            items: those whose place is not known.
            files: readers of the checkpoint's files.
            stats: counters; added to.
            threads: as many batches of items are being read at once.
            unranged: called with an item that cannot be ranged, and the reason; on any thread.

        Yields:
            Tells where the payload of an item lies, waiting for its turn; None for one that cannot be ranged. To be
            asked for the items in order, on one thread at a time. Raises `CorruptCheckpointError` if an item is not
            what the index says or its file is too short, and `LoadError` if reading failed.
        """
        if not items:
            yield self.of
            return
        batches = iter([items[at : at + _BATCH] for at in range(0, len(items), _BATCH)])
        pending: deque[Future[None]] = deque()
        with ThreadPoolExecutor(threads, thread_name_prefix="mcore_ckpt-locate") as pool:

            def begin_next() -> None:
                for batch in batches:
                    pending.append(pool.submit(self._locate_batch, batch, files, stats, unranged))
                    return

            def located(wanted: WantedItem) -> LocatedTensor | None:
                while wanted not in self and pending:
                    begin_next()
                    pending.popleft().result()
                return self.of(wanted)

            for _ in range(threads):
                begin_next()
            try:
                yield located
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _locate_batch(
        self,
        batch: Sequence[WantedItem],
        files: OpenFiles,
        stats: ReadStats,
        unranged: Callable[[WantedItem, str], None],
    ) -> None:
        headers = _Headers(stats)
        for wanted, following in zip(batch, [*batch[1:], None], strict=True):
            item = wanted.item
            try:
                with files.reader(item.file) as reader:
                    reader.check_range(item.offset, item.length)
                    read = headers.of(reader, item, following.item if following else None)
                    located = locate_tensor(read, item.length, wanted.where)
                check_located(wanted, located)
            except NotRangeable as reason:
                unranged(wanted, str(reason).removeprefix(f"{wanted.where}: "))
            except LoadError as error:
                raise naming(error, wanted.where) from error
            else:
                self._located[item.file, item.offset] = located


class _Headers:
    """Reads headers of items that follow one another: the end of one with the beginning of the next."""

    def __init__(self, stats: ReadStats) -> None:
        self._stats = stats
        self._file, self._start, self._content = "", 0, b""

    def of(self, reader: RangeReader, item: StoredItem, following: StoredItem | None) -> Callable[[int, int], bytes]:
        """Reads bytes of `item` by offset in it and length; `following` is the item whose turn is next."""
        end = item.offset + item.length
        ahead = 0
        if following is not None and following.file == item.file and 0 <= following.offset - end <= _NEAR_BYTES:
            ahead = following.offset + min(_HEAD_BYTES, following.length) - end

        def read(offset: int, length: int) -> bytes:
            start = item.offset + offset
            if item.file != self._file or not self._start <= start <= start + length <= self._start + len(
                self._content
            ):
                extra = ahead if start + length == end else 0
                extra = max(0, min(extra, reader.size_bytes - end))
                self._content = reader.read(start, length + extra)
                self._file, self._start = item.file, start
                self._stats.add(reads=1, bytes_read=length + extra)
            return self._content[start - self._start : start - self._start + length]

        return read


def check_located(wanted: WantedItem, located: LocatedTensor) -> None:
    """Raise `CorruptCheckpointError` unless the item holds the tensor that the index says it does."""
    if located.shape != wanted.chunk.sizes or located.dtype != dtype_name(wanted.dtype):
        raise CorruptCheckpointError(
            f"the index says {dtype_name(wanted.dtype)} of shape {list(wanted.chunk.sizes)}, stored is {located.dtype}"
            f" of shape {list(located.shape)}; index and data file do not belong together"
        )
    if located.payload_bytes != wanted.payload_bytes:
        raise CorruptCheckpointError(f"expected {wanted.payload_bytes} bytes of elements, got {located.payload_bytes}")


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


_logger = logging.getLogger(__name__)


class ItemDecoder:
    """Reads whole items and decodes them.

    Args:
        storage: the checkpoint's files.
        options: whether checksums are compared.
        stats: counters; added to.
    """

    def __init__(self, storage: Storage, options: LoadOptions, stats: ReadStats) -> None:
        self._storage = storage
        self._options = options
        self._stats = stats
        self._reasons: set[str] = set()

    def object_contents(self, entries: Iterable[ObjectEntry]) -> Iterator[tuple[ObjectEntry, bytes]]:
        """Stored objects as `torch.save` made them, in order of the files; neighbours are read together.

        Raises:
            CorruptCheckpointError, ChecksumError, LoadError: naming the key, the file and the bytes.
        """
        extents = [
            Extent(entry.item.file, entry.item.offset, entry.item.offset + entry.item.length, entry.item.length, entry)
            for entry in entries
        ]
        extents.sort(key=lambda extent: (extent.file, extent.start))
        files = OpenFiles(self._storage, self._options.direct_io)
        options = self._options
        try:
            for span in coalesce(extents, window_bytes=options.window_bytes, max_gap_bytes=options.max_gap_bytes):
                first: ObjectEntry = span.extents[0].owner
                content = self._read(files, first.fqn, StoredItem(span.file, span.start, span.stop - span.start))
                for extent in span.extents:
                    stored = content[extent.start - span.start : extent.stop - span.start]
                    yield extent.owner, self._checked(extent.owner.fqn, extent.owner.item, stored)
                    self._stats.add(bytes_needed=len(stored))
        finally:
            files.close()

    def place_tensor(self, wanted: WantedItem, reason: str) -> None:
        """Decode a stored tensor and copy what is wanted of it; logged once for each kind of reason."""
        kind = re.sub(r"\d+", "#", reason)
        if kind not in self._reasons:
            self._reasons.add(kind)
            _logger.warning(
                "%s is read with torch.load, whole and slowly, because %s; so are others like it", wanted.where, reason
            )
        files = OpenFiles(self._storage, self._options.direct_io)
        try:
            content = self._checked(wanted.fqn, wanted.item, self._read(files, wanted.fqn, wanted.item))
        finally:
            files.close()
        self._stats.add(fallbacks=1)
        try:
            loaded = load_object(content, where=wanted.where)
        except CorruptCheckpointError:
            raise
        except Exception as error:
            raise CorruptCheckpointError(
                f"{wanted.where}: cannot be decoded ({type(error).__name__}: {str(error)[:300]}); load another copy or"
                " an earlier checkpoint"
            ) from error
        sizes = wanted.chunk.sizes
        if not isinstance(loaded, torch.Tensor) or tuple(loaded.shape) != sizes or loaded.dtype != wanted.dtype:
            got = f"{loaded.dtype} of shape {list(loaded.shape)}" if isinstance(loaded, torch.Tensor) else type(loaded)
            raise CorruptCheckpointError(
                f"{wanted.where}: the index says {wanted.dtype} of shape {list(sizes)}, stored is {got}"
            )
        with torch.no_grad():
            for want in wanted.wants:
                want.tensor.detach().copy_(narrow(loaded, want.box))

    def _read(self, files: OpenFiles, fqn: str, item: StoredItem) -> bytes:
        try:
            with files.reader(item.file) as reader:
                stored = reader.read(item.offset, item.length)
        except LoadError as error:
            raise naming(error, _where(fqn, item)) from error
        self._stats.add(reads=1, bytes_read=len(stored))
        return stored

    def _checked(self, fqn: str, item: StoredItem, stored: bytes) -> bytes:
        """The item's container: transforms undone, checksums compared."""
        where = _where(fqn, item)
        content = _undo_transforms(stored, item.transforms, where) if item.transforms else stored
        if self._options.verify_crc:
            self._verify(content, where)
        return content

    def _verify(self, content: bytes, where: str) -> None:
        view = memoryview(content)

        def read(offset: int, length: int) -> bytes:
            return content[offset : offset + length]

        checked = 0
        try:
            for name, offset, length, expected in verify_records(read, len(content), where):
                if expected is None:
                    continue
                got = crc32(view[offset : offset + length])
                if got != expected:
                    raise ChecksumError(
                        f"{where}: record {name} (bytes [{offset}, {offset + length}) of the item) has CRC-32"
                        f" {got:#010x}, expected {expected:#010x}: the file was damaged after it was written; load"
                        " another copy or an earlier checkpoint"
                    )
                checked += 1
        except NotRangeable:
            refuse_zip_bomb(io.BytesIO(content), 0, where)
            checked = verify_compressed(read, len(content), where)  # torch inflates such records and compares nothing
        self._stats.add(records_checked=checked)


def _where(fqn: str, item: StoredItem) -> str:
    return f"{fqn} ({item.file}, bytes [{item.offset}, {item.offset + item.length}))"


def _undo_transforms(stored: bytes, transforms: tuple[str, ...], where: str) -> bytes:
    """Undo DCP's stream transforms, with the extensions that this torch knows."""
    try:
        from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension

        stream: Any = io.BytesIO(stored)
        for extension in ExtensionRegistry().from_descriptor_list(transforms):
            if isinstance(extension, StreamTransformExtension):
                stream = extension.transform_from(stream)
        return bytes(stream.read(-1))
    except Exception as error:
        raise LoadError(
            f"{where}: stored through {', '.join(transforms)}, which cannot be undone here"
            f" ({type(error).__name__}: {error}); install what these transforms need"
        ) from error
