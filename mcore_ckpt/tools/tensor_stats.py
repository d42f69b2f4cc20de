"""A stored tensor slab by slab, so that memory does not depend on its size; and numbers about its values. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.format.index import TensorEntry
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.tools.dtype_cast import as_numbers
from mcore_ckpt.tools.payloads import StoredPayloads, check_elements, read_box
from mcore_ckpt.tools.tilings import slabs

SLAB_BYTES = 16 * 1024 * 1024
_BATCH_ELEMS = 512 * 1024


class SlabReader:
    """Reads slabs (slices that span all trailing axes) of stored tensors into its own memory; one for each thread."""

    def __init__(self, payloads: StoredPayloads) -> None:
        self._payloads = payloads
        self._memory = bytearray()

    def read(self, entry: TensorEntry, slab: Box) -> memoryview:
        """The slab's bytes, valid until the next call; no checksums are compared. Raises as `read_box`."""
        nbytes = math.prod(slab.sizes) * element_bytes(entry.dtype)
        if len(self._memory) < nbytes:
            self._memory = bytearray(nbytes)
        return read_box(self._payloads, entry, slab.offsets, slab.sizes, memoryview(self._memory), checked=False)

    def walk(self, entry: TensorEntry, slab_bytes: int = SLAB_BYTES) -> Iterator[tuple[Box, memoryview]]:
        """All slabs of a tensor, in C order; the checksums of its chunks are compared before the first."""
        check_elements(self._payloads, entry)
        for slab in slabs(Box((0,) * len(entry.shape), entry.shape), element_bytes(entry.dtype), slab_bytes):
            yield slab, self.read(entry, slab)


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
        for batch in batches(numbers):
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


def batches(numbers: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """Pieces of a flat array that fit into a processor's caches in double precision."""
    for start in range(0, numbers.size, _BATCH_ELEMS):
        yield numbers[start : start + _BATCH_ELEMS]
