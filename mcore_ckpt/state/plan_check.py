"""What the coordinator checks of the plans of all ranks: the slices of each tensor tile it, none missing, none twice,
none outside.

`Accesses` are what ranks hold besides what they write, or are going to load: with them the same check validates
Megatron's access integrity.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Collection, Sequence
from itertools import chain, compress
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mcore_ckpt.core.boxes import Box, covers
from mcore_ckpt.core.errors import PlanError
from mcore_ckpt.format.integrity import PlannedTable, RankPlan, TableColumns, decoded_plans, encode_plan
from mcore_ckpt.state.shards import dtype_name, is_main, leaves_by_kind, stored_form


class _Shard(NamedTuple):
    """What a check asks of a shard, by Megatron's names."""

    key: str
    dtype: Any
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    prepend_axis_num: int
    axis_fragmentations: tuple[int, ...] | None  # None: the shards lie on no regular grid
    flattened_range: slice | None
    replica_id: Any


class Accesses(NamedTuple):
    """The shards of one rank, in columns of an entry for each, to compare with those of another save."""

    tensors: tuple[list[Any], ...]  # by the fields of `_Shard`
    objects: tuple[list[Any], ...]  # key, unique key, global shape, replica

    @classmethod
    def of(cls, sharded_state_dict: Any) -> Accesses:
        """Accesses of a nested dict/list, as they are now."""
        tensors, objects = leaves_by_kind(sharded_state_dict)
        return cls(
            (
                [shard.key for shard in tensors],
                [shard.dtype for shard in tensors],
                [tuple(shard.global_shape) for shard in tensors],
                [tuple(shard.global_offset) for shard in tensors],
                [tuple(shard.local_shape) for shard in tensors],
                [shard.prepend_axis_num for shard in tensors],
                [shard.axis_fragmentations for shard in tensors],
                [getattr(shard, "flattened_range", None) for shard in tensors],
                [shard.replica_id for shard in tensors],
            ),
            (
                [leaf.key for leaf in objects],
                [leaf.unique_key for leaf in objects],
                [tuple(leaf.global_shape) for leaf in objects],
                [leaf.replica_id for leaf in objects],
            ),
        )

    def told(self, written: Sequence[Sequence[Any]] | None = None, *, mains_are_written: bool = False) -> list[bytes]:
        """The report to the coordinator: main replicas, other replicas, objects. Main replicas are left out where they
        are as `written` by the plan of this rank (key, dtype, shape, offsets, sizes), or known to be those of all ranks
        together.
        """
        keys, dtypes, shapes, offsets, sizes = _stored(self.tensors)
        are_main = list(map(is_main, self.tensors[-1]))
        mains = [list(compress(column, are_main)) for column in (keys, dtypes, shapes, offsets, sizes)]
        is_written = mains_are_written or (
            written is not None and mains == [list(map(itemgetter(field), written)) for field in range(5)]
        )
        others = zip(keys, dtypes, shapes, strict=True)
        replicas = list(dict.fromkeys(other for other, main in zip(others, are_main, strict=True) if not main))
        uneven = list(dict.fromkeys(key for key, grid in zip(keys, self.tensors[6], strict=True) if grid is None))
        counts: dict[str, int] = {}
        unique_keys = []
        for key, unique_key, shape, replica in zip(*self.objects, strict=True):
            counts.setdefault(key, math.prod(shape))
            if is_main(replica):
                unique_keys.append((key, unique_key))
        return [
            b"" if is_written else _encoded_mains(*mains),
            _encoded([replicas, uneven]),
            _encoded([unique_keys, counts]),
        ]


