"""Megatron's fully parallel save wrapper, whose ranks agree here on which of them saves what.

Megatron gathers every shard of every rank of the parallelization group on every rank, at each save, and all run the
same choice on that. Here the ranks tell the group's coordinator in columns, and what many say alike is sent and decoded
once. The coordinator alone chooses an owner for each shard, by Megatron's rule. Each rank is told of its own shards,
and an unchanged structure exchanges a few bytes.

Megatron's own code runs behind another strategy, and in wrappers that keep the distribution
(`do_cache_distribution`, or in files) or store replicas next to the main ones. It distributes all loads.
"""

from __future__ import annotations

import functools
import pickle
import secrets
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.core.ranks import RankGroup
from mcore_ckpt.megatron.calls import MegatronErrors, MegatronSave, current_save, in_progress, wrapper_group
from mcore_ckpt.megatron.versions import megatron_module
from mcore_ckpt.state.plan_check import Accesses
from mcore_ckpt.state.shards import is_main_replica, is_sharded_tensor, leaves

_WHAT = "distribute the save over the ranks"


@dataclass(frozen=True, slots=True)
class _Agreed:
    """What the ranks of a parallelization group have agreed on, as one of them knows it."""

    of: tuple[list[Any], ...]  # what all shards of this rank were (`Accesses`): the distribution follows from that
    place: tuple[int, int]  # rank in the group, and its size
    name: bytes  # the same on all ranks, and of no other agreement
    distribution: Any  # Megatron's `ShardDistribution`
    mains_are_saved: bool = False  # what the ranks save are the group's main replicas, each once


# --- what Megatron calls ----------------------------------------------------------------------------------------------


def as_agreed(stock: Any) -> Any:
    """A `determine_main_replica_uniform_distribution` that returns what the ranks have agreed on, if they have."""

    @functools.wraps(stock)
    def determine_main_replica_uniform_distribution(*args: Any, **kwargs: Any) -> Any:
        call = current_save()
        return stock(*args, **kwargs) if call is None or call.distribution is None else call.distribution

    return determine_main_replica_uniform_distribution


def distributing(stock: Any) -> Any:
    """An `apply_saving_parallelization` of Megatron's wrapper ahead of which its ranks agree."""

    @functools.wraps(stock)
    def apply_saving_parallelization(self: Any, sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if (call := current_save()) is None:  # not within Megatron's `save`
            with in_progress(MegatronSave()):
                return apply_saving_parallelization(self, sharded_state_dict, *args, **kwargs)
        keeps = self.do_cache_distribution or getattr(self, "pg_cache_path", None) is not None
        group_of = wrapper_group(self)
        if keeps or getattr(self, "replicate_local_replicas", False) or group_of is None:
            if call.meets_in is not None:
                with MegatronErrors():
                    group = call.meets_in()
                    with call.within(group):  # ahead of what Megatron gathers
                        group.each("agree on the options", lambda: None, wrap=SaveError)
            return stock(self, sharded_state_dict, *args, **kwargs)
        with MegatronErrors():
            group = group_of()
            with call.within(group):
                found = _agree(self, sharded_state_dict, group)
        call.mains_are_saved |= found.mains_are_saved
        call.distribution = found.distribution
        try:
            return stock(self, sharded_state_dict, *args, **kwargs)
        finally:
            call.distribution = None

    return apply_saving_parallelization


# --- what the ranks agree on ------------------------------------------------------------------------------------------


def _agree(wrapper: Any, sharded_state_dict: Any, group: RankGroup) -> _Agreed:
    """What the ranks of a group agreed on last, if all hold what they held; else newly. Raises on all."""
    shards = [leaf for leaf in leaves(sharded_state_dict) if is_sharded_tensor(leaf)]
    known: _Agreed | None
    known, place = wrapper.base_strategy.agreed_distribution, (group.rank, group.size)
    held: list[tuple[list[Any], ...]] = []

    def name() -> bytes:
        held.append(Accesses.of(sharded_state_dict).tensors)
        return known.name if known is not None and (known.of, known.place) == (held[0], place) else b""

    def same(one: bytes, other: bytes) -> bytes:
        return one if one == other else b""

    named = group.run_merged(_WHAT, name, same, bytes, wrap=SaveError)
    if named:
        assert known is not None
        return known
    found = wrapper.base_strategy.agreed_distribution = _chosen(shards, held[0], group)
    return found


def _chosen(shards: list[Any], columns: tuple[list[Any], ...], group: RankGroup) -> _Agreed:
    """What the coordinator chooses for the shards of all ranks, as far as this rank has part in it."""
    told = group.gather_parts(_WHAT, lambda: tell(shards), wrap=SaveError)

    def choose() -> list[tuple[bytes, bytes, bool]]:
        given, (own, are_mains) = secrets.token_bytes(8), distributed(told or ())
        return [(given, bits, are_mains) for bits in own]

    given, bits, mains_are_saved = group.scatter(_WHAT, choose, wrap=SaveError)
    id_of = megatron_module("utils")._sharded_tensor_shard_id  # noqa: SLF001  (by which Megatron asks for shards)
    own = list(map(id_of, compress(shards, flags_of(bits, len(shards)))))
    distribution = megatron_module("exchange_utils").ShardDistribution(
        dict.fromkeys(own, group.rank), set(own), {}, {shard_id: [group.rank] for shard_id in own}
    )
    return _Agreed(columns, (group.rank, group.size), given, distribution, mains_are_saved)


# --- who saves which shard --------------------------------------------------------------------------------------------

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


def tell(shards: Sequence[Any]) -> list[bytes]:
    """What a rank tells the coordinator of the sharded tensors that it holds, and whose replica is the main one."""
    codes: dict[Any, int] = {}
    forms: list[Form] = []
    own_codes = array("I")
    size_of = megatron_module("exchange_utils")._shard_size  # noqa: SLF001  (as versions differ in it)
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
    return [zlib.compress(told, 1), _bits([is_main_replica(shard) for shard in shards])]


def _bits(flags: Sequence[bool] | _Flags) -> bytes:
    return np.packbits(np.asarray(flags, dtype=bool)).tobytes()


def flags_of(bits: bytes, number: int) -> _Flags:
    """One flag for each of a rank's shards."""
    return np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=number).astype(bool)


