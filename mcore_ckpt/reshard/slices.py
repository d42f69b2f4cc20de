"""Which slice of which stored tensor a requested tensor is made of, and the index that follows from it.

A chunk of the view is a stored chunk, or the slice of one that a part has in common with it. So everything that takes
an index and payloads (a reshard, an export) takes a view as well.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from mcore_ckpt.core.boxes import Box, covers, flat_boxes, intersect, relative, runs
from mcore_ckpt.core.errors import CorruptCheckpointError, OptionError
from mcore_ckpt.format.index import CheckpointIndex, ObjectEntry, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.tools.payloads import MADE_HERE


class Part(NamedTuple):
    """A slice of a requested tensor, and the stored slice that it is."""

    slice: Box
    key: str | None  # of the stored tensor; None: zeros
    # Slice of the stored tensor; its sizes are those of `slice`, except for axes of one element.
    stored: Box | None = None
    # Which axis of `slice` is which of `stored`, both counted from the last, -1; every other axis has one element.
    # None: the last axes correspond, as many as both have.
    axes: Sequence[tuple[int, int]] | None = None
    # The last axis of the stored tensor counts elements of a flattened array. `slice` lies there in C order from this
    # element on; `stored` is that array, with one element along every other axis.
    flat: int | None = None


class TensorView(NamedTuple):
    """A requested tensor: its shape in elements, its parts, and its dtype in case nothing of it is stored.

    `made`: the bytes of its elements, where they are made here; its one part is all of it, without a key.
    """

    shape: tuple[int, ...]
    parts: Sequence[Part]
    dtype: str | None = None
    made: bytes | None = None


class ChunkSlice(NamedTuple):
    """A slice of a stored chunk, in the chunk's own coordinates; without an entry: `made`, or zeros.

    `order` is that of the chunk's axes in the view, where it is another than in the file.
    """

    entry: TensorEntry | None
    chunk: StoredChunk | None
    slice: Box
    order: tuple[int, ...] | None
    made: bytes | None = None

    @property
    def elem_bytes(self) -> int:
        assert self.entry is not None
        return element_bytes(self.entry.dtype)


ChunkSlices = dict[tuple[str, tuple[int, ...]], ChunkSlice]


def as_stored(entry: TensorEntry) -> TensorView:
    """A view of all of one stored tensor."""
    everything = Box((0,) * len(entry.shape), entry.shape)
    return TensorView(entry.shape, (Part(everything, entry.fqn, everything),))


def view_index(
    base: CheckpointIndex,
    tensors: Mapping[str, TensorView],
    objects: Mapping[str, bytes] | None = None,
    kept_objects: Iterable[str] = (),
) -> tuple[CheckpointIndex, ChunkSlices, bytes]:
    """The index of a view with `tensors` by requested key, the slice of `base` behind each of its chunks, and its new
    `objects` (archives of `torch.save` by full key), joined. `kept_objects`: stored ones that stay.
    """
    chunks_of = _ChunksByLead(base)
    entries: dict[str, TensorEntry] = {}
    slices: ChunkSlices = {}
    for key, view in tensors.items():
        dtype = _dtype_of(key, view, base)
        found: list[StoredChunk] = []
        for part in view.parts:
            for box, origin in _chunk_slices(base, chunks_of, part):
                nbytes = math.prod(box.sizes) * element_bytes(dtype)
                found.append(StoredChunk(box.offsets, box.sizes, _item(origin, nbytes)))
                slices[key, box.offsets] = origin._replace(made=view.made)
        found = _with_named_zeros(found)
        problem = covers(view.shape, [Box(chunk.offsets, chunk.sizes) for chunk in found])
        if problem and math.prod(view.shape):
            raise CorruptCheckpointError(f"{key}: the chunks in {base.path} do not make it up: {problem}")
        entries[key] = TensorEntry(key, dtype, view.shape, tuple(found))
    made = b""
    kept = {key: base.objects[key] for key in kept_objects}
    starts: dict[bytes, int] = {}
    for key, content in (objects or {}).items():
        if content not in starts:
            starts[content] = len(made)
            made += content
        kept[key] = ObjectEntry(key, StoredItem(MADE_HERE, starts[content], len(content)))
    return CheckpointIndex(base.path, entries, kept, blocks=base.blocks), slices, made


def _dtype_of(key: str, view: TensorView, base: CheckpointIndex) -> str:
    stored = {part.key for part in view.parts if part.key is not None}
    dtypes = {base.tensors[name].dtype for name in stored}
    if not dtypes and view.dtype is not None:
        return view.dtype
    if len(dtypes) != 1:
        raise OptionError(
            f"{key} is made of {', '.join(sorted(stored)[:4])}, which are stored as {', '.join(sorted(dtypes))}; "
            "expected one dtype for all of them; an import gives them one by --dtype"
        )
    return dtypes.pop()


class _ChunksByLead:
    """The chunks of stored tensors that a slice may share elements with, by their leading axes of one element."""

    def __init__(self, base: CheckpointIndex) -> None:
        self._base = base
        self._known: dict[str, tuple[int, dict[tuple[int, ...], list[StoredChunk]]]] = {}
        self._rows: dict[str, dict[tuple[int, ...], tuple[list[int], list[StoredChunk]]]] = {}

    def along(self, key: str, cell: Box, start: int, stop: int) -> Iterable[StoredChunk]:
        """Chunks in order with elements `[start, stop)` of the last axis, where `cell` is in the other axes."""
        if key not in self._rows:
            rows: dict[tuple[int, ...], list[StoredChunk]] = {}
            for chunk in self._base.tensors[key].chunks:
                rows.setdefault(chunk.offsets[:-1], []).append(chunk)
            self._rows[key] = {}
            for lead, chunks in rows.items():
                chunks.sort(key=lambda chunk: chunk.offsets[-1])
                self._rows[key][lead] = [chunk.offsets[-1] for chunk in chunks], chunks
        starts, chunks = self._rows[key].get(cell.offsets[:-1], ([], []))
        return chunks[max(0, bisect_right(starts, start) - 1) : bisect_left(starts, stop)]

    def around(self, key: str, box: Box) -> Iterable[StoredChunk]:
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


def _chunk_slices(base: CheckpointIndex, chunks_of: _ChunksByLead, part: Part) -> Iterable[tuple[Box, ChunkSlice]]:
    """Each slice of the requested tensor that one stored chunk has, and where it is in that chunk."""
    if part.key is None or part.stored is None:
        yield part.slice, ChunkSlice(None, None, part.slice, None)
        return
    entry = base.tensors[part.key]
    if part.flat is not None:
        yield from _flat_slices(entry, chunks_of, part, part.stored, part.flat)
        return
    axes = len(part.stored.sizes)
    pairs = part.axes or [(-1 - n, -1 - n) for n in range(min(len(part.slice.sizes), axes))]
    pairs = sorted(pairs)
    theirs = [stored for _, stored in pairs]
    single = [axis for axis in range(axes) if axis - axes not in theirs]
    order = None if theirs == sorted(theirs) else (*single, *(axis + axes for axis in theirs))
    for chunk in chunks_of.around(part.key, part.stored):
        shared = intersect(Box(chunk.offsets, chunk.sizes), part.stored)
        if shared is None:
            continue
        inside = relative(shared, part.stored.offsets)
        offsets, sizes = list(part.slice.offsets), list(part.slice.sizes)
        for mine, stored in pairs:
            offsets[mine] += inside.offsets[stored]
            sizes[mine] = inside.sizes[stored]
        yield Box(tuple(offsets), tuple(sizes)), ChunkSlice(entry, chunk, relative(shared, chunk.offsets), order)


def _flat_slices(
    entry: TensorEntry, chunks_of: _ChunksByLead, part: Part, cell: Box, first: int
) -> Iterable[tuple[Box, ChunkSlice]]:
    stop = first + math.prod(part.slice.sizes)
    for chunk in chunks_of.along(entry.fqn, cell, first, stop):
        start, end = chunk.offsets[-1], chunk.offsets[-1] + chunk.sizes[-1]
        low, high = max(first, start), min(stop, end)
        for box in flat_boxes(part.slice.sizes, low - first, high - first):
            count, lead = math.prod(box.sizes), len(chunk.sizes) - 1
            inside = Box((*(0,) * lead, low - start), (*(1,) * lead, count))
            offsets = tuple(map(operator.add, part.slice.offsets, box.offsets))
            yield Box(offsets, box.sizes), ChunkSlice(entry, chunk, inside, None)
            low += count


def _item(origin: ChunkSlice, nbytes: int) -> StoredItem:
    """The item of a view's chunk: near where its elements lie, so that readers that sort by it read in order."""
    if origin.chunk is None:
        return StoredItem(MADE_HERE, 0, nbytes)
    item = origin.chunk.item
    return StoredItem(
        item.file, item.offset + runs(origin.chunk.sizes, origin.slice, origin.elem_bytes).first_byte, nbytes
    )


def _with_named_zeros(chunks: list[StoredChunk]) -> list[StoredChunk]:
    """Zeros lie in no file; the index has them where the chunks that they fill up lie."""
    real = next((chunk.item for chunk in chunks if chunk.item.file != MADE_HERE), None)
    if real is None:
        return chunks
    return [
        chunk if chunk.item.file != MADE_HERE else chunk._replace(item=StoredItem(real.file, real.offset, 0))
        for chunk in chunks
    ]
