"""The raw elements of stored tensors, for the offline commands: no torch, unless an item has to be decoded.

A chunk's payload is located by the headers of its item and compared with the index. It is then read into memory that
the caller has: any range of it, or what a box of the tensor needs (`read_box`). What cannot be read by range (stored
through a transform, not contiguous) is decoded completely.
"""

from __future__ import annotations

import math
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from mcore_ckpt.core.boxes import Box, covers, intersect, relative, runs, strides_of
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import ChecksumError, CorruptCheckpointError, LoadError
from mcore_ckpt.core.options import LoadOptions, PageCache
from mcore_ckpt.format.index import CheckpointIndex, ObjectEntry, StoredChunk, StoredItem, TensorEntry, read_item
from mcore_ckpt.format.integrity import inner_blocks
from mcore_ckpt.format.item import element_bytes, locate_tensor
from mcore_ckpt.format.zip_records import NotRangeable
from mcore_ckpt.load.checks import ItemCheck, check_item, range_crc
from mcore_ckpt.load.ranges import ReadPolicy, split_box
from mcore_ckpt.load.records import (
    MAX_IDLE_FILES,
    OpenFiles,
    PartSum,
    PayloadSums,
    ReadStats,
    check_apart,
    check_located,
    check_proportion,
    checksum_error,
    chunk_name,
    contiguous_around,
    item_name,
    naming,
    whole_blocks,
)
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.regrid import as_numbers, carrier, slabs

if TYPE_CHECKING:
    from mcore_ckpt.load.reads import ItemDecoder


MADE_HERE = "(made here)"
"""Stands for the file of what lies in none: objects and elements that are made up on the way."""


def made_objects(contents: Mapping[str, bytes]) -> dict[str, ObjectEntry]:
    """Entries of objects that are made up on the way."""
    return {key: ObjectEntry(key, StoredItem(MADE_HERE, 0, len(content))) for key, content in contents.items()}


_MAX_LOCATED = 4096
_WINDOW_BYTES = 4 * 1024 * 1024


class StoredPayload(NamedTuple):
    """The elements of one stored chunk: C order, little-endian."""

    where: str  # key, file and bytes, for messages
    file: str  # that holds them
    offset: int  # of the first, in the file
    nbytes: int  # of all
    crc32: int | None  # of all; None if the item carries none
    # The elements themselves, where they cannot be read from the file by range.
    decoded: bytes | memoryview | None = None
    # Makes them, from a byte on, where they lie nowhere as they are.
    fill: Callable[[int, memoryview], None] | None = None


