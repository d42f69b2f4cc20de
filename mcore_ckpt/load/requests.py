"""What a load requests -> the plan of what it reads, checked before a byte is read.

A request names a slice of a global tensor and the destination for it. The slice may overlap many stored chunks, which
have to hold all of it together. A `LoadPlan` holds each stored item once, with all destinations that request a part.

A load under the layout of the save requests small complete chunks by the ten thousand. `SmallChunks` holds their places
and addresses. The index gives the position of each, the bytes that frame its payload (this package's, for such a
tensor), and its CRC-32. So the chunks of one read are checked together: the frames around their payloads, and the sums
of these.

A destination that lies in host memory as the bytes lie in the file (same dtype, C-contiguous, a plain tensor) has an
*address*: bytes are read or copied straight there. Everything else (strided views, other dtypes, devices, tensor
subclasses) goes through torch, from a strided view of the buffer that the bytes were read into.

Where the stored dtype is not the destination's, elements are converted as `torch.Tensor.copy_` does, with one warning
for the load, or refused. Destinations that share memory (tied weights that were saved as several tensors, views of one
buffer) are found before anything is read, and are read one after the other, in the order of their requests.
"""

from __future__ import annotations

import math
import operator
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch

from mcore_ckpt.core.boxes import Box, covers, intersect, relative, runs
from mcore_ckpt.core.console import counted, logger_of
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import (
    ChecksumError,
    CorruptCheckpointError,
    DtypeMismatchError,
    KindMismatchError,
    LoadError,
    ShapeMismatchError,
)
from mcore_ckpt.core.ranks import own_rank
from mcore_ckpt.format.index import (
    CheckpointIndex,
    ChunkLookup,
    PackedTensors,
    StoredChunk,
    StoredItem,
    TensorEntry,
    TensorForm,
)
from mcore_ckpt.format.item import LocatedTensor, element_bytes, tensor_template
from mcore_ckpt.load.ranges import ReadPolicy
from mcore_ckpt.load.records import check_located, checksum_error, chunk_name, missing_key
from mcore_ckpt.state.shards import PLAIN, dtype_name, torch_dtype

_logger = logger_of(__name__)


OnDtypeMismatch = Literal["convert", "raise"]


def check_dtype(fqn: str, where: str, stored: torch.dtype, requested: torch.dtype, policy: OnDtypeMismatch) -> None:
    """Raise `DtypeMismatchError` if a tensor may not be converted, by `LoadOptions.on_dtype_mismatch`, or cannot."""
    if stored is requested:
        return
    what = f"{fqn}: {where} holds {dtype_name(stored)}, the destination is {dtype_name(requested)}"
    if policy == "raise":
        raise DtypeMismatchError(f'{what}; LoadOptions(on_dtype_mismatch="convert") converts')
    if not _converts(stored, requested):
        raise DtypeMismatchError(f"{what}, and torch cannot convert between the two; load into {dtype_name(stored)}")


class DtypeConversions:
    """Collects the conversions of a load, by the policy `LoadOptions.on_dtype_mismatch`."""

    def __init__(self, policy: OnDtypeMismatch, path: str) -> None:
        self._policy: OnDtypeMismatch = policy
        self._path = path
        self._keys: dict[tuple[torch.dtype, torch.dtype], dict[str, None]] = {}
        self._nested = 0

    def note(self, fqn: str, stored: torch.dtype, requested: torch.dtype) -> None:
        """A tensor is about to be converted. Raises `DtypeMismatchError` as `check_dtype`."""
        check_dtype(fqn, f"the checkpoint {self._path}", stored, requested, self._policy)
        self._keys.setdefault((stored, requested), {})[fqn] = None

    @contextmanager
    def of_one_load(self) -> Iterator[None]:
        """Warn at the end of the outermost of these contexts of what was converted inside."""
        self._nested += 1
        try:
            yield
        except BaseException:
            self._keys.clear()
            raise
        finally:
            self._nested -= 1
        if self._nested == 0 and self._keys:
            self._warn()
            self._keys.clear()

    def _warn(self) -> None:
        pairs = []
        for (stored, requested), keys in self._keys.items():
            some = [*keys][:2] + ["..."] * (len(keys) > 2)
            pairs.append(f"{len(keys)} from {dtype_name(stored)} to {dtype_name(requested)} ({', '.join(some)})")
        count = len({key for keys in self._keys.values() for key in keys})
        text = (
            f"{self._path}: {counted(count, 'tensor')} converted to the destination's dtype: {'; '.join(pairs)}."
            ' LoadOptions(on_dtype_mismatch="raise") refuses'
        )
        if own_rank() != 0:
            _logger.info("%s", text)  # rank 0 warns for all
        else:
            _logger.warning("%s", text)