def distributed(told: Sequence[Sequence[bytes]]) -> tuple[list[bytes], bool]:
    """For each rank, of what all have told (`tell`), a bit for each of its shards (`flags_of`): whether it saves that.
    And whether what they save are the group's main replicas, different shards, as all ranks describe them.
    """
    known: dict[bytes, int] = {}
    ranks_of: list[list[int]] = []  # of each kind of rank: those of one kind describe the same
    shards_of: list[_Ints] = []
    numbers: dict[ShardId, int] = {}  # of each shard of the group
    forms: list[Form] = []  # of each shard, that of the first rank that has it
    kinds: list[list[int]] = []  # of each shard, which kinds of rank hold it
    is_alike = True
    for rank, (described, _) in enumerate(told):
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
                kinds.append([])
            kinds[number].append(kind)
            is_alike &= forms[number] == form
            numbered.append(number)
        ranks_of.append([rank])
        shards_of.append(np.frombuffer(numbered, dtype=np.int64))
    of_rank = [shards_of[known[described]] for described, _ in told]
    mains = np.zeros(len(numbers), dtype=np.int64)  # how many replicas of each shard are main ones
    for own, (_, bits) in zip(of_rank, told, strict=True):
        np.add.at(mains, own[flags_of(bits, len(own))], 1)
    owners = _megatrons_owners(list(numbers), forms, mains > 0, kinds, ranks_of)
    return [_bits(owners[own] == rank) for rank, own in enumerate(of_rank)], is_alike and bool((mains <= 1).all())


def _megatrons_owners(
    ids: list[ShardId], forms: list[Form], here: _Flags, kinds: list[list[int]], ranks_of: list[list[int]]
) -> _Ints:
    """The rank that saves each shard, or -1 if it is not main `here`, as Megatron's `distribute_shards_to_ranks`
    chooses: first shards that few ranks hold, then large ones, each for the rank with the fewest bytes so far.
    """
    owners = np.full(len(ids), -1, dtype=np.int64)
    sizes = np.asarray([form.size_bytes for form in forms], dtype=np.int64)
    # The ranks that hold a shard, in rising order, twice where one holds it twice: alike for many shards.
    groups: dict[tuple[int, ...], int] = {}
    held_by = np.asarray([groups.setdefault(tuple(of_shard), len(groups)) for of_shard in kinds], dtype=np.int64)
    holders = [np.sort(np.concatenate([np.asarray(ranks_of[kind]) for kind in group])) for group in groups]
    times = np.asarray([len(ranks) for ranks in holders], dtype=np.int64)[held_by]
    alone = np.flatnonzero(here & (times == 1))
    owners[alone] = np.asarray([ranks[0] for ranks in holders], dtype=np.int64)[held_by[alone]]
    loads_bytes = np.zeros(sum(map(len, ranks_of)))
    np.add.at(loads_bytes, owners[alone], sizes[alone])
    shared = np.flatnonzero(here & (times > 1)).tolist()
    rows = zip(times[shared].tolist(), sizes[shared].tolist(), shared, strict=True)
    order = [(held, -size, *ids[number][:2], ids[number][2] or (), number) for held, size, number in rows]
    for *_, number in sorted(order):
        ranks = holders[held_by[number]]
        owners[number] = ranks[int(loads_bytes[ranks].argmin())]
        loads_bytes[owners[number]] += sizes[number]
    return owners
