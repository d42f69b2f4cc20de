"""What a rank tells the coordinator of its plan: columns of numbers and a list of keys, no object graphs.

Unpickling one object for each write item is most of a coordinator's time on a large cluster; columns cost a fixed
number of buffers for each rank. The coordinator checks them (`plan_check.py`); its writer process, or the commit, turns
them into `.metadata`.

The coordinator's check that the chunks of all ranks make up each tensor, on whole columns at a time.

A coordinator checks every chunk of every rank before a save begins, and training waits meanwhile. Chunks that follow
one another along one axis and span the others, which is what ranks give that divide a tensor, are told by a few numpy
operations for all tensors together; only what is left goes through `boxes.covers`, tensor by tensor.

`.metadata` of a new structure, put together while the files are being written.

It is about half a second's work for 20,000 tensors of two ranks, grows with the number of ranks, and needs nothing but
the ranks' plans. So the coordinator's writer process does it, on a second thread, and no training waits for it.
"""

from __future__ import annotations

import pickle
import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from mcore_ckpt.core.boxes import Box, covers
from mcore_ckpt.core.errors import PlanError
from mcore_ckpt.format.index import CheckpointIndex, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.format.metadata_write import MetadataEncoder

__all__ = [
    "LocalPlan",
    "LocalPlanBuilder",
    "TensorPlans",
    "check_plans",
    "encoded_beside",
    "index_tensors",
]


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """One rank's tensors, in columns.

    Attributes:
        keys: fqn of each tensor item.
        dtypes: names of the dtypes that occur; `dtype_codes[i]` selects one for item i.
        files: names of the files that this rank writes; `file_codes[i]` selects one for item i.
        file_bytes: length of each of those files.
        ndims: number of axes of item i; `boxes` holds 3 * ndims[i] numbers for it: global shape, offsets, sizes, all in
            elements.
        places: for each item, offset in its file and length, in bytes.
    """

    keys: list[str]
    dtypes: list[str]
    dtype_codes: array[int]
    files: list[str]
    file_bytes: list[int]
    file_codes: array[int]
    ndims: array[int]
    boxes: array[int]
    places: array[int]

    def encode(self) -> bytes:
        """The plan as bytes, to send to the coordinator of this process group."""
        return pickle.dumps(tuple(getattr(self, name) for name in self.__slots__), protocol=5)

    @classmethod
    def decode(cls, data: bytes) -> LocalPlan:
        """The inverse of `encode`; only for bytes that a rank of this process group sent."""
        return cls(*pickle.loads(data))


class LocalPlanBuilder:
    """Collects a rank's items, bucket by bucket."""

    def __init__(self) -> None:
        self._plan = LocalPlan([], [], array("i"), [], [], array("i"), array("i"), array("q"), array("q"))
        self._dtype_codes: dict[str, int] = {}

    def begin_file(self, file_name: str, size_bytes: int) -> None:
        """The items that follow lie in this file."""
        self._plan.files.append(file_name)
        self._plan.file_bytes.append(size_bytes)

    def add(
        self,
        key: str,
        dtype: str,
        shape: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
        offset_bytes: int,
        length_bytes: int,
    ) -> None:
        """One chunk: box (`offsets`, `sizes`) of a tensor of `shape`, `length_bytes` at `offset_bytes`."""
        plan = self._plan
        code = self._dtype_codes.get(dtype)
        if code is None:
            code = self._dtype_codes[dtype] = len(plan.dtypes)
            plan.dtypes.append(dtype)
        plan.keys.append(key)
        plan.dtype_codes.append(code)
        plan.file_codes.append(len(plan.files) - 1)
        plan.ndims.append(len(shape))
        plan.boxes.extend(shape)
        plan.boxes.extend(offsets)
        plan.boxes.extend(sizes)
        plan.places.append(offset_bytes)
        plan.places.append(length_bytes)

    def build(self) -> LocalPlan:
        """The finished plan."""
        return self._plan


