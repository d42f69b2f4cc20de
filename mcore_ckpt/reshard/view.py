"""A checkpoint as other tensors than those that it stores: slices of them, put together, cast or regrouped.

A chunk of a view is a stored chunk, or the slice of one that a part has in common with it. So everything that takes
an index and payloads (a reshard, an export) takes a view as well.

Where a slice of a stored chunk is one run of bytes, as rows of a matrix are, it is read from where it lies. Otherwise
it is gathered in memory, and transposed there if the view has another order of axes. Every stored chunk is read once,
in parts, whose checksums are joined; `check_rest` reads what is left of it and compares its checksum.

`DerivedPayloads` hands everything on to its base by itself: bytes read, slices left to compare, and inputs of the
bytes. A subclass says only which chunk of the base one of its own chunks is, or how its bytes are computed.

`FilePayloads` and `RegroupedPayloads` are tensors that lie plainly in files of others.
"""

from __future__ import annotations

import functools
import math
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from mcore_ckpt.core.boxes import Box, covers, flat_boxes, intersect, relative, runs
from mcore_ckpt.core.crc import crc32, crc32_combine
from mcore_ckpt.core.errors import CorruptCheckpointError, OptionError
from mcore_ckpt.core.team import current_team
from mcore_ckpt.format.index import CheckpointIndex, ChunkLookup, ObjectEntry, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.format.item import element_bytes
from mcore_ckpt.load.checks import range_crc
from mcore_ckpt.load.records import chunk_name, contiguous_around
from mcore_ckpt.storage.base import RangeReader, Storage
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.payloads import MADE_HERE, StoredPayload, StoredPayloads, check_sum, made_objects
from mcore_ckpt.tools.regrid import carrier, cast_floats


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
    """A requested tensor: its shape in elements, its parts, and its dtype in case nothing of it is stored."""

    shape: tuple[int, ...]
    parts: Sequence[Part]
    dtype: str | None = None


class ChunkSlice(NamedTuple):
    """A slice of a stored chunk, in its coordinates; without an entry: zeros. `order`: of its axes in the view."""

    entry: TensorEntry | None
    chunk: StoredChunk | None
    slice: Box
    order: tuple[int, ...] | None

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
    base: CheckpointIndex, tensors: Mapping[str, TensorView], objects: Mapping[str, bytes], kept_objects: Iterable[str]
) -> tuple[CheckpointIndex, ChunkSlices]:
    """The index of a view with `tensors` by requested key, and the slice of `base` behind each of its chunks; with new
    `objects` (archives of `torch.save` by full key). `kept_objects`: stored ones that stay.
    """

    @functools.cache
    def lookup(key: str) -> ChunkLookup:
        return base.tensors[key].lookup()

    def near(key: str, box: Box) -> list[StoredChunk]:
        chunks = base.tensors[key].chunks
        return sorted(chunks[number] for number in lookup(key).near(box))

    entries: dict[str, TensorEntry] = {}
    slices: ChunkSlices = {}
    for key, view in tensors.items():
        dtype = _dtype_of(key, view, base)
        found: list[StoredChunk] = []
        for part in view.parts:
            for box, origin in _chunk_slices(base, near, part):
                nbytes = math.prod(box.sizes) * element_bytes(dtype)
                found.append(StoredChunk(box.offsets, box.sizes, _item(origin, nbytes)))
                slices[key, box.offsets] = origin
        problem = covers(view.shape, [Box(chunk.offsets, chunk.sizes) for chunk in found])
        if problem and math.prod(view.shape):
            raise CorruptCheckpointError(f"{key}: the chunks in {base.path} do not make it up: {problem}")
        entries[key] = TensorEntry(key, dtype, view.shape, tuple(found))
    kept = {key: base.objects[key] for key in kept_objects}
    kept |= made_objects(objects)
    return CheckpointIndex(base.path, entries, kept, blocks=base.blocks), slices


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


_Near = Callable[[str, Box], list[StoredChunk]]
"""The chunks of a stored tensor that may overlap a slice of it, and few others."""


