"""Tensors put together from boxes of stored tensors, without copying any: a view of a checkpoint under other keys.

A piece of a view is a stored chunk, or the part of one that a box shares with it; where that part is one run of bytes,
as rows of a matrix are, it is read from where it lies. So whatever takes an index and payloads (a reshard, an export)
takes a view as well. Elements that are wanted the other way round are transposed in memory, chunk by chunk, and rows
that nothing stands for are zeros.

Each stored chunk is read once, in parts; `check_rest` then has seen all of it and compares its checksum.
"""

from __future__ import annotations

import math
import operator
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mcore_ckpt.core.boxes import Box, covers, flat_boxes, intersect, relative, runs
from mcore_ckpt.core.errors import ChecksumError, CorruptCheckpointError, OptionError
from mcore_ckpt.format.crc import crc32, crc32_combine
from mcore_ckpt.format.index import CheckpointIndex, ObjectEntry, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.items.checks import chunk_name
from mcore_ckpt.items.checksums import contiguous_around
from mcore_ckpt.storage.base import RangeReader
from mcore_ckpt.tools.dtype_cast import carrier
from mcore_ckpt.tools.payloads import MADE_HERE, StoredPayload, StoredPayloads

__all__ = ["PiecePayloads", "Source", "Wanted", "view_of"]

_WINDOW_BYTES = 4 * 1024 * 1024
# What was gathered and may be asked for again.
_GATHERED_BYTES = 128 * 1024 * 1024
# A chunk that parts are gathered from is read as a whole, and held against its checksum at once, up to this size.
_WHOLE_BYTES = 64 * 1024 * 1024


class Source(NamedTuple):
    """Where a box of a wanted tensor comes from.

    Attributes:
        box: of the wanted tensor.
        key: the stored tensor; None for zeros.
        stored_box: of the stored tensor; its sizes are those of `box`, but for axes of one element.
        axes: which axis of `box` is which of `stored_box`, counted from the last, -1; all others have one element.
            None: the last axes are the same, as many as both have.
        flat: the stored tensor's last axis counts elements of a flattened array, in which the box lies in its own
            order from this element on; `stored_box` is the array then, one element long but for that axis.
    """

    box: Box
    key: str | None
    stored_box: Box | None = None
    axes: Sequence[tuple[int, int]] | None = None
    flat: int | None = None


class Wanted(NamedTuple):
    """A tensor of the view: its shape, the boxes that it is made of, and its dtype, where all of them may be zeros."""

    shape: tuple[int, ...]
    sources: Sequence[Source]
    dtype: str | None = None


class _Piece(NamedTuple):
    """A part of a stored chunk, in coordinates of the chunk; without an entry: zeros.

    Attributes:
        order: of the chunk's axes, where it is not as they are stored.
    """

    entry: TensorEntry | None
    chunk: StoredChunk | None
    part: Box
    order: tuple[int, ...] | None


@dataclass(slots=True)
class _Kept:
    """What one thread has gathered last, by the piece's name, and what it was gathered from."""

    parts: dict[str, memoryview]
    around: tuple[tuple[str, tuple[int, ...], int], np.ndarray[Any, Any]] | None = None


_Places = dict[tuple[str, tuple[int, ...]], _Piece]


def view_of(
    base: CheckpointIndex,
    wanted: Mapping[str, Wanted],
    objects: Mapping[str, bytes] | None = None,
    kept_objects: Iterable[str] = (),
) -> tuple[CheckpointIndex, _Places, bytes]:
    """An index of the wanted tensors, where each of their chunks lies, and the contents of objects made here.

    Args:
        base: what is stored.
        wanted: tensors by key.
        objects: contents of objects by full key, each an archive of `torch.save`.
        kept_objects: full keys of stored objects that the view has as they are.

    Raises:
        OptionError: a wanted tensor is made of tensors of several dtypes.
        CorruptCheckpointError: what is stored does not hold all of what is wanted.
    """
    chunks_of = _ChunksByLead(base)
    tensors: dict[str, TensorEntry] = {}
    places: _Places = {}
    for key, tensor in wanted.items():
        dtypes = {base.tensors[source.key].dtype for source in tensor.sources if source.key is not None}
        if not dtypes and tensor.dtype is not None:
            dtypes = {tensor.dtype}
        if len(dtypes) != 1:
            names = sorted({source.key for source in tensor.sources if source.key is not None})
            raise OptionError(
                f"{key} is made of {', '.join(names[:4])}, which are stored as {', '.join(sorted(dtypes))}; expected "
                "one dtype for all of them; an import gives them one by --dtype"
            )
        (dtype,) = dtypes
        found: list[StoredChunk] = []
        for source in tensor.sources:
            for box, piece in _pieces(base, chunks_of, source):
                nbytes = math.prod(box.sizes) * element_bytes(dtype)
                chunk = StoredChunk(box.offsets, box.sizes, _item(piece, found, nbytes))
                places[key, box.offsets] = piece
                found.append(chunk)
        found = _named_zeros(found)
        problem = covers(tensor.shape, [Box(chunk.offsets, chunk.sizes) for chunk in found])
        if problem and math.prod(tensor.shape):
            raise CorruptCheckpointError(f"{key}: what {base.path} stores does not make it up: {problem}")
        tensors[key] = TensorEntry(key, dtype, tensor.shape, tuple(found))
    made = b""
    entries = {key: base.objects[key] for key in kept_objects}
    starts: dict[bytes, int] = {}
    for key, content in (objects or {}).items():
        if content not in starts:
            starts[content] = len(made)
            made += content
        entries[key] = ObjectEntry(key, StoredItem(MADE_HERE, starts[content], len(content)))
    return CheckpointIndex(base.path, tensors, entries, blocks=base.blocks), places, made


