"""What is written, laid out: tensors and objects -> balanced buckets -> every offset of each bucket's file.

A bucket is what goes into one file. Its file holds two halves: first **bytes_data**, the serialized objects, in a
region with some room to grow, then **tensor_data**, each tensor in the zip that `torch.save` writes. Sizes of tensors
are known when a save is planned, so every offset is, too; and because objects have a region of their own, tensors do
not move when an object changes its size.

`lay_out_rank` does so for all that one rank writes in one save. A `RankLayout` depends on the structure of the state
only (keys, dtypes, shapes, offsets), so it is kept and used again as long as that stays: the second save's planning is
free. `lay_out_file` lays out one file from the same parts, for a writer that is handed its buckets one by one. What a
save adds to a layout is a `WriteBucket`, made by `prepare_write_data`: the file's name, its bytes_data, its tensor_data
and the integrity footer.

To make `.metadata` from the plans of all ranks takes half a second for 20,000 tensors of two ranks, grows with the
number of ranks, and needs nothing but the plans: so the coordinator's writer process does that on a second thread
(`save/writer.py`), and no training waits for it.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from mcore_ckpt.core.boxes import Stretch
from mcore_ckpt.core.crc import crc32, shift_factor
from mcore_ckpt.core.errors import OptionError, SaveError
from mcore_ckpt.core.process import collector_paused
from mcore_ckpt.format.index import (
    CheckpointIndex,
    ObjectEntry,
    StoredChunk,
    StoredItem,
    TensorEntry,
    file_name_problem,
    of_different_offsets,
)
from mcore_ckpt.format.integrity import (
    BLOCK_BYTES,
    FooterPlan,
    TableColumns,
    data_file_name,
    inner_blocks,
    with_id,
)
from mcore_ckpt.format.item_layout import TensorTemplate, element_bytes, place, tensor_template
from mcore_ckpt.format.metadata_write import ChunkFactors, MetadataEncoder
from mcore_ckpt.state.plans import LocalPlan, decoded_plans

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class FileImage:
    """What has to be known of a file's structure to sum and write it; plain arrays, the same from save to save."""

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
    """What became of one file, with all of its checksums: what its rank sends to the coordinator."""

    name: str  # of the file
    size_bytes: int  # of the file, as finished
    table_crc32: int  # of the table in its integrity footer
    object_crcs: array[int]  # CRC-32 of each serialized object, in the order of the file (`array('I')`)
    crcs: array[int]  # CRC-32 of each payload (`array('I')`)
    long_payloads: array[int]  # numbers of the payloads that have cumulative CRCs (`array('I')`)
    inner_blocks: array[int]  # for each of those, how many (`array('I')`)
    blocks: array[int]  # cumulative CRC-32 at each block boundary inside each of those (`array('I')`)
    # Number of each payload that is several runs of its tensor, and what it adds to that tensor's fingerprint.
    parts: tuple[tuple[int, int], ...] = ()
    write_s: float = 0.0  # seconds of writing, summed over the I/O threads
    fsync_s: float = 0.0  # seconds of finishing the file (truncate, fsync, close)
    # The checksums are known, and the file ends with its integrity footer; not so of a file that a third-party callback
    # has written.
    has_footer: bool = True


class Window(NamedTuple):
    """Bytes `[start, stop)` of a file; `start` is a multiple of the window size."""

    start: int
    stop: int


def plan_windows(size_bytes: int, window_bytes: int = 8 * 1024 * 1024) -> Iterator[Window]:
    """Cut a file into windows of `window_bytes`, in file order; the last may be shorter."""
    for start in range(0, size_bytes, window_bytes):
        yield Window(start, min(start + window_bytes, size_bytes))


Fill = Callable[[Window, memoryview], None]


def check_results(planned: Sequence[PlannedFile], written: Sequence[WrittenFile]) -> None:
    """Raise `SaveError` unless every planned file was written, of its planned length, every payload summed."""
    got = [(file.name, file.size_bytes, len(file.crcs)) for file in written]
    expected = [
        (file.name, file.image.size_bytes, len(file.image.payload_offsets if result.has_footer else ()))
        for file, result in zip(planned, written, strict=False)
    ]
    if expected != got or len(planned) != len(written):
        raise SaveError(f"the writer's results are not what was planned: expected {expected}, got {got}")