def _chunk_slices(base: CheckpointIndex, near: _Near, part: Part) -> Iterable[tuple[Box, ChunkSlice]]:
    """Each slice of the requested tensor that one stored chunk has, and where it is in that chunk."""
    if part.key is None or part.stored is None:
        yield part.slice, ChunkSlice(None, None, part.slice, None)
        return
    entry = base.tensors[part.key]
    if part.flat is not None:
        yield from _flat_slices(entry, near, part, part.stored, part.flat)
        return
    axes = len(part.stored.sizes)
    pairs = part.axes or [(-1 - n, -1 - n) for n in range(min(len(part.slice.sizes), axes))]
    pairs = sorted(pairs)
    theirs = [stored for _, stored in pairs]
    single = [axis for axis in range(axes) if axis - axes not in theirs]
    order = None if theirs == sorted(theirs) else (*single, *(axis + axes for axis in theirs))
    for chunk in near(part.key, part.stored):
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
    entry: TensorEntry, near: _Near, part: Part, cell: Box, first: int
) -> Iterable[tuple[Box, ChunkSlice]]:
    stop = first + math.prod(part.slice.sizes)
    whole = Box((*cell.offsets[:-1], first), (*cell.sizes[:-1], stop - first))
    for chunk in near(entry.fqn, whole):
        lead = tuple(map(operator.sub, cell.offsets[:-1], chunk.offsets[:-1]))
        if any(not 0 <= at < size for at, size in zip(lead, chunk.sizes, strict=False)):
            continue
        start, end = chunk.offsets[-1], chunk.offsets[-1] + chunk.sizes[-1]
        low, high = max(first, start), min(stop, end)
        for box in flat_boxes(part.slice.sizes, low - first, high - first):
            count = math.prod(box.sizes)
            inside = Box((*lead, low - start), (*(1,) * len(lead), count))
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


_WINDOW_BYTES = 4 * 1024 * 1024
_ReadInto = Callable[[StoredPayload, int, memoryview], None]


class PartSums:
    """Sums of payloads that are read in parts, by any number of threads; `read_into` reads bytes of a payload."""

    def __init__(self, read_into: _ReadInto) -> None:
        self._read_into = read_into
        self._noted: dict[str, tuple[StoredPayload, list[tuple[int, int, int]]]] = {}
        self._lock = threading.Lock()

    def expect(self, payload: StoredPayload) -> None:
        """`totals` has this payload, even if no part of it is noted."""
        with self._lock:
            self._noted.setdefault(payload.where, (payload, []))

    def note(self, payload: StoredPayload, first: int, nbytes: int, value: int) -> None:
        """Note the CRC-32 of bytes that were read."""
        with self._lock:
            self._noted.setdefault(payload.where, (payload, []))[1].append((first, first + nbytes, value))

    def totals(self) -> Iterator[tuple[str, int]]:
        """By `where` the CRC-32 of each payload, when what was not read of it is read, too, if one is stored. Of ranks
        that have read parts of a payload, or expect it, one has it here. Raises `ChecksumError`.
        """
        self._take_share()
        window = memoryview(bytearray(_WINDOW_BYTES if self._noted else 0))
        for where, (payload, parts) in self._noted.items():
            value = at = 0
            for first, stop, own in (*sorted(parts), (payload.nbytes, payload.nbytes, 0)):
                crosses = first < at < stop
                start = stop if crosses else first
                if start > at:
                    if payload.crc32 is None:
                        break
                    value = range_crc(partial(self._read_into, payload), at, start - at, window, value)
                    at = start
                if first == at:
                    value, at = crc32_combine(value, own, stop - first), stop
            if at == payload.nbytes:
                check_sum(payload, value)
                yield where, value
        self._noted = {}

    def _take_share(self) -> None:
        team = current_team()
        if team.size == 1:
            return
        noted, self._noted = self._noted, {}
        of_ranks = team.run("join what was read", lambda: {where: parts for where, (_, parts) in noted.items()})
        for where, (payload, _) in noted.items():
            expecting = [rank for rank, of_rank in enumerate(of_ranks) if where in of_rank]
            having = [rank for rank in expecting if of_ranks[rank][where]] or expecting
            if having[crc32(where.encode()) % len(having)] == team.rank:
                self._noted[where] = payload, [part for rank in having for part in of_ranks[rank][where]]