class StoredPayloads:
    """Locates and reads payloads of one checkpoint; a context manager, for any number of threads.

    Args:
        index: of the checkpoint.
        storage: its files; by default those in the index's path.
        page_cache: as `LoadOptions.page_cache`.
        stored: the checkpoint's own index, where `index` has other keys: its files are compared with that.
    """

    open_files = MAX_IDLE_FILES
    """How many stay open at most."""

    def __init__(
        self,
        index: CheckpointIndex,
        storage: Storage | None = None,
        page_cache: PageCache = "auto",
        stored: CheckpointIndex | None = None,
    ) -> None:
        self.index = index
        self.storage = storage_at(index.path) if storage is None else storage
        self.files = OpenFiles(self.storage, page_cache, lambda: stored or self.index)
        self._located: OrderedDict[tuple[str, StoredChunk], StoredPayload] = OrderedDict()
        self._lock = threading.Lock()
        self._decoder: ItemDecoder | None = None
        compressed = [entry for entry in index.objects.values() if entry.item.is_compressed]
        self._unpacked = {entry.fqn: self.object_bytes(entry) for entry in compressed}
        if compressed:  # what is planned needs the lengths that they have in other files
            self.index = replace(index, objects={**index.objects, **made_objects(self._unpacked)})

    def locate(self, entry: TensorEntry, chunk: StoredChunk) -> StoredPayload:
        """Find the elements of a chunk; asked again soon, it answers from memory. Raises `LoadError`."""
        key = entry.fqn, chunk
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
        item, where = chunk.item, chunk_name(entry.fqn, chunk)
        if 0 in chunk.sizes:  # its item may be another chunk's, see `check_apart`
            return StoredPayload(where, item.file, item.offset, 0, 0)
        if item.is_compressed:
            return self._decode(entry, chunk, where, "it is compressed")
        try:
            with naming(lambda: where), self.files.reader(item.file) as reader:
                reader.check_range(item.offset, item.length)
                found = locate_tensor(
                    lambda offset, length: reader.read(item.offset + offset, length),
                    item.length,
                    where,
                    (entry.dtype, chunk.sizes),
                )
                nbytes = math.prod(chunk.sizes) * element_bytes(entry.dtype)
                check_located(found, entry.dtype, chunk.sizes, nbytes, item.crc32)
        except NotRangeable as reason:
            return self._decode(entry, chunk, where, str(reason).removeprefix(f"{where}: "))
        start = item.offset + found.payload_offset
        return StoredPayload(where, item.file, start, found.payload_bytes, found.crc32)

    def read_into(self, payload: StoredPayload, start: int, view: memoryview) -> None:
        """Fill `view` with the payload's bytes from `start` on; raises as `RangeReader.read_into`."""
        if payload.fill is not None:
            payload.fill(start, view)
            return
        if payload.decoded is not None:
            view[:] = payload.decoded[start : start + len(view)]
            return
        with self.files.reader(payload.file) as reader:
            reader.read_into(payload.offset + start, view)

    def _decode(self, entry: TensorEntry, chunk: StoredChunk, where: str, reason: str) -> StoredPayload:
        import torch

        from mcore_ckpt.load.reads import ItemDecoder
        from mcore_ckpt.load.requests import stored_dtype

        with self._lock:  # one for all items: it says once for each kind of reason that this is slow
            decoder = self._decoder = self._decoder or ItemDecoder(
                lambda: nullcontext(self.files), LoadOptions.from_environment(), ReadStats()
            )
        dtype = stored_dtype(entry)
        loaded = decoder.tensor(entry.fqn, chunk, dtype, reason)
        try:
            # A copy, since what is decoded may have any strides.
            tensor = torch.empty(chunk.sizes, dtype=dtype).copy_(loaded)
            content = tensor.reshape(-1).view(torch.uint8).numpy().data
        except (RuntimeError, TypeError) as error:
            raise LoadError(f"{where}: its elements cannot be taken as they are ({error!s:.200})") from error
        return StoredPayload(where, chunk.item.file, 0, len(content), None, content)

    def object_bytes(self, entry: ObjectEntry) -> bytes:
        """A stored object, after its checksums were compared. Raises `LoadError`."""
        item = entry.item
        if item.file == MADE_HERE:
            return self._unpacked[entry.fqn]
        with naming(partial(item_name, entry.fqn, item)), self.files.reader(item.file) as reader:
            check_item(ItemCheck(entry.fqn, item), reader)
            return read_item(reader, item)

    def was_read(self, entry: TensorEntry, chunk: StoredChunk, value: int) -> None:
        """Told the CRC-32 of a chunk that was read completely: what stores no sum of its own may add them up."""

    def was_read_before(self, entry: TensorEntry, chunk: StoredChunk) -> None:
        """Told of a chunk that an interrupted run has read: its sum may not have been compared."""

    def check_rest(self) -> None:
        """Told that nothing more is going to be read: what was read of chunks in parts is compared now."""

    def close(self) -> None:
        """Close the files."""
        self.files.close()

    def __enter__(self) -> StoredPayloads:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_tiled(index: CheckpointIndex, keys: Iterable[str]) -> None:
    """Raise `CorruptCheckpointError` unless the chunks hold each element of these tensors once, on which copies rely.
    Chunks too large for their items are refused, too, items in one place, and those beyond their file's end.
    """
    check_apart(index)
    storage = storage_at(index.path)
    sizes: dict[str, int] = {}
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
            if item.file not in sizes:
                sizes[item.file] = storage.size(item.file)
            if item.offset + item.length > sizes[item.file]:
                raise CorruptCheckpointError(
                    f"{chunk_name(entry.fqn, chunk)}: the file ends at byte {sizes[item.file]}; it was truncated, or "
                    "belongs to another save. Nothing was written"
                )
            check_proportion(nbytes, item, chunk_name(entry.fqn, chunk))


def check_sum(payload: StoredPayload, value: int) -> None:
    """Raise `ChecksumError` unless `value` is the CRC-32 that was stored with the elements (if there was one)."""
    if payload.crc32 is not None and payload.crc32 != value:
        raise checksum_error(payload.where, "its elements have", value, payload.crc32)


