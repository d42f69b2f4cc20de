"""Numbers about a tensor, or about two: walked slab by slab, so that memory does not depend on their size. No torch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from mcore_ckpt.core.boxes import Box, covers, intersect
from mcore_ckpt.core.errors import CorruptCheckpointError
from mcore_ckpt.format.index import StoredChunk, TensorEntry
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.tools.dtype_cast import as_numbers
from mcore_ckpt.tools.payloads import PayloadSource, StoredPayloads, check_elements
from mcore_ckpt.tools.regrid import Walk
from mcore_ckpt.tools.tilings import slabs

__all__ = ["Difference", "Differences", "SlabReader", "Stats", "tensor_stats"]

SLAB_BYTES = 16 * 1024 * 1024
_BATCH_ELEMS = 512 * 1024


class _MemorySink:
    """A sink into memory that is there."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def space(self, nbytes: int) -> memoryview:
        """What is left, as far as it is wanted."""
        return self._view[:nbytes]

    def filled(self, view: memoryview) -> None:
        """Go on behind it."""
        self._view = self._view[len(view) :]


class SlabReader:
    """Reads slabs (boxes that span all trailing axes) of stored tensors; one for each thread.

    Args:
        payloads: the checkpoint.
    """

    def __init__(self, payloads: StoredPayloads) -> None:
        self._payloads = payloads
        self._walk = Walk(slab_bytes=2 * SLAB_BYTES)
        self._memory = bytearray()

    def read(self, entry: TensorEntry, slab: Box) -> memoryview:
        """The slab's bytes, valid until the next call.

        Raises:
            CorruptCheckpointError: the stored chunks do not hold every element exactly once, or are damaged.
        """
        elem_bytes = element_bytes(entry.dtype)
        nbytes = math.prod(slab.sizes) * elem_bytes
        if len(self._memory) < nbytes:
            self._memory = bytearray(nbytes)
        view = memoryview(self._memory)[:nbytes]
        if not nbytes:
            return view
        chunks: list[tuple[StoredChunk, Box]] = []
        for chunk in entry.chunks:
            part = intersect(Box(chunk.offsets, chunk.sizes), slab)
            if part is not None:
                chunks.append((chunk, part))
        inside = [_relative(part, slab.offsets) for _, part in chunks]
        problem = covers(slab.sizes, inside)
        if problem:
            path = self._payloads.index.path
            raise CorruptCheckpointError(
                f"{entry.fqn}: the stored chunks of {path} do not hold the box at {list(slab.offsets)} of sizes "
                f"{list(slab.sizes)} exactly once: relative to it, {problem}. Run `mcore-ckpt verify {path}`"
            )
        self._walk.elem_bytes = elem_bytes
        sources = [PayloadSource(self._payloads, self._payloads.locate(entry, chunk)) for chunk, _ in chunks]
        boxes = [Box(chunk.offsets, chunk.sizes) for chunk, _ in chunks]
        self._walk.move(boxes, sources, [slab], [_MemorySink(view)], summed=False)
        return view

    def walk(self, entry: TensorEntry, slab_bytes: int = SLAB_BYTES) -> Iterator[tuple[Box, memoryview]]:
        """All slabs of a tensor, in C order; the checksums of its chunks are compared before the first.

        Raises:
            ChecksumError: a chunk is damaged.
        """
        check_elements(self._payloads, entry)
        for slab in slabs(Box((0,) * len(entry.shape), entry.shape), element_bytes(entry.dtype), slab_bytes):
            yield slab, self.read(entry, slab)


def _relative(box: Box, origin: tuple[int, ...]) -> Box:
    return Box(tuple(offset - base for offset, base in zip(box.offsets, origin, strict=True)), box.sizes)


@dataclass(frozen=True, slots=True)
class Stats:
    """Over the finite elements, in double precision; None where there are none, or for dtypes that are no numbers."""

    elements: int
    minimum: float | None
    maximum: float | None
    mean: float | None
    std: float | None
    norm: float | None
    zeros: int
    nans: int
    infinities: int


def tensor_stats(payloads: StoredPayloads, entry: TensorEntry) -> Stats:
    """Read a whole tensor and describe its values."""
    count = zeros = nans = infinities = finite_count = 0
    low, high = math.inf, -math.inf
    total = squares = 0.0
    for _, content in SlabReader(payloads).walk(entry):
        numbers = as_numbers(content, entry.dtype)
        if numbers is None:
            return Stats(math.prod(entry.shape), None, None, None, None, None, 0, 0, 0)
        for batch in _batches(numbers):
            values = np.abs(batch) if batch.dtype.kind == "c" else batch
            values = values.astype(np.float64)
            count += values.size
            zeros += int(np.count_nonzero(values == 0))
            nans += int(np.count_nonzero(np.isnan(values)))
            infinities += int(np.count_nonzero(np.isinf(values)))
            finite = values[np.isfinite(values)]
            if finite.size:
                finite_count += finite.size
                low, high = min(low, float(finite.min())), max(high, float(finite.max()))
                total += float(finite.sum())
                squares += float(np.dot(finite, finite))
    if not finite_count:
        return Stats(count, None, None, None, None, None, zeros, nans, infinities)
    mean = total / finite_count
    variance = max(0.0, squares / finite_count - mean * mean)
    return Stats(count, low, high, mean, math.sqrt(variance), math.sqrt(squares), zeros, nans, infinities)