class DerivedPayloads(StoredPayloads):
    """Payloads of `index` that are made of those of `base`, and new `objects`; a context manager, which closes it."""

    def __init__(
        self, base: StoredPayloads, index: CheckpointIndex, objects: Mapping[str, bytes] | None = None
    ) -> None:
        super().__init__(index, base.storage)
        self.base = base
        self._objects = objects or {}
        self.files = base.files
        self._sums = PartSums(base.read_into)
        self._chunks: dict[str, tuple[TensorEntry, StoredChunk]] = {}  # those of the base whose parts were read

    def base_chunk(self, entry: TensorEntry, chunk: StoredChunk) -> tuple[TensorEntry, StoredChunk] | None:
        """The base's chunk with exactly these elements, as they are; None: they are computed, or are others."""
        return entry, chunk

    def _locate(self, entry: TensorEntry, chunk: StoredChunk) -> StoredPayload:
        found = self.base_chunk(entry, chunk)
        assert found is not None, "a subclass locates what it computes"
        return self.base.locate(*found)

    def computed(
        self, entry: TensorEntry, chunk: StoredChunk, fill: Callable[[int, memoryview], None]
    ) -> StoredPayload:
        """A payload whose bytes `fill(start, view)` makes."""
        nbytes = math.prod(chunk.sizes) * element_bytes(entry.dtype)
        return StoredPayload(chunk_name(entry.fqn, chunk), chunk.item.file, 0, nbytes, None, fill=fill)

    def object_bytes(self, entry: ObjectEntry) -> bytes:
        made = self._objects.get(entry.fqn)
        return self.base.object_bytes(entry) if made is None else made

    def read_part(
        self, entry: TensorEntry, chunk: StoredChunk, start: int, nbytes: int, out: memoryview | None = None
    ) -> memoryview:
        """Bytes of a chunk of the base, for computing others; their checksum counts for `check_rest`."""
        memory = memoryview(bytearray(nbytes)) if out is None else out[:nbytes]
        payload = self.base.locate(entry, chunk)
        self.base.read_into(payload, start, memory)
        self.part_was_read(entry, chunk, payload, start, nbytes, crc32(memory))
        return memory

    def part_was_read(
        self, entry: TensorEntry, chunk: StoredChunk, payload: StoredPayload, start: int, nbytes: int, value: int
    ) -> None:
        """Bytes of a chunk of the base were read, which have this CRC-32."""
        self._chunks[payload.where] = entry, chunk
        self._sums.note(payload, start, nbytes, value)

    def was_read(self, entry: TensorEntry, chunk: StoredChunk, value: int) -> None:
        found = self.base_chunk(entry, chunk)
        if found is not None:
            self.base.was_read(*found, value)

    def was_read_before(self, entry: TensorEntry, chunk: StoredChunk) -> None:
        found = self.base_chunk(entry, chunk)
        if found is not None:
            self.base.was_read_before(*found)

    def expect(self, entry: TensorEntry, chunk: StoredChunk) -> None:
        """Compare a chunk of the base at last, though others have been computed from it before this run."""
        self._sums.expect(self.base.locate(entry, chunk))
        self.base.was_read_before(entry, chunk)

    def check_rest(self) -> None:
        for where, value in self._sums.totals():
            if where in self._chunks:
                self.base.was_read(*self._chunks[where], value)
        self.base.check_rest()

    def close(self) -> None:
        """Close the files."""
        self.base.close()


