"""Moving elements from one division of a tensor into chunks to another, in one pass, block by block and slab by slab
(`tilings.py`): each byte is taken once and given once.

Knows neither files nor checkpoints: sources fill memory, sinks take it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from mcore_ckpt.core.boxes import Box, bounding, intersect
from mcore_ckpt.core.crc import crc32, crc32_combine
from mcore_ckpt.tools.dtype_cast import carrier
from mcore_ckpt.tools.tilings import SLAB_BYTES, slabs

# From this size on, a second sum of the same bytes is cheaper derived from the first than computed.
_MIN_COMBINED_BYTES = 512 * 1024


class Source(Protocol):
    """Where the bytes of one chunk come from.

    It may have `lend(start, nbytes)`: memory that holds bytes from `start` on, `nbytes` of them or fewer, until it is
    asked again; None if it has none.
    """

    def read_into(self, start: int, view: memoryview) -> None:
        """Fill `view` with the chunk's bytes from `start` on."""


class Sink(Protocol):
    """Where the bytes of one chunk go, front to back."""

    def space(self, nbytes: int) -> memoryview:
        """Memory for the next bytes: `nbytes` of them or fewer, but at least one."""

    def filled(self, view: memoryview) -> None:
        """`view`, which `space` gave, holds the bytes."""


def _start_in(chunk: Box, part: Box, elem_bytes: int) -> int:
    """Byte offset of a part's first element in its chunk."""
    position = 0
    for outer, size, inner in zip(chunk.offsets, chunk.sizes, part.offsets, strict=True):
        position = position * size + inner - outer
    return position * elem_bytes


class CrcSink:
    """A sink that keeps nothing but the CRC-32; `window` is memory that all sinks of one thread share."""

    __slots__ = ("_window", "crc32")

    def __init__(self, window: memoryview) -> None:
        self._window = window
        self.crc32 = 0

    def space(self, nbytes: int) -> memoryview:
        """The window, or its beginning."""
        return self._window[:nbytes]

    def filled(self, view: memoryview) -> None:
        """Sum what is there."""
        self.crc32 = crc32(view, self.crc32)


def reads_of(
    source_boxes: Sequence[Box], target_boxes: Sequence[Box], elem_bytes: int, slab_bytes: int = SLAB_BYTES
) -> Iterator[tuple[int, int, int]]:
    """What `Walk.move` is going to read of a block, nearly in its order: number of the source, first byte, bytes."""
    if len(source_boxes) == 1 and list(source_boxes) == list(target_boxes):
        yield 0, 0, math.prod(source_boxes[0].sizes) * elem_bytes
        return
    for slab in slabs(bounding(target_boxes), elem_bytes, slab_bytes):
        for n, box in enumerate(source_boxes):
            part = intersect(box, slab)
            if part is not None:
                yield n, _start_in(box, part, elem_bytes), math.prod(part.sizes) * elem_bytes


