"""Megatron's fully parallel save wrapper, whose ranks agree here on which of them saves what.

Megatron gathers every shard of every rank of the parallelization group on every rank, at each save, and all
run the same choice on that. Here the ranks tell the group's coordinator in columns, what many say alike is sent once,
and the coordinator alone chooses, as Megatron does (`megatron/_distribution.py`). Each rank is told of its own
shards, and an unchanged structure exchanges a few bytes.

Megatron's own code runs behind another strategy, and in wrappers that keep the distribution
(`do_cache_distribution`, or in files) or store replicas next to the main ones. It distributes all loads.
"""

from __future__ import annotations

import functools
import secrets
import weakref
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any

import torch.distributed as dist

from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.core.ranks import RankGroup, coordination_group
from mcore_ckpt.megatron._distribution import (
    Columns,
    columns_of,
    flags_of,
    megatrons_owners,
    merged,
    own_of_each_rank,
    tell,
)
from mcore_ckpt.megatron._errors import MegatronErrors
from mcore_ckpt.megatron._validation import (
    come_to_exchange_within,
    is_validated_here,
    meet,
    note_mains_are_saved,
    tell_other_groups,
)
from mcore_ckpt.megatron._versions import differences, megatron_module, patches
from mcore_ckpt.state.shards import is_sharded_tensor, leaves

_WHAT = "distribute the save over the ranks"


@dataclass(frozen=True, slots=True)
class _Agreed:
    """What the ranks of a parallelization group have agreed on, as one of them knows it."""

    of: Columns
    place: tuple[int, int]  # rank in the group, and its size
    name: bytes  # the same on all ranks, and of no other agreement
    distribution: Any  # Megatron's `ShardDistribution`
    mains_are_saved: bool = False  # what the ranks save are the group's main replicas, each once


# Of each wrapper. As long as all ranks of its group hold what they held, it stays.
_agreed: weakref.WeakKeyDictionary[Any, _Agreed] = weakref.WeakKeyDictionary()
# What Megatron's wrapper is to be told when it asks.
_found: ContextVar[Any] = ContextVar("_found", default=None)


def replace_wrappers() -> None:
    """Put ours where Megatron's wrapper asks who saves what."""
    module = megatron_module("strategies.fully_parallel")
    determining = _determining(module.determine_main_replica_uniform_distribution)
    patches.set(module, "determine_main_replica_uniform_distribution", determining)
    saves = module.FullyParallelSaveStrategyWrapper
    patches.set(saves, "apply_saving_parallelization", _applying(saves.apply_saving_parallelization))


def _served_group(wrapper: Any) -> Callable[[], RankGroup] | None:
    """The ranks over which a wrapper distributes a save in the way of this package; None if it does so in another way.
    To be called by all of them.
    """
    of_base = getattr(wrapper.base_strategy, "options", None)
    if not isinstance(of_base, SaveOptions):
        return None
    keeps = wrapper.do_cache_distribution or getattr(wrapper, "pg_cache_path", None) is not None
    if keeps or getattr(wrapper, "replicate_local_replicas", False):
        return None
    group = wrapper.parallelization_group
    return None if dist.get_world_size(group) == 1 else partial(coordination_group, group)


def first_group(strategy: Any) -> Callable[[], RankGroup] | None:
    """The ranks between which a save with this strategy has its first exchange; None if that is of all ranks.

    Where Megatron writes the common state ahead (to 0.18), all meet there. Later, behind a wrapper, its group does.
    """
    if not (differences().common_state_is_an_object and dist.is_initialized()):
        return None
    if not isinstance(getattr(getattr(strategy, "base_strategy", None), "options", None), SaveOptions):
        return None
    group = strategy.parallelization_group
    return None if dist.get_world_size(group) == 1 else partial(coordination_group, group)


# --- what Megatron calls ----------------------------------------------------------------------------------------------


def _determining(stock: Any) -> Any:
    @functools.wraps(stock)
    def determine_main_replica_uniform_distribution(*args: Any, **kwargs: Any) -> Any:
        found = _found.get()
        return stock(*args, **kwargs) if found is None else found

    return determine_main_replica_uniform_distribution


def _applying(stock: Any) -> Any:
    @functools.wraps(stock)
    def apply_saving_parallelization(self: Any, sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        group_of, meets_in = _served_group(self), first_group(self)
        if group_of is None:
            if meets_in is not None and is_validated_here():
                with MegatronErrors():
                    come_to_exchange_within()
                    meet(meets_in(), coordination_group())
            return stock(self, sharded_state_dict, *args, **kwargs)
        with MegatronErrors():
            group = group_of()
            come_to_exchange_within()
            try:
                found = _agree(self, sharded_state_dict, group)
            except BaseException as error:
                if is_validated_here():
                    tell_other_groups(group, coordination_group(), error, _WHAT, SaveError)
                raise
        if found.mains_are_saved:
            note_mains_are_saved()
        token = _found.set(found.distribution)
        try:
            return stock(self, sharded_state_dict, *args, **kwargs)
        finally:
            _found.reset(token)

    return apply_saving_parallelization


# --- what the ranks agree on ------------------------------------------------------------------------------------------


def _agree(wrapper: Any, sharded_state_dict: Any, group: RankGroup) -> _Agreed:
    """What the ranks of a group agreed on last, if all hold what they held; else newly. Raises on all."""
    shards = [leaf for leaf in leaves(sharded_state_dict) if is_sharded_tensor(leaf)]
    known, place = _agreed.get(wrapper), (group.rank, group.size)
    held: list[Columns] = []

    def name() -> bytes:
        held.append(columns_of(shards))
        return known.name if known is not None and (known.of, known.place) == (held[0], place) else b""

    def same(one: bytes, other: bytes) -> bytes:
        return one if one == other else b""

    named = group.run_merged(_WHAT, name, same, bytes, wrap=SaveError)
    if named:
        assert known is not None
        return known
    found = _agreed[wrapper] = _chosen(shards, held[0], group)
    return found


def _chosen(shards: list[Any], columns: Columns, group: RankGroup) -> _Agreed:
    """What the coordinator chooses for the shards of all ranks, as far as this rank has part in it."""
    told = group.run_gather_parts(_WHAT, lambda: tell(shards, _megatrons_size), wrap=SaveError)

    def choose() -> list[tuple[bytes, bytes, bool]]:
        held = merged(told or ())
        given, own = secrets.token_bytes(8), own_of_each_rank(held, megatrons_owners(held))
        return [(given, bits, held.is_each_main_once) for bits in own]

    given, bits, mains_are_saved = group.run_scattered(_WHAT, choose, wrap=SaveError)
    own = _shard_ids(compress(shards, flags_of(bits, len(shards))))
    distribution = megatron_module("exchange_utils").ShardDistribution(
        dict.fromkeys(own, group.rank), set(own), {}, {shard_id: [group.rank] for shard_id in own}
    )
    return _Agreed(columns, (group.rank, group.size), given, distribution, mains_are_saved)


def _shard_ids(shards: Iterable[Any]) -> list[Any]:
    """By which Megatron asks a distribution for shards."""
    return list(map(megatron_module("utils")._sharded_tensor_shard_id, shards))  # noqa: SLF001


def _megatrons_size(shard: Any) -> int:
    return int(megatron_module("exchange_utils")._shard_size(shard))  # noqa: SLF001  (as versions differ in it)