def check_elements(payloads: StoredPayloads, entry: TensorEntry) -> None:
    """Read all chunks of a tensor ahead of slabs across them, and compare checksums; raises `ChecksumError`."""
    for chunk in entry.chunks:
        payload = payloads.locate(entry, chunk)
        if payload.crc32 is not None:
            window = memoryview(bytearray(min(_WINDOW_BYTES, payload.nbytes)))
            check_sum(payload, range_crc(partial(payloads.read_into, payload), 0, payload.nbytes, window))


def _check_part(
    payloads: StoredPayloads, payload: StoredPayload, chunk: StoredChunk, box: Box, elem_bytes: int
) -> None:
    """Compare the sums of the blocks that a box of a chunk lies in, where the index has them."""
    item = chunk.item
    running = payloads.index.blocks.get((item.file, item.offset), ())
    if item.crc32 is None or payload.decoded is not None or len(running) != inner_blocks(payload.nbytes):
        return

    def damaged(start: int, stop: int, got: int, expected: int) -> ChecksumError:
        return checksum_error(payload.where, f"the bytes [{start}, {stop}) of its elements have", got, expected)

    around = contiguous_around(chunk.sizes, box)
    first = runs(chunk.sizes, around, elem_bytes).first_byte
    start, stop = whole_blocks(first, first + math.prod(around.sizes) * elem_bytes, payload.nbytes)
    stream = PartSum(PayloadSums(payload.nbytes, item.crc32, running, damaged), start)
    window = memoryview(bytearray(min(_WINDOW_BYTES, stop - start)))
    while start < stop:
        view = window[: min(len(window), stop - start)]
        payloads.read_into(payload, start, view)
        stream.feed(view)
        start += len(view)


def read_box(
    payloads: StoredPayloads,
    entry: TensorEntry,
    offsets: Sequence[int],
    sizes: Sequence[int],
    out: memoryview | None = None,
    *,
    checked: bool = True,
) -> memoryview:
    """Read a slice of a tensor, in elements, into `out` or new memory: C order, little-endian. Raises `LoadError`;
    `checked`: for damage, too, as far as complete chunks or blocks have sums.
    """
    elem_bytes = element_bytes(entry.dtype)
    nbytes = math.prod(sizes) * elem_bytes
    memory = memoryview(bytearray(nbytes)) if out is None else out[:nbytes]
    box = Box(tuple(offsets), tuple(sizes))
    parts = [
        (chunk, part) for chunk in entry.chunks if (part := intersect(Box(chunk.offsets, chunk.sizes), box)) is not None
    ]
    problem = covers(sizes, [relative(part, box.offsets) for _, part in parts])
    if problem and nbytes:
        raise CorruptCheckpointError(
            f"{entry.fqn}: the stored chunks of {payloads.index.path} do not hold the slice at {list(offsets)} of "
            f"sizes {list(sizes)} exactly once: relative to the slice, {problem}. Run `mcore-ckpt verify "
            f"{payloads.index.path}`"
        )
    spare = bytearray()
    for chunk, part in parts:
        payload = payloads.locate(entry, chunk)
        inside = relative(part, chunk.offsets)
        whole, value = part.sizes == chunk.sizes, 0  # the pieces of a whole chunk follow one another without gaps
        if checked and not whole:
            _check_part(payloads, payload, chunk, inside, elem_bytes)
        for piece in split_box(chunk.sizes, inside, elem_bytes, ReadPolicy()):
            length = piece.stop - piece.start
            place = relative(
                Box(tuple(map(operator.add, piece.box.offsets, chunk.offsets)), piece.box.sizes), box.offsets
            )
            lies = runs(box.sizes, place, elem_bytes)
            straight = lies.run_bytes == length
            if not straight and len(spare) < length:
                spare = bytearray(length)
            content = memory[lies.first_byte :][:length] if straight else memoryview(spare)[:length]
            payloads.read_into(payload, piece.start, content)
            if checked and whole:
                value = crc32(content, value)
            if not straight:
                strides = [stride * elem_bytes for stride in strides_of(chunk.sizes)]
                elements = as_strided(np.frombuffer(content, carrier(elem_bytes)), piece.box.sizes, strides)
                target = np.frombuffer(memory, carrier(elem_bytes)).reshape(box.sizes)
                target[tuple(slice(at, at + size) for at, size in zip(*place, strict=True))] = elements
        if checked and whole:
            check_sum(payload, value)
    return memory


