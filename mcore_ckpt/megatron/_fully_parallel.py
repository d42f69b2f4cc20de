"""Megatron's fully parallel wrappers, whose ranks agree here on who saves and who loads what.

Megatron gathers every shard of every rank of the parallelization group on every rank, at each save and load, and all
run the same choice on that. Here the ranks tell the group's coordinator in columns, what many say alike is sent once,
and the coordinator alone chooses, as Megatron does (`layout/distribution.py`). For a save each rank is told of its own
shards, and an unchanged structure exchanges a few bytes. For a load all ranks are told of what they exchange: the
exchange of tensors stays Megatron's. Objects are not gathered: each rank reads those that it requests.

Megatron's own code runs where `distribution="megatron"` says so, behind another strategy, and in wrappers that keep
distributions in files or store replicas next to the main ones, as versions after 0.19 can.
"""

from __future__ import annotations

import copy
import functools
import inspect
import secrets
import weakref
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any

import torch.distributed as dist

from mcore_ckpt.core.errors import CheckpointError, LoadError, SaveError
from mcore_ckpt.core.options import LoadOptions, SaveOptions
from mcore_ckpt.core.ranks import RankGroup, coordination_group
from mcore_ckpt.layout.distribution import (
    Columns,
    Form,
    columns_of,
    decode_shared,
    encode_shared,
    flags_of,
    megatrons_owners,
    merged,
    own_of_each_rank,
    tell,
)
from mcore_ckpt.layout.shards import is_sharded_tensor, leaves
from mcore_ckpt.megatron._errors import MegatronErrors
from mcore_ckpt.megatron._together import load_of_all
from mcore_ckpt.megatron._validation import (
    come_to_exchange_within,
    is_validated_here,
    meet,
    note_mains_are_saved,
    tell_other_groups,
)
from mcore_ckpt.megatron._versions import differences, mapping, megatron_module, patches

_WHAT = {SaveError: "distribute the save over the ranks", LoadError: "distribute the load over the ranks"}


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
# Within a load whose ranks read objects themselves.
_reads_objects: ContextVar[bool] = ContextVar("_reads_objects", default=False)


def replace_wrappers() -> None:
    """Put ours where Megatron's wrappers ask who saves and who loads what, and where they gather objects."""
    module = megatron_module("strategies.fully_parallel")
    for name, replacement in (
        ("determine_main_replica_uniform_distribution", _determining),
        ("exchange_loaded_objects_gather_object", _not_gathering),
    ):
        patches.set(module, name, replacement(getattr(module, name)))
    saves, loads = module.FullyParallelSaveStrategyWrapper, module.FullyParallelLoadStrategyWrapper
    patches.set(saves, "apply_saving_parallelization", _applying(saves.apply_saving_parallelization))
    patches.set(loads, "apply_loading_parallelization", _loading(loads.apply_loading_parallelization))
    patches.set(loads, "load", _reading_objects(loads.load))
    deferring = loads._defer_loading_sharded_objects  # noqa: SLF001  (where a load says which objects it reads)
    patches.set(loads, "_defer_loading_sharded_objects", staticmethod(_deferring_none(deferring)))


def served_group(strategy: Any, options: type[SaveOptions] | type[LoadOptions]) -> Callable[[], RankGroup] | None:
    """The ranks over which a wrapper distributes saves or loads in the way of this package; None if it is no wrapper,
    or does so in another way. To be called by all of them.
    """
    of_base = getattr(getattr(strategy, "base_strategy", None), "options", None)
    if not isinstance(of_base, options) or of_base.distribution == "megatron" or not dist.is_initialized():
        return None
    if getattr(strategy, "pg_cache_path", None) is not None or getattr(strategy, "replicate_local_replicas", False):
        return None
    group = strategy.parallelization_group
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
        group_of, meets_in = served_group(self, SaveOptions), first_group(self)
        if isinstance(getattr(self.base_strategy, "options", None), SaveOptions):
            self.base_strategy.is_distributed = True
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
                found = _agree(self, sharded_state_dict, group, SaveError, _save_of)
            except BaseException as error:
                if is_validated_here():
                    tell_other_groups(group, coordination_group(), error, _WHAT[SaveError], SaveError)
                raise
        if found.mains_are_saved:
            note_mains_are_saved()
        return _called(stock, found, self, sharded_state_dict, *args, **kwargs)

    return apply_saving_parallelization


