"""Stored items that are decoded rather than ranged: objects, and tensors that `torch.save` stored in an unusual way.

The whole item is read into memory, its stream transforms are undone, its checksums compared, and `torch.load` with
`weights_only=True` does the rest.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from mcore_ckpt.container import NotRangeable, verify_records
from mcore_ckpt.crc import crc32
from mcore_ckpt.errors import ChecksumError, CorruptCheckpointError, LoadError
from mcore_ckpt.fetch import OpenFiles, ReadStats, naming
from mcore_ckpt.metadata import ObjectEntry, StoredItem
from mcore_ckpt.options import LoadOptions
from mcore_ckpt.placement import narrow
from mcore_ckpt.ranges import Extent, coalesce
from mcore_ckpt.read_requests import WantedItem
from mcore_ckpt.safe_pickle import load_object, refuse_zip_bomb
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.zip_compressed import verify_compressed

__all__ = ["ItemDecoder"]

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