@lru_cache(maxsize=256)
def _converts(stored: torch.dtype, requested: torch.dtype) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of complex numbers that lose their imaginary part: the load itself warns
        try:
            torch.empty(1, dtype=requested).copy_(torch.empty(1, dtype=stored))
        except (RuntimeError, TypeError, NotImplementedError):
            return False
    return True


_Rows = np.ndarray[tuple[int], np.dtype[np.void]]


def overlapping(requests: Sequence[ReadRequest]) -> set[int]:
    """Numbers of those whose destinations may share memory with another one, and get other values there."""
    ranges = [(*found, number) for number, request in enumerate(requests) if (found := memory_of(request.tensor))]
    # (Parts of one destination get the same values, as a plan of many stored chunks has them.)
    return {
        number
        for group in _touching(ranges)
        if len({_global_tensor(requests[number]) for number in group}) > 1
        for number in group
    }


def _touching(ranges: Iterable[tuple[int, int, int]]) -> Iterator[list[int]]:
    """Numbers of ranges (first, end, number) that touch, directly or by others; of those alone, nothing."""
    group: list[int] = []
    reach = 0
    for start, stop, number in sorted(ranges):
        if start >= reach:
            if len(group) > 1:
                yield group
            group = []
        group.append(number)
        reach = max(reach, stop)
    if len(group) > 1:
        yield group


def _global_tensor(request: ReadRequest) -> tuple[str, int, tuple[int, ...]]:
    """The key, and where all of the global tensor would lie if the memory went on: slices that have these alike get the
    same values where they overlap.
    """
    tensor, strides = request.tensor, request.tensor.stride()
    behind = sum(map(operator.mul, request.offsets, strides))
    return request.fqn, tensor.data_ptr() - behind * tensor.element_size(), strides


class ReadRequest(NamedTuple):
    """A box of a global tensor, in elements, and where it goes."""

    fqn: str  # key of the global tensor
    tensor: torch.Tensor  # destination of shape `sizes`; any strides, any device; written in place, without autograd
    offsets: tuple[int, ...]  # first element of the box in the global tensor
    sizes: tuple[int, ...]
    global_shape: tuple[int, ...] | None = None  # that the global tensor must have; None: any that the box fits into
    # The box may reach past the stored global tensor; what both have is loaded, and the rest of the destination left
    # alone (Megatron's `allow_shape_mismatch`: a vocabulary padded otherwise).
    allow_partial: bool = False


def tensor_entry(fqn: str, index: CheckpointIndex) -> TensorEntry:
    """The index entry of a tensor; raises `MissingKeyError` or `KindMismatchError`."""
    entry = index.tensors.get(fqn)
    if entry is not None:
        return entry
    if fqn in index.objects:
        raise KindMismatchError(f"{fqn}: a tensor is requested, but {index.path} holds an object under this key")
    raise missing_key(fqn, f"the checkpoint {index.path}", [*index.tensors, *index.objects], index.removed)


def stored_dtype(entry: TensorEntry) -> torch.dtype:
    """torch's dtype of a stored tensor. `LoadError`: the installed torch has no such dtype."""
    dtype = torch_dtype(entry.dtype)
    if dtype is None:
        raise LoadError(f"{entry.fqn}: stored as {entry.dtype}, which torch {torch.__version__} does not have")
    return dtype


class Want(NamedTuple):
    """A box of a stored chunk, and the destination of the same shape that wants it."""

    box: Box  # relative to the chunk, in elements
    whole: bool  # the box is the whole chunk
    tensor: torch.Tensor  # the destination; written in place
    address: int  # where its bytes lie, when they lie exactly as stored (`address_of`); 0 otherwise

    def address_at(self, box: Box, elem_bytes: int) -> int:
        """Where the bytes of `box` (relative to the chunk) belong, if they are contiguous in host memory; else 0."""
        if not self.address:
            return 0
        destination = runs(self.box.sizes, relative(box, self.box.offsets), elem_bytes)
        return 0 if destination.counts else self.address + destination.first_byte