class CastPayloads(DerivedPayloads):
    """Payloads of which those with a key in `dtypes` are in another floating-point dtype."""

    def __init__(self, base: StoredPayloads, dtypes: Mapping[str, str]) -> None:
        self._dtypes = dtypes
        tensors = base.index.tensors
        cast = {key: tensors[key]._replace(dtype=dtype) for key, dtype in dtypes.items()}
        super().__init__(base, replace(base.index, tensors={**tensors, **cast}))

    def base_chunk(self, entry: TensorEntry, chunk: StoredChunk) -> tuple[TensorEntry, StoredChunk] | None:
        return None if entry.fqn in self._dtypes else (entry, chunk)

    def was_read_before(self, entry: TensorEntry, chunk: StoredChunk) -> None:
        super().was_read_before(entry, chunk)
        if entry.fqn in self._dtypes:
            self.expect(self.base.index.tensors[entry.fqn], chunk)

    def _locate(self, entry: TensorEntry, chunk: StoredChunk) -> StoredPayload:
        if entry.fqn not in self._dtypes:
            return self.base.locate(entry, chunk)
        before = self.base.index.tensors[entry.fqn]
        self.base.locate(before, chunk)  # raises for a damaged item, before anything is written
        elem_bytes, to_bytes = element_bytes(before.dtype), element_bytes(entry.dtype)

        def fill(start: int, view: memoryview) -> None:
            """Bytes from `start` on, of the dtype that they are converted to; a view may part an element."""
            first, last = start // to_bytes, -(-(start + len(view)) // to_bytes)
            content = self.read_part(before, chunk, first * elem_bytes, (last - first) * elem_bytes)
            try:
                converted = cast_floats(content, before.dtype, entry.dtype, overflow="raise")
            except FloatingPointError as error:
                raise OptionError(
                    f"{chunk_name(entry.fqn, chunk)}: holds elements that are too large for {entry.dtype}, in which "
                    "they would be infinite; choose another dtype (bf16 has almost the range of fp32)"
                ) from error
            view[:] = converted[start - first * to_bytes :][: len(view)]

        return self.computed(entry, chunk, fill)


def cast_payloads(base: StoredPayloads, dtype_of: Callable[[TensorEntry], str]) -> StoredPayloads:
    """`base` with each tensor in the dtype that `dtype_of` gives; `base` itself where all of them have that already."""
    dtypes = {key: dtype for key, entry in base.index.tensors.items() if (dtype := dtype_of(entry)) != entry.dtype}
    return CastPayloads(base, dtypes) if dtypes else base


