"""The optimizer's state of single parameters, read from flat buckets by the tables that were saved with them.

    tables of all groups  ->  where each slice of a parameter lies  ->  covering reads  ->  strided copies

`dp_reshardable` stores buckets; under a division of the model other than that of the save, ranks ask for slices of
`optimizer.state.<state>.<parameter>`. A slice is intersected with the stored ones. Its intersection with one of them is
a strided slice of a bucket, read in runs of at most 16 MiB, gaps included where its own runs are short; dense ones go
to their destination, others through at most 64 MiB of staging buffers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch

from mcore_ckpt.core.boxes import Box, covers, intersect, relative, strides_of
from mcore_ckpt.core.errors import CorruptCheckpointError, MissingKeyError, ShapeMismatchError
from mcore_ckpt.format.index import CheckpointIndex, ChunkLookup
from mcore_ckpt.format.parameter_table import STATE_KEY, extent_of, stored_tables
from mcore_ckpt.load.ranges import batches
from mcore_ckpt.load.reader import CheckpointReader
from mcore_ckpt.load.requests import ReadRequest, narrow
from mcore_ckpt.state.shards import local_box

_READ_BYTES: Final = 16 * 1024 * 1024
_STAGED_BYTES: Final = 64 * 1024 * 1024
# Runs that are shorter are read with what lies between them.
_RUN_ELEMS: Final = 16 * 1024
_MAIN_PARAMETER: Final = "param"
_FROZEN_OR_NEW: Final = "it was frozen in the job that saved them, or is new in this one"


class _Part(NamedTuple):
    """A stored slice of a parameter."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    bucket: str  # key without the state
    first: int  # element of the bucket
    strides: tuple[int, ...]  # in it

    @property
    def slice(self) -> Box:
        """The slice of the parameter."""
        return Box(self.offsets, self.sizes)


@dataclass(slots=True)
class _Parameter:
    shape: tuple[int, ...]
    parts: list[_Part] = field(default_factory=list)
    lookup: ChunkLookup[_Part] | None = None

    def overlapping(self, box: Box) -> Sequence[_Part]:
        """Parts that may overlap a slice."""
        self.lookup = self.lookup or ChunkLookup(self.parts)
        return self.lookup.near(box)


class _Read(NamedTuple):
    """A run of a bucket, and what of it goes where."""

    key: str
    first: int
    elems: int
    strides: tuple[int, ...]
    target: torch.Tensor

    @property
    def is_dense(self) -> bool:
        """Whether the run is what goes there, in its order."""
        sizes = tuple(self.target.shape)
        in_order = zip(sizes, self.strides, strides_of(sizes), strict=True)
        is_run = all(size == 1 or stride == dense for size, stride, dense in in_order)
        return is_run and self.target.is_contiguous()

    @property
    def staged_bytes(self) -> int:
        """Bytes of the staging buffer that it needs."""
        return 0 if self.is_dense else self.elems * self.target.element_size()


def advice_on_states(missing: Collection[str], index: CheckpointIndex) -> str:
    """Why a checkpoint has weights in flat buckets, but none of these states next to them; or nothing."""
    weights = {f"{key.rpartition('.')[0]}.{_MAIN_PARAMETER}" for key in missing}
    if not index.tensors.keys().isdisjoint(missing) or not weights <= index.tensors.keys():
        return ""
    return (
        ". The job that saved it had taken no step of its optimizer, which had no such state (with fp16, the loss "
        "scaler skips the first steps): load another iteration, or add --no-load-optim"
    )