def index_tensors(plans: Iterable[LocalPlan]) -> dict[str, TensorEntry]:
    """The index entries of all ranks' tensors, by key, in the order of the ranks; for plans that were checked."""
    heads: dict[str, tuple[str, tuple[int, ...], list[StoredChunk]]] = {}
    for plan in plans:
        boxes, places, files, dtypes = plan.boxes.tolist(), plan.places.tolist(), plan.files, plan.dtypes
        position = 0
        columns = zip(plan.keys, plan.ndims, plan.dtype_codes, plan.file_codes, places[::2], places[1::2], strict=True)
        for key, ndim, dtype_code, file_code, offset, length in columns:
            offsets_at = position + ndim
            sizes_at = offsets_at + ndim
            stop = sizes_at + ndim
            head = heads.get(key)
            if head is None:
                head = heads[key] = (dtypes[dtype_code], tuple(boxes[position:offsets_at]), [])
            item = StoredItem(files[file_code], offset, length)
            head[2].append(StoredChunk(tuple(boxes[offsets_at:sizes_at]), tuple(boxes[sizes_at:stop]), item))
            position = stop
    return {
        key: TensorEntry(key, dtype, shape, _of_different_offsets(chunks))
        for key, (dtype, shape, chunks) in heads.items()
    }


def _of_different_offsets(chunks: list[StoredChunk]) -> tuple[StoredChunk, ...]:
    """The chunks of one tensor, at most one for each offset: readers look them up by that.

    Only an empty chunk can lie where another one begins; it holds nothing that anybody could miss.
    """
    kept: dict[tuple[int, ...], StoredChunk] = {}
    for chunk in chunks:
        if chunk.offsets not in kept or all(chunk.sizes):
            kept[chunk.offsets] = chunk
    return tuple(chunks) if len(kept) == len(chunks) else tuple(kept.values())


_Ints = npt.NDArray[np.int64]


