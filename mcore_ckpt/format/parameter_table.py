"""The parameters of flat buckets: the slices of parameters in a bucket, and their elements.

Megatron's `dp_reshardable` stores the optimizer's state as flat buckets, which say nothing of parameters. Each group of
data-parallel ranks has one table, in columns: a member of the record of its object `...per_bucket_numel`, which other
readers pass by (`docs/format.md`).

Nothing in a table is trusted. Slices lie inside their parameters, regions inside their buckets, none overlaps another,
and what lies between two of them is padding: less than the table allows, and in front of a multiple of its alignment.
So a region that was moved by one element, or left out, is found without reading an element.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from mcore_ckpt.core.boxes import Box, covers
from mcore_ckpt.core.errors import CorruptCheckpointError, MissingKeyError
from mcore_ckpt.format.index import CheckpointIndex, is_flat_bucket
from mcore_ckpt.format.integrity import Columns, deflated, text_bytes
from mcore_ckpt.format.zip_records import member_of

TABLE_MEMBER: Final = "archive/mcore_ckpt/parameters"
BUCKET: Final = re.compile(
    r"(?P<group>(?P<chained>chained_\d+\.)?optimizer\.distributed\.dp_group_idx_(?P<number>\d+)\.)"
    r"gbuf_idx_(?P<buffer>\d+)\.dtype_(?P<dtype>.+)\.bucket_idx_(?P<bucket>\d+)\.(?P<state>\w+)"
)
"""The key of a flat bucket of one state."""
GROUP_OBJECT: Final = re.compile(
    r"(?P<group>(?P<chained>chained_\d+\.)?optimizer\.distributed\.dp_group_idx_(?P<number>\d+)\.)"
    r"(?P<name>\w+)/shard_0_1"
)
"""The key of an object that a group of ranks has stored with its buckets."""
STATE_KEY: Final = re.compile(r"(?P<prefix>(?:chained_\d+\.)?optimizer\.state\.)(?P<state>[^.]+)\.(?P<key>.+)")
"""The key of a state of one parameter, where the parameters' shapes are stored (`fully_reshardable`)."""
TABLE_HOLDER: Final = "per_bucket_numel"
"""Name of the object whose record has the table."""
SIZES_OF_BUCKETS: Final = (TABLE_HOLDER, f"{TABLE_HOLDER}_unpadded")
"""Names of the objects that say nothing that another layout needs."""

_MAGIC: Final = b"\x89mckFLAT"
_HEAD: Final = struct.Struct("<8sIQ")
_VERSION: Final = 1
_COUNTS: Final = 7
_MOST_REGIONS: Final = 2_000_000
_MOST_BYTES: Final = 256 * 1024 * 1024
_MOST_ELEMENTS: Final = 2**62
_MOST_AXES: Final = 64

_Numbers = np.ndarray[Any, np.dtype[np.int64]]


class Form(NamedTuple):
    """What regions of parameters divided alike have in common; all in elements."""

    shape: tuple[int, ...]  # of the parameter
    sizes: tuple[int, ...]  # of the slice
    strides: tuple[int, ...]  # of the slice's elements in the bucket


class Region(NamedTuple):
    """A slice of a parameter, and where it lies in a flat bucket."""

    bucket: int  # its number in the table
    key: str  # of the parameter
    form: Form
    offsets: tuple[int, ...]  # of the slice, in elements
    first: int  # element of the bucket that is the slice's first
    is_copy: bool  # other ranks hold the main replica of the slice

    @property
    def slice(self) -> Box:
        """The slice of the parameter."""
        return Box(self.offsets, self.form.sizes)