SLAB_BYTES = 16 * 1024 * 1024
_BATCH_ELEMS = 512 * 1024


class SlabReader:
    """Reads slabs (slices that span all trailing axes) of stored tensors into its own memory; one for each thread."""

    def __init__(self, payloads: StoredPayloads) -> None:
        self._payloads = payloads
        self._memory = bytearray()

    def read(self, entry: TensorEntry, slab: Box) -> memoryview:
        """The slab's bytes, valid until the next call; no checksums are compared. Raises as `read_box`."""
        nbytes = math.prod(slab.sizes) * element_bytes(entry.dtype)
        if len(self._memory) < nbytes:
            self._memory = bytearray(nbytes)
        return read_box(self._payloads, entry, slab.offsets, slab.sizes, memoryview(self._memory), checked=False)

    def walk(self, entry: TensorEntry, slab_bytes: int = SLAB_BYTES) -> Iterator[tuple[Box, memoryview]]:
        """All slabs of a tensor, in C order; the checksums of its chunks are compared before the first."""
        check_elements(self._payloads, entry)
        for slab in slabs(Box((0,) * len(entry.shape), entry.shape), element_bytes(entry.dtype), slab_bytes):
            yield slab, self.read(entry, slab)


@dataclass(frozen=True, slots=True)
class Stats:
    """Over the finite elements, in double precision, extrema of integers exactly; None where there are none, for dtypes
    that are no numbers, and for a mean, deviation or norm that doubles cannot hold.
    """

    elements: int
    minimum: float | None
    maximum: float | None
    mean: float | None
    std: float | None
    norm: float | None
    zeros: int
    nans: int
    infinities: int


def tensor_stats(payloads: StoredPayloads, entry: TensorEntry, values: np.ndarray[Any, Any] | None = None) -> Stats:
    """Describe the values of a tensor, which is read; or those of a slice of it, which has been."""
    count = zeros = nans = infinities = finite_count = 0
    low: float = math.inf
    high: float = -math.inf
    base: int | None = None  # from which the average counts: for integers the first batch's lowest, else 0
    average = spread = squares = 0.0  # `spread`: the sum of squares of what differs from the average
    read = (as_numbers(content, entry.dtype) for _, content in SlabReader(payloads).walk(entry))
    for numbers in read if values is None else [values.reshape(-1)]:
        if numbers is None:
            return Stats(math.prod(entry.shape), None, None, None, None, None, 0, 0, 0)
        for batch in batches(numbers):
            doubles = (np.abs(batch) if batch.dtype.kind == "c" else batch).astype(np.float64)
            count += doubles.size
            zeros += int(np.count_nonzero(doubles == 0))
            nans += int(np.count_nonzero(np.isnan(doubles)))
            infinities += int(np.count_nonzero(np.isinf(doubles)))
            finite = doubles[np.isfinite(doubles)]
            if finite.size:
                finite_count += finite.size
                share = finite.size / finite_count
                exact = batch if batch.dtype.kind in "iu" else finite
                low, high = min(low, exact.min().item()), max(high, exact.max().item())
                with np.errstate(over="ignore", invalid="ignore"):
                    squares += float(np.dot(finite, finite))
                    start = 0
                    if exact is batch:  # doubles have not all digits of large integers, but those by which they differ
                        start = exact.min().item()
                        finite = (exact - exact.min()).view(f"u{exact.itemsize}").astype(np.float64)
                    base = start if base is None else base
                    # Merged as Chan, Golub and LeVeque do (1979): squares of large numbers would hide a small spread.
                    step, apart = start - base + float(finite.mean()) - average, finite - finite.mean()
                    spread += float(np.dot(apart, apart)) + step * ((finite_count - finite.size) * share) * step
                    average += step * share
    if not finite_count:
        return Stats(count, None, None, None, None, None, zeros, nans, infinities)
    derived = ((base or 0) + average, math.sqrt(spread / finite_count), math.sqrt(squares))
    mean, std, norm = (value if math.isfinite(value) else None for value in derived)
    return Stats(count, low, high, mean, std, norm, zeros, nans, infinities)


def batches(numbers: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """Pieces of a flat array that fit into a processor's caches in double precision."""
    for start in range(0, numbers.size, _BATCH_ELEMS):
        yield numbers[start : start + _BATCH_ELEMS]