def address_of(tensor: torch.Tensor, stored_dtype: torch.dtype) -> int:
    """Where in host memory a box of the tensor's own shape, stored as `stored_dtype`, belongs byte for byte; else 0."""
    if (
        tensor.dtype is stored_dtype
        and tensor.is_cpu
        and tensor.is_contiguous()
        and type(tensor) in PLAIN
        and tensor.layout is torch.strided
        and not tensor.is_neg()
        and not (stored_dtype.is_complex and tensor.is_conj())
    ):
        return tensor.data_ptr()
    return 0


def memory_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """First byte and end of a tensor's memory, gaps included; None if it has none of its own."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return None
    try:
        start = tensor.data_ptr()
    except RuntimeError:  # a subclass that holds other tensors
        return None
    if not start:
        return None
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def narrow(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The view of `tensor` that `box` (in elements) names."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor


@dataclass(slots=True, eq=False)
class WantedItem:
    """A stored chunk, and the slices of it that are requested."""

    fqn: str  # key of the global tensor
    dtype: torch.dtype  # stored dtype
    chunk: StoredChunk  # the chunk and where it is stored
    payload_bytes: int  # size of the chunk's elements
    wants: list[Want] = field(default_factory=list)  # slices and destinations

    @property
    def needed_bytes(self) -> int:
        """How many bytes the destinations take; what several of them request counts several times."""
        wants = self.wants
        if len(wants) == 1 and wants[0].whole:
            return self.payload_bytes
        return sum(math.prod(want.box.sizes) for want in wants) * self.dtype.itemsize

    @property
    def item(self) -> StoredItem:
        """Where the chunk is stored."""
        return self.chunk.item

    @property
    def key(self) -> tuple[str, int, str]:
        """File, offset and key: the order of the files."""
        return self.chunk.item.file, self.chunk.item.offset, self.fqn

    @property
    def kind(self) -> tuple[StoredItem, torch.dtype, tuple[int, ...]]:
        """The item, and what the index says that it is."""
        return self.chunk.item, self.dtype, self.chunk.sizes

    @property
    def where(self) -> str:
        """The chunk, as an error message names it."""
        return chunk_name(self.fqn, self.chunk)

    @property
    def expected(self) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape that the index says the item has."""
        return dtype_name(self.dtype), self.chunk.sizes

    def check(self, located: LocatedTensor) -> None:
        """Raise `CorruptCheckpointError` unless the item holds the tensor that the index says it does."""
        check_located(located, *self.expected, self.payload_bytes, self.item.crc32)

    def own_start(self) -> int | None:
        """Where the payload begins in its file, if this package wrote the item; None if the index does not tell."""
        item = self.chunk.item
        if item.crc32 is None:
            return None
        try:
            template = tensor_template(*self.expected)
        except ValueError:
            return None
        if template.item_bytes != item.length or not template.payload_bytes:
            return None
        return item.offset + len(template.head)

    def damaged(self, offset: int, length: int, got: int, expected: int) -> ChecksumError:
        """The error for bytes `[offset, offset + length)` of the item, which hold its elements."""
        start = self.item.offset + offset
        return checksum_error(
            self.where, f"the bytes [{start}, {start + length}) of {self.item.file} have", got, expected
        )


# So many items can be scattered by one call: the kernel takes 1,024 places (UIO_MAXIOV), of which each wants four.
_MAX_SCATTERED: Final = 256


class _Kind(NamedTuple):
    """What all items have in common that this package writes for a dtype and shape."""

    dtype: torch.dtype  # of the destination
    item_bytes: int  # length of the item
    payload_bytes: int  # length of the payload
    frame: bytes  # what stands before and behind the payload, with zeros where its CRC-32 belongs
    row: tuple[int, ...]  # a `_ROW` in which nothing else is known; `stop` is the length of an item


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