class _ChunksByLead:
    """The chunks of stored tensors that a box may share elements with, found by their leading axes of one element."""

    def __init__(self, base: CheckpointIndex) -> None:
        self._base = base
        self._known: dict[str, tuple[int, dict[tuple[int, ...], list[StoredChunk]]]] = {}
        self._rows: dict[str, dict[tuple[int, ...], tuple[list[int], list[StoredChunk]]]] = {}

    def along(self, key: str, cell: Box, start: int, stop: int) -> Iterable[StoredChunk]:
        """Chunks in order that have elements `[start, stop)` of the last axis, at the place of `cell` in the others."""
        if key not in self._rows:
            rows: dict[tuple[int, ...], list[StoredChunk]] = {}
            for chunk in self._base.tensors[key].chunks:
                rows.setdefault(chunk.offsets[:-1], []).append(chunk)
            self._rows[key] = {}
            for place, chunks in rows.items():
                chunks.sort(key=lambda chunk: chunk.offsets[-1])
                self._rows[key][place] = [chunk.offsets[-1] for chunk in chunks], chunks
        starts, chunks = self._rows[key].get(cell.offsets[:-1], ([], []))
        return chunks[max(0, bisect_right(starts, start) - 1) : bisect_left(starts, stop)]

    def around(self, key: str, box: Box) -> list[StoredChunk]:
        if key not in self._known:
            entry = self._base.tensors[key]
            lead = 0
            while lead < len(entry.shape) and all(chunk.sizes[lead] == 1 for chunk in entry.chunks):
                lead += 1
            by_lead: dict[tuple[int, ...], list[StoredChunk]] = {}
            for chunk in entry.chunks:
                by_lead.setdefault(chunk.offsets[:lead], []).append(chunk)
            self._known[key] = lead, by_lead
        lead, by_lead = self._known[key]
        if all(size == 1 for size in box.sizes[:lead]):
            return by_lead.get(box.offsets[:lead], [])
        return [chunk for chunks in by_lead.values() for chunk in chunks]


def _pieces(base: CheckpointIndex, chunks_of: _ChunksByLead, source: Source) -> Iterable[tuple[Box, _Piece]]:
    if source.key is None or source.stored_box is None:
        yield source.box, _Piece(None, None, source.box, None)
        return
    entry = base.tensors[source.key]
    if source.flat is not None:
        yield from _flat_pieces(entry, chunks_of, source, source.stored_box, source.flat)
        return
    axes = len(source.stored_box.sizes)
    pairs = source.axes or [(-1 - n, -1 - n) for n in range(min(len(source.box.sizes), axes))]
    pairs = sorted(pairs)
    single = [axis for axis in range(axes) if axis - axes not in {theirs for _, theirs in pairs}]
    order: tuple[int, ...] | None = (*single, *(theirs + axes for _, theirs in pairs))
    if [theirs for _, theirs in pairs] == sorted(theirs for _, theirs in pairs):
        order = None
    for chunk in chunks_of.around(source.key, source.stored_box):
        shared = intersect(Box(chunk.offsets, chunk.sizes), source.stored_box)
        if shared is None:
            continue
        inside = relative(shared, source.stored_box.offsets)
        offsets, sizes = list(source.box.offsets), list(source.box.sizes)
        for mine, theirs in pairs:
            offsets[mine] += inside.offsets[theirs]
            sizes[mine] = inside.sizes[theirs]
        yield Box(tuple(offsets), tuple(sizes)), _Piece(entry, chunk, relative(shared, chunk.offsets), order)


