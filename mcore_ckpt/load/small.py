"""Small complete chunks, read many at a time.

A load under the layout of the save requests them by the ten thousand. `SmallChunks` holds their places and addresses.
The index gives the position of each, the bytes that frame its payload (this package's, for such a tensor), and its
CRC-32. So the chunks of one read are checked together: the frames around their payloads, and the sums of these. Only
where something differs is each chunk of the read taken by itself. The kernel scatters what the page cache holds:
payloads to where they belong, the frames side by side into a buffer (`scatter`). What comes from the device is read
into a buffer and copied out of it (`place`).
"""

from __future__ import annotations

import ctypes
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import torch

from mcore_ckpt.core.boxes import Box, covers
from mcore_ckpt.core.crc import crc32s
from mcore_ckpt.format.index import CheckpointIndex, PackedTensors, StoredChunk, TensorForm
from mcore_ckpt.format.item_layout import tensor_template
from mcore_ckpt.load.placement import (
    FEW_CHUNKS,
    ReadBuffer,
    Want,
    WantedItem,
    address_of,
    memory_at,
    only_box,
)
from mcore_ckpt.load.policy import ReadPolicy
from mcore_ckpt.state.torch_classes import torch_dtype
from mcore_ckpt.storage.base import RangeReader

# So many items can be scattered by one call: the kernel takes 1,024 places (UIO_MAXIOV), of which each wants four.
_MAX_SCATTERED: Final = 256

# Holding the GIL, which another thread would take for a while: the copies are short.
_memmove = ctypes.PyDLL(None).memmove
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove.restype = None


class _Kind(NamedTuple):
    """What all items have in common that this package writes for a dtype and shape."""

    dtype: torch.dtype  # of the destination
    item_bytes: int  # length of an item
    head_bytes: int  # length of the frame before the payload
    payload_bytes: int  # length of the payload
    frame: bytes  # what stands before and behind the payload, with zeros where its CRC-32 belongs
    first_crc: int  # where in `frame` it belongs
    second_crc: int  # where in `frame` it belongs


# One small chunk that is read.
_ROW: Final = np.dtype(
    [
        ("number", "i8"),  # among the chunks that were taken
        ("kind", "i8"),  # number of its kind
        ("start", "i8"),  # its item in the file: first byte
        ("stop", "i8"),  # end
        ("head", "i8"),  # bytes before the payload
        ("payload", "i8"),  # bytes of the payload
        ("tail", "i8"),  # bytes behind the payload
        ("address", "i8"),  # where the payload belongs
        ("frame", "i8"),  # where its frame begins, if the frames of all chunks lie side by side
        ("first_crc", "i8"),  # where the CRC-32 belongs, counted as `frame`
        ("second_crc", "i8"),  # where it belongs again
        ("crc", "<u4"),  # CRC-32 of the payload
    ],
    align=True,
)
Request = TypeVar("Request", bound=tuple[Any, ...])  # `ReadRequest`
_Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
_Rows = np.ndarray[tuple[int], np.dtype[np.void]]
_FOUR = np.arange(4)


