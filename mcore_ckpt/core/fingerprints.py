"""The fingerprint of a tensor: the CRC-32 of all its bytes in C order, put together from slices in any order.

A CRC-32 is linear. The CRC-32 of a whole is the XOR of those of its runs, each shifted by the bytes behind the run. A
slice of rows is one run; a slice of columns is a run for each row, and rows lie at equal distances, so that 16
neighbours at a time are shifted and joined. A save also needs the CRC-32 of the slice's own bytes. It is joined from
the same sums of rows: each byte is summed once. (`crc32_combine` is Mark Adler's, in zlib; shifts by a table are
Kadatch and Jenkins', "Everything we know about CRC but afraid to forget", 2010.)

The fingerprint of a state has 128 bits: four words, each the XOR over its tensors of their CRC-32 times one word of a
hash of key, dtype and shape, plus another. Without torch.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mcore_ckpt.core.boxes import Box, Runs, Stretch, runs
from mcore_ckpt.core.crc import NO_SHIFT, POLYNOMIAL, crc32, crc32_combine, crc32_of_zeros, shift_factor

_Words = npt.NDArray[np.uint32]
_WORDS: Final = 4
_ONE: Final = np.uint32(NO_SHIFT)
# Short rows so close together are summed with zeros between: a call for each takes as long as 3 KB of zeros.
_PADDED_BYTES: Final = 2048
_PADDED_RUN_BYTES: Final = 1024
_PADDED_ROWS: Final = 64
_WINDOW_BYTES: Final = 1024 * 1024
_FAN_IN: Final = 16  # CRCs joined at a time: the table of a distance fits a core's cache
# From so many bytes on, and in rows as long, their CRC-32 is sooner joined from those of the rows than summed.
_JOINED_BYTES: Final = 1024 * 1024
_JOINED_ROW_BYTES: Final = 4096
# From here on, rows are joined one by one.
_LONG_ROW_BYTES: Final = 256 * 1024
_NOTHING: Final = np.zeros(0, np.uint32)


class TensorFingerprint(NamedTuple):
    """One global tensor: dtype without `torch.`, global shape in elements, CRC-32 of its bytes in C order."""

    dtype: str
    shape: tuple[int, ...]
    crc32: int

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} {self.crc32:08x}"


@dataclass(frozen=True, slots=True)
class StateFingerprint:
    """The fingerprint of a state: the same under every parallel layout.

    Attributes:
        total: 32 hexadecimal digits; the same for the same keys, dtypes, shapes and bytes.
        tensors: the fingerprint of each tensor by key.
    """

    total: str
    tensors: Mapping[str, TensorFingerprint]

    def __str__(self) -> str:
        return self.total

    def differing(self, other: StateFingerprint) -> list[str]:
        """Keys of tensors that only one of the two has, or that differ."""
        keys = dict.fromkeys((*self.tensors, *other.tensors))
        return [key for key in keys if self.tensors.get(key) != other.tensors.get(key)]


def part_of(content: Any, shape: Sequence[int], box: Box, elem_bytes: int) -> int:
    """What a slice adds (by XOR) to the CRC-32 of its tensor.

    Args:
        content: the bytes of the slice's elements, in C order; C-contiguous object with the buffer protocol.
        shape: of the global tensor, in elements.
        box: the slice, in elements.
        elem_bytes: of one element.
    """
    of = runs(shape, box, elem_bytes)
    if not of.run_bytes:
        return 0
    view = memoryview(content).cast("B")
    if len(of) == 1:
        return _shift_one(crc32(view), _bytes_behind(of, shape, elem_bytes))
    rows = np.frombuffer(view, np.uint8).reshape(-1, of.run_bytes)
    counts, strides = of.counts, of.strides
    if _is_padded(of):
        groups = rows.reshape(-1, counts[-1], of.run_bytes)
        values = np.array([_padded_crc(group, strides[-1]) for group in groups], np.uint32)
        counts, strides = counts[:-1], strides[:-1]
    else:
        values = np.fromiter(map(crc32, rows), np.uint32, len(rows))
    values = values.reshape(counts)
    for stride in reversed(strides):
        values = _joined(values, stride)
    return _shift_one(int(values), _bytes_behind(of, shape, elem_bytes))


def part_of_run(crc: int, stretch: Stretch) -> int | None:
    """What a stored chunk adds, from the CRC-32 of its elements; None if they are not one run of the tensor."""
    behind = stretch.bytes_behind()
    return None if behind is None else _shift_one(crc, behind)


def part_of_elements(content: Any, stretch: Stretch, first: int = 0) -> int:
    """What elements of a stored chunk add, from the one numbered `first` on; `content` as of `part_of`."""
    view = memoryview(content).cast("B")
    total = done = 0
    for box in stretch.boxes(first, len(view) // stretch.elem_bytes):
        nbytes = math.prod(box.sizes) * stretch.elem_bytes
        total ^= part_of(view[done : done + nbytes], stretch.shape, box, stretch.elem_bytes)
        done += nbytes
    return total


class StridedSums:
    """What chunks of several runs add to their tensors, summed as they pass; chunks of one form are joined together."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[Stretch, Runs, list[_Words]]] = {}
        self._begun: dict[int, int] = {}  # of a row of which bytes are still to come
        self._parts: dict[int, int] = {}

    def feed(
        self, number: int, stretch: Stretch, content: Any, first_byte: int, value: int = 0, cuts: Sequence[int] = ()
    ) -> list[int]:
        """The next bytes of the chunk of that number, from its `first_byte` on. Returns its CRC-32 up to each of `cuts`
        (ascending, in bytes of `content`) and up to the end of `content`; `value`: up to its begin.
        """
        view = memoryview(content).cast("B")
        bounds = list(itertools.pairwise((0, *cuts, len(view))))
        found = self._rows.get(number)
        if found is None and not first_byte and (of := _rows_to_sum(stretch)) is not None:
            found = self._rows[number] = stretch, of, []
        if found is None:
            part = part_of_elements(view, stretch, first_byte // stretch.elem_bytes)
            self._parts[number] = self._parts.get(number, 0) ^ part
            return _sums(view, bounds, value)
        _, of, crcs = found
        if of.run_bytes >= _LONG_ROW_BYTES:
            return self._feed_long_rows(number, of, crcs, view, bounds, first_byte, value)
        if len(view) < _JOINED_BYTES or of.run_bytes < _JOINED_ROW_BYTES:
            sums = []
            for start, stop in bounds:
                value = crc32(view[start:stop], value)
                sums.append(value)
                self._feed_rows(number, of, crcs, view, first_byte, start, stop)  # that lie in the CPU's cache now
            return sums
        pieces = [self._feed_rows(number, of, crcs, view, first_byte, *bound) for bound in bounds]
        rows = np.zeros((len(pieces), max(len(some) for _, some in pieces)), np.uint32)
        for row, (_, some) in zip(rows, pieces, strict=True):
            row[len(row) - len(some) :] = some  # 0 is the CRC-32 of nothing
        sums = []
        for (start, stop), (head, some), joined in zip(
            bounds, pieces, _joined(rows, of.run_bytes).tolist(), strict=True
        ):
            middle = start + head + len(some) * of.run_bytes
            value = crc32_combine(crc32(view[start : start + head], value), joined, middle - start - head)
            value = crc32(view[middle:stop], value)
            sums.append(value)
        return sums

    def _feed_long_rows(
        self,
        number: int,
        of: Runs,
        crcs: list[_Words],
        view: memoryview,
        bounds: Iterable[tuple[int, int]],
        first_byte: int,
        value: int,
    ) -> list[int]:
        """As `feed`: each stretch up to the end of a row or to a cut is summed once, for the row and for the chunk."""
        sums = []
        for start, stop in bounds:
            while start < stop:
                done = (first_byte + start) % of.run_bytes
                nbytes = min(of.run_bytes - done, stop - start)
                crc = crc32(view[start : start + nbytes])
                value = crc32_combine(value, crc, nbytes)
                self._begun[number] = crc32_combine(self._begun[number], crc, nbytes) if done else crc
                if done + nbytes == of.run_bytes:
                    crcs.append(np.array([self._begun[number]], np.uint32))
                start += nbytes
            sums.append(value)
        return sums

    def _feed_rows(
        self, number: int, of: Runs, crcs: list[_Words], view: memoryview, first_byte: int, start: int, stop: int
    ) -> tuple[int, _Words]:
        """Sum the rows in `view[start:stop]`; returns bytes of a row begun before, and CRC-32s of complete rows."""
        head = min(-(first_byte + start) % of.run_bytes, stop - start)
        if head:
            self._begun[number] = crc32(view[start : start + head], self._begun[number])
            if (first_byte + start + head) % of.run_bytes:
                return head, _NOTHING
            crcs.append(np.array([self._begun[number]], np.uint32))
        start += head
        middle = start + (stop - start) // of.run_bytes * of.run_bytes
        rows = np.frombuffer(view[start:middle], np.uint8).reshape(-1, of.run_bytes)
        crcs.append(np.fromiter(map(crc32, rows), np.uint32, len(rows)))
        if middle < stop:
            self._begun[number] = crc32(view[middle:stop])
        return head, crcs[-1]

    def finish(self) -> dict[int, int]:
        """By number of the chunk, of whose rows complete ones have come."""
        alike: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for number, (_, of, _) in self._rows.items():
            alike.setdefault((of.counts, of.strides), []).append(number)
        for (counts, strides), numbers in alike.items():
            rows = np.zeros((len(numbers), math.prod(counts)), np.uint32)  # 0 is the CRC-32 of nothing
            for crcs, number in zip(rows, numbers, strict=True):
                _, _, values = self._rows[number]
                row = np.concatenate(values) if values else _NOTHING
                crcs[: len(row)] = row
            joined = rows.reshape(-1, *counts)
            for stride in reversed(strides):
                joined = _joined(joined, stride)
            for number, value in zip(numbers, joined.tolist(), strict=True):
                stretch, of, _ = self._rows[number]
                self._parts[number] = _shift_one(value, _bytes_behind(of, stretch.shape, stretch.elem_bytes))
        return self._parts


def _rows_to_sum(stretch: Stretch) -> Runs | None:
    """The rows of a chunk that are best summed each by itself; None: there are none."""
    if stretch.elems != math.prod(stretch.box.sizes):
        return None
    of = runs(stretch.shape, stretch.box, stretch.elem_bytes)
    return of if of.strides and not _is_padded(of) else None


def products(crcs: _Words, factors: _Words) -> _Words:
    """Each CRC-32 times its factor (`core.crc.shift_factor`), which is 1 of most."""
    result = crcs.copy()
    others = np.flatnonzero(factors != _ONE)
    if len(others):
        result[others] = _products(crcs[others], factors[others])
    return result


def state_of(tensors: Mapping[str, TensorFingerprint]) -> StateFingerprint:
    """The fingerprint of a state from those of its tensors by key."""
    words = np.zeros(_WORDS, np.uint32)
    if tensors:
        hashed = [_hash_words(key, tensor.dtype, tensor.shape) for key, tensor in tensors.items()]
        factors, constants = (np.array(column, np.uint32) for column in zip(*hashed, strict=True))
        crcs = np.array([tensor.crc32 for tensor in tensors.values()], np.uint32)
        words = np.bitwise_xor.reduce(_products(factors, crcs[:, None]) ^ constants, axis=0)
    return StateFingerprint("".join(f"{word:08x}" for word in words.tolist()), tensors)


def _hash_words(key: str, dtype: str, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A tensor's factors, none of them 0, and its constants."""
    text = f"{key}\0{dtype}\0{','.join(map(str, shape))}"
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    words = [int.from_bytes(digest[at : at + 4], "big") for at in range(0, len(digest), 4)]
    return tuple(word or 1 for word in words[:_WORDS]), tuple(words[_WORDS:])


def _sums(view: memoryview, bounds: Iterable[tuple[int, int]], value: int) -> list[int]:
    """CRC-32 up to the end of each of adjoining stretches, continued from `value`."""
    sums = []
    for start, stop in bounds:
        value = crc32(view[start:stop], value)
        sums.append(value)
    return sums


def _bytes_behind(of: Runs, shape: Sequence[int], elem_bytes: int) -> int:
    """Bytes of the tensor behind the last run of a slice."""
    last = of.first_byte + sum((count - 1) * stride for count, stride in zip(of.counts, of.strides, strict=True))
    return math.prod(shape) * elem_bytes - last - of.run_bytes


def _is_padded(of: Runs) -> bool:
    return of.run_bytes < _PADDED_RUN_BYTES and of.strides[-1] <= _PADDED_BYTES and of.counts[-1] >= _PADDED_ROWS


def _padded_crc(rows: npt.NDArray[np.uint8], stride_bytes: int) -> int:
    """What rows at equal distances count together: by the CRC-32 of all of them with zeros between."""
    count, run_bytes = rows.shape
    step = min(count, _WINDOW_BYTES // stride_bytes)
    window = np.zeros((step, stride_bytes), np.uint8)
    total = 0
    for at in range(0, count, step):
        some = rows[at : at + step]
        window[: len(some), stride_bytes - run_bytes :] = some
        value = crc32(window[: len(some)]) ^ _of_padding(len(some), run_bytes, stride_bytes)
        total = _shift_one(total, len(some) * stride_bytes) ^ value
    return total


@lru_cache(maxsize=64)
def _of_padding(count: int, run_bytes: int, stride_bytes: int) -> int:
    """By how much the CRC-32 of so many rows with zeros between differs from what the rows count."""
    of_rows = _joined(np.full(count, crc32_of_zeros(run_bytes), np.uint32), stride_bytes)
    return crc32_of_zeros(count * stride_bytes) ^ int(of_rows)


def _shift_one(crc: int, nbytes: int) -> int:
    return crc32_combine(crc, 0, nbytes)


def _products(a: _Words, b: _Words) -> _Words:
    """Products of polynomials modulo the CRC's, element by element."""
    a, b = np.broadcast_arrays(a, b)
    product = np.zeros(a.shape, np.uint32)
    for bit in range(31, -1, -1):
        product ^= np.where(a >> np.uint32(bit) & 1, b, 0).astype(np.uint32)
        b = (b >> np.uint32(1)) ^ np.where(b & 1, np.uint32(POLYNOMIAL), np.uint32(0))
    return product


def _joined(values: _Words, stride_bytes: int) -> _Words:
    """Join along the last axis what lies at equal distances; 0 of nothing."""
    if not values.shape[-1]:
        return np.zeros(values.shape[:-1], np.uint32)
    while (count := values.shape[-1]) > 1:
        if missing := -count % _FAN_IN:  # 0 is the CRC-32 of nothing
            values = np.concatenate([np.zeros((*values.shape[:-1], missing), values.dtype), values], axis=-1)
        groups = np.ascontiguousarray(values, "<u4").view(np.uint8).reshape(*values.shape[:-1], -1, 4 * _FAN_IN)
        table, firsts = _join_table(stride_bytes)
        values = np.bitwise_xor.reduce(table.take(groups + firsts), axis=-1)
        stride_bytes *= _FAN_IN
    return values[..., 0]


@lru_cache(maxsize=512)
def _join_table(stride_bytes: int) -> tuple[_Words, npt.NDArray[np.intp]]:
    """For each byte of neighbours' CRCs, what each of its values counts in front of those behind; where each begins."""
    factors = [shift_factor(stride_bytes * behind) for behind in range(_FAN_IN - 1, -1, -1)]
    bits = np.array([1 << bit for bit in range(32)], np.uint32)
    single = _products(bits, np.array(factors, np.uint32)[:, None]).reshape(-1, 8)
    table = np.zeros((len(single), 256), np.uint32)
    for bit in range(8):
        table[:, 1 << bit : 2 << bit] = table[:, : 1 << bit] ^ single[:, bit : bit + 1]
    return table.reshape(-1), np.arange(0, table.size, 256, dtype=np.intp)
