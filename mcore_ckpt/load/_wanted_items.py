"""A stored chunk of which a load requests something, and how it is found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from mcore_ckpt.format.index import StoredChunk, StoredItem
from mcore_ckpt.format.item_reading import LocatedTensor
from mcore_ckpt.load._placement import Want
from mcore_ckpt.load.checks import check_located, chunk_name
from mcore_ckpt.state.torch_classes import dtype_name

# Up to here a look at every chunk of a tensor is cheaper than an index of them.
FEW_CHUNKS = 8


@dataclass(slots=True, eq=False)
class WantedItem:
    """A stored chunk, and the slices of it that are requested."""

    fqn: str  # key of the global tensor
    dtype: torch.dtype  # stored dtype
    chunk: StoredChunk  # the chunk and where it is stored
    payload_bytes: int  # size of the chunk's elements
    wants: list[Want] = field(default_factory=list)  # slices and destinations

    @property
    def needed_bytes(self) -> int:
        """How many bytes the destinations take; what several of them request counts several times."""
        wants = self.wants
        if len(wants) == 1 and wants[0].whole:
            return self.payload_bytes
        return sum(math.prod(want.box.sizes) for want in wants) * self.dtype.itemsize

    @property
    def item(self) -> StoredItem:
        """Where the chunk is stored."""
        return self.chunk.item

    @property
    def key(self) -> tuple[str, int, str]:
        """File, offset and key: the order of the files."""
        return self.chunk.item.file, self.chunk.item.offset, self.fqn

    @property
    def where(self) -> str:
        """The chunk, as an error message names it."""
        return chunk_name(self.fqn, self.chunk)

    @property
    def expected(self) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape that the index says the item has."""
        return dtype_name(self.dtype), self.chunk.sizes

    def check(self, located: LocatedTensor) -> None:
        """Raise `CorruptCheckpointError` unless the item holds the tensor that the index says it does."""
        check_located(located, *self.expected, self.payload_bytes, self.item.crc32)


def only_box(
    starts: Sequence[tuple[int, ...]],
    lengths: Sequence[tuple[int, ...]],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
) -> int | None:
    """Number of the slice that is just this one, if no other one overlaps it; of slices at `starts` of `lengths`."""
    found = None
    for number, (start_of, length_of) in enumerate(zip(starts, lengths, strict=True)):
        if start_of == offsets and length_of == sizes:
            if found is not None:
                return None
            found = number
            continue
        for start, size, other_start, other_size in zip(offsets, sizes, start_of, length_of):  # noqa: B905
            if start + size <= other_start or other_start + other_size <= start:
                break
        else:
            return None
    return found
