"""Checkpoints in any layout, made of `torch.save` items."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.dcp.reader import FileSystemReader
from mcore_ckpt.format.index import CheckpointIndex, ObjectEntry, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.format.metadata_write import encode_metadata
from mcore_ckpt.load.requests import ReadRequest
from tests.support.local_files import flip


class StoredTensor(NamedTuple):
    """A global tensor, and the boxes in which it is to be stored."""

    tensor: torch.Tensor
    boxes: Sequence[Box]


def stock_item(value: Any) -> bytes:
    """What `torch.save` makes of a tensor or object."""
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


def flip_byte(index: CheckpointIndex, fqn: str, *, at_fraction: float) -> tuple[Path, int]:
    """Damage the item of a tensor's first chunk, at a fraction of its length."""
    item = index.tensors[fqn].chunks[0].item
    path = Path(index.path) / item.file
    at = item.offset + int(item.length * at_fraction)
    flip(path, at, 0x40)
    return path, at