class SmallChunks:
    """Collects items all of which is requested, if `policy` takes them for small; where there is a manifest, with a
    checksum for each. Keeps the destinations alive. `numbers` are those of the index, `kind_numbers` which of `kinds`.
    """

    def __init__(self, index: CheckpointIndex, policy: ReadPolicy) -> None:
        self.tensors: list[torch.Tensor] = []
        self.addresses: list[int] = []
        self.numbers: list[int] = []
        self.kind_numbers: list[int] = []
        self.kinds: list[_Kind] = []
        tensors = index.tensors
        self._packed = tensors if isinstance(tensors, PackedTensors) and tensors.places.crcs else None
        self._policy = policy
        self._taken = bytearray(0 if self._packed is None else len(self._packed.places.lengths))
        # By form of a global tensor (`id`: they belong to the index), slice, and shape: number of the chunk, number and
        # dtype of its kind, bytes of its item; None: it is left to others.
        self._places: dict[tuple[int, Any, Any, Any], tuple[int, int, torch.dtype, int] | None] = {}
        self._chunks: dict[int, dict[tuple[tuple[int, ...], tuple[int, ...]], int]] = {}  # of a form, by slice

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, requests: Iterable[Request]) -> list[Request]:
        """Add a request for a small item that can be copied to its destination as it is. Returns all other requests,
        which may be wrong, or merely unusual.
        """
        packed = self._packed
        if packed is None:
            return list(requests)
        row_of, forms, firsts, lengths = packed.rows.get, packed.forms, packed.firsts, packed.places.lengths
        tensors, addresses, numbers, kinds = self.tensors, self.addresses, self.numbers, self.kind_numbers
        places, taken = self._places, self._taken
        others: list[Request] = []
        for request in requests:
            fqn, tensor, offsets, sizes, shape, _ = request
            row = row_of(fqn)
            if row is not None and tensor.shape == sizes:
                form = forms[row]
                key = id(form), offsets, sizes, shape
                place = places[key] if key in places else self._find(form, offsets, sizes, shape)
                if place is not None:
                    chunk, kind, dtype, item_bytes = place
                    number, address = firsts[row] + chunk, address_of(tensor, dtype)
                    if address and lengths[number] == item_bytes and not taken[number]:
                        taken[number] = 1
                        tensors.append(tensor)
                        addresses.append(address)
                        numbers.append(number)
                        kinds.append(kind)
                        continue
            others.append(request)
        return others

    def memory(self) -> tuple[_Ints, _Ints]:
        """Where the destinations lie: first bytes and ends."""
        starts = np.array(self.addresses, dtype=np.int64)
        payloads = np.array([kind.payload_bytes for kind in self.kinds], dtype=np.int64)
        return starts, starts + payloads[self.kind_numbers] if self.kind_numbers else starts

    def _find(
        self, form: TensorForm, offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]
    ) -> tuple[int, int, torch.dtype, int] | None:
        place = None
        if form.shape == shape:
            chunk = self._chunk(form, offsets, sizes)
            dtype = torch_dtype(form.dtype)
            kind = None if chunk is None or dtype is None else _kind(form.dtype, sizes, dtype)
            if chunk is not None and kind is not None and kind.item_bytes <= self._policy.max_small_bytes:
                place = chunk, len(self.kinds), kind.dtype, kind.item_bytes
                self.kinds.append(kind)
        self._places[id(form), offsets, sizes, shape] = place
        return place

    def _chunk(self, form: TensorForm, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> int | None:
        """As `only_box`. Of many chunks, as many ranks write them, it is looked once whether any overlap."""
        if len(form.offsets) <= FEW_CHUNKS:
            return only_box(form.offsets, form.sizes, offsets, sizes)
        chunks = self._chunks.get(id(form))
        if chunks is None:
            boxes = list(map(Box, form.offsets, form.sizes))
            apart = all(map(all, form.sizes)) and covers(form.shape, boxes) is None
            chunks = self._chunks[id(form)] = dict(zip(boxes, range(len(boxes)), strict=True)) if apart else {}
        return chunks.get((offsets, sizes))

    def wanted_by_several(self, ranks: int) -> bool:
        """Whether, as `LoadPlan.times_wanted` counts, all of them are requested twice."""
        if self._packed is None or not self.numbers:
            return False
        rows = np.searchsorted(self._packed.firsts, self.numbers, "right") - 1
        tensors = Counter(map(self._packed.forms.__getitem__, set(rows.tolist())))
        wanted = sum(self.kinds[number].payload_bytes * count for number, count in Counter(self.kind_numbers).items())
        there = sum(_tensor_bytes(form) * count for form, count in tensors.items())
        return ranks * wanted >= 2 * there

    def wanted(self, at: int) -> WantedItem:
        """One of them, as any other item that is requested."""
        assert self._packed is not None
        number = self.numbers[at]
        row = bisect_right(self._packed.firsts, number) - 1
        form, which = self._packed.forms[row], number - self._packed.firsts[row]
        chunk = StoredChunk(form.offsets[which], form.sizes[which], self._packed.places.item(number))
        kind, sizes = self.kinds[self.kind_numbers[at]], chunk.sizes
        want = Want(Box((0,) * len(sizes), sizes), True, self.tensors[at], self.addresses[at])
        return WantedItem(self._packed.names[row], kind.dtype, chunk, kind.payload_bytes, [want])

    def reads(self) -> list[SmallRead]:
        """Join chunks with cheap gaps between them into reads; in order of file and start."""
        if self._packed is None or not self.numbers:
            return []
        places = self._packed.places
        rows, numbers = self._rows(), np.array(self.numbers, dtype=np.int64)
        rows["start"] = np.frombuffer(places.offsets, dtype=np.int64)[numbers]
        rows["stop"] += rows["start"]
        rows["crc"] = np.frombuffer(places.crcs, dtype=np.uint32)[numbers]
        files = np.frombuffer(places.file_numbers, dtype=np.uint32)[numbers]
        ranks = np.empty(len(places.files), dtype=np.int64)
        by_name = sorted(range(len(places.files)), key=places.files.__getitem__)
        ranks[by_name] = np.arange(len(by_name))
        order = np.lexsort((rows["start"], ranks[files]))
        rows, files = rows[order], files[order]
        frames = rows["head"] + rows["tail"]
        rows["frame"] = np.cumsum(frames) - frames
        rows["first_crc"] += rows["frame"]
        rows["second_crc"] += rows["frame"]
        is_end = np.diff(files) != 0
        is_end |= rows["start"][1:] - rows["stop"][:-1] > self._policy.cheap_gap_bytes
        joined: list[SmallRead] = []
        first = 0
        for end in [*(np.flatnonzero(is_end) + 1).tolist(), len(rows)]:
            joined += self._cut(places.files[files[first]], rows[first:end], self._policy.window_bytes, end - first)
            first = end
        return joined

    def _rows(self) -> _Rows:
        """A row for each chunk, with what does not depend on its place in a file; `stop` is the length of its item."""
        rows = np.zeros(len(self.numbers), dtype=_ROW)
        rows["number"] = np.arange(len(rows))
        rows["kind"] = self.kind_numbers
        rows["address"] = self.addresses
        for name, values in (
            ("stop", [kind.item_bytes for kind in self.kinds]),
            ("head", [kind.head_bytes for kind in self.kinds]),
            ("payload", [kind.payload_bytes for kind in self.kinds]),
            ("first_crc", [kind.first_crc for kind in self.kinds]),
            ("second_crc", [kind.second_crc for kind in self.kinds]),
        ):
            rows[name] = np.array(values, dtype=np.int64)[rows["kind"]]
        rows["tail"] = rows["stop"] - rows["head"] - rows["payload"]
        return rows

    def shorter(self, read: SmallRead, window_bytes: int) -> list[SmallRead]:
        """`read` in shorter reads, each of which can be scattered."""
        return list(self._cut(read.file, read.rows, window_bytes, _MAX_SCATTERED))

    def _cut(self, file: str, rows: _Rows, window_bytes: int, max_items: int) -> Iterator[SmallRead]:
        """Reads of at most `window_bytes` and `max_items`, or of one item."""
        starts, stops = np.ascontiguousarray(rows["start"]), np.ascontiguousarray(rows["stop"])
        at = 0
        while at < len(rows):
            fitting = int(np.searchsorted(stops, starts[at] + window_bytes, "right"))
            end = max(min(fitting, at + max_items), at + 1)
            yield SmallRead(file, int(starts[at]), int(stops[end - 1]), rows[at:end], self)
            at = end


def _tensor_bytes(form: TensorForm) -> int:
    dtype = torch_dtype(form.dtype)
    return 0 if dtype is None else math.prod(form.shape) * dtype.itemsize


def _kind(dtype: str, sizes: tuple[int, ...], own: torch.dtype) -> _Kind | None:
    try:
        template = tensor_template(dtype, sizes)
    except ValueError:
        return None
    if not template.payload_bytes:
        return None
    head_bytes, frame = len(template.head), template.head + template.tail
    first, second = (head_bytes + position for position in template.crc_positions)
    return _Kind(own, template.item_bytes, head_bytes, template.payload_bytes, frame, first, second)


class SmallRead(NamedTuple):
    """One read: bytes `[start, stop)` of a file, and a row for each chunk that lies in it, in order."""

    file: str
    start: int
    stop: int
    rows: _Rows
    chunks: SmallChunks

    def wanted(self) -> list[WantedItem]:
        """Each chunk by itself."""
        return list(map(self.chunks.wanted, self.rows["number"].tolist()))

    def expected_frames(self) -> bytes:
        """What should stand around the payloads, side by side."""
        rows, kinds = self.rows, self.chunks.kinds
        expected = bytearray().join([kinds[number].frame for number in rows["kind"].tolist()])
        content, first = np.frombuffer(expected, dtype=np.uint8), rows["frame"][0]
        crcs = np.ascontiguousarray(rows["crc"]).view(np.uint8).reshape(-1, 4)
        for name in ("first_crc", "second_crc"):
            content[(rows[name] - first)[:, None] + _FOUR] = crcs
        return bytes(expected)

    def has_sums(self, payloads: Iterable[memoryview]) -> bool:
        """Whether payloads, in order, have the sums that the index says."""
        return np.fromiter(crc32s(payloads), "<u4", len(self.rows)).tobytes() == self.rows["crc"].tobytes()


def scatter(read: SmallRead, reader: RangeReader, buffer: ReadBuffer) -> bool:
    """Have payloads put where they belong, and the frames around them into a buffer, which has room for the read. False
    if the reader cannot do that, or one of the chunks is not just what is expected.
    """
    rows = read.rows
    count, addresses = len(rows), rows["address"]
    frames = rows["frame"] - rows["frame"][0]
    frame_bytes = int(frames[-1] + rows["head"][-1] + rows["tail"][-1])
    vectors = np.zeros((count, 4, 2), dtype=np.uint64)
    vectors[:, 0, 0] = frames + buffer.address
    vectors[:, 0, 1] = rows["head"]
    vectors[:, 1, 0] = addresses
    vectors[:, 1, 1] = rows["payload"]
    vectors[:, 2, 0] = vectors[:, 0, 0] + vectors[:, 0, 1]
    vectors[:, 2, 1] = rows["tail"]
    vectors[:, 3, 0] = buffer.address + frame_bytes
    vectors[:-1, 3, 1] = rows["start"][1:] - rows["stop"][:-1]
    if not reader.scatter(read.start, vectors.ctypes.data, 4 * count, read.stop - read.start):
        return False
    if bytes(buffer.view[:frame_bytes]) != read.expected_frames():
        return False
    lowest = int(addresses.min())
    starts = addresses - lowest
    stops = starts + rows["payload"]
    memory = memory_at(lowest, int(stops.max()))
    return read.has_sums(map(memory.__getitem__, map(slice, starts.tolist(), stops.tolist())))


def place(read: SmallRead, view: memoryview, address: int, shift: int) -> bool:
    """Check chunks in memory, and copy their payloads to where they belong; their file would begin at `shift`. False if
    one of them is not as expected; then nothing has been copied.
    """
    rows = read.rows
    heads = rows["start"] + shift
    payloads = heads + rows["head"]
    tails = payloads + rows["payload"]
    sources, stops = payloads.tolist(), tails.tolist()
    frames = chain.from_iterable(
        zip(map(slice, heads.tolist(), sources), map(slice, stops, (rows["stop"] + shift).tolist()), strict=True)
    )
    if b"".join(map(view.__getitem__, frames)) != read.expected_frames():
        return False
    if not read.has_sums(map(view.__getitem__, map(slice, sources, stops))):
        return False
    for target, source, nbytes in zip(
        rows["address"].tolist(), (payloads + address).tolist(), rows["payload"].tolist(), strict=True
    ):
        _memmove(target, source, nbytes)
    return True
