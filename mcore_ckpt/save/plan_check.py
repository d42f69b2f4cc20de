"""What the coordinator checks: the slices of each tensor tile it, none missing, none twice, none outside; and that the
replicas that ranks hold without saving them equal those that are saved.

`Accesses` are what ranks hold besides what they write: with them the same check validates Megatron's access integrity.

A replica is told by 8 bytes of a hash of its slice's key and place. What a rank has summed is told in one number of a
fixed size: the sum of a hash of slice and CRC-32 over its replicas. The coordinator knows how many ranks hold each
slice, and the CRC-32 of what is saved of it, so it knows what the numbers of all ranks have to come to. Only if they do
not, each rank sends 12 bytes for each replica, which say what differs.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress
from operator import itemgetter
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mcore_ckpt.core.boxes import Box, covers
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import PlanError
from mcore_ckpt.core.fingerprints import DivergedReplica
from mcore_ckpt.format.index import parse_shadow_key
from mcore_ckpt.save.buckets import GlobalPlan, LocalPlan, TensorSpec, decoded_plans
from mcore_ckpt.state.shards import (
    contents,
    is_main,
    is_main_replica,
    is_sharded_tensor,
    leaves,
    leaves_by_kind,
    noted_shapes,
    stored_form,
)
from mcore_ckpt.state.torch_classes import PLAIN, dtype_name


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
        """Those of a nested dict/list, as they are now."""
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

    def told(self, written: Sequence[TensorSpec] | None = None, *, mains_are_written: bool = False) -> list[bytes]:
        """What the coordinator is told of them (`plan_check.py`): main replicas, other replicas, objects. Of main
        replicas nothing, where they are what the plan of this rank says that it has `written`, or are known to be what
        all ranks together have.
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
            b"" if is_written else _plan_of(*mains).encode(),
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


def _plan_of(keys: list[str], dtypes: list[str], shapes: list[Any], offsets: list[Any], sizes: list[Any]) -> LocalPlan:
    codes = {dtype: code for code, dtype in enumerate(dict.fromkeys(dtypes))}
    boxes = chain.from_iterable(chain.from_iterable(zip(shapes, offsets, sizes, strict=True)))
    return LocalPlan(
        keys=keys,
        dtypes=list(codes),
        dtype_codes=array("i", map(codes.__getitem__, dtypes)),
        files=[],
        file_bytes=[],
        file_codes=array("i"),
        ndims=array("i", map(len, shapes)),
        boxes=array("q", boxes),
        places=array("q"),
    )


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

    def __init__(self, items: _Items, first: _Ints) -> None:
        self._items = items
        self.first = first  # item of each key
        self._numbers = {key: number for number, key in enumerate(items.keys)}

    @classmethod
    def of(cls, items: _Items) -> PlannedTensors:
        """Those of these items. They are numbered as they came."""
        # (`np.unique` imports all of `numpy.ma` when it is first called: as long as all else here.)
        return cls(items, np.flatnonzero(np.diff(np.maximum.accumulate(items.key_ids), prepend=-1)))

    def head(self, key: str) -> tuple[str, tuple[int, ...], int] | None:
        """dtype and global shape of a tensor, and the first rank that has a chunk of it; None if none has."""
        number = self._numbers.get(key)
        if number is None:
            return None
        item, items = int(self.first[number]), self._items
        return items.dtypes[items.dtype_ids[item]], items.numbers(item)[0], int(items.ranks[item])


def global_plan(
    told: Sequence[tuple[bytes, Mapping[str, tuple[int, ...]]]], accesses: Sequence[Sequence[bytes]] = ()
) -> GlobalPlan:
    """Put the plans of all ranks, and their notes on shapes of parameters, together. Raises `PlanError`.

    With `accesses`, what ranks tell of all that they hold (`Accesses.told`) is checked, too.
    """
    plans = decoded_plans(encoded for encoded, _ in told)
    planned = check_plans(plans)
    if accesses:
        _check_told(accesses, plans, planned)
    files = sorted(pair for plan in plans for pair in zip(plan.files, plan.file_bytes, strict=True))
    return GlobalPlan(tuple(encoded for encoded, _ in told), tuple(files), noted_shapes(shapes for _, shapes in told))


