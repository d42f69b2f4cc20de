"""Moving elements from one division of a tensor into chunks to another, in one pass.

A tensor falls into *blocks*: chunks of either side that have only to do with one another. A block is walked in *slabs*,
which span all trailing axes: a chunk's share of a slab is one contiguous run of its bytes, whichever axis it is divided
along; and the runs of a chunk come in ascending order. Hence each byte is taken once and given once, sources can be
read, and targets written and summed, front to back, in memory that depends on the size of a slab alone.

Knows neither files nor checkpoints. At the top are elements of any stored dtype as
numpy floats, and back; numpy has no bfloat16 and no 8-bit floats. Conversions round to nearest, ties to even, as torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from mcore_ckpt.core.boxes import Box, intersect, relative
from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.format.tensor_pickle import DTYPES

_NUMPY = {name: np.dtype(entry.numpy) for name, entry in DTYPES.items() if entry.numpy}

_ALSO = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
DTYPE_NAMES = {**_ALSO, "fp64": "float64", "float64": "float64", **{name: name for name in _ALSO.values()}}
"""What people call floating-point dtypes -> torch's name."""


def floating_dtype(name: str | None, option: str = "dtype") -> str | None:
    """A floating-point dtype as people name it (`bf16`), in torch's name; None stays None. Raises `OptionError`."""
    if name is not None and name not in DTYPE_NAMES:
        raise OptionError(f"{option} {name}: expected one of {', '.join(sorted(DTYPE_NAMES))}")
    return None if name is None else DTYPE_NAMES[name]


_CARRIERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


def carrier(elem_bytes: int) -> Any:
    """A numpy dtype of that width, to move elements bit by bit whatever they mean."""
    return _CARRIERS[elem_bytes]


@lru_cache(maxsize=8)
def _float8_values(dtype: str) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    """The value of each of the 256 codes of an 8-bit float; None if torch has none of that name."""
    import torch  # (few checkpoints hold them)

    kind = getattr(torch, dtype, None) if dtype.startswith("float8_") else None
    return None if kind is None else torch.arange(256, dtype=torch.uint8).view(kind).float().numpy()


def as_numbers(content: memoryview, dtype: str) -> np.ndarray[Any, Any] | None:
    """Elements as a flat numpy array: bfloat16 and 8-bit floats as float32, others as they are; None if not numbers."""
    direct = _NUMPY.get(dtype)
    if direct is not None:
        return np.frombuffer(content, direct)
    if dtype == "bfloat16":
        return (np.frombuffer(content, np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype == "bcomplex32":
        return (np.frombuffer(content, np.uint16).astype(np.uint32) << 16).view(np.complex64)
    if dtype == "complex32":
        return np.frombuffer(content, np.float16).astype(np.float32).view(np.complex64)
    values = _float8_values(dtype)
    return None if values is None else values[np.frombuffer(content, np.uint8)]


def cast_floats(
    content: memoryview, dtype: str, to: str, overflow: Literal["ignore", "raise"] = "ignore"
) -> memoryview:
    """Convert floating-point elements; `FloatingPointError` with `overflow="raise"` for one that becomes infinite.
    `OptionError`: either is no floating-point dtype that this can convert.
    """
    numbers = as_numbers(content, dtype)
    if numbers is None or numbers.dtype.kind != "f":
        raise OptionError(f"{dtype} cannot be converted to {to}; expected a floating-point dtype")
    if to == "bfloat16":
        with np.errstate(over=overflow):
            singles = numbers.astype(np.float32)
        rounded = _to_bfloat16(singles)
        if overflow == "raise" and not np.isinf(singles[(rounded & 0x7FFF) == 0x7F80]).all():
            raise FloatingPointError("overflow encountered in a conversion to bfloat16")
        return rounded.data.cast("B")
    target = _NUMPY.get(to)
    if target is None or target.kind != "f":
        raise OptionError(f"dtype {to!r}: expected one of {', '.join(sorted(DTYPE_NAMES))}")
    with np.errstate(over=overflow):
        # As torch does, float64 goes to float16 through float32.
        narrow = numbers.astype(np.float32) if to == "float16" else numbers
        return np.ascontiguousarray(narrow.astype(target)).data.cast("B")


def rounded(numbers: np.ndarray[Any, Any], to: str) -> np.ndarray[Any, Any]:
    """Elements in a floating-point dtype, each rounded once, where `cast_floats` goes through float32. bfloat16 comes
    as its bits. `FloatingPointError` for an element that becomes infinite.
    """
    with np.errstate(over="raise"):
        if to != "bfloat16":
            return numbers.astype(_NUMPY[to], copy=False)
        singles = numbers.astype(np.float32, copy=False)
    bits, halves = singles.view(np.uint32), _to_bfloat16(singles)
    if singles is not numbers:  # between two of bfloat16, float32 may say "half-way" where float64 knows better
        wrong = np.flatnonzero(((bits & 0xFFFF) == 0x8000) & (singles != numbers))
        halves[wrong] = (bits[wrong] >> 16) + (np.abs(numbers[wrong]) > np.abs(singles[wrong]))
    infinite = (halves & 0x7FFF) == 0x7F80
    if infinite.any() and not np.isinf(numbers[infinite]).all():
        raise FloatingPointError("overflow encountered in a conversion to bfloat16")
    return halves


class Mismatch(NamedTuple):
    """How many elements do not round to those that are stored; of the first: position, rounded value, stored value."""

    differing: int
    position: int
    rounded: float
    stored: float


def rounding_mismatch(exact: memoryview, dtype: str, stored: memoryview, to: str) -> Mismatch | None:
    """Compare elements, rounded to the dtype `to`, with `stored`; None if they are the same. NaN is NaN."""
    rounded = cast_floats(exact, dtype, to)
    if rounded == stored:
        return None
    expected, found = as_numbers(rounded, to), as_numbers(stored, to)
    assert expected is not None
    assert found is not None
    wrong = ((expected != found) & ~((expected != expected) & (found != found))).nonzero()[0]
    if not len(wrong):
        return None
    first = int(wrong[0])
    return Mismatch(len(wrong), first, float(expected[first]), float(found[first]))


def _to_bfloat16(numbers: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    bits = numbers.view(np.uint32)
    sums = bits >> 16
    sums &= 1
    sums += 0x7FFF
    sums += bits
    sums >>= 16
    rounded, nans = sums.astype(np.uint16), np.isnan(numbers)
    if nans.any():
        rounded[nans] = 0x7FC0
    return rounded


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


def assembled(part: Box, elem_bytes: int, read: Iterable[tuple[Box, memoryview]]) -> memoryview:
    """The elements of a part of a slab, of what was read of the slab."""
    array = np.empty(part.sizes, carrier(elem_bytes))
    for box, content in read:
        cell = intersect(box, part)
        if cell is not None:
            elements = np.frombuffer(content, carrier(elem_bytes)).reshape(box.sizes)
            array[_within(part, cell)] = elements[_within(box, cell)]
    return array.reshape(-1).view(np.uint8).data


def _within(outer: Box, inner: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(*relative(inner, outer.offsets), strict=True))