def _stored(tensors: tuple[list[Any], ...]) -> tuple[list[Any], ...]:
    """Key, dtype, global shape, offsets and sizes of shards, as they are stored."""
    keys, dtypes, shapes, offsets, boxes, prepended, _, stretches, _ = tensors
    sizes = [(1,) * axes + box if axes else box for axes, box in zip(prepended, boxes, strict=True)]
    if any(stretch is not None for stretch in stretches):
        forms = [stored_form(shard) for shard in map(_Shard._make, zip(*tensors, strict=True))]
        shapes, offsets, sizes = ([form[field] for form in forms] for field in range(3))
    return keys, list(map(dtype_name, dtypes)), shapes, offsets, sizes


def _encoded_mains(keys: list[str], dtypes: list[str], *boxes: list[Any]) -> bytes:
    return encode_plan([PlannedTable("", 0, TableColumns.of(keys, dtypes, zip(*boxes, strict=True)))])


def _encoded(value: Any) -> bytes:
    # Ranks that say the same say it by the same bytes, which pickles need not be. Shapes may be numpy's integers.
    return json.dumps(value, separators=(",", ":"), default=operator.index).encode()


_Ints = npt.NDArray[np.int64]

_SAVES, _LOADS = "saves", "loads"  # what is done with tensors, in messages
_DONE = {_SAVES: "saved", _LOADS: "loaded for all"}
_NAMED = 8


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


class PlannedTensors:
    """The tensors of plans that have been checked."""

    def __init__(self, items: _Items) -> None:
        self._items = items
        # Item of each key, which are numbered as they came. (`np.unique` imports all of `numpy.ma` when it is first
        # called: as long as all else here.)
        self.first = np.flatnonzero(np.diff(np.maximum.accumulate(items.key_ids), prepend=-1))
        self._numbers = {key: number for number, key in enumerate(items.keys)}

    def head(self, key: str) -> tuple[str, tuple[int, ...], int] | None:
        """dtype and global shape of a tensor, and the first rank that has a chunk of it; None if none has."""
        number = self._numbers.get(key)
        if number is None:
            return None
        item, items = int(self.first[number]), self._items
        return items.dtypes[items.dtype_ids[item]], items.numbers(item)[0], int(items.ranks[item])


def check_saves(plans: Sequence[RankPlan], accesses: Sequence[Sequence[bytes]] = ()) -> None:
    """Check what all ranks save, and with `accesses` (`Accesses.told`) what they hold. Raises `PlanError`."""
    planned = check_plans(plans)
    if not accesses:
        return
    if any(of_rank[0] for of_rank in accesses):
        # On some rank a wrapper has chosen others to write than are main replicas.
        pairs = zip(accesses, plans, strict=True)
        planned = check_plans([decoded_plans(mains[:1])[0] if mains[0] else plan for mains, plan in pairs])
    _check_replicas(planned, accesses, _SAVES)
    _check_objects(planned, accesses)


def check_requests(accesses: Sequence[Sequence[bytes]]) -> None:
    """Check what all ranks load, as Megatron does; any part of tensors on no regular grid. Raises `PlanError`."""
    plans = decoded_plans(of_rank[0] for of_rank in accesses)
    uneven = frozenset(key for encoded in {of_rank[1] for of_rank in accesses} for key in json.loads(encoded)[1])
    if uneven:
        _check_grids(uneven, plans, accesses)
    requested = check_plans(plans, _LOADS, partly=uneven)
    _check_replicas(requested, accesses, _LOADS)
    _check_objects(requested, accesses)


def _check_grids(uneven: frozenset[str], plans: Sequence[RankPlan], accesses: Sequence[Sequence[bytes]]) -> None:
    """Check that no rank holds a shard on a regular grid of a tensor of which another has one on none."""
    for rank, (plan, of_rank) in enumerate(zip(plans, accesses, strict=True)):
        replicas, of_this_rank = json.loads(of_rank[1])
        mains = chain.from_iterable(file.columns.keys for file in plan)
        even = uneven & {*mains, *(key for key, _, _ in replicas)} - set(of_this_rank)
        if even:
            raise PlanError(
                f"{min(even)}: rank {rank} holds a shard of it on a regular grid, and another rank one on none "
                "(axis_fragmentations None)"
            )


