"""Which rank of a group saves each shard that several ranks of it hold.

Each rank tells the coordinator of the group its shards in columns, and ranks that hold the same ones send the same
bytes, of which one is sent and decoded. The coordinator chooses an owner for each shard, by the rule of Megatron-Core's
fully parallel save wrapper.
"""

from __future__ import annotations

import math
import pickle
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mcore_ckpt.state.shards import is_main_replica

_Ints = npt.NDArray[np.int64]
_Flags = npt.NDArray[np.bool_]

ShardId = tuple[str, tuple[int, ...], tuple[int, int] | None]
"""Key, global offset, and the stretch `[start, stop)` of a flattened shard: replicas have it in common."""


class Form(NamedTuple):
    """What a shard is besides its key. Many shards have the same."""

    offset: tuple[int, ...]
    stretch: tuple[int, int] | None
    dtype: Any
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    fragments: tuple[int, ...] | None
    prepended_axes: int
    size_bytes: int

    def shard_id(self, key: str) -> ShardId:
        """By which ranks know the shard of that key."""
        return key, self.offset, self.stretch


Columns = tuple[list[Any], ...]
"""What the distribution of a rank's shards follows from, to compare with that of another save."""


def columns_of(shards: Sequence[Any]) -> Columns:
    """Those of sharded tensors, as they are now."""
    return (
        [shard.key for shard in shards],
        [shard.dtype for shard in shards],
        [tuple(shard.global_shape) for shard in shards],
        [tuple(shard.global_offset) for shard in shards],
        [tuple(shard.local_shape) for shard in shards],
        [shard.prepend_axis_num for shard in shards],
        [shard.axis_fragmentations for shard in shards],
        [getattr(shard, "flattened_range", None) for shard in shards],
        [is_main_replica(shard) for shard in shards],
    )


def size_of(shard: Any) -> int:
    """Bytes of a sharded tensor, as it is stored."""
    stretch = getattr(shard, "flattened_range", None)
    elements: int = math.prod(shard.local_shape) if stretch is None else stretch.stop - stretch.start
    return elements * int(shard.dtype.itemsize)


def tell(shards: Sequence[Any], size_of: Callable[[Any], int] = size_of) -> list[bytes]:
    """What a rank tells the coordinator of the sharded tensors that it holds, and whose replica is the main one."""
    codes: dict[Any, int] = {}
    forms: list[Form] = []
    own_codes = array("I")
    for shard in shards:
        stretch = getattr(shard, "flattened_range", None)
        described = (
            tuple(shard.global_offset),
            None if stretch is None else (stretch.start, stretch.stop),
            shard.dtype,
            tuple(shard.local_shape),
            tuple(shard.global_shape),
            None if shard.axis_fragmentations is None else tuple(shard.axis_fragmentations),
            shard.prepend_axis_num,
        )
        code = codes.setdefault(described, len(codes))
        if code == len(forms):
            forms.append(Form(*described, int(size_of(shard))))
        own_codes.append(code)
    told = pickle.dumps(([shard.key for shard in shards], forms, own_codes), protocol=5)
    return [
        zlib.compress(told, 1),
        _bits([is_main_replica(shard) for shard in shards]),
    ]


def _bits(flags: Sequence[bool] | _Flags) -> bytes:
    return np.packbits(np.asarray(flags, dtype=bool)).tobytes()


def flags_of(bits: bytes, number: int) -> list[bool]:
    """One flag for each of a rank's shards."""
    found: list[bool] = _unpacked(bits, number).tolist()
    return found


def _unpacked(bits: bytes, number: int) -> _Flags:
    return np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=number).astype(bool)


class _Holders(NamedTuple):
    """Ranks that hold a shard, in rising order: with those that hold it twice, and each once."""

    times: _Ints
    ranks: _Ints


@dataclass(frozen=True, slots=True)
class Held:
    """What the ranks of a group hold, each shard once, numbered as the ranks have them."""

    ids: list[ShardId]
    forms: list[Form]  # of each, that of the first rank that has it
    sizes: _Ints  # bytes of each
    main_replicas: _Ints  # of each, how many of its replicas are main ones
    holders: list[_Holders]
    held_by: _Ints  # of each shard, which of `holders`
    odd: set[int]  # shards that some rank describes otherwise
    of_rank: list[_Ints]  # the shards of each rank, in its own order
    is_main: list[_Flags]  # which of those are main replicas

    @property
    def is_each_main_once(self) -> bool:
        """Whether the main replicas of the group are different shards, that all ranks describe alike."""
        return not self.odd and bool((self.main_replicas <= 1).all())


