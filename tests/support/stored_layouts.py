"""Checkpoints in any layout, made of `torch.save` items."""

import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.dcp.reader import FileSystemReader
from mcore_ckpt.format.index import CheckpointIndex, ObjectEntry, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.format.integrity import NO_SAVE_ID
from mcore_ckpt.format.item import TensorTemplate, tensor_template
from mcore_ckpt.format.metadata_write import encode_metadata
from mcore_ckpt.format.parameter_table import Region
from mcore_ckpt.image.layout import TensorSpec, WriteBucket, fill_bucket, lay_out_file
from mcore_ckpt.load.requests import ReadRequest
from mcore_ckpt.save.staging import BucketSource
from tests.support.local_files import flip


class StoredTensor(NamedTuple):
    """A global tensor, and the boxes in which it is to be stored."""

    tensor: torch.Tensor
    boxes: Sequence[Box]


def stock_item(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def rewritten(item: bytes, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """The archive as Python's zipfile writes it, with checksums that fit; `change(name, content)` of each record."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(item)) as old, zipfile.ZipFile(stream, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, change(name.partition("/")[2], old.read(name)))
    return stream.getvalue()


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """A copy of a box of a tensor, contiguous and with a storage of its own."""
    slices = tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))
    return tensor[slices].clone(memory_format=torch.contiguous_format)


def write_checkpoint(
    directory: Path,
    tensors: Mapping[str, StoredTensor],
    objects: Mapping[str, Any] | None = None,
    *,
    item_of: Callable[[torch.Tensor], bytes] = stock_item,
    files: int = 1,
    padding: Sequence[int] = (0,),
) -> CheckpointIndex:
    """Write a checkpoint, items dealt out to `files` files, with paddings (bytes, used in turn) before them."""
    directory.mkdir(parents=True, exist_ok=True)
    contents = [bytearray() for _ in range(files)]
    count = 0

    def store(content: bytes) -> StoredItem:
        nonlocal count
        file = contents[count % files]
        file += b"\xa5" * padding[count % len(padding)]
        item = StoredItem(f"__0_{count % files}.distcp", len(file), len(content))
        file += content
        count += 1
        return item

    entries = {}
    for fqn, (tensor, boxes) in tensors.items():
        chunks = tuple(StoredChunk(box.offsets, box.sizes, store(item_of(part(tensor, box)))) for box in boxes)
        entries[fqn] = TensorEntry(fqn, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), chunks)
    object_entries = {fqn: ObjectEntry(fqn, store(stock_item(value))) for fqn, value in (objects or {}).items()}
    for number, content in enumerate(contents):
        (directory / f"__0_{number}.distcp").write_bytes(content)
    index = CheckpointIndex(str(directory), entries, object_entries)
    (directory / ".metadata").write_bytes(encode_metadata(index))
    return index


def whole(tensor: torch.Tensor) -> StoredTensor:
    """A tensor in one chunk."""
    return StoredTensor(tensor, [Box((0,) * tensor.dim(), tuple(tensor.shape))])


def row_chunks(tensor: torch.Tensor, parts: int) -> StoredTensor:
    """A matrix cut into groups of whole rows, as a column-parallel weight is."""
    step = tensor.shape[0] // parts
    return StoredTensor(tensor, [Box((at * step, 0), (step, tensor.shape[1])) for at in range(parts)])


def load_box(reader: FileSystemReader, fqn: str, like: torch.Tensor, box: Box | None = None) -> torch.Tensor:
    """A box of a stored tensor (all of it by default), in the dtype of `like`."""
    box = Box((0,) * like.dim(), tuple(like.shape)) if box is None else box
    destination = torch.zeros(box.sizes, dtype=like.dtype)
    reader.read_items([ReadRequest(fqn, destination, *box)])
    return destination


def flip_item(index: CheckpointIndex, fqn: str) -> None:
    """Damage a byte in the middle of a tensor's first chunk."""
    item = index.tensors[fqn].chunks[0].item
    flip(Path(index.path) / item.file, item.offset + item.length // 2, 0xFF)


# --- strategies of Hypothesis for boxes, and for boxes that together hold each element of a tensor once ---------------


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...], *, empty: bool = False) -> Box:
    """A box inside `shape`; with `empty`, also one without elements."""
    least = 0 if empty else 1
    offsets, sizes = [], []
    for size in shape:
        start = draw(st.integers(0, size - least))
        offsets.append(start)
        sizes.append(draw(st.integers(least, size - start)))
    return Box(tuple(offsets), tuple(sizes))


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...], max_boxes: int = 8, *, empty: bool = False) -> list[Box]:
    """Boxes that hold each element once: `shape` cut, and some of the parts cut again, along any axes.

    With `empty`, some of the boxes may have no elements.
    """
    least = 0 if empty else 1
    boxes = [Box((0,) * len(shape), tuple(shape))]
    for _ in range(draw(st.integers(0, max_boxes - 1))):
        at = draw(st.integers(0, len(boxes) - 1))
        offsets, sizes = boxes[at]
        axes = [axis for axis, size in enumerate(sizes) if size >= 2 * least]
        if not axes:
            continue
        axis = draw(st.sampled_from(axes))
        cut = draw(st.integers(least, sizes[axis] - least))
        first = Box(offsets, (*sizes[:axis], cut, *sizes[axis + 1 :]))
        second = Box(
            (*offsets[:axis], offsets[axis] + cut, *offsets[axis + 1 :]),
            (*sizes[:axis], sizes[axis] - cut, *sizes[axis + 1 :]),
        )
        boxes[at : at + 1] = [first, second]
    return boxes