def _check_told(accesses: Sequence[Sequence[bytes]], plans: Sequence[LocalPlan], planned: PlannedTensors) -> None:
    if any(of_rank[0] for of_rank in accesses):
        # On some rank a wrapper has chosen others to write than are main replicas.
        pairs = zip(accesses, plans, strict=True)
        planned = check_plans([LocalPlan.decode(mains[0]) if mains[0] else plan for mains, plan in pairs])
    _check_replicas(planned, accesses, _SAVES)
    _check_objects(planned, accesses)


def check_requests(accesses: Sequence[Sequence[bytes]]) -> None:
    """Check what all ranks are going to load, as Megatron does: `Accesses.told` of each. Raises `PlanError`.

    Of tensors whose shards lie on no regular grid any part may be asked for, if that is so of all of their shards.
    """
    plans = decoded_plans(of_rank[0] for of_rank in accesses)
    uneven = frozenset(key for encoded in {of_rank[1] for of_rank in accesses} for key in json.loads(encoded)[1])
    if uneven:
        _check_grids(uneven, plans, accesses)
    requested = check_plans(plans, _LOADS, partly=uneven)
    _check_replicas(requested, accesses, _LOADS)
    _check_objects(requested, accesses)


def _check_grids(uneven: frozenset[str], plans: Sequence[LocalPlan], accesses: Sequence[Sequence[bytes]]) -> None:
    """Check that no rank holds a shard on a regular grid of a tensor of which another has one on none."""
    for rank, (plan, of_rank) in enumerate(zip(plans, accesses, strict=True)):
        replicas, of_this_rank = json.loads(of_rank[1])
        even = uneven & {*plan.keys, *(key for key, _, _ in replicas)} - set(of_this_rank)
        if even:
            raise PlanError(
                f"{min(even)}: rank {rank} holds a shard of it on a regular grid, and another rank one on none "
                "(axis_fragmentations None)"
            )


def _check_replicas(mains: PlannedTensors, accesses: Sequence[Sequence[bytes]], does: str) -> None:
    """Check that what ranks hold besides main replicas are copies of those."""
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


def check_plans(
    plans: Sequence[LocalPlan], does: str = _SAVES, partly: Collection[str] = frozenset()
) -> PlannedTensors:
    """Check every rank's tensors against those of all others.

    Raises `PlanError`, which names key and ranks, if they disagree on dtype or shape, or if chunks overlap, leave a gap
    or stick out (not of keys in `partly`). A shadow copy need not be complete; what it copies has to be saved, in the
    same dtype and shape. `does` is what the ranks do with the tensors, in words.
    """
    items = _joined(plans)
    planned = PlannedTensors.of(items)
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
    shadows = [key_id for key_id, key in enumerate(items.keys) if parse_shadow_key(key) is not None]
    if shadows:
        told[shadows] = True
        _check_shadow_copies(items, first, shadows)
    if not told.all():
        _check_one_by_one(items, first, ~told)
    return planned


