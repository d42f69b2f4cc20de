"""Payloads of a view.

Where a slice of a stored chunk is one run of bytes, as rows of a matrix are, it is read from where it lies. Otherwise
it is gathered in memory, and transposed there if the view has another order of axes. Every stored chunk is read once,
in parts; `check_rest` reads what is left of it and compares its checksum.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from mcore_ckpt.core.boxes import Box, relative, runs
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.format.index import StoredChunk, TensorEntry
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.load.checks import chunk_name
from mcore_ckpt.load.checksums import contiguous_around
from mcore_ckpt.reshard.derived import DerivedPayloads
from mcore_ckpt.reshard.part_sums import check_sum
from mcore_ckpt.reshard.slices import ChunkSlice, TensorView, view_index
from mcore_ckpt.storage.base import RangeReader
from mcore_ckpt.tools.dtype_cast import carrier
from mcore_ckpt.tools.payloads import MADE_HERE, StoredPayload, StoredPayloads

# What one thread has gathered and may be asked for again.
_GATHERED_BYTES = 128 * 1024 * 1024
# A chunk that parts are gathered from is read completely, and compared with its checksum at once, up to this size.
_COMPLETE_BYTES = 64 * 1024 * 1024


@dataclass(slots=True)
class _Gathered:
    """What one thread has gathered last, by name of the view's chunk, and what it was gathered from."""

    parts: dict[str, memoryview]
    around: tuple[tuple[str, tuple[int, ...], int], np.ndarray[Any, Any]] | None = None