def _kind(dtype: str, sizes: tuple[int, ...], own: torch.dtype, number: int) -> _Kind | None:
    try:
        template = tensor_template(dtype, sizes)
    except ValueError:  # this package writes no such items
        return None
    head_bytes, item_bytes, payload_bytes = len(template.head), template.item_bytes, template.payload_bytes
    if not payload_bytes:
        return None
    first, second = template.crc_positions
    crcs = head_bytes + first, head_bytes + second
    row = 0, number, 0, item_bytes, head_bytes, payload_bytes, len(template.tail), 0, 0, *crcs, 0
    return _Kind(own, item_bytes, payload_bytes, template.head + template.tail, row)


_FOUR = np.arange(4)


class SmallChunks:
    """Collects small items that are requested as they are, in lists of plain numbers: there are ten thousands."""

    def __init__(self, index: CheckpointIndex, policy: ReadPolicy) -> None:
        self._tensors: list[torch.Tensor] = []
        self.addresses: list[int] = []  # where the bytes of each tensor lie
        self._numbers: list[int] = []  # of each chunk, in the index
        self.kind_numbers: list[int] = []  # which of `kinds` each is
        self.kinds: list[_Kind] = []
        tensors = index.tensors
        self._packed = tensors if isinstance(tensors, PackedTensors) and tensors.places.crcs else None
        self._policy = policy
        self._taken = bytearray(0 if self._packed is None else len(self._packed.places.lengths))
        # By form of a global tensor (`id`: they belong to the index), slice, and shape: number of the chunk, number and
        # dtype of its kind, bytes of its item; None: it is left to others.
        self._places: dict[tuple[int, Any, Any, Any], tuple[int, int, torch.dtype, int] | None] = {}
        self._lookups: dict[int, ChunkLookup] = {}  # by form, too

    def take(self, requests: Iterable[ReadRequest]) -> list[ReadRequest]:
        """Take requests for small items that are copied as they are; returns the others, wrong or merely unusual."""
        packed = self._packed
        if packed is None:
            return list(requests)
        tensors, addresses, numbers, kinds = self._tensors, self.addresses, self._numbers, self.kind_numbers
        row_of, forms, firsts, lengths = packed.rows.get, packed.forms, packed.firsts, packed.places.lengths
        places, taken = self._places, self._taken
        others: list[ReadRequest] = []
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

    def _find(
        self, form: TensorForm, offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...] | None
    ) -> tuple[int, int, torch.dtype, int] | None:
        place = None
        if form.shape == shape and len(offsets) == len(sizes) == len(form.shape):
            lookup = self._lookups.get(id(form))
            if lookup is None:
                lookup = self._lookups[id(form)] = ChunkLookup(form.offsets, form.sizes)
            chunk = lookup.only(Box(offsets, sizes))
            dtype = torch_dtype(form.dtype)
            kind = None if chunk is None or dtype is None else _kind(form.dtype, sizes, dtype, len(self.kinds))
            if chunk is not None and kind is not None and kind.item_bytes <= self._policy.max_small_bytes:
                place = chunk, len(self.kinds), kind.dtype, kind.item_bytes
                self.kinds.append(kind)
        self._places[id(form), offsets, sizes, shape] = place
        return place

    def wanted_by_several(self, ranks: int) -> bool:
        """Whether, as `LoadPlan.times_wanted` counts, all of them are requested twice."""
        if self._packed is None or not self._numbers:
            return False
        rows = np.searchsorted(self._packed.firsts, self._numbers, "right") - 1
        tensors = Counter(map(self._packed.forms.__getitem__, set(rows.tolist())))
        wanted = sum(self.kinds[number].payload_bytes * count for number, count in Counter(self.kind_numbers).items())
        there = sum(math.prod(form.shape) * element_bytes(form.dtype) * count for form, count in tensors.items())
        return bool(ranks * wanted >= 2 * there)

    def wanted(self, at: int) -> WantedItem:
        """One of them, as any other item that is requested."""
        assert self._packed is not None
        number = self._numbers[at]
        row = bisect_right(self._packed.firsts, number) - 1
        form, which = self._packed.forms[row], number - self._packed.firsts[row]
        chunk = StoredChunk(form.offsets[which], form.sizes[which], self._packed.places.item(number))
        kind, sizes = self.kinds[self.kind_numbers[at]], chunk.sizes
        want = Want(Box((0,) * len(sizes), sizes), True, self._tensors[at], self.addresses[at])
        return WantedItem(self._packed.names[row], kind.dtype, chunk, kind.payload_bytes, [want])

    def reads(self) -> list[SmallRead]:
        """Join chunks with cheap gaps between them into reads; in order of file and start."""
        if self._packed is None or not self._numbers:
            return []
        places, numbers = self._packed.places, np.array(self._numbers, dtype=np.int64)
        of_kinds = np.array([kind.row for kind in self.kinds], dtype=_ROW)
        rows = np.take(of_kinds, self.kind_numbers)  # (ten times as fast as by an index)
        rows["number"], rows["address"] = np.arange(len(rows)), self.addresses
        rows["start"] = np.frombuffer(places.offsets, dtype=np.int64)[numbers]
        rows["stop"] += rows["start"]
        rows["crc"] = np.frombuffer(places.crcs, dtype=np.uint32)[numbers]
        files = np.frombuffer(places.file_numbers, dtype=np.uint32)[numbers]
        ranks = np.empty(len(places.files), dtype=np.int64)
        by_name = sorted(range(len(places.files)), key=places.files.__getitem__)
        ranks[by_name] = np.arange(len(by_name))
        order = np.lexsort((rows["start"], ranks[files]))
        rows, files = np.take(rows, order), files[order]
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
        return np.fromiter(map(crc32, payloads), "<u4", len(self.rows)).tobytes() == self.rows["crc"].tobytes()