def _flat_pieces(
    entry: TensorEntry, chunks_of: _ChunksByLead, source: Source, cell: Box, first: int
) -> Iterable[tuple[Box, _Piece]]:
    stop = first + math.prod(source.box.sizes)
    for chunk in chunks_of.along(entry.fqn, cell, first, stop):
        start, end = chunk.offsets[-1], chunk.offsets[-1] + chunk.sizes[-1]
        low, high = max(first, start), min(stop, end)
        for part in flat_boxes(source.box.sizes, low - first, high - first):
            count = math.prod(part.sizes)
            lead = len(chunk.sizes) - 1
            inside = Box((*(0,) * lead, low - start), (*(1,) * lead, count))
            offsets = tuple(map(operator.add, source.box.offsets, part.offsets))
            yield Box(offsets, part.sizes), _Piece(entry, chunk, inside, None)
            low += count


def _item(piece: _Piece, before: Sequence[StoredChunk], nbytes: int) -> StoredItem:
    """What stands for a piece in an index: near where it lies, so that what is sorted by place is read in order."""
    if piece.chunk is None or piece.entry is None:
        return StoredItem(MADE_HERE, 0, nbytes)
    item = piece.chunk.item
    first = runs(piece.chunk.sizes, piece.part, element_bytes(piece.entry.dtype)).first_byte
    return StoredItem(item.file, item.offset + first, nbytes)


def _named_zeros(chunks: list[StoredChunk]) -> list[StoredChunk]:
    """Zeros lie in no file; in an index they follow what they fill up."""
    real = next((chunk.item for chunk in chunks if chunk.item.file != MADE_HERE), None)
    if real is None:
        return chunks
    return [
        chunk if chunk.item.file != MADE_HERE else chunk._replace(item=StoredItem(real.file, real.offset, 0))
        for chunk in chunks
    ]