def _batches(numbers: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    for start in range(0, numbers.size, _BATCH_ELEMS):
        yield numbers[start : start + _BATCH_ELEMS]


@dataclass(frozen=True, slots=True)
class Difference:
    """How two tensors of one shape differ.

    Attributes:
        elements: how many they have.
        differing: how many are not the same value (two NaNs are; so are 0.0 and -0.0).
        max_abs: largest absolute difference of finite elements.
        max_rel: largest difference relative to the larger of the two.
        nan_mismatches: elements of which one is a NaN or infinite, and the other is something else.
        nans_a, nans_b: NaNs on either side.
        identical: every bit is the same.
        measured: `max_abs` and `max_rel` say by how much elements differ; False for dtypes that are no numbers.
    """

    elements: int
    differing: int
    max_abs: float
    max_rel: float
    nan_mismatches: int
    nans_a: int
    nans_b: int
    identical: bool
    measured: bool = True


class Differences:
    """Adds up `Difference` over slabs."""

    def __init__(self, dtype_a: str, dtype_b: str) -> None:
        self._dtypes = dtype_a, dtype_b
        self._elements = self._differing = self._mismatches = self._nans_a = self._nans_b = 0
        self._max_abs = self._max_rel = 0.0
        self._identical = dtype_a == dtype_b
        self._measured = True

    def add(self, a: memoryview, b: memoryview) -> None:
        """Compare the same box of both."""
        elem_bytes = element_bytes(self._dtypes[0])
        if self._dtypes[0] == self._dtypes[1] and same_bytes(a, b):
            self._elements += len(a) // elem_bytes
            self._count_same_nans(a)
            return
        self._identical = False
        left, right = as_numbers(a, self._dtypes[0]), as_numbers(b, self._dtypes[1])
        if left is None or right is None:  # no numbers: only their bits can be compared
            self._elements += len(a) // elem_bytes
            self._differing += _differing_elements(a, b, elem_bytes, element_bytes(self._dtypes[1]))
            self._measured = False
            return
        self._elements += left.size
        for x, y in zip(_batches(left), _batches(right), strict=True):
            self._compare(x, y)

    def _count_same_nans(self, content: memoryview) -> None:
        # Equal bits need no comparison; NaNs in them are found only where a float could be one.
        numbers = as_numbers(content, self._dtypes[0])
        if numbers is None or numbers.dtype.kind not in "fc":
            return
        # A NaN makes the sum a NaN (so may infinities): one pass that rarely needs another.
        with np.errstate(all="ignore"):
            if math.isnan(abs(numbers.sum(dtype=np.float64 if numbers.dtype.kind == "f" else None))):
                count = int(np.count_nonzero(np.isnan(numbers)))
                self._nans_a += count
                self._nans_b += count

    def _compare(self, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> None:
        wide = np.complex128 if "c" in (x.dtype.kind, y.dtype.kind) else np.float64
        a, b = x.astype(wide), y.astype(wide)
        exact_ints = x.dtype.kind in "iu" and x.dtype == y.dtype
        if exact_ints:
            same = x == y  # 64-bit integers are not exact in double precision
        else:
            same = a == b
        nan_a, nan_b = np.isnan(a), np.isnan(b)
        same |= nan_a & nan_b
        self._nans_a += int(np.count_nonzero(nan_a))
        self._nans_b += int(np.count_nonzero(nan_b))
        unequal = ~same
        self._differing += int(np.count_nonzero(unequal))
        finite = np.isfinite(a) & np.isfinite(b)
        self._mismatches += int(np.count_nonzero(unequal & ~finite))
        chosen = unequal & finite
        if chosen.any():
            if exact_ints:
                high, low = np.maximum(x, y)[chosen], np.minimum(x, y)[chosen]
                # Modulo 2**64 the difference is right whatever the sign, and never too large.
                distance = (high.astype(np.uint64) - low.astype(np.uint64)).astype(np.float64)
            else:
                with np.errstate(over="ignore"):
                    distance = np.abs(a[chosen] - b[chosen])
            scale = np.maximum(np.abs(a[chosen]), np.abs(b[chosen]))
            self._max_abs = max(self._max_abs, float(distance.max()))
            with np.errstate(all="ignore"):
                self._max_rel = max(self._max_rel, float(np.max(distance / np.where(scale == 0, 1, scale))))

    def result(self) -> Difference:
        """The sum."""
        return Difference(
            self._elements,
            self._differing,
            self._max_abs,
            self._max_rel,
            self._mismatches,
            self._nans_a,
            self._nans_b,
            self._identical,
            self._measured,
        )


def _differing_elements(a: memoryview, b: memoryview, a_bytes: int, b_bytes: int) -> int:
    """How many elements have other bits; all of them, if they have other widths."""
    if a_bytes != b_bytes:
        return len(a) // a_bytes
    unequal = np.frombuffer(a, np.uint8) != np.frombuffer(b, np.uint8)
    return int(np.count_nonzero(unequal.reshape(-1, a_bytes).any(axis=1)))


@lru_cache(maxsize=1)
def _memcmp() -> Any:
    function = ctypes.CDLL(None).memcmp
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    function.restype = ctypes.c_int
    return function


def same_bytes(a: memoryview, b: memoryview) -> bool:
    """Whether two writable views hold the same bytes; at memory speed and without the GIL, unlike `==`."""
    if len(a) != len(b):
        return False
    if not len(a):
        return True
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in (a, b)]
    return bool(_memcmp()(*addresses, len(a)) == 0)