def _loading(stock: Any) -> Any:
    @functools.wraps(stock)
    def apply_loading_parallelization(self: Any, sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        group_of = served_group(self, LoadOptions)
        if group_of is None:
            return stock(self, sharded_state_dict, *args, **kwargs)
        together = load_of_all()
        with MegatronErrors():
            group = group_of()
            try:
                found = _agree(self, sharded_state_dict, group, LoadError, _load_of, keeps=self.do_cache_distribution)
            except BaseException as error:
                if together is not None:
                    together.distributes_in = None
                    if together.reads_in:
                        tell_other_groups(group, together.group, error, _WHAT[LoadError], LoadError)
                raise
        if together is not None:
            together.distributes_in = None
        return _called(stock, found, self, sharded_state_dict, *args, **kwargs)

    return apply_loading_parallelization


def _called(stock: Any, found: _Agreed, wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    if wrapper.cached_distribution is not found.distribution:
        wrapper.cached_distribution = None  # of another structure
    token = _found.set(found.distribution)
    try:
        return stock(wrapper, *args, **kwargs)
    finally:
        _found.reset(token)


def _reading_objects(stock: Any) -> Any:
    @functools.wraps(stock)
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        token = _reads_objects.set(served_group(self, LoadOptions) is not None)
        try:
            return stock(self, *args, **kwargs)
        finally:
            _reads_objects.reset(token)

    return load


def _deferring_none(stock: Any) -> Any:
    @functools.wraps(stock)
    def defer_loading_sharded_objects(sharded_state_dict: Any) -> Any:
        objects, others, read_here, read_elsewhere = stock(sharded_state_dict)
        if _reads_objects.get():
            read_here, read_elsewhere = {**read_here, **read_elsewhere}, {}
        return objects, others, read_here, read_elsewhere

    return defer_loading_sharded_objects


def _not_gathering(stock: Any) -> Any:
    @functools.wraps(stock)
    def exchange_loaded_objects_gather_object(loaded_objects: Any) -> Any:
        return loaded_objects if _reads_objects.get() else stock(loaded_objects)

    return exchange_loaded_objects_gather_object


# --- what the ranks agree on ------------------------------------------------------------------------------------------


def _agree(
    wrapper: Any,
    sharded_state_dict: Any,
    group: RankGroup,
    wrap: type[CheckpointError],
    renew: Callable[[list[Any], RankGroup], tuple[bytes, Any, bool]],
    *,
    keeps: bool = True,
) -> _Agreed:
    """What the ranks of a group agreed on last, if all hold what they held; else newly. Raises on all. Nothing
    is kept where the wrapper is not likely to be asked again.
    """
    shards = [leaf for leaf in leaves(sharded_state_dict) if is_sharded_tensor(leaf)]
    if not keeps:
        return _Agreed((), (group.rank, group.size), *renew(shards, group))
    known, place = _agreed.get(wrapper), (group.rank, group.size)
    held: list[Columns] = []

    def name() -> bytes:
        held.append(columns_of(shards))
        return known.name if known is not None and (known.of, known.place) == (held[0], place) else b""

    def same(one: bytes, other: bytes) -> bytes:
        return one if one == other else b""

    named = group.run_merged(_WHAT[wrap], name, same, bytes, wrap=wrap)
    if named:
        assert known is not None
        return known
    found = _Agreed(held[0], place, *renew(shards, group))
    _agreed[wrapper] = found
    return found


def _save_of(shards: list[Any], group: RankGroup) -> tuple[bytes, Any, bool]:
    """A name, the distribution of a save as far as this rank has part in it, and `_Agreed.mains_are_saved`."""
    what = _WHAT[SaveError]
    told = group.run_gather_parts(what, lambda: tell(shards, _megatrons_size), wrap=SaveError)

    def choose() -> list[tuple[bytes, bytes, bool]]:
        held = merged(told or ())
        owners = megatrons_owners(held, with_others=False, others_last=False)
        given, own = secrets.token_bytes(8), own_of_each_rank(held, owners)
        return [(given, bits, held.is_each_main_once) for bits in own]

    given, bits, mains_are_saved = group.run_scattered(what, choose, wrap=SaveError)
    own = _shard_ids(compress(shards, flags_of(bits, len(shards))))
    found = _distribution(dict.fromkeys(own, group.rank), {}, {shard_id: [group.rank] for shard_id in own})
    return given, found, mains_are_saved


def _load_of(shards: list[Any], group: RankGroup) -> tuple[bytes, Any, bool]:
    """A name, and the distribution of a load: all that ranks exchange, and besides what this rank alone holds."""
    what = _WHAT[LoadError]
    told = group.run_gather_parts(what, lambda: tell(shards, _megatrons_size), wrap=LoadError)

    def choose() -> tuple[bytes, bytes]:
        held = merged(told or ())
        owners = megatrons_owners(held, with_others=True, others_last=_chooses_others_last())
        return secrets.token_bytes(8), encode_shared(held, owners)

    given, encoded = group.run_on_coordinator(what, choose, wrap=LoadError)
    shared = decode_shared(encoded)
    own = dict(zip(_shard_ids(shards), shards, strict=True))
    ids = [form.shard_id(key) for key, form in zip(shared.keys, shared.forms, strict=True)]
    exchanged = set(ids)
    alone = [shard_id for shard_id in own if shard_id not in exchanged]
    described = {
        shard_id: _described(key, form) if (held := own.get(shard_id)) is None else _without_data(held)
        for shard_id, key, form in zip(ids, shared.keys, shared.forms, strict=True)
    }
    return (
        given,
        _distribution(
            {**dict.fromkeys(alone, group.rank), **dict(zip(ids, shared.owners, strict=True))},
            {**{shard_id: _without_data(own[shard_id]) for shard_id in alone}, **described},
            {**{shard_id: [group.rank] for shard_id in alone}, **dict(zip(ids, shared.holders, strict=True))},
        ),
        False,
    )


def _distribution(owners: dict[Any, int], described: dict[Any, Any], holders: dict[Any, list[int]]) -> Any:
    return megatron_module("exchange_utils").ShardDistribution(owners, set(owners), described, holders)


def _shard_ids(shards: Iterable[Any]) -> list[Any]:
    """By which Megatron asks a distribution for shards."""
    return list(map(megatron_module("utils")._sharded_tensor_shard_id, shards))  # noqa: SLF001


def _megatrons_size(shard: Any) -> int:
    return int(megatron_module("exchange_utils")._shard_size(shard))  # noqa: SLF001  (as versions differ in it)


def _chooses_others_last() -> bool:
    """Whether what no rank of the group holds as the main replica is chosen for after all else: from 0.13 on."""
    return len(inspect.signature(megatron_module("exchange_utils").distribute_shards_to_ranks).parameters) > 3


def _without_data(shard: Any) -> Any:
    blank = copy.copy(shard)
    blank.data = None
    return blank


def _described(key: str, form: Form) -> Any:
    return mapping().ShardedTensor(
        key=key,
        data=None,
        dtype=form.dtype,
        local_shape=form.local_shape,
        global_shape=form.global_shape,
        global_offset=form.offset,
        axis_fragmentations=form.fragments,
        prepend_axis_num=form.prepended_axes,
        flattened_range=None if form.stretch is None else slice(*form.stretch),
    )