class ViewPayloads(DerivedPayloads):
    """Payloads of a view of `base`; `tensors`, `objects` and `kept_objects` as for `view_index`."""

    def __init__(
        self,
        base: StoredPayloads,
        tensors: Mapping[str, TensorView],
        objects: Mapping[str, bytes] | None = None,
        kept_objects: Iterable[str] = (),
    ) -> None:
        index, self._slices, made = view_index(base.index, tensors, objects, kept_objects)
        super().__init__(base, index)
        self.files = _FilesAndMade(base, made)  # type: ignore[assignment]
        self._threads = threading.local()
        self._gathering = threading.Lock()

    def base_chunk(self, entry: TensorEntry, chunk: StoredChunk) -> None:
        """As `DerivedPayloads.base_chunk`: chunks of a view are parts of others."""

    def recipe(self) -> Iterable[str]:
        yield from self.base.recipe()
        for (key, offsets), origin in self._slices.items():
            if origin.chunk is not None:
                yield f"{key} {offsets} {origin.chunk.item[:2]} {origin.slice} {origin.order}"

    def _locate(self, entry: TensorEntry, chunk: StoredChunk) -> StoredPayload:
        origin = self._slices[entry.fqn, chunk.offsets]
        nbytes = math.prod(chunk.sizes) * element_bytes(entry.dtype)
        where = chunk_name(entry.fqn, chunk)
        if origin.entry is None or origin.chunk is None:
            return StoredPayload(where, chunk.item.file, 0, nbytes, None, origin.made or bytes(nbytes))
        stored = self.base.locate(origin.entry, origin.chunk)
        first = _first_byte(origin)
        if first is None:

            def gather(start: int, view: memoryview) -> None:
                view[:] = self._gathered(where, origin)[start : start + len(view)]

            return self.computed(entry, chunk, gather, stored.file)
        if stored.decoded is not None:
            content = memoryview(stored.decoded)[first : first + nbytes]
            return StoredPayload(where, stored.file, 0, nbytes, None, content)
        if stored.computed:
            read_into = self.base.read_into
            return self.computed(entry, chunk, lambda start, view: read_into(stored, first + start, view), stored.file)
        crc = stored.crc32 if nbytes == stored.nbytes else None
        return StoredPayload(where, stored.file, stored.offset + first, nbytes, crc)

    def _gathered(self, where: str, origin: ChunkSlice) -> memoryview:
        """A slice in memory of its own, in the view's order; the last few are kept: readers alternate between them.
        Each thread has its own: two threads would replace each other's.
        """
        if not hasattr(self._threads, "gathered"):
            self._threads.gathered = _Gathered({})
        own: _Gathered = self._threads.gathered
        known = own.parts.pop(where, None)
        if known is None:
            room = _GATHERED_BYTES - math.prod(origin.slice.sizes) * origin.elem_bytes
            while own.parts and sum(map(len, own.parts.values())) > room:
                own.parts.pop(next(iter(own.parts)))
            with self._gathering:  # one thread at a time, since what is gathered from takes memory, too
                known = self._gather(origin, own)
        own.parts[where] = known
        return known

    def _gather(self, origin: ChunkSlice, own: _Gathered) -> memoryview:
        assert origin.entry is not None
        assert origin.chunk is not None
        around = Box((0,) * len(origin.chunk.sizes), origin.chunk.sizes)
        if math.prod(around.sizes) * origin.elem_bytes > _COMPLETE_BYTES:
            around = contiguous_around(origin.chunk.sizes, origin.slice)
        first = runs(origin.chunk.sizes, around, origin.elem_bytes).first_byte
        key = origin.entry.fqn, origin.chunk.offsets, first
        if own.around is None or own.around[0] != key:
            own.around = None
            stored = self.base.locate(origin.entry, origin.chunk)
            memory = memoryview(bytearray(math.prod(around.sizes) * origin.elem_bytes))
            self.base.read_into(stored, first, memory)
            if len(memory) == stored.nbytes:
                check_sum(stored, crc32(memory))
            self.part_was_read(origin.entry, origin.chunk, stored, first, memory)
            own.around = key, np.frombuffer(memory, carrier(origin.elem_bytes)).reshape(around.sizes)
        inside = relative(origin.slice, around.offsets)
        cut = own.around[1][tuple(slice(at, at + n) for at, n in zip(inside.offsets, inside.sizes, strict=True))]
        if inside.sizes == around.sizes:
            own.around = None  # no other slice is in it
        if origin.order is not None:
            cut = cut.transpose(origin.order)
        return memoryview(np.ascontiguousarray(cut).reshape(-1).view(np.uint8).data)

    def was_read(self, entry: TensorEntry, chunk: StoredChunk, value: int) -> None:
        """Note the CRC-32 of a chunk of the view; raise `ChecksumError` if its stored chunk turns out damaged."""
        origin = self._slices[entry.fqn, chunk.offsets]
        first = None if origin.chunk is None else _first_byte(origin)
        if origin.entry is None or origin.chunk is None or first is None:
            return
        stored = self.base.locate(origin.entry, origin.chunk)
        total = self._sums.note(stored, first, math.prod(origin.slice.sizes) * origin.elem_bytes, value)
        if total is not None:
            self.base.was_read(origin.entry, origin.chunk, total)

    def check_rest(self) -> None:
        """Read the rest of each chunk that the view has slices of, and compare its checksum; raises `ChecksumError`.

        The rest are slices that no requested tensor has, and those that an earlier run has written.
        """
        for origin in self._slices.values():
            if origin.entry is None or origin.chunk is None:
                continue
            if _first_byte(origin) is None:
                # What is gathered from a small chunk is compared whenever it is read.
                checked = math.prod(origin.chunk.sizes) * origin.elem_bytes <= _COMPLETE_BYTES
            else:
                checked = origin.slice.sizes == origin.chunk.sizes
            if not checked:
                self._sums.expect(self.base.locate(origin.entry, origin.chunk))
        super().check_rest()


def _first_byte(origin: ChunkSlice) -> int | None:
    """Where a slice begins in its chunk, if it is one run of bytes in the view's order."""
    assert origin.chunk is not None
    run = runs(origin.chunk.sizes, origin.slice, origin.elem_bytes)
    return run.first_byte if origin.order is None and len(run) == 1 else None


class _FilesAndMade:
    """Files of the base, and a pseudo-file with the objects that are made here."""

    def __init__(self, base: StoredPayloads, made: bytes) -> None:
        self._base = base
        self._made = _MadeReader(made)

    def reader(self, name: str) -> AbstractContextManager[RangeReader]:
        return nullcontext(self._made) if name == MADE_HERE else self._base.files.reader(name)

    def close(self) -> None:
        """Close the files."""
        self._base.files.close()


class _MadeReader(RangeReader):
    """Bytes in memory as a file."""

    def __init__(self, content: bytes) -> None:
        self.name, self.size_bytes, self._content = MADE_HERE, len(content), content

    def read_into(self, offset: int, view: memoryview, arrived: Any = None) -> None:
        self.check_range(offset, len(view))
        view[:] = self._content[offset : offset + len(view)]
        if arrived is not None:
            arrived(view)

    def close(self) -> None:
        pass
