"""How two divisions of one tensor into chunks are walked together: the geometry, without bytes and without numpy.

A tensor falls into *blocks*: chunks of either side that have only to do with one another. A block is walked in *slabs*,
which span all trailing axes, so that what a chunk has of a slab is one contiguous run of its bytes, whichever axis it
is divided along; and the runs of a chunk come in ascending order. Hence sources can be read, and targets written and
summed, front to back, in memory that depends on the size of a slab alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mcore_ckpt.core.boxes import Box

SLAB_BYTES = 4 * 1024 * 1024


class Block(NamedTuple):
    """Positions of sources and targets that overlap no others, each in the order of their offsets."""

    sources: list[int]
    targets: list[int]


def blocks(sources: Sequence[Box], targets: Sequence[Box]) -> Iterator[Block]:
    """Split a tensor into independent blocks, in the order of their offsets. Boxes without elements are left out."""
    if len(sources) == 1 and len(targets) == 1 and 0 not in sources[0].sizes:  # most tensors of most checkpoints
        yield Block([0], [0])
        return
    boxes = [*sources, *targets]
    count = len(sources)

    def split(members: list[int], axis: int) -> Iterator[list[int]]:
        if not members or axis == len(boxes[members[0]].offsets):
            if members:
                yield members
            return
        members.sort(key=lambda n: boxes[n].offsets[axis])
        group: list[int] = []
        stop = 0
        for member in members:
            start, size = boxes[member].offsets[axis], boxes[member].sizes[axis]
            if group and start >= stop:
                yield from split(group, axis + 1)
                group = []
            stop = max(stop, start + size) if group else start + size
            group.append(member)
        yield from split(group, axis + 1)

    nonempty = [n for n, box in enumerate(boxes) if 0 not in box.sizes]
    for members in split(nonempty, 0):
        members.sort(key=lambda n: boxes[n].offsets)
        yield Block([n for n in members if n < count], [n - count for n in members if n >= count])


def slabs(box: Box, elem_bytes: int, slab_bytes: int = SLAB_BYTES) -> Iterator[Box]:
    """Cut a box into pieces of at most `slab_bytes` that span all its trailing axes, in C order."""
    rank = len(box.sizes)
    if 0 in box.sizes:
        return
    if not rank:
        yield box
        return
    cut, inner_bytes = rank - 1, elem_bytes
    while cut > 0 and inner_bytes * box.sizes[cut] <= slab_bytes:
        inner_bytes *= box.sizes[cut]
        cut -= 1
    step = max(1, slab_bytes // inner_bytes)
    for index in itertools.product(*(range(size) for size in box.sizes[:cut])):
        lead = tuple(offset + i for offset, i in zip(box.offsets, index, strict=False))
        for start in range(0, box.sizes[cut], step):
            count = min(step, box.sizes[cut] - start)
            yield Box(
                (*lead, box.offsets[cut] + start, *box.offsets[cut + 1 :]),
                (*(1,) * cut, count, *box.sizes[cut + 1 :]),
            )