def _check_replicas(mains: PlannedTensors, accesses: Sequence[Sequence[bytes]], does: str) -> None:
    """Check that further replicas of ranks are copies of main ones."""
    first_with: dict[bytes, int] = {}
    for rank, of_rank in enumerate(accesses):
        first_with.setdefault(of_rank[1], rank)
    for encoded, rank in first_with.items():
        for key, dtype, shape in json.loads(encoded)[0]:
            main = mains.head(key)
            if main is None:
                raise PlanError(
                    f"{key}: rank {rank} holds a replica of it, and no rank the main one (replica_id 0), which alone "
                    f"is {_DONE[does]}"
                )
            if (dtype, tuple(shape)) != main[:2]:
                raise PlanError(
                    f"{key}: rank {main[2]} {does} {main[0]} of global shape {main[1]}, rank {rank} holds a replica of "
                    f"{dtype} of global shape {tuple(shape)}"
                )


def _check_objects(tensors: PlannedTensors, accesses: Sequence[Sequence[bytes]]) -> None:
    """Check that each object has one main replica, that there are as many of a key as its shape says, and no tensor."""
    numbers: dict[str, int] = {}
    held_by: dict[str, dict[str, int]] = {}
    decoded: dict[bytes, Any] = {}
    for rank, of_rank in enumerate(accesses):
        if of_rank[2] not in decoded:
            decoded[of_rank[2]] = json.loads(of_rank[2])
        mains, of_keys = decoded[of_rank[2]]
        for key, number in of_keys.items():
            tensor = tensors.head(key)
            if tensor is not None:
                raise PlanError(f"{key}: an object on rank {rank}, and a tensor on rank {tensor[2]}")
            numbers.setdefault(key, number)
        for key, unique_key in mains:
            of_key = held_by.setdefault(key, {})
            if unique_key in of_key:
                raise PlanError(
                    f"{unique_key}: an object of which rank {of_key[unique_key]} and rank {rank} hold a main replica "
                    "(replica_id 0)"
                )
            of_key[unique_key] = rank
    for key, number in numbers.items():
        found = held_by.get(key, {})
        if len(found) != number:
            raise PlanError(
                f"{key}: an object in {number} parts, and ranks hold main replicas (replica_id 0) of {len(found)}: "
                f"{', '.join(sorted(found)[:_NAMED])}{', ...' if len(found) > _NAMED else ''}"
            )


def check_plans(plans: Sequence[RankPlan], does: str = _SAVES, partly: Collection[str] = frozenset()) -> PlannedTensors:
    """Check every rank's tensors against those of all others.

    Raises `PlanError`, which names key and ranks, if they disagree on dtype or shape, or if chunks overlap, leave a gap
    or stick out (not of keys in `partly`). `does` is what the ranks do with the tensors, in words.
    """
    items = _joined(plans)
    planned = PlannedTensors(items)
    if not items.keys:
        return planned
    first = planned.first
    heads = first[items.key_ids]  # for each item the first one of its key
    alike = (items.dtype_ids == items.dtype_ids[heads]) & (items.ndims == items.ndims[heads])
    told = np.zeros(len(items.keys), dtype=bool)  # keys whose chunks are known to tile
    for ndim in np.flatnonzero(np.bincount(items.ndims[alike])).tolist():
        chosen = np.flatnonzero(alike & (items.ndims == ndim))
        if len(chosen) == len(items.key_ids):
            numbers = items.boxes.reshape(len(chosen), 3, ndim)  # as they are: there may be gigabytes
        else:
            numbers = items.boxes[items.positions[chosen][:, None] + np.arange(3 * ndim)].reshape(len(chosen), 3, ndim)
        rows = np.zeros(len(items.key_ids), dtype=np.int64)
        rows[chosen] = np.arange(len(chosen))
        alike[chosen] = _in_all_columns(numbers[:, 0] == numbers[rows[heads[chosen]], 0])
        key_ids = items.key_ids[chosen]
        told[key_ids] = _in_a_row(key_ids, numbers)[key_ids]
    if not alike.all():
        wrong = int(np.flatnonzero(~alike)[0])
        raise PlanError(_disagreement(items, int(heads[wrong]), wrong, does))
    if partly:
        told |= np.asarray([key in partly for key in items.keys])
    if not told.all():
        _check_one_by_one(items, first, ~told)
    return planned