@dataclass(slots=True)
class Walk:
    """Moves blocks from sources to sinks, in one thread; its memory is used again for each."""

    elem_bytes: int = 1  # size of an element, in sources and sinks alike
    slab_bytes: int = SLAB_BYTES  # about what is worked on at once
    _read_memory: bytearray = field(default_factory=bytearray)
    _part_memory: bytearray = field(default_factory=bytearray)

    def move(
        self,
        source_boxes: Sequence[Box],
        sources: Sequence[Source],
        target_boxes: Sequence[Box],
        sinks: Sequence[Sink],
    ) -> list[int]:
        """Fill the sinks of one block; returns the CRC-32 of what was read of each source."""
        crcs = [0] * len(sources)
        if len(sources) == 1 and list(source_boxes) == list(target_boxes):
            crcs[0] = self._straight(sources[0], 0, source_boxes[0], sinks[0], 0)
            return crcs
        for slab in slabs(bounding(target_boxes), self.elem_bytes, self.slab_bytes):
            from_sources = [
                (n, part) for n, box in enumerate(source_boxes) if (part := intersect(box, slab)) is not None
            ]
            to_targets = [(n, part) for n, box in enumerate(target_boxes) if (part := intersect(box, slab)) is not None]
            if len(from_sources) == 1 and len(to_targets) == 1 and from_sources[0][1] == to_targets[0][1]:
                (n, part), (m, _) = from_sources[0], to_targets[0]
                start = _start_in(source_boxes[n], part, self.elem_bytes)
                crcs[n] = self._straight(sources[n], start, part, sinks[m], crcs[n])
                continue
            read: dict[int, tuple[Box, Any]] = {}
            straight: dict[int, int] = {}
            for m, part in to_targets:
                for n, other in from_sources:
                    if other == part:
                        straight[m] = n
            memory = self._memory(sum(math.prod(part.sizes) for n, part in from_sources if n not in straight.values()))
            for n, part in from_sources:
                if n in straight.values():
                    continue
                nbytes = math.prod(part.sizes) * self.elem_bytes
                view, memory = memory[:nbytes], memory[nbytes:]
                sources[n].read_into(_start_in(source_boxes[n], part, self.elem_bytes), view)
                crcs[n] = crc32(view, crcs[n])
                read[n] = part, np.frombuffer(view, carrier(self.elem_bytes)).reshape(part.sizes)
            for m, part in to_targets:
                if m in straight:
                    n = straight[m]
                    start = _start_in(source_boxes[n], part, self.elem_bytes)
                    crcs[n] = self._straight(sources[n], start, part, sinks[m], crcs[n])
                else:
                    self._assemble(part, list(read.values()), sinks[m])
        return crcs

    def _memory(self, elems: int) -> memoryview:
        nbytes = elems * self.elem_bytes
        if len(self._read_memory) < nbytes:
            self._read_memory = bytearray(nbytes)
        return memoryview(self._read_memory)[:nbytes]

    def _straight(self, source: Source, start: int, part: Box, sink: Sink, value: int) -> int:
        """What one source has of the slab is what one sink wants of it: read it to where it goes."""
        nbytes = math.prod(part.sizes) * self.elem_bytes
        lend = getattr(source, "lend", None) if isinstance(sink, CrcSink) else None
        sums_itself = hasattr(sink, "crc32")
        done = 0
        while done < nbytes:
            view: memoryview | None = None if lend is None else lend(start + done, nbytes - done)
            if view is None:
                view = sink.space(nbytes - done)
                source.read_into(start + done, view)
            if sums_itself and len(view) >= _MIN_COMBINED_BYTES:
                before = sink.crc32  # type: ignore[attr-defined]
                sink.filled(view)
                # From another beginning the same bytes lead to another sum, by what became of the difference.
                value = crc32_combine(before ^ value, sink.crc32, len(view))  # type: ignore[attr-defined]
            else:
                value = crc32(view, value)
                sink.filled(view)
            done += len(view)
        return value

    def _assemble(self, part: Box, read: list[tuple[Box, Any]], sink: Sink) -> None:
        """Put a sink's part of the slab together from what was read."""
        nbytes = math.prod(part.sizes) * self.elem_bytes
        view = sink.space(nbytes)
        whole = len(view) == nbytes
        if not whole and len(self._part_memory) < nbytes:
            self._part_memory = bytearray(nbytes)
        memory = view if whole else memoryview(self._part_memory)[:nbytes]
        array = np.frombuffer(memory, carrier(self.elem_bytes)).reshape(part.sizes)
        for box, elements in read:
            cell = intersect(box, part)
            if cell is not None:
                array[_within(part, cell)] = elements[_within(box, cell)]
        if whole:
            sink.filled(view)
            return
        done = 0
        while done < nbytes:
            piece = min(len(view), nbytes - done)
            view[:piece] = memory[done : done + piece]
            sink.filled(view[:piece])
            done += piece
            if done < nbytes:
                view = sink.space(nbytes - done)


def _within(outer: Box, inner: Box) -> tuple[slice, ...]:
    return tuple(
        slice(start - base, start - base + size)
        for start, base, size in zip(inner.offsets, outer.offsets, inner.sizes, strict=True)
    )
