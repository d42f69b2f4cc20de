"""Where each parameter lies in the flat buckets of Megatron-Core's distributed optimizer.

The optimizer keeps its state in buffers, one for each chunk of the model and kind of element, cut into buckets. A
buffer holds the parameters of the chunk in the reverse order of `named_parameters()`, each from a multiple of 64
elements on. Where buckets begin follows from their stored sizes, whatever made them end there. Which parameters there
are, in which order, only the model tells (`reshard.parameter_orders`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import CorruptCheckpointError

_ALIGNMENT = 64


class ParameterBox(NamedTuple):
    """A slice of the global tensor `key`: the elements of a flattened parameter from `first` on, in C order."""

    key: str
    shape: tuple[int, ...]
    box: Box
    first: int


class FlatParameter(NamedTuple):
    """A parameter of one rank's chunk of the model, and the slices which together are all of it.

    `own_bucket`: it shares no bucket, as embeddings that two stages hold. `is_copy`: another rank has the original.
    """

    name: str
    numel: int
    own_bucket: bool
    is_copy: bool
    boxes: tuple[ParameterBox, ...]


class BucketOffset(NamedTuple):
    """Where a parameter begins: number of the bucket, and its first element in it."""

    bucket: int
    first: int


def places_in_buckets(parameters: Sequence[FlatParameter], sizes: Sequence[int], where: str) -> list[BucketOffset]:
    """Lay parameters into buckets of `sizes` elements (without padding at their ends), as Megatron-Core does.

    Raises `CorruptCheckpointError` if they do not fill buckets of these sizes.
    """
    places: list[BucketOffset] = []
    bucket, at = 0, 0
    for parameter in parameters:
        start = _aligned(at)
        # A bucket before an embedding that gets one of its own ends where that would have begun.
        if bucket < len(sizes) and at and sizes[bucket] in (at, start):
            bucket, start = bucket + 1, 0
        if bucket >= len(sizes) or start + parameter.numel > sizes[bucket]:
            raise CorruptCheckpointError(
                f"{where}: the parameters of the model do not fill the buckets that are stored: {parameter.name} of "
                f"{parameter.numel} elements would end at element {start + parameter.numel} of bucket {bucket}, "
                + (f"which has {sizes[bucket]}" if bucket < len(sizes) else f"and there are {len(sizes)}")
                + ". The stored arguments are not those of the model that was saved. Nothing was written"
            )
        places.append(BucketOffset(bucket, start))
        at = start + parameter.numel
    if bucket != len(sizes) - 1 or (sizes and sizes[bucket] not in (at, _aligned(at))):
        raise CorruptCheckpointError(
            f"{where}: the {len(parameters)} parameters of the model end at element {at} of bucket {bucket}, expected "
            f"{len(sizes)} buckets of {list(sizes)[:8]} elements to be filled; the stored arguments are not those of "
            "the model that was saved. Nothing was written"
        )
    return places


def _aligned(element: int) -> int:
    return -(-element // _ALIGNMENT) * _ALIGNMENT