def _joined(plans: Sequence[RankPlan]) -> _Items:
    key_numbers: dict[str, int] = {}
    dtype_numbers: dict[str, int] = {}
    of_list: dict[int, _Ints] = {}  # files with the same keys share one list of them
    tables = [file.columns for plan in plans for file in plan]
    for table in tables:
        if id(table.keys) not in of_list:
            numbers = [key_numbers.setdefault(key, len(key_numbers)) for key in table.keys]
            of_list[id(table.keys)] = _column(numbers)
    dtype_ids = [_column([])]
    for table in tables:
        of_table = _column([dtype_numbers.setdefault(name, len(dtype_numbers)) for name in table.dtypes])
        dtype_ids.append(of_table[_column(table.dtype_codes)] if table.keys else _column([]))
    ndims = np.concatenate([_column([]), *(_column(table.ndims) for table in tables)])
    return _Items(
        keys=list(key_numbers),
        key_ids=np.concatenate([_column([]), *(of_list[id(table.keys)] for table in tables)]),
        ranks=np.repeat(np.arange(len(plans)), [sum(len(file.columns.keys) for file in plan) for plan in plans]),
        dtypes=list(dtype_numbers),
        dtype_ids=np.concatenate(dtype_ids),
        ndims=ndims,
        boxes=np.concatenate([_column([]), *(_column(table.boxes) for table in tables)]),
        positions=np.cumsum(3 * ndims) - 3 * ndims,
    )


def _column(values: Any) -> _Ints:
    return np.asarray(values, dtype=np.int64)


def _in_a_row(key_ids: _Ints, numbers: _Ints) -> npt.NDArray[np.bool_]:
    """For each key, whether its chunks follow one another along one axis and span the others; False says nothing."""
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
    fits = (divided.sum(axis=1) <= 1) & (lengths > 0) & _in_all_columns(others == 0) & _in_all_columns(shapes > 0)
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


def _in_all_columns(values: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """`values.all(axis=1)` for a few long columns, of which numpy takes one row after the other."""
    found = np.ones(len(values), dtype=bool)
    for column in values.T:
        found &= column
    return found


def _disagreement(items: _Items, head: int, other: int, does: str = _SAVES) -> str:
    first, second = (
        f"{items.dtypes[items.dtype_ids[item]]} of global shape {items.numbers(item)[0]}" for item in (head, other)
    )
    key = items.keys[items.key_ids[other]]
    return f"{key}: rank {items.ranks[head]} {does} {first}, rank {items.ranks[other]} {second}"


def _check_one_by_one(items: _Items, first: _Ints, wanted: npt.NDArray[np.bool_]) -> None:
    """Check the tiling of the wanted keys, in the order of the keys."""
    boxes: dict[int, list[Box]] = {key_id: [] for key_id in np.flatnonzero(wanted).tolist()}
    for item in np.flatnonzero(wanted[items.key_ids]).tolist():
        _, offsets, sizes = items.numbers(item)
        boxes[int(items.key_ids[item])].append(Box(offsets, sizes))
    for key_id, of_key in boxes.items():
        problem = covers(items.numbers(int(first[key_id]))[0], of_key)
        if problem:
            holders = sorted(set(items.ranks[items.key_ids == key_id].tolist()))
            named = ", ".join(map(str, holders[:_NAMED])) + (", ..." if len(holders) > _NAMED else "")
            raise PlanError(f"{items.keys[key_id]}: {problem}; chunks of it are on rank {named}")
