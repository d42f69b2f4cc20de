"""One file, laid out: tensors and objects -> every offset in it, before its first byte is written.

A file holds two halves: first **bytes_data**, the serialized objects, in a region with some room to grow, then
**tensor_data**, each tensor in the zip that `torch.save` writes, and last the integrity footer. Sizes of tensors are
known beforehand, so every offset is, too; and because objects have a region of their own, tensors do not move when an
object changes its size.

A `BucketLayout` depends on the structure of the state only (keys, dtypes, shapes, offsets). A `FileImage` is the part
of it that a writer needs: where payloads lie, and the places of their checksums.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import TYPE_CHECKING, NamedTuple

from mcore_ckpt.core.boxes import Stretch
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.format.integrity import BLOCK_BYTES, FooterPlan, TableColumns, inner_blocks
from mcore_ckpt.format.item import TensorTemplate, element_bytes, place, tensor_template

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


def check_results(planned: Sequence[PlannedFile], written: Sequence[WrittenFile]) -> None:
    """Raise `SaveError` unless every planned file was written, of its planned length, every payload summed."""
    got = [(file.name, file.size_bytes, len(file.crcs)) for file in written]
    expected = [(file.name, file.image.size_bytes, len(file.image.payload_offsets)) for file in planned]
    if expected != got:
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
    """Lay out a bucket's file, and the same in columns; the region of the objects gets some room to grow beyond
    `objects_bytes`.
    """
    templates = [tensor_template(spec.dtype, spec.sizes) for spec in specs]
    item_offsets = array("q")
    payload_offsets = array("q")
    payload_lengths = array("q")
    crc_positions = array("q")
    item_bytes: list[int] = []
    # The region of the objects: what they take now and a quarter more, in whole pages.
    needed = objects_end(objects_bytes) if objects_bytes else 0
    position = bytes_region = -(-(needed + needed // 4) // _PAGE_BYTES) * _PAGE_BYTES
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
        file_name, tuple(specs), bytes_region, tuple(templates), item_offsets, image, footer, position
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