def merged(told: Sequence[Sequence[bytes]]) -> Held:
    """What all ranks have told (`tell`)."""
    known: dict[bytes, int] = {}
    ranks_of: list[list[int]] = []
    shards_of: list[_Ints] = []
    numbers: dict[ShardId, int] = {}
    forms: list[Form] = []
    kinds: list[list[int]] = []  # of each shard, which of `ranks_of` hold it
    odd: set[int] = set()
    for rank, (described, *_) in enumerate(told):
        kind = known.setdefault(described, len(known))
        if kind < len(ranks_of):
            ranks_of[kind].append(rank)
            continue
        keys, own_forms, codes = pickle.loads(zlib.decompress(described))
        numbered = array("q")
        for key, code in zip(keys, codes, strict=True):
            form = own_forms[code]
            number = numbers.setdefault((key, form.offset, form.stretch), len(numbers))
            if number == len(forms):
                forms.append(form)
                kinds.append([kind])
            else:
                kinds[number].append(kind)
                if forms[number] != form:
                    odd.add(number)
            numbered.append(number)
        ranks_of.append([rank])
        shards_of.append(np.frombuffer(numbered, dtype=np.int64))
    kind_of = [known[described] for described, *_ in told]
    of_rank = [shards_of[kind] for kind in kind_of]
    is_main = [_unpacked(of[1], len(own)) for of, own in zip(told, of_rank, strict=True)]
    main_replicas = np.zeros(len(numbers), dtype=np.int64)
    for own, flags in zip(of_rank, is_main, strict=True):
        np.add.at(main_replicas, own[flags], 1)
    groups: dict[tuple[int, ...], int] = {}
    held_by = [groups.setdefault(tuple(of_shard), len(groups)) for of_shard in kinds]
    return Held(
        ids=list(numbers),
        forms=forms,
        sizes=np.asarray([form.size_bytes for form in forms], dtype=np.int64),
        main_replicas=main_replicas,
        holders=[_holders([ranks_of[kind] for kind in group]) for group in groups],
        held_by=np.asarray(held_by, dtype=np.int64),
        odd=odd,
        of_rank=of_rank,
        is_main=is_main,
    )


def _holders(ranks: Sequence[Sequence[int]]) -> _Holders:
    times = np.sort(np.concatenate([np.asarray(some, dtype=np.int64) for some in ranks]))
    return _Holders(times, times[np.diff(times, prepend=-1) > 0])


Owners = _Ints
"""Of each shard, the rank that has been chosen, or -1."""


def megatrons_owners(held: Held) -> Owners:
    """Owners as Megatron-Core's `distribute_shards_to_ranks` chooses them for a save, of one parallelization group."""
    here = held.main_replicas > 0
    owners = np.full(len(here), -1, dtype=np.int64)
    _choose(held, here, _Loads(len(held.of_rank)), owners)
    return owners


class _Loads:
    """Bytes of each rank so far."""

    def __init__(self, ranks: int) -> None:
        self.ranks = np.zeros(ranks)

    def add(self, ranks: int | _Ints, sizes_bytes: int | _Ints) -> None:
        """Give a rank so much more, or several."""
        np.add.at(self.ranks, ranks, sizes_bytes)

    def least(self, ranks: _Ints) -> int:
        """The first of those ranks with the least."""
        if len(ranks) == len(self.ranks):
            return int(self.ranks.argmin())
        return int(ranks[int(self.ranks[ranks].argmin())])


def _choose(held: Held, some: _Flags, loads: _Loads, owners: Owners) -> None:
    """Choose owners of some shards: of those that few ranks hold first, then of large ones."""
    coverage = np.asarray([len(holders.times) for holders in held.holders], dtype=np.int64)[held.held_by]
    alone = np.flatnonzero(some & (coverage == 1))
    first = np.asarray([holders.ranks[0] for holders in held.holders], dtype=np.int64)
    owners[alone] = first[held.held_by[alone]]
    loads.add(owners[alone], held.sizes[alone])
    shared = np.flatnonzero(some & (coverage > 1)).tolist()
    keys = [
        (times, -size, key, offset, stretch or (), number)
        for number, times, size, (key, offset, stretch) in zip(
            shared,
            coverage[shared].tolist(),
            held.sizes[shared].tolist(),
            map(held.ids.__getitem__, shared),
            strict=True,
        )
    ]
    keys.sort()
    for number in map(itemgetter(-1), keys):
        rank = loads.least(held.holders[held.held_by[number]].ranks)
        owners[number] = rank
        loads.add(rank, int(held.sizes[number]))


def own_of_each_rank(held: Held, owners: Owners) -> list[bytes]:
    """For each rank a bit for each of its shards (`flags_of`): whether it saves that. Without an owner a shard stays
    with its main replicas, if there are any.
    """
    answers: list[bytes] = []
    for rank, (own, flags) in enumerate(zip(held.of_rank, held.is_main, strict=True)):
        chosen = owners[own]
        answers.append(_bits((chosen == rank) | ((chosen < 0) & flags)))
    return answers