class PiecePayloads(StoredPayloads):
    """Payloads of a view; a context manager, which closes those that it is made of.

    Args:
        base: payloads of what is stored.
        wanted, objects, kept_objects: as for `view_of`.
    """

    def __init__(
        self,
        base: StoredPayloads,
        wanted: Mapping[str, Wanted],
        objects: Mapping[str, bytes] | None = None,
        kept_objects: Iterable[str] = (),
    ) -> None:
        index, self._places, made = view_of(base.index, wanted, objects, kept_objects)
        super().__init__(index, base.storage)
        self._base = base
        self._again = _wanted_again(wanted)
        self.files = _FilesAndMade(base, made)  # type: ignore[assignment]
        self._computed: dict[str, tuple[_Piece | None, StoredPayload, int]] = {}
        self._threads = threading.local()
        self._gathered_from: set[tuple[str, int]] = set()
        self._overlapping: set[tuple[str, int]] = set()
        self._noted: set[tuple[tuple[str, tuple[int, ...], int], int]] = set()
        self._gathering = threading.Lock()
        self._seen: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
        self._payload_of: dict[tuple[str, int], StoredPayload] = {}
        self._compared: set[tuple[str, int]] = set()
        self._seeing = threading.Lock()

    def recipe(self) -> Iterable[str]:
        """What else the bytes of the view depend on, for telling one view from another."""
        for (key, offsets), piece in self._places.items():
            if piece.chunk is not None:
                yield f"{key} {offsets} {piece.chunk.item[:2]} {piece.part} {piece.order}"

    def _locate(self, entry: TensorEntry, chunk: StoredChunk) -> StoredPayload:
        piece = self._places[entry.fqn, chunk.offsets]
        nbytes = math.prod(chunk.sizes) * element_bytes(entry.dtype)
        where = chunk_name(entry.fqn, chunk)
        if piece.entry is None or piece.chunk is None:
            return StoredPayload(where, chunk.item.file, 0, nbytes, None, bytes(nbytes))
        stored = self._base.locate(piece.entry, piece.chunk)
        elem_bytes = element_bytes(piece.entry.dtype)
        run = runs(piece.chunk.sizes, piece.part, elem_bytes)
        if piece.order is not None or len(run) > 1:
            self._computed[where] = piece, stored, 0
            return StoredPayload(where, stored.file, 0, nbytes, None, computed=True)
        first, last = run.first_byte, run.first_byte + nbytes
        if stored.decoded is not None:
            return StoredPayload(where, stored.file, 0, nbytes, None, memoryview(stored.decoded)[first:last])
        if stored.computed:
            self._computed[where] = None, stored, first
            return StoredPayload(where, stored.file, 0, nbytes, None, computed=True)
        crc = stored.crc32 if nbytes == stored.nbytes else None
        return StoredPayload(where, stored.file, stored.offset + first, nbytes, crc)

    def read_into(self, payload: StoredPayload, start: int, view: memoryview) -> None:
        """As `StoredPayloads.read_into`."""
        if not payload.computed:
            super().read_into(payload, start, view)
            return
        piece, stored, first = self._computed[payload.where]
        if piece is None:
            self._base.read_into(stored, first + start, view)
        else:
            view[:] = self._gathered(payload.where, piece, stored)[start : start + len(view)]

    def _gathered(self, where: str, piece: _Piece, stored: StoredPayload) -> memoryview:
        """A part that is no run of bytes, or is wanted in another order, in memory of its own.

        The last few stay: what is read from several of them by turns would otherwise be gathered each time anew. Each
        thread has its own: of two that read large ones by turns, either would have to gather again what the other has
        put away.
        """
        kept = self._kept_of_thread()
        known = kept.parts.pop(where, None)
        if known is None:
            assert piece.entry is not None
            room = _GATHERED_BYTES - math.prod(piece.part.sizes) * element_bytes(piece.entry.dtype)
            while kept.parts and sum(map(len, kept.parts.values())) > room:
                kept.parts.pop(next(iter(kept.parts)))
            with self._gathering:  # one at a time, since what is gathered from takes memory, too
                known = self._gather(piece, stored, kept)
        kept.parts[where] = known
        return known

    def _kept_of_thread(self) -> _Kept:
        if not hasattr(self._threads, "kept"):
            self._threads.kept = _Kept({})
        kept: _Kept = self._threads.kept
        return kept

    def _gather(self, piece: _Piece, stored: StoredPayload, kept: _Kept) -> memoryview:
        assert piece.entry is not None
        assert piece.chunk is not None
        elem_bytes = element_bytes(piece.entry.dtype)
        around = Box((0,) * len(piece.chunk.sizes), piece.chunk.sizes)
        if stored.nbytes > _WHOLE_BYTES:
            around = contiguous_around(piece.chunk.sizes, piece.part)
        first = runs(piece.chunk.sizes, around, elem_bytes).first_byte
        key = piece.entry.fqn, piece.chunk.offsets, first
        if kept.around is None or kept.around[0] != key:
            kept.around = None
            memory = memoryview(bytearray(math.prod(around.sizes) * elem_bytes))
            self._base.read_into(stored, first, memory)
            if len(memory) == stored.nbytes:
                if stored.crc32 is not None and crc32(memory) != stored.crc32:
                    raise _damaged(stored, crc32(memory))
            elif stored.crc32 is not None and (key, len(memory)) not in self._noted:
                self._noted.add((key, len(memory)))
                self._gathered_from.add((piece.chunk.item.file, piece.chunk.item.offset))
                self._note(piece.entry, piece.chunk, stored, first, len(memory), crc32(memory))
            kept.around = key, np.frombuffer(memory, carrier(elem_bytes)).reshape(around.sizes)
        inside = relative(piece.part, around.offsets)
        whole = kept.around[1]
        cut = whole[tuple(slice(at, at + size) for at, size in zip(inside.offsets, inside.sizes, strict=True))]
        if inside.sizes == around.sizes:
            kept.around = None  # nothing else is wanted of it
        if piece.order is not None:
            cut = cut.transpose(piece.order)
        return memoryview(np.ascontiguousarray(cut).reshape(-1).view(np.uint8).data)

    def was_read(self, entry: TensorEntry, chunk: StoredChunk, value: int) -> None:
        """Note the CRC-32 of a piece as it was read; raise `ChecksumError` if its stored chunk turns out damaged."""
        if entry.fqn in self._again:
            return
        piece = self._places[entry.fqn, chunk.offsets]
        if piece.entry is None or piece.chunk is None or piece.order is not None:
            return
        run = runs(piece.chunk.sizes, piece.part, element_bytes(piece.entry.dtype))
        stored = self._base.locate(piece.entry, piece.chunk)
        if len(run) != 1:
            return
        self._note(piece.entry, piece.chunk, stored, run.first_byte, run.run_bytes, value)

    def _note(
        self, entry: TensorEntry, chunk: StoredChunk, stored: StoredPayload, first: int, nbytes: int, value: int
    ) -> None:
        """A part of a chunk was read, and has this CRC-32; no part is noted twice."""
        key = chunk.item.file, chunk.item.offset
        with self._seeing:
            if key in self._overlapping:
                return
            seen = self._seen.setdefault(key, [])
            if key in self._gathered_from and any(
                start < first + nbytes and first < start + size for start, size, _ in seen
            ):
                # What is gathered is read with what lies between: `check_rest` reads this chunk once more.
                self._overlapping.add(key)
                self._payload_of[key] = stored
                seen.clear()
                return
            seen.append((first, nbytes, value))
            if sum(nbytes for _, nbytes, _ in seen) < stored.nbytes:
                self._payload_of[key] = stored
                return
            del self._seen[key]
            self._payload_of.pop(key, None)
            self._compared.add(key)
        # What stores no sum for it may be a part of something that does.
        self._base.was_read(entry, chunk, _compare(stored, seen))

    def check_rest(self) -> None:
        """Read what was not read here of chunks that the view has parts of, and compare their checksums.

        Parts that nobody wanted, and those that an earlier run has moved.

        Raises:
            ChecksumError: one is damaged.
        """
        for piece in self._places.values():
            if piece.entry is None or piece.chunk is None:
                continue
            key = piece.chunk.item.file, piece.chunk.item.offset
            elem_bytes = element_bytes(piece.entry.dtype)
            run = piece.order is None and len(runs(piece.chunk.sizes, piece.part, elem_bytes)) == 1
            if run and piece.part.sizes == piece.chunk.sizes:
                continue
            if not run and math.prod(piece.chunk.sizes) * elem_bytes <= _WHOLE_BYTES:
                continue  # each time that it was gathered from, it was read and compared as a whole
            if key not in self._compared and key not in self._seen:
                stored = self._base.locate(piece.entry, piece.chunk)
                if stored.crc32 is not None:
                    self._seen[key], self._payload_of[key] = [], stored
        for key, seen in self._seen.items():
            stored = self._payload_of[key]
            if stored.crc32 is None:
                continue
            at = 0
            for start, nbytes, _ in [*sorted(seen), (stored.nbytes, 0, 0)]:
                if start > at:
                    seen.append((at, start - at, self._sum(stored, at, start)))
                at = start + nbytes
            _compare(stored, seen)
            self._compared.add(key)
        self._seen.clear()
        self._base.check_rest()

    def _sum(self, stored: StoredPayload, start: int, stop: int) -> int:
        value = 0
        window = memoryview(bytearray(min(_WINDOW_BYTES, stop - start)))
        while start < stop:
            view = window[: min(len(window), stop - start)]
            self._base.read_into(stored, start, view)
            value = crc32(view, value)
            start += len(view)
        return value

    def close(self) -> None:
        """Close the files."""
        self._base.close()