class _Items(NamedTuple):
    """The write items of all ranks, rank after rank; `keys` holds each key once, `key_ids` the place of each in it."""

    keys: list[str]
    key_ids: _Ints
    ranks: _Ints
    dtypes: list[str]
    dtype_ids: _Ints
    ndims: _Ints
    boxes: _Ints
    positions: _Ints  # where in `boxes` the numbers of an item begin

    def numbers(self, item: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Global shape, offsets and sizes of one item."""
        start, ndim = int(self.positions[item]), int(self.ndims[item])
        values = self.boxes[start : start + 3 * ndim].tolist()
        return tuple(values[:ndim]), tuple(values[ndim : 2 * ndim]), tuple(values[2 * ndim :])


def check_plans(plans: Sequence[LocalPlan]) -> None:
    """Check every rank's tensors against those of all others.

    Args:
        plans: by rank.

    Raises:
        PlanError: ranks disagree on a tensor's dtype or shape, or its chunks overlap, leave a gap or stick out; names
            the key, the ranks and what was found.
    """
    items = _joined(plans)
    if not items.keys:
        return
    _, first = np.unique(items.key_ids, return_index=True)
    heads = first[items.key_ids]  # for each item the first one of its key
    alike = (items.dtype_ids == items.dtype_ids[heads]) & (items.ndims == items.ndims[heads])
    told = np.zeros(len(items.keys), dtype=bool)  # keys whose chunks are known to tile
    for ndim in np.unique(items.ndims[alike]).tolist():
        chosen = np.flatnonzero(alike & (items.ndims == ndim))
        numbers = items.boxes[items.positions[chosen][:, None] + np.arange(3 * ndim)].reshape(len(chosen), 3, ndim)
        rows = np.zeros(len(items.key_ids), dtype=np.int64)
        rows[chosen] = np.arange(len(chosen))
        alike[chosen] = (numbers[:, 0] == numbers[rows[heads[chosen]], 0]).all(axis=1)
        key_ids = items.key_ids[chosen]
        told[key_ids] = _in_a_row(key_ids, numbers)[key_ids]
    if not alike.all():
        wrong = int(np.flatnonzero(~alike)[0])
        raise PlanError(_disagreement(items, int(heads[wrong]), wrong))
    if not told.all():
        _check_one_by_one(items, first, ~told)


def _joined(plans: Sequence[LocalPlan]) -> _Items:
    key_numbers: dict[str, int] = {}
    dtype_numbers: dict[str, int] = {}
    key_ids = [key_numbers.setdefault(key, len(key_numbers)) for plan in plans for key in plan.keys]
    dtype_ids = [_column([])]
    for plan in plans:
        of_rank = _column([dtype_numbers.setdefault(name, len(dtype_numbers)) for name in plan.dtypes])
        dtype_ids.append(of_rank[_column(plan.dtype_codes)] if plan.keys else _column([]))
    ndims = np.concatenate([_column([]), *(_column(plan.ndims) for plan in plans)])
    return _Items(
        keys=list(key_numbers),
        key_ids=_column(key_ids),
        ranks=np.repeat(np.arange(len(plans)), [len(plan.keys) for plan in plans]),
        dtypes=list(dtype_numbers),
        dtype_ids=np.concatenate(dtype_ids),
        ndims=ndims,
        boxes=np.concatenate([_column([]), *(_column(plan.boxes) for plan in plans)]),
        positions=np.cumsum(3 * ndims) - 3 * ndims,
    )


def _column(values: Any) -> _Ints:
    return np.asarray(values, dtype=np.int64)


def _in_a_row(key_ids: _Ints, numbers: _Ints) -> npt.NDArray[np.bool_]:
    """For each key, whether its chunks follow one another along one axis and span the others; False says nothing.

    Args:
        key_ids: of each chunk.
        numbers: chunks x (shape, offsets, sizes) x axes.
    """
    count, _, ndim = numbers.shape
    good = np.ones(int(key_ids.max()) + 1, dtype=bool)
    if ndim == 0:
        good[np.bincount(key_ids) != 1] = False
        return good
    shapes, offsets, sizes = numbers[:, 0], numbers[:, 1], numbers[:, 2]
    everyone = np.arange(count)
    divided = sizes != shapes
    axes = divided.argmax(axis=1)
    starts, lengths, whole = offsets[everyone, axes], sizes[everyone, axes], shapes[everyone, axes]
    others = offsets.copy()
    others[everyone, axes] = 0
    fits = (divided.sum(axis=1) <= 1) & (lengths > 0) & ~others.any(axis=1) & (shapes > 0).all(axis=1)
    good[key_ids[~fits]] = False
    order = np.lexsort((starts, key_ids))
    key_ids, axes, starts, lengths, whole = (column[order] for column in (key_ids, axes, starts, lengths, whole))
    goes_on = key_ids[1:] == key_ids[:-1]
    joined = ~goes_on | ((starts[1:] == starts[:-1] + lengths[:-1]) & (axes[1:] == axes[:-1]))
    good[key_ids[1:][~joined]] = False
    begins = np.concatenate(([True], ~goes_on))
    ends = np.concatenate((~goes_on, [True]))
    good[key_ids[begins & (starts != 0)]] = False
    good[key_ids[ends & (starts + lengths != whole)]] = False
    return good


def _disagreement(items: _Items, head: int, other: int) -> str:
    first, second = (
        f"{items.dtypes[items.dtype_ids[item]]} of global shape {items.numbers(item)[0]}" for item in (head, other)
    )
    key = items.keys[items.key_ids[head]]
    return f"{key}: rank {items.ranks[head]} saves {first}, rank {items.ranks[other]} {second}"


def _check_one_by_one(items: _Items, first: _Ints, wanted: npt.NDArray[np.bool_]) -> None:
    """Check the tiling of the wanted keys, in the order of the keys."""
    boxes: dict[int, list[Box]] = {key_id: [] for key_id in np.flatnonzero(wanted).tolist()}
    for item in np.flatnonzero(wanted[items.key_ids]).tolist():
        _, offsets, sizes = items.numbers(item)
        boxes[int(items.key_ids[item])].append(Box(offsets, sizes))
    for key_id, of_key in boxes.items():
        problem = covers(items.numbers(int(first[key_id]))[0], of_key)
        if problem:
            raise PlanError(f"{items.keys[key_id]}: {problem}")


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorPlans:
    """What `.metadata` says of tensors, before it is put together. Cheap to pickle.

    Attributes:
        encoded: every rank's `LocalPlan`, encoded; checked before (`plan_check.py`).
        mcore_data: as in `CheckpointIndex`.
    """

    encoded: tuple[bytes, ...]
    mcore_data: dict[str, dict[str, Any]] = field(default_factory=dict)

    def encoder(self) -> MetadataEncoder:
        """Put it together."""
        tensors = index_tensors(map(LocalPlan.decode, self.encoded))
        return MetadataEncoder(CheckpointIndex("", tensors, {}, mcore_data=self.mcore_data))


def encoded_beside(plans: TensorPlans | None, write: Callable[[], T]) -> tuple[T, MetadataEncoder | None]:
    """Call `write`, and make the encoder of `plans`, if there are any, on another thread meanwhile.

    Raises:
        Exception: what `write` raises, or else what making the encoder does.
    """
    if plans is None:
        return write(), None
    outcome: list[MetadataEncoder | Exception] = []

    def encode() -> None:
        try:
            outcome.append(plans.encoder())
        except Exception as error:  # noqa: BLE001  (raised below, on the thread that waits for it)
            outcome.append(error)

    thread = threading.Thread(target=encode, name="mcore_ckpt-metadata", daemon=True)
    thread.start()
    try:
        written = write()
    finally:
        thread.join()
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return written, outcome[0]