class BucketReads:
    """Parameters of a checkpoint whose optimizer state is flat buckets, for loads under any division of the model.

    Args:
        reader: of the checkpoint.
        keys: of the parameters that are requested; no others are kept.

    Raises:
        CorruptCheckpointError: a table is damaged, or two of them contradict each other.
        MissingKeyError: there is no table of a bucket.
    """

    def __init__(self, reader: CheckpointReader, keys: Collection[str]) -> None:
        self._index = reader.index
        self._parameters: dict[str, _Parameter] = {}
        requested = dict.fromkeys(keys)
        for table in stored_tables(reader.index, reader.object_bytes):
            for region in table.regions(requested):
                known = self._parameters.setdefault(region.key, _Parameter(region.form.shape))
                if known.shape != region.form.shape:
                    raise CorruptCheckpointError(
                        f"{reader.path}: {region.key} has the shape {list(known.shape)} in one table of parameters, "
                        f"{list(region.form.shape)} in that of {table.buckets[region.bucket]}"
                    )
                if not region.is_copy:
                    (_, sizes, strides), bucket = region.form, table.buckets[region.bucket]
                    known.parts.append(_Part(region.offsets, sizes, bucket, region.first, strides))

    def __contains__(self, key: str) -> bool:
        """Whether that is the key of a state of a parameter that the buckets have, and no tensor is stored under it."""
        return key not in self._index.tensors and self._found(key) is not None

    def _found(self, key: str) -> tuple[str, _Parameter] | None:
        match = STATE_KEY.fullmatch(key)
        parameter = None if match is None else self._parameters.get(match["key"])
        return None if match is None or parameter is None else (match["state"], parameter)

    def check(self, shards: Iterable[Any]) -> None:
        """Raise unless all that these `ShardedTensor`s ask for is in the buckets, once: `MissingKeyError`: a parameter,
        layers of it or a state are not. `ShapeMismatchError`: a parameter of another shape is.
        `CorruptCheckpointError`: stored slices overlap.
        """
        for shard in shards:
            found = self._found(shard.key)
            if found is not None:
                self._shares(shard, *found)
            elif shard.key not in self._index.tensors:
                raise MissingKeyError(
                    f"{shard.key}: the optimizer's flat buckets of {self._index.path} have no such parameter; "
                    f"{_FROZEN_OR_NEW}"
                )

    def _shares(self, shard: Any, state: str, parameter: _Parameter) -> list[tuple[_Part, Box]]:
        """Stored slices that make up a requested one, each with what they have in common."""
        shape = tuple(shard.global_shape)
        if shape != parameter.shape and not (shard.allow_shape_mismatch and len(shape) == len(parameter.shape)):
            raise ShapeMismatchError(
                f"{shard.key}: the checkpoint {self._index.path} has the parameter in the shape "
                f"{list(parameter.shape)}, expected {list(shape)}"
            )
        requested = Box(tuple(shard.global_offset), local_box(shard))
        near = [(part, intersect(part.slice, requested)) for part in parameter.overlapping(requested)]
        shares = [(part, share) for part, share in near if share is not None]
        buckets = sorted({part.bucket for part, _ in shares})
        for bucket in buckets:
            if f"{bucket}.{state}" not in self._index.tensors:
                why = advice_on_states([f"{bucket}.{state}"], self._index)
                raise MissingKeyError(f"{shard.key}: {bucket} of {self._index.path} has no {state!r}{why}")
        # Layers share a key. A gap of frozen layers matters to ranks that ask for these alone.
        within = intersect(requested, Box((0,) * len(parameter.shape), parameter.shape))
        found = [] if within is None else [relative(share, within.offsets) for _, share in shares]
        if within is None or not (problem := covers(within.sizes, found)):
            return shares
        if sum(math.prod(box.sizes) for box in found) < math.prod(within.sizes):
            raise MissingKeyError(
                f"{shard.key}: the optimizer's flat buckets of {self._index.path} do not have all of its elements at "
                f"{list(within.offsets)} of sizes {list(within.sizes)}; {_FROZEN_OR_NEW}"
            )
        raise CorruptCheckpointError(
            f"{self._index.path}: the tables of parameters of {', '.join(buckets[:3])} do not make up {shard.key}: "
            f"{problem}. One is of another save, or damaged; load another copy or an earlier checkpoint"
        )

    def _of_shard(self, shard: Any, state: str, parameter: _Parameter) -> Iterator[_Read]:
        requested = Box(tuple(shard.global_offset), local_box(shard))
        shares = self._shares(shard, state, parameter)
        if shard.data is None:
            shard.init_data("cpu")
        data = shard.data.detach().view(requested.sizes)
        if tuple(shard.global_shape) != parameter.shape:
            data.zero_()
        for part, share in shares:
            inside = relative(share, part.offsets).offsets
            first = part.first + sum(map(operator.mul, inside, part.strides))
            yield from _covering(
                f"{part.bucket}.{state}", first, part.strides, narrow(data, relative(share, requested.offsets))
            )

    def read(self, reader: CheckpointReader, shards: Iterable[Any]) -> None:
        """Fill the data of `ShardedTensor`s, in the order of the buckets. Raises as `check` and `read_items`."""
        found: list[_Read] = []
        for shard in shards:
            if (asked := self._found(shard.key)) is not None:
                found += self._of_shard(shard, *asked)
        found.sort(key=operator.attrgetter("key", "first"))
        with torch.no_grad():
            for batch in batches(found, operator.attrgetter("staged_bytes"), _STAGED_BYTES):
                requests = []
                for read in batch:
                    shape = self._index.tensors[read.key].shape
                    to = read.target.view(-1) if read.is_dense else torch.empty(read.elems, dtype=read.target.dtype)
                    requests.append(ReadRequest(read.key, to, (read.first,), (read.elems,), shape))
                reader.read_items(requests)
                for read, request in zip(batch, requests, strict=True):
                    if not read.is_dense:
                        read.target.copy_(torch.as_strided(request.tensor, read.target.shape, read.strides))


def _covering(key: str, first: int, strides: tuple[int, ...], target: torch.Tensor) -> Iterator[_Read]:
    """Reads of at most 16 MiB that cover a strided slice of a bucket; what has long runs is read run by run."""
    sizes = tuple(target.shape)
    count = extent_of(sizes, strides)
    longest = 1
    for size, stride in sorted(zip(sizes, strides, strict=True), key=operator.itemgetter(1)):
        if size > 1 and stride == longest:
            longest *= size
    is_dense = count <= 4 * math.prod(sizes) or longest < _RUN_ELEMS
    if (count * target.element_size() <= _READ_BYTES and is_dense) or math.prod(sizes) == 1:
        yield _Read(key, first, count, strides, target)
        return
    axis = max((a for a, size in enumerate(sizes) if size > 1), key=lambda a: (strides[a], sizes[a]))
    half = sizes[axis] // 2
    yield from _covering(key, first, strides, target.narrow(axis, 0, half))
    rest = target.narrow(axis, half, sizes[axis] - half)
    yield from _covering(key, first + half * strides[axis], strides, rest)
