"""Stored items that are decoded rather than ranged: objects, and tensors that `torch.save` stored in an unusual way.

The whole item is read into memory, its stream transforms are undone, its checksums compared, and
`safe_pickle.load_object` does the rest.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from typing import Any

import torch

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import IF_DAMAGED, CorruptCheckpointError, LoadError
from mcore_ckpt.core.options import LoadOptions
from mcore_ckpt.core.process import together
from mcore_ckpt.format.index import ObjectEntry, StoredChunk, StoredItem
from mcore_ckpt.format.safe_pickle import load_object
from mcore_ckpt.load.checks import check_proportion, chunk_name, item_name
from mcore_ckpt.load.checksums import check_records, checksum_error
from mcore_ckpt.load.open_files import OpenFiles, ReadStats, naming, using
from mcore_ckpt.load.ranges import Extent, Span, coalesce

_logger = logger_of(__name__)


class ItemDecoder:
    """Reads items and decodes them. `opened` gives the files. Transforms are undone by DCP's `ExtensionRegistry`; None:
    what torch knows.
    """

    def __init__(
        self,
        opened: Callable[[], AbstractContextManager[OpenFiles]],
        options: LoadOptions,
        stats: ReadStats,
        extension_registry: Any = None,
    ) -> None:
        self._extension_registry = extension_registry
        self._opened = opened
        self._options = options
        self._stats = stats
        self._reasons: set[str] = set()

    def object_contents(self, entries: Iterable[ObjectEntry]) -> Iterator[tuple[ObjectEntry, bytes]]:
        """Stored objects as `torch.save` made them, in order of the files; neighbours are read together."""
        extents = [
            Extent(entry.item.file, entry.item.offset, entry.item.offset + entry.item.length, entry.item.length, entry)
            for entry in entries
        ]
        extents.sort(key=lambda extent: (extent.file, extent.start))
        with self._opened() as files:
            spans = coalesce(extents, **files.read_sizes())
            at_once = max(1, files.open_ahead)
            while few := list(islice(spans, at_once)):
                contents = together(at_once, *(partial(self._read_span, files, span) for span in few))
                for span, content in zip(few, contents, strict=True):
                    for extent in span.extents:
                        stored = content[extent.start - span.start : extent.stop - span.start]
                        with using(span.file):
                            checked = self._checked(extent.owner.fqn, extent.owner.item, stored, is_object=True)
                        yield extent.owner, checked
                        self._stats.add(bytes_needed=len(stored))

    def _read_span(self, files: OpenFiles, span: Span) -> bytes:
        first: ObjectEntry = span.extents[0].owner
        return self._read(files, first.fqn, StoredItem(span.file, span.start, span.stop - span.start))

    def tensor(self, fqn: str, chunk: StoredChunk, dtype: torch.dtype, reason: str) -> torch.Tensor:
        """Decode a stored chunk of a tensor, for a `reason` that is logged once for each kind."""
        where = chunk_name(fqn, chunk)
        check_proportion(math.prod(chunk.sizes) * dtype.itemsize, chunk.item, where)
        kind = re.sub(r"\d+", "#", reason)
        if kind not in self._reasons:
            self._reasons.add(kind)
            _logger.warning(
                "%s is read and decoded completely, which is slow, because %s; so are others like it", where, reason
            )
        with self._opened() as files:
            stored = self._read(files, fqn, chunk.item)
        content = self._checked(fqn, chunk.item, stored, is_object=False)
        self._stats.add(fallbacks=1)
        try:
            loaded = load_object(
                content,
                self._options.allowed_classes,
                where=where,
                verify_crc=False,  # compared above
            )
        except CorruptCheckpointError:
            raise
        except Exception as error:
            raise CorruptCheckpointError(
                f"{where}: cannot be decoded ({type(error).__name__}: {str(error)[:300]}); {IF_DAMAGED}"
            ) from error
        if not isinstance(loaded, torch.Tensor) or tuple(loaded.shape) != chunk.sizes or loaded.dtype != dtype:
            got = f"{loaded.dtype} of shape {list(loaded.shape)}" if isinstance(loaded, torch.Tensor) else type(loaded)
            raise CorruptCheckpointError(
                f"{where}: the index says {dtype} of shape {list(chunk.sizes)}, stored is {got}"
            )
        if loaded.layout is not torch.strided or loaded.device.type == "meta":
            kind = "on the meta device" if loaded.device.type == "meta" else f"of layout {loaded.layout}"
            raise CorruptCheckpointError(
                f"{where}: expected a tensor with an element at each place, stored is one {kind}; {IF_DAMAGED}"
            )
        # Through the class: an attribute that the pickle gave it may have any name.
        return torch.Tensor.detach(loaded)

    def _read(self, files: OpenFiles, fqn: str, item: StoredItem) -> bytes:
        try:
            with using(item.file), files.reader(item.file) as reader:
                stored = reader.read(item.offset, item.length)
        except LoadError as error:
            raise naming(error, item_name(fqn, item)) from error
        self._stats.add(reads=1, bytes_read=len(stored))
        return stored

    def _checked(self, fqn: str, item: StoredItem, stored: bytes, *, is_object: bool) -> bytes:
        """The item's container: transforms undone, checksums compared."""
        where = item_name(fqn, item)
        # What is neither an object nor transformed has the CRC-32 of its payload alone in the index.
        if item.crc32 is not None and (is_object or item.transforms):
            got = crc32(stored)
            if got != item.crc32:
                raise checksum_error(where, "its bytes have", got, item.crc32)
        content = self._undo_transforms(stored, item.transforms, where) if item.transforms else stored
        self._verify(content, where)
        return content

    def _verify(self, content: bytes, where: str) -> None:
        view = memoryview(content)

        def read(offset: int, length: int) -> bytes:
            return content[offset : offset + length]

        def sum_up(offset: int, length: int) -> int:
            return crc32(view[offset : offset + length])

        self._stats.add(records_checked=check_records(read, sum_up, len(content), where))

    def _undo_transforms(self, stored: bytes, transforms: tuple[str, ...], where: str) -> bytes:
        """Undo DCP's stream transforms, in the order in which they are named."""
        stream: Any = io.BytesIO(stored)
        at_fault = ", ".join(transforms)
        try:
            registry = self._extension_registry
            if registry is None:
                from torch.distributed.checkpoint._extension import ExtensionRegistry

                registry = ExtensionRegistry()
            for descriptor in transforms:
                at_fault = descriptor
                for extension in registry.from_descriptor_list([descriptor]):
                    # Any extension may be registered; those that transform streams have this method.
                    if hasattr(extension, "transform_from"):
                        stream = extension.transform_from(stream)
            at_fault = ", ".join(transforms)
            return bytes(stream.read(-1))
        except Exception as error:
            raise LoadError(
                f"{where}: stored through the extension {at_fault}, which cannot be undone here"
                f" ({type(error).__name__}: {error}); install what it needs, or read with"
                " `FileSystemReader(path, _extension_registry=...)` and a registry that knows it"
            ) from error
