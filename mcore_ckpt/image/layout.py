"""Files laid out, every offset in them before the first byte is written; and `.metadata` of what was written.

A file holds two halves: first **bytes_data**, the serialized objects, in a region with some room to grow, then
**tensor_data**, each tensor in the zip that `torch.save` writes, and last the integrity footer. Sizes of tensors are
known beforehand, so every offset is, too; and because objects have a region of their own, tensors do not move when an
object changes its size.

A `BucketLayout` depends on the structure of the state only (keys, dtypes, shapes, offsets). A `FileImage` is the part
of it that a writer needs: where payloads lie, and the places of their checksums.

Of all ranks' plans and results `.metadata` is made: the index of the tensors, the manifest, the fingerprints. To put
the index together takes half a second for 20,000 tensors of two ranks, and needs nothing but the plans: so the
coordinator's writer process does that on a second thread, and no training waits for it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from mcore_ckpt.core.boxes import Stretch
from mcore_ckpt.core.crc import NO_SHIFT, crc32, shift_factor
from mcore_ckpt.core.errors import PlanError
from mcore_ckpt.core.process import collector_paused
from mcore_ckpt.format.index import (
    CheckpointIndex,
    ObjectEntry,
    StoredChunk,
    StoredItem,
    TensorEntry,
    of_different_offsets,
)
from mcore_ckpt.format.integrity import (
    BLOCK_BYTES,
    NO_FINGERPRINT,
    FooterPlan,
    Manifest,
    ManifestFile,
    RankPlan,
    TableColumns,
    decoded_plans,
    inner_blocks,
)
from mcore_ckpt.format.item import PAGE_BYTES, TensorTemplate, element_bytes, tensor_template
from mcore_ckpt.format.metadata_read import COMMON_FILE
from mcore_ckpt.format.metadata_write import ChunkFactors, MetadataEncoder

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class FileImage:
    """The structure of a file, as far as its writer needs it; plain arrays, the same from save to save."""

    size_bytes: int  # of the file
    payload_offsets: array[int]  # first byte of each payload in the file (`array('q')`), ascending, without overlap
    payload_lengths: array[int]  # bytes of each payload (`array('q')`)
    # File offsets of the uint32 (little endian) that take the CRC-32 of payload 0, then 1, ... (`array('q')`); the same
    # number for each, and each behind the end of its payload.
    crc_positions: array[int]
    # Number of each payload whose elements are several runs of its tensor, and where they lie in that: what they add to
    # the tensor's fingerprint is summed, too. Of others it follows from the CRC-32.
    strided: tuple[tuple[int, Stretch], ...] = ()
    # Numbers of the payloads that are longer than a block (`array('I')`).
    long_payloads: array[int] = field(init=False, compare=False)
    # For each of those, how many block boundaries lie inside it (`array('I')`).
    inner_blocks: array[int] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        long = array("I", [number for number, nbytes in enumerate(self.payload_lengths) if nbytes > BLOCK_BYTES])
        object.__setattr__(self, "long_payloads", long)
        counts = array("I", [inner_blocks(self.payload_lengths[number]) for number in long])
        object.__setattr__(self, "inner_blocks", counts)


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One file of one save, as its writer gets it."""

    name: str  # inside the checkpoint directory
    image: FileImage  # its structure
    table_crc32: int = 0  # of the table in its integrity footer
    # CRC-32 of each serialized object in it, in the order of the file (`array('I')`).
    object_crcs: array[int] = field(default_factory=lambda: array("I"))
    buffer_offset: int = 0  # where its bytes begin in the staging buffer, a multiple of 4096; without meaning elsewhere


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """The result of one file, with all of its checksums: its rank sends it to the coordinator."""

    name: str  # of the file
    size_bytes: int  # of the file, as finished
    table_crc32: int  # of the table in its integrity footer
    object_crcs: array[int]  # CRC-32 of each serialized object, in the order of the file (`array('I')`)
    crcs: array[int]  # CRC-32 of each payload (`array('I')`)
    long_payloads: array[int]  # numbers of the payloads that have cumulative CRCs (`array('I')`)
    inner_blocks: array[int]  # for each of those, how many (`array('I')`)
    blocks: array[int]  # cumulative CRC-32 at each block boundary inside each of those (`array('I')`)
    # Number of each payload of several runs of its tensor, and its term of the tensor's fingerprint.
    parts: tuple[tuple[int, int], ...] = ()
    write_s: float = 0.0  # seconds of writing, summed over the I/O threads
    fsync_s: float = 0.0  # seconds of finishing the file (truncate, fsync, close)


class Window(NamedTuple):
    """Bytes `[start, stop)` of a file; `start` is a multiple of the window size."""

    start: int
    stop: int