class RegroupedPayloads(DerivedPayloads):
    """Payloads with an axis that counts several things divided into one for each, by key in `shapes`. `OptionError`: a
    chunk cuts through them.
    """

    def __init__(self, base: StoredPayloads, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._together: dict[tuple[str, StoredChunk], tuple[TensorEntry, StoredChunk]] = {}
        tensors = dict(base.index.tensors)
        for key, shape in shapes.items():
            entry = tensors[key]
            axis = next(n for n, size in enumerate(shape) if size != entry.shape[n])
            count = shape[axis + 1]
            chunks = []
            for chunk in entry.chunks:
                offsets, sizes = list(chunk.offsets), list(chunk.sizes)
                if offsets[axis] % count or sizes[axis] % count:
                    raise OptionError(
                        f"{key}: a chunk at {offsets} of sizes {sizes} cuts through what is counted in {count}s along "
                        f"axis {axis}; save the model in complete rows of that axis"
                    )
                offsets[axis : axis + 1] = [offsets[axis] // count, 0]
                sizes[axis : axis + 1] = [sizes[axis] // count, count]
                chunks.append(chunk._replace(offsets=tuple(offsets), sizes=tuple(sizes)))
                self._together[key, chunks[-1]] = entry, chunk
            tensors[key] = TensorEntry(key, entry.dtype, shape, tuple(chunks), entry.requires_grad)
        super().__init__(base, replace(base.index, tensors=tensors))

    def base_chunk(self, entry: TensorEntry, chunk: StoredChunk) -> tuple[TensorEntry, StoredChunk]:
        return self._together.get((entry.fqn, chunk), (entry, chunk))


# What one thread has gathered and may be asked for again.
_GATHERED_BYTES = 128 * 1024 * 1024
# A chunk that parts are gathered from is read completely, and compared with its checksum at once, up to this size.
_COMPLETE_BYTES = 64 * 1024 * 1024


class _Gathered(threading.local):
    """The slices that one thread has gathered last, by name of the view's chunk, and their source."""

    def __init__(self) -> None:
        self.parts: dict[str, memoryview] = {}
        self.around: tuple[tuple[str, tuple[int, ...], int], np.ndarray[Any, Any]] | None = None


class ViewPayloads(DerivedPayloads):
    """Payloads of a view of `base`; `tensors`, `objects` and `kept_objects` as for `view_index`."""

    def __init__(
        self,
        base: StoredPayloads,
        tensors: Mapping[str, TensorView],
        objects: Mapping[str, bytes] | None = None,
        kept_objects: Iterable[str] = (),
    ) -> None:
        index, self._slices = view_index(base.index, tensors, objects or {}, kept_objects)
        super().__init__(base, index, objects)
        self._own = _Gathered()
        self._gathering = threading.Lock()

    def base_chunk(self, entry: TensorEntry, chunk: StoredChunk) -> None:
        """As `DerivedPayloads.base_chunk`: chunks of a view are parts of others."""

    def _locate(self, entry: TensorEntry, chunk: StoredChunk) -> StoredPayload:
        origin = self._slices[entry.fqn, chunk.offsets]
        nbytes = math.prod(chunk.sizes) * element_bytes(entry.dtype)
        where = chunk_name(entry.fqn, chunk)
        if origin.entry is None or origin.chunk is None:
            return StoredPayload(where, chunk.item.file, 0, nbytes, None, bytes(nbytes))
        stored = self.base.locate(origin.entry, origin.chunk)
        first = _first_byte(origin)
        if first is None:

            def gather(start: int, view: memoryview) -> None:
                view[:] = self._gathered(where, origin)[start : start + len(view)]

            return self.computed(entry, chunk, gather)
        if stored.decoded is not None:
            content = memoryview(stored.decoded)[first : first + nbytes]
            return StoredPayload(where, stored.file, 0, nbytes, None, content)
        if stored.fill is not None:
            read_into = self.base.read_into
            return self.computed(entry, chunk, lambda start, view: read_into(stored, first + start, view))
        crc = stored.crc32 if nbytes == stored.nbytes else None
        return StoredPayload(where, stored.file, stored.offset + first, nbytes, crc)

    def _gathered(self, where: str, origin: ChunkSlice) -> memoryview:
        """A slice in memory of its own, in the view's order; the last few are kept: readers alternate between them."""
        own = self._own
        known = own.parts.pop(where, None)
        if known is None:
            room = _GATHERED_BYTES - math.prod(origin.slice.sizes) * origin.elem_bytes
            while own.parts and sum(map(len, own.parts.values())) > room:
                own.parts.pop(next(iter(own.parts)))
            with self._gathering:  # one thread at a time, since what is gathered from takes memory, too
                known = self._gather(origin)
        own.parts[where] = known
        return known

    def _gather(self, origin: ChunkSlice) -> memoryview:
        own = self._own
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
            value = crc32(memory)
            if len(memory) == stored.nbytes:
                check_sum(stored, value)
            self.part_was_read(origin.entry, origin.chunk, stored, first, len(memory), value)
            own.around = key, np.frombuffer(memory, carrier(origin.elem_bytes)).reshape(around.sizes)
        inside = relative(origin.slice, around.offsets)
        cut = own.around[1][tuple(slice(at, at + n) for at, n in zip(inside.offsets, inside.sizes, strict=True))]
        if inside.sizes == around.sizes:
            own.around = None  # no other slice is in it
        if origin.order is not None:
            cut = cut.transpose(origin.order)
        return memoryview(np.ascontiguousarray(cut).reshape(-1).view(np.uint8).data)

    def was_read_before(self, entry: TensorEntry, chunk: StoredChunk) -> None:
        origin = self._slices[entry.fqn, chunk.offsets]
        if origin.entry is not None and origin.chunk is not None:
            self.base.was_read_before(origin.entry, origin.chunk)

    def was_read(self, entry: TensorEntry, chunk: StoredChunk, value: int) -> None:
        origin = self._slices[entry.fqn, chunk.offsets]
        first = None if origin.chunk is None else _first_byte(origin)
        if origin.entry is None or origin.chunk is None or first is None:
            return
        stored, nbytes = self.base.locate(origin.entry, origin.chunk), math.prod(origin.slice.sizes) * origin.elem_bytes
        self.part_was_read(origin.entry, origin.chunk, stored, first, nbytes, value)

    def check_rest(self) -> None:
        """Read what is not requested, or was written before, of each chunk in the view; raises `ChecksumError`."""
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


class Record(NamedTuple):
    """Bytes of a file with one CRC-32 (None: none is stored); `name` is for messages."""

    name: str
    start: int
    nbytes: int
    crc32: int | None


class FileRange(NamedTuple):
    """Elements in a file, C order, little-endian: all of `record`, or a part; `strides`, in elements, if with gaps."""

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
        """Read and compare the rest (padding) of records that were read in part; raises `ChecksumError`."""
        for _ in self._sums.totals():
            pass