def _joined(plans: Sequence[LocalPlan]) -> _Items:
    key_numbers: dict[str, int] = {}
    dtype_numbers: dict[str, int] = {}
    of_list: dict[int, _Ints] = {}  # ranks with the same keys share one list of them
    for plan in plans:
        if id(plan.keys) not in of_list:
            numbers = [key_numbers.setdefault(key, len(key_numbers)) for key in plan.keys]
            of_list[id(plan.keys)] = _column(numbers)
    dtype_ids = [_column([])]
    for plan in plans:
        of_rank = _column([dtype_numbers.setdefault(name, len(dtype_numbers)) for name in plan.dtypes])
        dtype_ids.append(of_rank[_column(plan.dtype_codes)] if plan.keys else _column([]))
    ndims = np.concatenate([_column([]), *(_column(plan.ndims) for plan in plans)])
    return _Items(
        keys=list(key_numbers),
        key_ids=np.concatenate([_column([]), *(of_list[id(plan.keys)] for plan in plans)]),
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
    `numbers`: chunks x (shape, offsets, sizes) x axes.
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


def _check_shadow_copies(items: _Items, first: _Ints, shadows: Sequence[int]) -> None:
    """Check that the chunks of copies lie inside the tensors that they copy."""
    numbers = {key: key_id for key_id, key in enumerate(items.keys)}
    for item in np.flatnonzero(np.isin(items.key_ids, shadows)).tolist():
        key, rank = items.keys[items.key_ids[item]], items.ranks[item]
        shadow = parse_shadow_key(key)
        if shadow is None or shadow.fqn not in numbers:
            raise PlanError(f"{key}: rank {rank} saves a shadow copy of a tensor that no rank saves")
        original = int(first[numbers[shadow.fqn]])
        shape, offsets, sizes = items.numbers(item)
        if items.dtype_ids[item] != items.dtype_ids[original] or shape != items.numbers(original)[0]:
            raise PlanError(_disagreement(items, original, item))
        if any(start < 0 or start + size > whole for start, size, whole in zip(offsets, sizes, shape, strict=True)):
            raise PlanError(
                f"{key}: rank {rank} saves the slice at {list(offsets)} of sizes {list(sizes)}, which does not lie "
                f"inside the shape {list(shape)}"
            )


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


_SAMPLE: Final = 16  # one slice in so many

_Ids = npt.NDArray[np.uint64]


class ReplicaDigest(NamedTuple):
    """Of the replicas of one rank, or of several: how many, and the sum of their hashes, modulo 2^64."""

    replicas: int
    total: int

    def added(self, other: ReplicaDigest) -> ReplicaDigest:
        """Of the replicas of both."""
        return ReplicaDigest(self.replicas + other.replicas, (self.total + other.total) % 2**64)


class ReplicaSums(NamedTuple):
    """Of the replicas of one rank: the slice of each (`array('Q')`), and the CRC-32 of its elements (`array('I')`)."""

    slices: array[int]
    crcs: array[int]

    @classmethod
    def none(cls) -> ReplicaSums:
        """Of a rank that has none."""
        return cls(array("Q"), array("I"))

    def digest(self) -> ReplicaDigest:
        """All of them in one number."""
        return digest_of(np.array(self.slices, np.uint64), np.array(self.crcs, np.uint32))


def slice_id(key: str, offsets: Sequence[int], sizes: Sequence[int]) -> int:
    """By which ranks know a slice of a tensor, as it is stored."""
    text = f"{key}\0{','.join(map(str, offsets))}\0{','.join(map(str, sizes))}"
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def slice_ids(plans: Iterable[LocalPlan]) -> array[int]:
    """Of all items that ranks write, in the order of their plans."""
    found = array("Q")
    for plan in plans:
        numbers, at = plan.boxes.tolist(), 0
        for key, ndim in zip(plan.keys, plan.ndims, strict=True):
            found.append(slice_id(key, numbers[at + ndim : at + 2 * ndim], numbers[at + 2 * ndim : at + 3 * ndim]))
            at += 3 * ndim
    return found


def digest_of(slices: _Ids, crcs: npt.NDArray[np.uint32], times: npt.NDArray[np.int64] | None = None) -> ReplicaDigest:
    """Of replicas of these slices, each so many times (None: once), with these CRC-32s."""
    mixed = slices ^ (crcs.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    # The finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    if times is None:
        return ReplicaDigest(len(slices), int(mixed.sum(dtype=np.uint64)))
    return ReplicaDigest(int(times.sum()), int((mixed * times.astype(np.uint64)).sum(dtype=np.uint64)))


def is_sampled(slices: _Ids, save_id: bytes) -> npt.NDArray[np.bool_]:
    """Which of these slices are compared where one in 16 is; others in each save."""
    found: npt.NDArray[np.bool_] = slices % np.uint64(_SAMPLE) == np.uint64(_sampled(save_id))
    return found


def _sampled(save_id: bytes) -> int:
    return int.from_bytes(save_id[:8], "little") % _SAMPLE


def held_slices(tree: Any) -> bytes:
    """The slices in a nested dict/list that this rank holds, saved by itself or by others: 8 bytes for each.
    Data-parallel ranks say the same, and so it travels once.
    """
    return array("Q", (number for number, _ in _comparable(tree))).tobytes()


def replica_sums(tree: Any, save_id: bytes, *, sample: bool) -> ReplicaSums:
    """Sum the replicas in a nested dict/list that this rank holds and another one saves; `sample`: those of slices that
    `is_sampled`. Raises `PlanError` if the memory of one is not there.
    """
    found, chosen = ReplicaSums.none(), _sampled(save_id)
    for number, shard in _comparable(tree):
        if is_main_replica(shard) or (sample and number % _SAMPLE != chosen):
            continue
        found.slices.append(number)
        found.crcs.append(_crc_of(str(shard.key), shard.data))
    return found


def _comparable(tree: Any) -> Iterator[tuple[int, Any]]:
    """The sharded tensors whose elements can be summed, and the slice of each."""
    for shard in leaves(tree):
        if not is_sharded_tensor(shard) or parse_shadow_key(shard.key) is not None:
            continue
        data = shard.data
        if type(data) in PLAIN and data.layout is torch.strided and not data.is_meta:
            form = stored_form(shard)
            yield slice_id(shard.key, form.offsets, form.sizes), shard


def _crc_of(key: str, data: torch.Tensor) -> int:
    """Of the elements in C order."""
    value = 0
    with torch.no_grad():
        for content, _ in contents(key, data, tuple(data.shape), (0, data.numel())):
            value = crc32(content, value)
    return value


class ReplicaCheck:
    """Compares the replicas that ranks hold with what is saved; on the coordinator, of one plan. `held`: what each rank
    holds (`held_slices`).
    """

    def __init__(self, plan: GlobalPlan, held: Sequence[bytes]) -> None:
        self._plan = plan
        ids = np.array(slice_ids(plan.decoded()), np.uint64)
        self._order = np.argsort(ids, kind="stable")  # items of the plan
        self._ids = ids[self._order]
        holders = np.zeros(len(ids), np.int64)
        for slices, ranks in Counter(held).items():
            at, known = self._found(np.frombuffer(slices, np.uint64))
            np.add.at(holders, at[known], ranks)
        self._replicas = np.maximum(holders - 1, 0)  # of each id, how many there are besides the one that is saved

    def _found(self, ids: _Ids) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Where each of these ids stands in `_ids`, and whether it does."""
        if not len(self._ids):
            return np.zeros(len(ids), np.int64), np.zeros(len(ids), bool)
        at = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        return at, self._ids[at] == ids

    def are_equal(self, crcs: Sequence[int], digest: ReplicaDigest, sampled_in: bytes | None) -> bool:
        """Whether all replicas are what is saved, as far as their digest tells; False says nothing. `crcs`: of all
        items, in the order of the plan; `digest`: of what all ranks have summed, in that save one slice in 16.
        """
        times = self._replicas
        if sampled_in is not None:
            times = np.where(is_sampled(self._ids, sampled_in), times, 0)
        return digest_of(self._ids, np.array(crcs, np.uint32)[self._order], times) == digest

    def diverged(self, crcs: Sequence[int], replicas: Sequence[ReplicaSums]) -> list[DivergedReplica]:
        """Slices that ranks hold with other bits than they were saved with; `replicas`: of each rank."""
        saved = np.array(crcs, np.uint32)
        others: dict[int, list[int]] = {}
        for rank, (slices, sums) in enumerate(replicas):
            at, known = self._found(np.array(slices, np.uint64))
            items = self._order[at[known]]
            for item in items[saved[items] != np.array(sums, np.uint32)[known]].tolist():
                others.setdefault(item, []).append(rank)
        found, number = [], 0
        for rank, of_rank in enumerate(self._plan.decoded() if others else ()):
            boxes, at_box = of_rank.boxes.tolist(), 0
            for key, ndim in zip(of_rank.keys, of_rank.ndims, strict=True):
                if number in others:
                    offsets = tuple(boxes[at_box + ndim : at_box + 2 * ndim])
                    sizes = tuple(boxes[at_box + 2 * ndim : at_box + 3 * ndim])
                    found.append(DivergedReplica(key, offsets, sizes, rank, tuple(others[number]), rank))
                at_box += 3 * ndim
                number += 1
        return found