Fill = Callable[[Window, memoryview], None]


_OBJECT_ALIGNMENT_BYTES = 64


class TensorSpec(NamedTuple):
    """One tensor to be written: box (`offsets`, `sizes`) of a global tensor of `shape`, in elements."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    nbytes: int
    original_shape: tuple[int, ...] | None = None  # of the parameter, where `shape` is that of a stored form

    def stretch(self) -> Stretch:
        """Where its elements lie in the tensor."""
        return Stretch.of_chunk(self.shape, self.offsets, self.sizes, element_bytes(self.dtype), self.original_shape)


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """Where everything lies in one bucket's file, the same in every save of a structure; in bytes from its start."""

    file_name: str  # name inside the checkpoint directory, without the id of a save
    specs: tuple[TensorSpec, ...]  # the tensors, in the order of the file
    region_bytes: int  # length of the bytes_data region, which starts at 0 and is a multiple of 4096
    templates: tuple[TensorTemplate, ...]  # for each tensor, its item without the payload
    item_offsets: array[int]  # for each tensor, where its item starts
    image: FileImage  # what a writer needs: the file's size, the payloads and the places of their checksums
    footer: FooterPlan  # the integrity footer, as far as the structure tells
    footer_offset: int  # where the integrity footer begins, which is where the last item ends


def objects_end(objects_bytes: Sequence[int]) -> int:
    return place_objects(objects_bytes)[-1] + objects_bytes[-1]