def _wanted_again(wanted: Mapping[str, Wanted]) -> set[str]:
    """Tensors of a view that are made of the very boxes which another tensor, before them, is made of."""
    used: set[tuple[str, Box | None]] = set()
    again: set[str] = set()
    for key, tensor in wanted.items():
        boxes = {(source.key, source.stored_box) for source in tensor.sources if source.key is not None}
        if boxes and boxes <= used:
            again.add(key)
        used |= boxes
    return again


def _compare(stored: StoredPayload, seen: list[tuple[int, int, int]]) -> int:
    """The CRC-32 of a chunk that was read in parts; raises `ChecksumError` if another one is stored with it."""
    value = 0
    for _, nbytes, part in sorted(seen):
        value = crc32_combine(value, part, nbytes)
    if stored.crc32 is not None and value != stored.crc32:
        raise _damaged(stored, value)
    return value


def _damaged(stored: StoredPayload, value: int) -> ChecksumError:
    return ChecksumError(
        f"{stored.where}: the source is damaged: its elements have CRC-32 {value:#010x}, expected "
        f"{stored.crc32:#010x}. Run `mcore-ckpt verify` on it, and take a sound copy"
    )


class _FilesAndMade:
    """Files of the base, and beside them one that is nowhere: the objects that are made here."""

    def __init__(self, base: StoredPayloads, made: bytes) -> None:
        self._base = base
        self._made = _MadeReader(made)

    def reader(self, name: str) -> AbstractContextManager[RangeReader]:
        """As `OpenFiles.reader`."""
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