_PAGE_BYTES = 4096
_OBJECT_ALIGNMENT_BYTES = 64


class TensorSpec(NamedTuple):
    """One tensor to be written: box (`offsets`, `sizes`) of a global tensor of `shape`, in elements.

    `original_shape` is the parameter's own global shape where `shape` is that of a stored form (see `flattened`).
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    nbytes: int
    original_shape: tuple[int, ...] | None = None

    def stretch(self) -> Stretch:
        """Where its elements lie in the tensor."""
        return Stretch.of_chunk(self.shape, self.offsets, self.sizes, element_bytes(self.dtype), self.original_shape)


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """Where everything lies in one bucket's file, the same in every save of a structure; in bytes from its start."""

    file_name: str  # name inside the checkpoint directory, without the id of a save
    specs: tuple[TensorSpec, ...]  # the tensors, in the order of the file
    object_keys: tuple[str, ...]  # of the objects, in the order of the file
    region_bytes: int  # length of the bytes_data region, which starts at 0 and is a multiple of 4096
    templates: tuple[TensorTemplate, ...]  # for each tensor, its item without the payload
    item_offsets: array[int]  # for each tensor, where its item starts
    image: FileImage  # what a writer needs: the file's size, the payloads and the places of their checksums
    footer: FooterPlan  # the integrity footer, as far as the structure tells

    @property
    def footer_offset(self) -> int:
        """Where the integrity footer begins, which is where the last item ends."""
        return self.image.size_bytes - self.footer.size_bytes


def balance(sizes_bytes: Sequence[int], buckets: int) -> list[list[int]]:
    """Distribute items over buckets evenly: the largest item first, each to the bucket that is least filled.

    Returns the indices of each bucket's items in their original order: neighbours in the model stay neighbours.
    """
    if buckets == 1:
        return [list(range(len(sizes_bytes)))]
    filled = [(0, bucket) for bucket in range(buckets)]
    chosen: list[list[int]] = [[] for _ in range(buckets)]
    for index in sorted(range(len(sizes_bytes)), key=sizes_bytes.__getitem__, reverse=True):
        total_bytes, bucket = filled[0]
        chosen[bucket].append(index)
        heapq.heapreplace(filled, (total_bytes + sizes_bytes[index], bucket))
    for indices in chosen:
        indices.sort()
    return chosen


def check_hint(separation_hint: str) -> None:
    """Raise `OptionError` if names of files cannot begin with it."""
    problem = "names another directory" if "/" in separation_hint else None
    problem = problem or file_name_problem(data_file_name(0, 0, separation_hint))
    if problem:
        raise OptionError(f"separation_hint={separation_hint!r:.80}: a file name that begins with it {problem}")