def place_objects(objects_bytes: Sequence[int]) -> list[int]:
    """Offset of each serialized object in its region, in bytes: one after the other, 64-aligned."""
    offsets = []
    position = 0
    for nbytes in objects_bytes:
        offsets.append(position)
        position += -(-nbytes // _OBJECT_ALIGNMENT_BYTES) * _OBJECT_ALIGNMENT_BYTES
    return offsets


def lay_out_file(
    file_name: str,
    specs: Sequence[TensorSpec],
    object_keys: Sequence[str] = (),
    objects_bytes: Sequence[int] = (),
) -> tuple[BucketLayout, TableColumns]:
    """Lay out a bucket's file, and the same in columns; objects may grow a little beyond `objects_bytes`."""
    templates = [tensor_template(spec.dtype, spec.sizes) for spec in specs]
    item_offsets = array("q")
    payload_offsets = array("q")
    payload_lengths = array("q")
    crc_positions = array("q")
    item_bytes: list[int] = []
    # The region of the objects: what they take now and a quarter more, in whole pages.
    needed = objects_end(objects_bytes) if objects_bytes else 0
    position = bytes_region = -(-(needed + needed // 4) // PAGE_BYTES) * PAGE_BYTES
    for _, alike in groupby(templates, id):  # most tensors are like their neighbours: those lie at equal distances
        template, *others = alike
        count, payload, size_bytes = 1 + len(others), len(template.head), template.item_bytes
        first = _place(position, template)
        step = _place(first + size_bytes, template) - first
        starts = range(first, first + count * step, step)
        item_offsets.extend(starts)
        payload_offsets.extend(range(first + payload, starts.stop + payload, step))
        payload_lengths.extend([template.payload_bytes] * count)
        crcs = [payload + template.payload_bytes + crc_position for crc_position in template.crc_positions]
        crc_positions.extend([start + crc for start in starts for crc in crcs])
        item_bytes += [size_bytes] * count
        position = starts[-1] + size_bytes
    columns = TableColumns.of(
        [spec.key for spec in specs],
        [spec.dtype for spec in specs],
        [(spec.shape, spec.offsets, spec.sizes) for spec in specs],
        chain.from_iterable(zip(item_offsets, item_bytes, strict=True)),
        object_keys,
    )
    footer = FooterPlan.of(columns)
    image = FileImage(
        size_bytes=position + footer.size_bytes,
        payload_offsets=payload_offsets,
        payload_lengths=payload_lengths,
        crc_positions=crc_positions,
        strided=tuple(_strided(specs)),
    )
    layout = BucketLayout(
        file_name, tuple(specs), bytes_region, tuple(templates), item_offsets, image, footer, position
    )
    return layout, columns


def _place(position: int, template: TensorTemplate) -> int:
    """The first offset from `position` on at which an item of that template may start; a large payload fills pages."""
    before = len(template.head) if template.alignment == PAGE_BYTES else 0
    return -(-(position + before) // template.alignment) * template.alignment - before


def _strided(specs: Sequence[TensorSpec]) -> Iterator[tuple[int, Stretch]]:
    """Number of each tensor of which a slice is saved that is several runs of it, and where its elements lie."""
    for number, spec in enumerate(specs):
        if spec.original_shape is None and spec.sizes[1:] == spec.shape[1:]:
            continue  # rows, as most are
        stretch = spec.stretch()
        if stretch.bytes_behind() is None:
            yield number, stretch


class WriteBucket(NamedTuple):
    """The content of one file in one save: serialized objects, and apart from them tensors."""

    layout: BucketLayout  # of the file
    file: PlannedFile  # the same for its writer
    bytes_data: tuple[memoryview, ...]  # the serialized objects
    offsets: tuple[int, ...]  # where each of them lies in the file, in bytes
    footer: bytes  # the integrity footer
    tensor_data: Sequence[torch.Tensor]  # detached, in the order of the file; none, if payloads come by themselves
    pointers: Sequence[int] | None = None  # address of each tensor in host memory, 0 if unknown; None: not looked for

    def around(self, number: int) -> bytes:
        """The file's bytes between payload `number - 1` and payload `number`, with zeros for checksums."""
        layout, image = self.layout, self.layout.image
        if number:
            before = layout.templates[number - 1].tail
            position = image.payload_offsets[number - 1] + image.payload_lengths[number - 1] + len(before)
        else:
            before, position = self._region(), layout.region_bytes
        if number == len(layout.templates):
            return before + bytes(layout.footer_offset - position) + self.footer
        return before + bytes(layout.item_offsets[number] - position) + layout.templates[number].head

    def _region(self) -> bytes:
        region = bytearray(self.layout.region_bytes)
        for offset, data in zip(self.offsets, self.bytes_data, strict=True):
            region[offset : offset + len(data)] = data
        return bytes(region)


def fill_bucket(
    layout: BucketLayout,
    name: str,
    save_id: bytes,
    bytes_data: Sequence[memoryview],
    tensor_data: Sequence[torch.Tensor] = (),
    pointers: Sequence[int] | None = None,
) -> WriteBucket:
    """The bucket of one save in a file of this layout and name, closed with its integrity footer."""
    lengths = [len(data) for data in bytes_data]
    offsets = place_objects(lengths)
    footer, table_crc32 = layout.footer.fill(save_id, layout.image.size_bytes, zip(offsets, lengths, strict=True))
    file = PlannedFile(name, layout.image, table_crc32, array("I", map(crc32, bytes_data)))
    return WriteBucket(layout, file, tuple(bytes_data), tuple(offsets), footer, tensor_data, pointers)


# --- what was written -------------------------------------------------------------------------------------------------


def index_tensors(plans: Iterable[RankPlan]) -> tuple[dict[str, TensorEntry], array[int]]:
    """The index entries of all ranks' tensors by key, and for each chunk its item's number in the plans."""
    heads: dict[str, tuple[str, tuple[int, ...], list[StoredChunk], list[int]]] = {}
    number = 0
    known: dict[tuple[int, ...], tuple[int, ...]] = {}  # offsets and sizes recur in many tensors: one of each is kept
    same = known.setdefault
    for file, _, columns in chain.from_iterable(plans):
        boxes, places, dtypes = columns.boxes.tolist(), columns.places.tolist(), columns.dtypes
        position = 0
        rows = zip(columns.keys, columns.ndims, columns.dtype_codes, places[::2], places[1::2], strict=True)
        for key, ndim, dtype_code, offset, length in rows:
            offsets_at = position + ndim
            sizes_at = offsets_at + ndim
            stop = sizes_at + ndim
            head = heads.get(key)
            if head is None:
                head = heads[key] = (dtypes[dtype_code], tuple(boxes[position:offsets_at]), [], [])
            item = StoredItem(file, offset, length)
            offsets, sizes = tuple(boxes[offsets_at:sizes_at]), tuple(boxes[sizes_at:stop])
            head[2].append(StoredChunk(same(offsets, offsets), same(sizes, sizes), item))
            head[3].append(number)
            number += 1
            position = stop
    entries: dict[str, TensorEntry] = {}
    order = array("I")
    for key, (dtype, shape, chunks, numbers) in heads.items():
        kept = of_different_offsets(chunks)
        entries[key] = TensorEntry(key, dtype, shape, tuple(chunks[n] for n in kept) if kept else tuple(chunks))
        order.extend([numbers[n] for n in kept] if kept else numbers)
    return entries, order


@dataclass(frozen=True, slots=True)
class GlobalPlan:
    """All ranks' tensors, checked before (`state/plan_check.py`): what `.metadata` is made from. Cheap to pickle."""

    encoded: tuple[bytes, ...]  # the plan of each rank
    files: tuple[tuple[str, int], ...] = ()  # name, without the id of a save, and length in bytes of all ranks' files
    mcore_data: dict[str, dict[str, Any]] = field(default_factory=dict)  # as in `CheckpointIndex`

    @collector_paused()
    def encoder(self) -> MetadataEncoder:
        """Put the index of the tensors together, which takes half a second for 20,000 tensors of two ranks."""
        tensors, order = index_tensors(decoded_plans(self.encoded))
        index = CheckpointIndex("", tensors, {}, mcore_data=self.mcore_data)
        return MetadataEncoder(index, order, chunk_factors(index))


def chunk_factors(index: CheckpointIndex) -> ChunkFactors:
    """How the CRC-32 of each chunk counts in the fingerprint of its tensor."""
    factors, firsts = array("I"), array("q")
    for key, dtype, shape, chunks, _ in index.tensors.values():
        firsts.append(len(factors))
        own_shape = index.original_shape(key)
        if len(chunks) == 1 and chunks[0].sizes == shape and own_shape is None:
            factors.append(NO_SHIFT)
            continue
        elem_bytes = element_bytes(dtype)
        for offsets, sizes, _ in chunks:
            behind = Stretch.of_chunk(shape, offsets, sizes, elem_bytes, own_shape).bytes_behind()
            factors.append(0 if behind is None else shift_factor(behind))
    return ChunkFactors(factors, firsts)


def metadata_of(
    encoder: MetadataEncoder,
    objects: Sequence[tuple[ObjectEntry, ...]],
    files: Sequence[Sequence[WrittenFile]],
    *,
    save_id: bytes,
    storage_meta: dict[str, Any],
    common: ManifestFile | None = None,
    names: Mapping[str, str] | None = None,
) -> bytes:
    """The content of `.metadata`. Raises `PlanError` if two ranks have written objects of one key.

    `objects` are index entries of each rank's objects, file by file; `files` each rank's files, in the order of its
    plan. `names`: new names for files of the plan.
    """
    entries: dict[str, ObjectEntry] = {}
    for rank, of_rank in enumerate(objects):
        for entry in of_rank:
            if entry.fqn in entries:
                raise PlanError(f"{entry.fqn}: rank {rank} writes an object that another rank has written, too")
            entries[entry.fqn] = entry
    written = list(chain.from_iterable(files))
    order = encoder.order  # the number of each tensor item among those of all files
    crcs = list(chain.from_iterable(file.crcs for file in written))
    firsts = list(accumulate((len(file.crcs) for file in written), initial=0))
    cumulative: dict[int, array[int]] = {}
    for first, file in zip(firsts, written, strict=False):
        at = 0
        for number, count in zip(file.long_payloads, file.inner_blocks, strict=True):
            cumulative[first + number] = file.blocks[at : at + count]
            at += count
    summed = [(n, cumulative[number]) for n, number in enumerate(order) if number in cumulative] if cumulative else []
    listed = {file.name: ManifestFile(file.size_bytes, file.table_crc32, save_id) for file in written}
    if common is not None:
        listed[COMMON_FILE] = common
    ordered = array("I", [crcs[number] for number in order])
    ordered.extend(chain.from_iterable(file.object_crcs for file in written))
    manifest = Manifest(
        save_id,
        dict(sorted(listed.items())),
        ordered,
        array("Q", [n for n, _ in summed]),
        array("I", [len(sums) for _, sums in summed]),
        array("I", chain.from_iterable(sums for _, sums in summed)),
        fingerprints=None if encoder.factors is None else _fingerprints(encoder.factors, order, crcs, written, firsts),
    )
    return encoder.encode(entries, files=names, storage_meta=storage_meta, manifest=manifest)


def _fingerprints(
    factors: ChunkFactors,
    order: Sequence[int],
    crcs: Sequence[int],
    files: Sequence[WrittenFile],
    firsts: Sequence[int],
) -> array[int]:
    """The fingerprint of each tensor; -1 of those without. `firsts`: number of the first item of each file."""
    import numpy as np  # which a writer process does without

    if not factors.firsts:
        return array("q")
    counts = np.array(crcs, np.uint32)[np.array(order)]
    multipliers = np.array(factors.factors, np.uint32)
    if (multipliers != NO_SHIFT).any():
        from mcore_ckpt.core.fingerprints import products

        counts = products(counts, multipliers)
    unknown = set[int]()
    if not multipliers.all():
        parts = {first + n: part for first, file in zip(firsts, files, strict=False) for n, part in file.parts}
        for chunk in np.flatnonzero(multipliers == 0).tolist():
            part = parts.get(order[chunk])
            counts[chunk] = part or 0
            if part is None:  # a rank saves without fingerprints
                unknown.add(bisect_right(factors.firsts, chunk) - 1)
    sums = np.bitwise_xor.reduceat(counts, np.array(factors.firsts)).astype(np.int64)
    sums[sorted(unknown)] = NO_FINGERPRINT
    return array("q", sums.tobytes())