# --- tensors that are stored as a whole, and items in memory, for tests that lay out files without planning a save ----


def specs_of(tensors: Iterable[torch.Tensor]) -> list[TensorSpec]:
    """Each tensor as the whole of a global tensor, under keys `0`, `1`, ..."""
    specs = []
    for number, tensor in enumerate(tensors):
        shape = tuple(tensor.shape)
        dtype = str(tensor.dtype).removeprefix("torch.")
        specs.append(TensorSpec(str(number), dtype, shape, (0,) * len(shape), shape, tensor.nbytes))
    return specs


def bucket_of(*tensors: torch.Tensor, name: str = "__0_0.distcp") -> WriteBucket:
    """What is written into a file that holds these tensors."""
    return fill_bucket(lay_out_file(name, specs_of(tensors))[0], name, NO_SAVE_ID, [], tensors)


def source_of(*tensors: torch.Tensor) -> BucketSource:
    """The bytes of a file that holds these tensors."""
    return BucketSource(bucket_of(*tensors))


def encode_tensor(dtype: str, shape: tuple[int, ...], payload: Any) -> bytes:
    """A complete item, from any bytes-like payload."""
    template = tensor_template(dtype, shape)
    payload = memoryview(payload).cast("B")
    assert len(payload) == template.payload_bytes
    return b"".join((template.head, payload, tail_with(template, crc32(payload))))


def tail_with(template: TensorTemplate, crc: int) -> bytes:
    """What stands behind a payload that has this CRC-32."""
    tail = bytearray(template.tail)
    for position in template.crc_positions:
        tail[position : position + 4] = crc.to_bytes(4, "little")
    return bytes(tail)


@dataclass(frozen=True)
class UncheckedTable:
    """A table of parameters by its fields, to be encoded without a check, which the writer would not write; `buckets`:
    name and number of elements of each.
    """

    buckets: Sequence[tuple[str, int]]
    regions: Sequence[Region]
    alignment: int = 64  # of what lies behind padding
    longest: int = 63  # padding

    def encoded(self) -> bytes:
        forms = list(dict.fromkeys(one.form for one in self.regions))
        described = [n for form in forms for n in (len(form.shape), *form.shape, *form.sizes, *form.strides)]
        offsets = [n for one in self.regions for n in one.offsets]
        counts = len(self.buckets), len(forms), len(self.regions), len(described), len(offsets)
        names = [name.encode() for name in (*(n for n, _ in self.buckets), *(one.key for one in self.regions))]
        wide = [*counts, self.alignment, self.longest, *(n for _, n in self.buckets), *described, *offsets]
        wide += [one.first for one in self.regions]
        narrow = [*(one.bucket for one in self.regions), *(forms.index(one.form) for one in self.regions)]
        narrow += [*(one.is_copy for one in self.regions), *map(len, names)]
        content = np.array(wide, "<u8").tobytes() + np.array(narrow, "<u4").tobytes() + b"".join(names)
        return struct.pack("<8sIQ", b"\x89mckFLAT", 1, len(content)) + zlib.compress(content)