class LoadPlan:
    """What one load reads, and where it goes: `small` chunks, and other `items` by file, offset and key."""

    def __init__(self, index: CheckpointIndex, conversions: DtypeConversions, policy: ReadPolicy) -> None:
        self.small = SmallChunks(index, policy)
        self.items: dict[tuple[str, int, str], WantedItem] = {}
        self._index = index
        self._conversions = conversions
        self._policy = policy
        self._lookups: dict[str, ChunkLookup] = {}
        self._elems: dict[str, tuple[int, int]] = {}  # of each tensor: those that are requested, and all
        self._requests: list[ReadRequest] = []
        self._tensors: list[torch.Tensor] = []  # destinations of `items`

    def add(self, requests: Iterable[ReadRequest]) -> None:
        """Find the stored chunks that hold what is requested, and check it: raises as `CheckpointReader.read_items`."""
        requests = list(requests)
        self._requests += requests
        index = self._index
        for request in self.small.take(requests):
            fqn, tensor, offsets, sizes = request[:4]
            entry = index.tensors.get(fqn) or tensor_entry(fqn, index)
            dtype = stored_dtype(entry)
            if tensor.dtype is not dtype:
                self._conversions.note(fqn, dtype, tensor.dtype)
            if tensor.is_meta or (type(tensor) not in PLAIN and tensor.untyped_storage().device.type == "meta"):  # fake
                raise LoadError(
                    f"{fqn}: the destination ({type(tensor).__name__}) is on the meta device, and what is loaded would "
                    "be lost; put it on a device first (`to_empty`), or leave it out of the load"
                )
            self._tensors.append(tensor)
            _check_shape(request, entry, index)
            lookup = self._lookups.get(fqn)
            if lookup is None:
                lookup = self._lookups[fqn] = entry.lookup()
            box = Box(tuple(offsets), tuple(sizes))
            only = lookup.only(box)
            if only is None:
                self._add_parts(request, box, entry, dtype, [entry.chunks[number] for number in lookup.near(box)])
            else:
                self._add_part(entry, dtype, entry.chunks[only], Box((0,) * len(sizes), box.sizes), tensor)

    def times_wanted(self, ranks: int) -> dict[str, int]:
        """How often so many ranks of this host request each byte of a tensor among `items`, if each requests as much as
        this one: no rank tells another, and those of other pipeline stages may request nothing.
        """
        return {fqn: ranks * wanted // there for fqn, (wanted, there) in self._elems.items()}

    def turns(self) -> list[LoadPlan]:
        """This plan; or several, if destinations share memory: these come one by one, the last request last."""
        small = self.small
        ranges = [found for tensor in self._tensors if (found := memory_of(tensor)) is not None]
        payloads = np.array([kind.payload_bytes for kind in small.kinds], dtype=np.int64)
        own = np.array(small.addresses, dtype=np.int64)
        of_small = np.stack((own, own + payloads[np.array(small.kind_numbers, dtype=np.int64)]))
        memory = np.append(np.array(ranges, dtype=np.int64).reshape(-1, 2).T, of_small, axis=1)
        starts, stops = memory[:, np.argsort(memory[0])]
        if not (starts[1:] < np.maximum.accumulate(stops)[:-1]).any():
            return [self]
        shared = overlapping(self._requests)
        if not shared:
            return [self]
        others = [request for number, request in enumerate(self._requests) if number not in shared]
        turns = []
        for requests in (others, *([self._requests[number]] for number in sorted(shared))):
            turn = LoadPlan(self._index, self._conversions, self._policy)
            turn.add(requests)
            turns.append(turn)
        return turns

    def _add_parts(
        self, request: ReadRequest, box: Box, entry: TensorEntry, dtype: torch.dtype, chunks: Iterable[StoredChunk]
    ) -> None:
        found: list[Box] = []
        for chunk in chunks:
            overlap = intersect(box, Box(chunk.offsets, chunk.sizes))
            if overlap is None:
                continue
            inside = relative(overlap, box.offsets)
            found.append(inside)
            part = request.tensor if overlap == box else narrow(request.tensor.detach(), inside)
            self._add_part(entry, dtype, chunk, relative(overlap, chunk.offsets), part)
        expected = Box((0,) * len(box.sizes), box.sizes)
        if request.allow_partial:
            stored = intersect(box, Box((0,) * len(entry.shape), entry.shape))
            if stored is None:
                return
            expected = relative(stored, box.offsets)
        problem = covers(expected.sizes, [relative(part, expected.offsets) for part in found])
        if problem:
            raise CorruptCheckpointError(
                f"{entry.fqn}: the stored chunks do not hold the wanted box at {list(box.offsets)} of sizes"
                f" {list(box.sizes)} exactly once: relative to the box, {problem}. The save of {self._index.path} did"
                " not finish or its index is damaged; load an earlier checkpoint"
            )

    def _add_part(
        self, entry: TensorEntry, dtype: torch.dtype, chunk: StoredChunk, box: Box, tensor: torch.Tensor
    ) -> None:
        if 0 in box.sizes:
            return
        key = (chunk.item.file, chunk.item.offset, entry.fqn)
        item = self.items.get(key)
        if item is None:
            item = self.items[key] = WantedItem(entry.fqn, dtype, chunk, math.prod(chunk.sizes) * dtype.itemsize)
        wanted, there = self._elems.get(entry.fqn) or (0, math.prod(entry.shape))
        self._elems[entry.fqn] = wanted + math.prod(box.sizes), there
        item.wants.append(Want(box, box.sizes == chunk.sizes, tensor, address_of(tensor, dtype)))


def _check_shape(request: ReadRequest, entry: TensorEntry, index: CheckpointIndex) -> None:
    fqn, tensor, offsets, sizes, global_shape, allow_partial = request
    shape = entry.shape
    if tensor.shape != sizes:
        raise ShapeMismatchError(
            f"{fqn}: a box of sizes {list(sizes)} is requested in a destination of shape {list(tensor.shape)}"
        )
    if len(offsets) != len(shape) or len(sizes) != len(shape):
        raise ShapeMismatchError(
            f"{fqn}: the checkpoint {index.path} holds global shape {list(shape)}, but a box of {len(sizes)} axes is"
            f" wanted (at {list(offsets)} of sizes {list(sizes)})"
        )
    if allow_partial:
        return
    if global_shape is not None and global_shape != shape:
        raise ShapeMismatchError(
            f"{fqn}: the checkpoint {index.path} holds global shape {list(shape)}, expected {list(global_shape)}"
        )
    for offset, size, whole in zip(offsets, sizes, shape, strict=True):
        if offset < 0 or offset + size > whole:
            raise ShapeMismatchError(
                f"{fqn}: the box at {list(offsets)} of sizes {list(sizes)} does not lie inside the global shape"
                f" {list(shape)} that the checkpoint {index.path} holds"
            )