def extent_of(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements lie from the first to the last of a strided slice, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def dense_slices(region: Region) -> Iterator[tuple[Box, int]]:
    """A region as slices of its parameter that lie in C order in the bucket, each with its first element there."""
    sizes, strides, inner = region.form.sizes, region.form.strides, 1
    axis = len(sizes)
    while axis and (sizes[axis - 1] == 1 or strides[axis - 1] == inner):
        axis -= 1
        inner *= sizes[axis]
    for steps in itertools.product(*map(range, sizes[:axis])):
        offsets = (*map(operator.add, region.offsets, steps), *region.offsets[axis:])
        yield Box(offsets, (*(1,) * axis, *sizes[axis:])), region.first + sum(map(operator.mul, steps, strides))


def encode_parameters(buckets: Sequence[tuple[str, int]], regions: Sequence[Region]) -> bytes:
    """The table of buckets (name, elements). `CorruptCheckpointError`: no reader would take it."""
    if len(regions) > _MOST_REGIONS:
        raise CorruptCheckpointError(f"{len(regions)} regions, at most {_MOST_REGIONS} fit into a table")
    forms: dict[Form, int] = {}
    numbers = [forms.setdefault(region.form, len(forms)) for region in regions]
    described = [n for form in forms for n in (len(form.shape), *form.shape, *form.sizes, *form.strides)]
    offsets = [n for region in regions for n in region.offsets]
    firsts, owners = [region.first for region in regions], [region.bucket for region in regions]
    padding = _padding(firsts, owners, [extent_of(*form[1:]) for form in forms], numbers, buckets)
    names = [text_bytes(name) for name in (*(name for name, _ in buckets), *(region.key for region in regions))]
    counts = [len(buckets), len(forms), len(regions), len(described), len(offsets), *padding]
    content = [
        np.array([*counts, *(elems for _, elems in buckets), *described, *offsets, *firsts], "<u8").tobytes(),
        np.array([*owners, *numbers, *(region.is_copy for region in regions), *map(len, names)], "<u4").tobytes(),
        *names,
    ]
    packed, unpacked_bytes = deflated(content)
    encoded = _HEAD.pack(_MAGIC, _VERSION, unpacked_bytes) + packed
    ParameterTable(encoded, "the table that was made")
    return encoded


def _padding(
    firsts: Sequence[int],
    owners: Sequence[int],
    extents: Sequence[int],
    forms: Sequence[int],
    buckets: Sequence[tuple[str, int]],
) -> tuple[int, int]:
    """What the starts of regions behind padding are multiples of, and the longest padding, in elements."""
    alignment, longest = 0, 0
    ends = [0] * len(buckets)
    for owner, first, form in sorted(zip(owners, firsts, forms, strict=True)):
        if first > ends[owner]:
            alignment, longest = math.gcd(alignment, first), max(longest, first - ends[owner])
        ends[owner] = max(ends[owner], first + extents[form])
    left = [elems - end for (_, elems), end in zip(buckets, ends, strict=True)]
    return alignment, max([longest, *left])


class FlatBucket(NamedTuple):
    """A stored bucket: how many elements it has, and the dtype of each state of them."""

    elems: int
    states: dict[str, str]


def flat_buckets(index: CheckpointIndex) -> dict[str, dict[str, FlatBucket]]:
    """The buckets of a checkpoint by key without the state, by prefix of the group of ranks."""
    found: dict[str, dict[str, FlatBucket]] = {}
    for key in filter(is_flat_bucket, index.tensors):
        if (match := BUCKET.fullmatch(key)) is not None:
            entry, name = index.tensors[key], key.removesuffix(f".{match['state']}")
            bucket = found.setdefault(match["group"], {}).setdefault(name, FlatBucket(math.prod(entry.shape), {}))
            if entry.shape != (bucket.elems,):
                raise CorruptCheckpointError(
                    f"{index.path}: {key} has the shape {list(entry.shape)}, another state of that bucket has "
                    f"{bucket.elems} elements"
                )
            bucket.states[match["state"]] = entry.dtype
    return found


def table_holders(index: CheckpointIndex) -> dict[str, str]:
    """Keys of the objects whose records may have a table, by the prefix of the group of ranks."""
    matches = ((key, GROUP_OBJECT.fullmatch(key)) for key in index.objects)
    return {match["group"]: key for key, match in matches if match is not None and match["name"] == TABLE_HOLDER}


def stored_tables(index: CheckpointIndex, record_of: Callable[[str], bytes]) -> Iterator[ParameterTable]:
    """The table of each group of ranks that has stored flat buckets, one after the other; `record_of`: reads the record
    of an object. `CorruptCheckpointError`: one is damaged, or of other buckets. `MissingKeyError`: one is not there.
    """
    holders = table_holders(index)
    for group, buckets in flat_buckets(index).items():
        content = member_of(record_of(holders[group]), TABLE_MEMBER) if group in holders else None
        if content is None:
            raise MissingKeyError(f"{index.path}: the flat buckets of {group} have no table of their parameters")
        yield ParameterTable(content, f"{index.path}: the table of parameters of {group}", group, buckets)


def tensors_of_buckets(
    index: CheckpointIndex, tables: Iterable[ParameterTable]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of each state of each parameter, by the key that it is requested under."""
    return {
        f"optimizer.state.{state}.{region.key}": (dtype, region.form.shape)
        for table in tables
        for region in table.regions()
        for state, dtype in table.states[region.bucket].items()
    }


class ParameterTable:
    """A decoded table, of which all has been checked that can be without the checkpoint."""

    def __init__(
        self, data: bytes, where: str, group: str = "", stored: Mapping[str, FlatBucket] | None = None
    ) -> None:
        head = Columns(data, where)
        magic, version, unpacked_bytes = _HEAD.unpack(head.bytes(_HEAD.size))
        if magic != _MAGIC or version != _VERSION or unpacked_bytes > _MOST_BYTES:
            raise head.wrong(f"expected version {_VERSION} and at most {_MOST_BYTES} bytes, got {data[:20]!r}")
        columns = Columns.inflated(data[_HEAD.size :], unpacked_bytes, where)
        self._wrong = columns.wrong
        buckets, forms, regions, described, offsets, alignment, longest = columns.column("Q", _COUNTS)
        if regions > _MOST_REGIONS or buckets > regions or forms > regions or alignment > _MOST_ELEMENTS:
            raise columns.wrong(f"{regions} regions of {buckets} buckets and {forms} forms, aligned to {alignment}")
        self.sizes = columns.column("Q", buckets).tolist()
        if sum(self.sizes) > _MOST_ELEMENTS:
            raise columns.wrong(f"its buckets have {sum(self.sizes)} elements")
        self._forms = self._decoded_forms(columns.column("Q", described), forms)
        self._offsets = _int64(columns.column("Q", offsets))
        self._firsts = _int64(columns.column("Q", regions))
        self._owners, self._of_forms, self._copies = (_int64(columns.column("I", regions)) for _ in range(3))
        lengths = columns.column("I", buckets + regions)
        names = columns.texts(lengths)
        columns.finish()
        self._names, self.keys = names[:buckets], names[buckets:]  # keys: of the parameter of each region
        self.buckets = [group + name for name in self._names]  # without the state
        if len({*self._names}) < len(self._names):
            raise columns.wrong("a bucket is named twice")
        if stored is not None:
            own, others = dict(zip(self.buckets, self.sizes, strict=True)), {n: one.elems for n, one in stored.items()}
            if other := min((name for name in {*own, *others} if own.get(name) != others.get(name)), default=""):
                raise columns.wrong(f"{own.get(other)} elements of {other}, of which {others.get(other)} are stored")
            self.states = [stored[name].states for name in self.buckets]  # dtypes by state
        if regions and (self._owners.max() >= buckets or self._of_forms.max() >= forms or self._copies.max() > 1):
            raise columns.wrong("a region is of a bucket or a form that it does not have")
        self._check_slices()
        self._check_buckets(alignment, longest)

    def _decoded_forms(self, numbers: Any, count: int) -> list[Form]:
        forms: list[Form] = []
        at = 0
        for _ in range(count):
            axes = numbers[at] if at < len(numbers) else -1
            if not 0 <= axes <= _MOST_AXES or at + 1 + 3 * axes > len(numbers):
                raise self._wrong(f"form {len(forms)} is not complete")
            form = Form(*(tuple(numbers[at + 1 + n * axes : at + 1 + (n + 1) * axes]) for n in range(3)))
            inside = all(0 < size <= whole for size, whole in zip(form.sizes, form.shape, strict=True))
            reach = 1
            for stride, size in sorted(zip(form.strides, form.sizes, strict=True)):
                inside = inside and (size == 1 or stride >= reach)
                reach = reach if size == 1 else stride * size
            if not inside or math.prod(form.shape) > _MOST_ELEMENTS or extent_of(*form[1:]) > _MOST_ELEMENTS:
                raise self._wrong(f"no slice of a parameter is {form}")
            forms.append(form)
            at += 1 + 3 * axes
        if at != len(numbers):
            raise self._wrong("its forms have other lengths than it says")
        return forms

    def _check_slices(self) -> None:
        """Check that each slice lies inside its parameter."""
        axes = np.array([len(form.shape) for form in self._forms], np.int64)
        begins = np.array(list(accumulate(axes.tolist(), initial=0))[:-1], np.int64)
        room = np.array([w - s for form in self._forms for w, s in zip(form.shape, form.sizes, strict=True)], np.int64)
        counts = axes[self._of_forms]
        self._at = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        if self._at[-1] != len(self._offsets):
            raise self._wrong("its slices have another number of offsets than axes")
        position = np.arange(len(self._offsets)) - np.repeat(self._at[:-1], counts)
        beyond = self._offsets > room[np.repeat(begins[self._of_forms], counts) + position]
        if beyond.any():
            number = int(np.searchsorted(self._at, beyond.argmax(), side="right")) - 1
            raise self._wrong(f"a slice leaves its parameter: {self._shown(number)}")

    def _check_buckets(self, alignment: int, longest: int) -> None:
        """Check that regions and padding are all of each bucket, and no element is in two of them."""
        extents = np.array([extent_of(*form[1:]) for form in self._forms], np.int64)[self._of_forms]
        elems = np.array([math.prod(form.sizes) for form in self._forms], np.int64)[self._of_forms]
        sizes = np.array(self.sizes, np.int64)
        begins = np.cumsum(sizes) - sizes
        beyond = self._firsts > sizes[self._owners] - extents
        if beyond.any():
            raise self._wrong(f"a region leaves its bucket: {self._shown(int(beyond.argmax()))}")
        order = np.lexsort((self._firsts, self._owners))
        owners, starts = self._owners[order], (begins[self._owners] + self._firsts)[order]
        ends = np.maximum.accumulate(starts + extents[order]) if len(order) else starts
        is_next = owners[1:] == owners[:-1]
        before = np.concatenate([begins[owners[:1]], np.where(is_next, ends[:-1], begins[owners[1:]])])
        padded = starts - before
        firsts = self._firsts[order]
        unaligned = firsts % alignment != 0 if alignment else firsts != 0
        wrong = (padded > longest) | ((padded > 0) & unaligned)
        if wrong.any():
            number = int(order[wrong.argmax()])
            raise self._wrong(
                f"{int(padded[wrong.argmax()])} elements of no parameter lie before {self._shown(number)}"
            )
        last = np.zeros(len(sizes), np.int64)
        np.maximum.at(last, owners, ends)
        left = np.where(last > 0, begins + sizes - last, sizes)
        if (left > longest).any():
            number = int((left > longest).argmax())
            raise self._wrong(f"{int(left[number])} elements at the end of {self.buckets[number]} are of no parameter")
        # Regions that lie in one another are those of one parameter, divided along an inner axis.
        groups = np.concatenate([np.flatnonzero(padded >= 0), [len(order)]])
        held = np.add.reduceat(elems[order], groups[:-1]) if len(order) else elems
        spans = ends[groups[1:] - 1] - starts[groups[:-1]] if len(order) else elems
        for number in np.flatnonzero(held != spans).tolist()[:1]:
            raise self._wrong(
                f"{int(held[number])} elements lie in {int(spans[number])} of {self._shown(int(order[groups[number]]))}"
            )
        for number in np.flatnonzero(np.diff(groups) > 1).tolist():
            self._check_interleaved(order[groups[number] : groups[number + 1]].tolist())

    def _check_interleaved(self, numbers: Sequence[int]) -> None:
        regions = list(self._made_of(numbers))
        begin = min(region.first for region in regions)
        end = max(region.first + extent_of(*region.form[1:]) for region in regions)
        sizes = [
            {stride: size for size, stride in zip(*region.form[1:], strict=True) if size > 1} for region in regions
        ]
        strides = sorted({1, *(stride for of_region in sizes for stride in of_region)}, reverse=True)
        boxes, is_grid = [], not any(a % b for a, b in pairwise(strides))
        for region, of_region in zip(regions, sizes, strict=True):
            rest, offsets = region.first - begin, []
            for stride in strides:
                offsets.append(rest // stride)
                rest %= stride
            boxes.append(Box(tuple(offsets), tuple(of_region.get(stride, 1) for stride in strides)))
        shape = [-(-(end - begin) // strides[0]), *(a // b for a, b in pairwise(strides))]
        if not is_grid or covers(shape, boxes) is not None:
            raise self._wrong(f"regions overlap: {self._shown(numbers[0])} and {self._shown(numbers[1])}")

    def _region(self, number: int) -> Region:
        return next(self._made_of([number]))

    def _made_of(self, numbers: Sequence[int]) -> Iterator[Region]:
        rows = np.array(numbers, np.int64)
        columns = (self._owners, self._of_forms, self._at[:-1], self._at[1:], self._firsts, self._copies)
        offsets = self._offsets.tolist() if len(numbers) > 1 else self._offsets
        for number, owner, form, at, end, first, copied in zip(
            numbers, *(column[rows].tolist() for column in columns), strict=True
        ):
            box = tuple(map(int, offsets[at:end]))
            yield Region(owner, self.keys[number], self._forms[form], box, first, bool(copied))

    def _shown(self, number: int) -> str:
        region = self._region(number)
        return (
            f"{region.key} at {list(region.offsets)} of sizes {list(region.form.sizes)}, from element {region.first} "
            f"of {self.buckets[region.bucket]}"
        )

    def regions(self, keys: Mapping[str, Any] | None = None) -> Iterator[Region]:
        """All regions, or those of some parameters."""
        return self._made_of([n for n, key in enumerate(self.keys) if keys is None or key in keys])

    def is_as(self, other: ParameterTable) -> bool:
        """Whether both say the same, though maybe of buckets of other groups of ranks."""
        plain, columns = (
            ("_names", "sizes", "keys", "_forms"),
            ("_offsets", "_firsts", "_owners", "_of_forms", "_copies"),
        )
        is_alike = all(getattr(self, name) == getattr(other, name) for name in plain)
        return is_alike and all(np.array_equal(getattr(self, name), getattr(other, name)) for name in columns)


def _int64(column: Any) -> _Numbers:
    numbers = np.frombuffer(column, np.uint64 if column.itemsize == 8 else np.uint32).astype(np.uint64)
    return np.minimum(numbers, np.uint64(2 * _MOST_ELEMENTS - 1)).astype(np.int64)
