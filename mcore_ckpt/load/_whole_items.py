"""Small items that go as they are, all of each, to where they belong: columns of places and addresses, made once.

A load under the layout of the save wants whole chunks, by the ten thousand. For each of those, all that can be known is
known before its bytes are read: where it lies, how long it is, which bytes stand before and behind its payload (those
that this package writes for such a tensor), what its CRC-32 is, and where in memory it goes. So the items of a span
are checked together, by comparing all that stands around their payloads with what should, and all sums with those of
`.metadata`; and only when something differs is any item looked at by itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from operator import itemgetter
from typing import Final, NamedTuple

import numpy as np
import torch

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.format.crc import crc32s
from mcore_ckpt.format.index import CheckpointIndex, StoredChunk
from mcore_ckpt.format.item_layout import tensor_template
from mcore_ckpt.load._placement import Want, address_of
from mcore_ckpt.load.ranges import CHEAP_GAP_BYTES, Extent, coalesce
from mcore_ckpt.load.read_requests import WantedItem, only_chunk, stored_dtype

__all__ = ["MAX_WHOLE_BYTES", "WholeItem", "WholeItems", "WholeSpan", "cut", "place", "spans_of"]

# Up to here, an item is read whole with its neighbours, and copied out of the buffer: a copy at memory speed costs less
# than reads of its own for header and payload.
MAX_WHOLE_BYTES: Final = 1024 * 1024

# Up to here a look at every chunk of a tensor is cheaper than an index of them.
_FEW_CHUNKS = 8

# Without letting go of the GIL, which another thread would take for a while: the copies are short.
_memmove = ctypes.PyDLL(None).memmove
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove.restype = None


class _Kind(NamedTuple):
    """What all items have in common that this package writes for a dtype and shape.

    Attributes:
        dtype: of the destination.
        item_bytes: length of an item.
        head_bytes: what stands before the payload.
        payload_bytes: length of the payload.
        first, middle, last: what stands around the payload, cut where its CRC-32 is.
    """

    dtype: torch.dtype
    item_bytes: int
    head_bytes: int
    payload_bytes: int
    first: bytes
    middle: bytes
    last: bytes


class WholeItem(NamedTuple):
    """An item, all of which is wanted.

    Attributes:
        file, offset: where it lies.
        address: where its payload belongs.
        crc32: of its payload.
        kind: what it looks like.
        fqn, chunk, tensor: what it is, and the destination, which is kept alive by this.
    """

    file: str
    offset: int
    address: int
    crc32: int
    kind: _Kind
    fqn: str
    chunk: StoredChunk
    tensor: torch.Tensor

    def wanted(self) -> WantedItem:
        """The same, to be looked at by itself."""
        sizes = self.chunk.sizes
        want = Want(Box((0,) * len(sizes), sizes), True, self.tensor, self.address)
        return WantedItem(self.fqn, self.kind.dtype, self.chunk, self.kind.payload_bytes, [want])


class WholeItems:
    """Collects items of which all is wanted.

    Args:
        index: of the checkpoint.
        max_bytes: items that are longer are left to others.
    """

    def __init__(self, index: CheckpointIndex, max_bytes: int) -> None:
        self.rows: list[WholeItem] = []
        self._index = index
        self._entry = index.tensors.get
        self._max_bytes = min(max_bytes, MAX_WHOLE_BYTES)
        self._kinds: dict[tuple[str, tuple[int, ...]], _Kind | None] = {}

    def take(
        self,
        fqn: str,
        tensor: torch.Tensor,
        offsets: tuple[int, ...],
        sizes: tuple[int, ...],
        shape: tuple[int, ...],
    ) -> bool:
        """Add what a destination wants, if that is a small item that can be copied to it as it is.

        Args:
            fqn: key of the global tensor.
            tensor: the destination.
            offsets, sizes: box that it wants of the global tensor, in elements.
            shape: that the global tensor must have.

        Returns:
            Whether it has been added. Otherwise it may be wrong, or merely unusual: nothing has been decided.
        """
        entry = self._entry(fqn)
        if entry is None or entry.shape != shape:
            return False
        chunks = entry.chunks
        if len(chunks) == 1:
            chunk: StoredChunk | None = chunks[0]
        else:
            chunk = only_chunk(chunks, offsets, sizes) if len(chunks) <= _FEW_CHUNKS else None
        if chunk is None or chunk.sizes != sizes or chunk.offsets != offsets or tensor.shape != sizes:
            return False
        file, offset, length, transforms, crc = chunk.item
        if crc is None or transforms or length > self._max_bytes:
            return False
        key = entry.dtype, sizes
        kind = self._kinds[key] if key in self._kinds else self._kinds.setdefault(key, _kind(*key, stored_dtype(entry)))
        if kind is None or kind.item_bytes != length:
            return False
        address = address_of(tensor, kind.dtype)
        if not address:
            return False
        self.rows.append(_new_row((file, offset, address, crc, kind, fqn, chunk, tensor)))
        return True


def _new_row(fields: tuple[str, int, int, int, _Kind, str, StoredChunk, torch.Tensor]) -> WholeItem:
    return tuple.__new__(WholeItem, fields)


def _kind(dtype: str, sizes: tuple[int, ...], own: torch.dtype) -> _Kind | None:
    try:
        template = tensor_template(dtype, sizes)
    except ValueError:
        return None
    if not template.payload_bytes:
        return None
    head, tail = template.head, template.tail
    first, second = template.crc_positions
    return _Kind(
        own,
        template.item_bytes,
        len(head),
        template.payload_bytes,
        head + tail[:first],
        tail[first + 4 : second],
        tail[second + 4 :],
    )


class WholeSpan(NamedTuple):
    """One read: bytes `[start, stop)` of a file, and the items that lie in it, in order."""

    file: str
    start: int
    stop: int
    rows: Sequence[WholeItem]


def spans_of(
    rows: Sequence[WholeItem], *, window_bytes: int, max_gap_bytes: int
) -> tuple[list[WholeSpan], list[WholeItem]]:
    """Join items that lie close together into spans, as `coalesce` does.

    Returns:
        The spans, in order of file and start; and items that share their bytes with others.
    """
    spans: list[WholeSpan] = []
    shared: list[WholeItem] = []
    for file, group in groupby(sorted(rows, key=itemgetter(0, 1)), itemgetter(0)):
        own = list(group)
        starts = np.array([row.offset for row in own])
        stops = starts + np.array([row.kind.item_bytes for row in own])
        gaps = starts[1:] - stops[:-1]
        if (gaps < 0).any():
            shared += own
        elif ((gaps > CHEAP_GAP_BYTES) & (gaps <= max_gap_bytes)).any():
            extents = [
                Extent(file, row.offset, row.offset + row.kind.item_bytes, row.kind.item_bytes, row) for row in own
            ]
            spans += [
                WholeSpan(file, span.start, span.stop, [extent.owner for extent in span.extents])
                for span in coalesce(extents, window_bytes=window_bytes, max_gap_bytes=max_gap_bytes)
            ]
        else:
            ends = np.append(np.flatnonzero(gaps > min(CHEAP_GAP_BYTES, max_gap_bytes)) + 1, len(own))
            spans += _cut(file, own, starts, stops, ends, window_bytes)
    return spans, shared


def cut(span: WholeSpan, window_bytes: int) -> list[WholeSpan]:
    """The same in shorter spans."""
    starts = np.array([row.offset for row in span.rows])
    stops = starts + np.array([row.kind.item_bytes for row in span.rows])
    return list(_cut(span.file, span.rows, starts, stops, np.array([len(span.rows)]), window_bytes))


def _cut(
    file: str,
    rows: Sequence[WholeItem],
    starts: np.ndarray[tuple[int], np.dtype[np.int64]],
    stops: np.ndarray[tuple[int], np.dtype[np.int64]],
    ends: np.ndarray[tuple[int], np.dtype[np.int64]],
    window_bytes: int,
) -> Iterator[WholeSpan]:
    """Spans of at most `window_bytes`, or of one item, that end at `ends` at the latest."""
    at = 0
    while at < len(rows):
        fitting = int(np.searchsorted(stops, starts[at] + window_bytes, "right"))
        end = min(max(fitting, at + 1), int(ends[np.searchsorted(ends, at, "right")]))
        yield WholeSpan(file, int(starts[at]), int(stops[end - 1]), rows[at:end])
        at = end


def place(rows: Sequence[WholeItem], view: memoryview, address: int, shift: int, verify_crc: bool) -> bool:
    """Check items in memory, and copy their payloads to where they belong.

    Args:
        rows: the items.
        view, address: the memory.
        shift: where in it the beginning of their file would lie.
        verify_crc: compare the CRC-32 of the payloads.

    Returns:
        False if any of them is not just what is expected; then nothing has been copied.
    """
    heads = [row.offset + shift for row in rows]
    payloads = [head + row.kind.head_bytes for head, row in zip(heads, rows, strict=True)]
    tails = [payload + row.kind.payload_bytes for payload, row in zip(payloads, rows, strict=True)]
    around = b"".join(
        chain.from_iterable(
            (view[head:payload], view[tail : head + row.kind.item_bytes])
            for head, payload, tail, row in zip(heads, payloads, tails, rows, strict=True)
        )
    )
    expected = b"".join(
        chain.from_iterable(
            (kind.first, crc, kind.middle, crc, kind.last)
            for kind, crc in [(row.kind, row.crc32.to_bytes(4, "little")) for row in rows]
        )
    )
    if around != expected:
        return False
    if verify_crc and crc32s(map(view.__getitem__, map(slice, payloads, tails))) != [row.crc32 for row in rows]:
        return False
    for row, payload in zip(rows, payloads, strict=True):
        _memmove(row.address, address + payload, row.kind.payload_bytes)
    return True