def split_buckets(
    keys: Sequence[str],
    sizes_bytes: Sequence[int],
    thread_count: int,
    separation_hint: str | None = None,
) -> list[tuple[str, list[int]]]:
    """Choose the buckets of one rank: `(file name prefix, item indices)` for each that is not empty.

    With a separation hint, items whose key starts with it go into files whose names start with it; each of the two
    groups has half of the `thread_count` files.
    """
    groups: list[tuple[str, list[int]]] = [("", list(range(len(keys))))]
    if separation_hint is not None:
        thread_count = max(1, thread_count // 2)
        hinted = [index for index, key in enumerate(keys) if key.startswith(separation_hint)]
        apart = set(hinted)
        groups = [("", [i for i in range(len(keys)) if i not in apart]), (separation_hint, hinted)]
    buckets: list[tuple[str, list[int]]] = []
    for prefix, members in groups:
        sizes = [sizes_bytes[index] for index in members]
        chosen = [indices for indices in balance(sizes, thread_count) if indices]
        buckets += [(prefix, [members[position] for position in indices]) for indices in chosen]
    return buckets


def region_bytes(objects_bytes: Sequence[int]) -> int:
    """Length of the region for serialized objects: what they take now and a quarter more, in whole pages."""
    if not objects_bytes:
        return 0
    needed = _end(objects_bytes)
    return -(-(needed + needed // 4) // _PAGE_BYTES) * _PAGE_BYTES


def _end(objects_bytes: Sequence[int]) -> int:
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
    """Lay out a bucket's file, and the same in columns; the region of the objects gets some room to grow beyond
    `objects_bytes`.
    """
    templates = [tensor_template(spec.dtype, spec.sizes) for spec in specs]
    item_offsets = array("q")
    payload_offsets = array("q")
    payload_lengths = array("q")
    crc_positions = array("q")
    item_bytes: list[int] = []
    position = bytes_region = region_bytes(objects_bytes)
    for _, alike in groupby(templates, id):  # most tensors are like their neighbours: those lie at equal distances
        template, *others = alike
        count, payload, size_bytes = 1 + len(others), len(template.head), template.item_bytes
        first = place(position, template)
        step = place(first + size_bytes, template) - first
        starts = range(first, first + count * step, step)
        item_offsets.extend(starts)
        payload_offsets.extend(range(first + payload, starts.stop + payload, step))
        payload_lengths.extend([template.payload_bytes] * count)
        crcs = [payload + template.payload_bytes + crc_position for crc_position in template.crc_positions]
        crc_positions.extend([start + crc for start in starts for crc in crcs])
        item_bytes += [size_bytes] * count
        position = starts[-1] + size_bytes
    columns = _table_columns(specs, item_offsets, item_bytes, object_keys)
    footer = FooterPlan.of(columns)
    image = FileImage(
        size_bytes=position + footer.size_bytes,
        payload_offsets=payload_offsets,
        payload_lengths=payload_lengths,
        crc_positions=crc_positions,
        strided=tuple(_strided(specs)),
    )
    layout = BucketLayout(
        file_name, tuple(specs), tuple(object_keys), bytes_region, tuple(templates), item_offsets, image, footer
    )
    return layout, columns


def _strided(specs: Sequence[TensorSpec]) -> Iterator[tuple[int, Stretch]]:
    """Number of each tensor of which a slice is saved that is several runs of it, and where its elements lie."""
    for number, spec in enumerate(specs):
        if spec.original_shape is None and spec.sizes[1:] == spec.shape[1:]:
            continue  # rows, as most are
        stretch = spec.stretch()
        if stretch.bytes_behind() is None:
            yield number, stretch


def footer_plan(
    specs: Sequence[TensorSpec],
    item_offsets: Iterable[int],
    item_bytes: Iterable[int],
    object_keys: Sequence[str],
) -> FooterPlan:
    """The integrity footer of a file that holds these tensors, in its order, and objects of these keys."""
    return FooterPlan.of(_table_columns(specs, item_offsets, item_bytes, object_keys))


def _table_columns(
    specs: Sequence[TensorSpec],
    item_offsets: Iterable[int],
    item_bytes: Iterable[int],
    object_keys: Sequence[str],
) -> TableColumns:
    dtypes = {dtype: code for code, dtype in enumerate(dict.fromkeys(spec.dtype for spec in specs))}
    boxes = chain.from_iterable([(spec.shape, spec.offsets, spec.sizes) for spec in specs])
    places = chain.from_iterable(zip(item_offsets, item_bytes, strict=True))
    return TableColumns(
        tuple(dtypes),
        [spec.key for spec in specs],
        array("I", [dtypes[spec.dtype] for spec in specs]),
        array("I", [len(spec.shape) for spec in specs]),
        array("q", list(chain.from_iterable(boxes))),
        array("q", list(places)),
        object_keys,
    )


class WriteBucket(NamedTuple):
    """What one save writes into one file: serialized objects, and apart from them tensors."""

    layout: BucketLayout  # of the file
    file: PlannedFile  # the same for its writer
    bytes_data: tuple[memoryview, ...]  # the serialized objects
    offsets: tuple[int, ...]  # where each of them lies in the file, in bytes
    footer: bytes  # the integrity footer
    tensor_data: Sequence[torch.Tensor]  # detached, in the order of the file
    pointers: Sequence[int] | None = None  # address of each tensor in host memory, 0 if unknown; None: not looked for


def fill_bucket(
    layout: BucketLayout,
    name: str,
    save_id: bytes,
    bytes_data: Sequence[memoryview],
    tensor_data: Sequence[torch.Tensor],
    pointers: Sequence[int] | None = None,
) -> WriteBucket:
    """The bucket of one save in a file of this layout and name, closed with its integrity footer."""
    lengths = [len(data) for data in bytes_data]
    offsets = place_objects(lengths)
    footer, table_crc32 = layout.footer.fill(save_id, layout.image.size_bytes, zip(offsets, lengths, strict=True))
    file = PlannedFile(name, layout.image, table_crc32, array("I", map(crc32, bytes_data)))
    return WriteBucket(layout, file, tuple(bytes_data), tuple(offsets), footer, tensor_data, pointers)


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The files of one rank, in every save of the same structure."""

    specs: tuple[TensorSpec, ...]  # the tensors, in the trainer's order; what a later save compares its own with
    buckets: tuple[BucketLayout, ...]  # the layout of each file
    members: tuple[tuple[int, ...], ...]  # for each file, the indices of its tensors
    objects: tuple[tuple[int, ...], ...]  # for each file, the indices of its objects
    plan: LocalPlan  # the same for the coordinator
    object_keys: tuple[str, ...]  # of the objects that the files were laid out for
    separation_hint: str | None  # prefix of keys whose files carry it, too

    @property
    def file_bytes(self) -> int:
        """Length of all files together, in bytes."""
        return sum(bucket.image.size_bytes for bucket in self.buckets)

    def has_room(self, keys: Sequence[str], sizes_bytes: Sequence[int]) -> bool:
        """Whether the objects of a save fit into these files: the same keys, in regions that are long enough."""
        return tuple(keys) == self.object_keys and all(
            not chosen or _end([sizes_bytes[index] for index in chosen]) <= bucket.region_bytes
            for bucket, chosen in zip(self.buckets, self.objects, strict=True)
        )

    def object_entries(self, buckets: Sequence[WriteBucket]) -> tuple[ObjectEntry, ...]:
        """Index entries of the objects of one save, file by file."""
        return tuple(
            ObjectEntry(self.object_keys[index], StoredItem(bucket.file.name, offset, len(data)))
            for bucket, chosen in zip(buckets, self.objects, strict=True)
            for index, offset, data in zip(chosen, bucket.offsets, bucket.bytes_data, strict=True)
        )


def prepare_write_data(
    layout: RankLayout,
    objects: Sequence[memoryview],
    tensors: Sequence[torch.Tensor],
    pointers: Sequence[int],
    save_id: bytes,
) -> list[WriteBucket]:
    """Sort what a rank saves into its buckets, bytes_data apart from tensor_data. Expects that the objects have room.
    The names of the files carry the id of the save, so no name is used twice.
    """
    return [
        fill_bucket(
            of_file,
            with_id(of_file.file_name, save_id),
            save_id,
            [objects[index] for index in chosen],
            [tensors[index] for index in members],
            [pointers[index] for index in members],
        )
        for of_file, chosen, members in zip(layout.buckets, layout.objects, layout.members, strict=True)
    ]


def lay_out_rank(
    specs: Sequence[TensorSpec],
    object_keys: Sequence[str],
    object_bytes: Sequence[int],
    *,
    rank: int,
    thread_count: int,
    separation_hint: str | None = None,
) -> RankLayout:
    """Lay out what a rank writes: `thread_count` files at most, keys with the `separation_hint` apart."""
    keys = [spec.key for spec in specs]
    chosen = split_buckets(keys, [spec.nbytes for spec in specs], thread_count, separation_hint)
    prefixes = [prefix for prefix, _ in chosen]
    for prefix in _prefixes_of_objects(object_keys, separation_hint):
        if prefix not in prefixes:
            chosen.append((prefix, []))
            prefixes.append(prefix)
    names = [data_file_name(rank, i, prefix) for i, prefix in enumerate(prefixes)]
    objects_of_file = _spread(object_keys, names, separation_hint)
    buckets = []
    laid_out = []
    for name, objects, (_, indices) in zip(names, objects_of_file, chosen, strict=True):
        of_file = [specs[index] for index in indices]
        sizes = [object_bytes[index] for index in objects]
        bucket, columns = lay_out_file(name, of_file, [object_keys[index] for index in objects], sizes)
        buckets.append(bucket)
        laid_out.append((name, bucket.image.size_bytes, columns))
    return RankLayout(
        specs=tuple(specs),
        buckets=tuple(buckets),
        members=tuple(tuple(indices) for _, indices in chosen),
        objects=tuple(map(tuple, objects_of_file)),
        plan=LocalPlan.of(laid_out),
        object_keys=tuple(object_keys),
        separation_hint=separation_hint,
    )


def _prefixes_of_objects(keys: Sequence[str], separation_hint: str | None) -> list[str]:
    if separation_hint is None:
        return [""] if keys else []
    hinted = [key.startswith(separation_hint) for key in keys]
    return ([] if all(hinted) else [""]) + ([separation_hint] if any(hinted) else [])


def _spread(keys: Sequence[str], names: Sequence[str], hint: str | None) -> list[list[int]]:
    """Objects to files, in turn; hinted keys only to files that carry the hint, the others only to the others."""
    chosen: list[list[int]] = [[] for _ in names]
    hinted_files = [i for i, name in enumerate(names) if hint is not None and name.startswith(hint)]
    plain_files = [i for i in range(len(names)) if i not in hinted_files]
    turns = {True: 0, False: 0}
    for index, key in enumerate(keys):
        hinted = hint is not None and key.startswith(hint)
        files = hinted_files if hinted else plain_files
        if not files:
            continue
        chosen[files[turns[hinted] % len(files)]].append(index)
        turns[hinted] += 1
    return chosen


def index_tensors(plans: Iterable[LocalPlan]) -> tuple[dict[str, TensorEntry], array[int]]:
    """The index entries of all ranks' tensors, by key; and for each chunk its item's number among those of
    all plans.
    """
    heads: dict[str, tuple[str, tuple[int, ...], list[StoredChunk], list[int]]] = {}
    number = 0
    known: dict[tuple[int, ...], tuple[int, ...]] = {}  # offsets and sizes recur in many tensors: one of each is kept
    same = known.setdefault
    for plan in plans:
        boxes, places, files, dtypes = plan.boxes.tolist(), plan.places.tolist(), plan.files, plan.dtypes
        position = 0
        columns = zip(plan.keys, plan.ndims, plan.dtype_codes, plan.file_codes, places[::2], places[1::2], strict=True)
        for key, ndim, dtype_code, file_code, offset, length in columns:
            offsets_at = position + ndim
            sizes_at = offsets_at + ndim
            stop = sizes_at + ndim
            head = heads.get(key)
            if head is None:
                head = heads[key] = (dtypes[dtype_code], tuple(boxes[position:offsets_at]), [], [])
            item = StoredItem(files[file_code], offset, length)
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

    encoded: tuple[bytes, ...]  # every rank's `LocalPlan`, encoded
    files: tuple[tuple[str, int], ...] = ()  # name, without the id of a save, and length in bytes of all ranks' files
    mcore_data: dict[str, dict[str, Any]] = field(default_factory=dict)  # as in `CheckpointIndex`

    def decoded(self) -> list[LocalPlan]:
        """Every rank's plan."""
        return decoded_plans(self.encoded)

    @collector_paused()
    def encoder(self) -> MetadataEncoder:
        """Put the index of the tensors together, which takes half a second for 20,000 tensors of two ranks."""
        tensors, order = index_tensors(self.decoded())
        index = CheckpointIndex("", tensors, {}, mcore_data=self.mcore_data)
        return MetadataEncoder(index, order, chunk_factors(index))


def chunk_factors(index: CheckpointIndex) -> ChunkFactors:
    """How the CRC-32 of each chunk counts in the fingerprint of its tensor."""
    factors, firsts = array("I"), array("q")
    one = shift_factor(0)
    for key, dtype, shape, chunks, _ in index.tensors.values():
        firsts.append(len(factors))
        own_shape = index.original_shape(key)
        if len(chunks) == 1 and chunks[0].sizes == shape and own_shape is None:
            factors.append(one)
            continue
        elem_bytes = element_bytes(dtype)
        for offsets, sizes, _ in chunks:
            behind = Stretch.of_chunk(shape, offsets, sizes, elem_bytes, own_shape).bytes_behind()
            factors.append(0 if behind is None else shift_factor(behind))
    return ChunkFactors(factors, firsts)
