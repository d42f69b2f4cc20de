"""Megatron's validation of access integrity, in the exchange that a save of this package makes anyway.

Megatron gathers all shards of all ranks on every rank, at each save and load, and sends the common state of rank 0 to
all. Within a save of ours it is asked for here, and done when the strategy agrees with the other ranks on the plan
(`save/_planning.py`): main replicas have to tile each tensor as that check says, and what has not changed since it was
checked is not checked again. Within a load the ranks tell the coordinator in columns. Elsewhere (another strategy,
local checkpoints, `validation="megatron"`) Megatron's own functions run.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import operator
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from mcore_ckpt.core.errors import OptionError, PlanError, SaveError
from mcore_ckpt.core.options import LoadOptions, SaveOptions
from mcore_ckpt.core.ranks import RankGroup, coordination_group
from mcore_ckpt.layout.accesses import Accesses
from mcore_ckpt.layout.plan_check import check_requests
from mcore_ckpt.megatron._errors import MegatronErrors
from mcore_ckpt.megatron._together import load_of_all
from mcore_ckpt.megatron._versions import CHECKPOINTING, megatron_module, patches
from mcore_ckpt.save.transaction import Validation

# Under this name Megatron warns of a common state that differs.
_logger = logging.getLogger(f"{CHECKPOINTING}.validation")


@dataclass(slots=True)
class _Asked:
    """What Megatron has asked to be validated within one call of its `save`."""

    accesses: Accesses | None = None
    common: Any = None


_of_save: ContextVar[_Asked | None] = ContextVar("_of_save", default=None)
# By default group, the values of `SaveOptions.validation` that all ranks have had in a save.
_agreed: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
_of_load: ContextVar[bool] = ContextVar("_of_load", default=False)


@contextmanager
def validation_of_save(strategy: Any, strategy_class: type) -> Iterator[None]:
    """Within a call of Megatron's `save` with that strategy: what it asks to be validated is noted for the strategy."""
    while hasattr(strategy, "base_strategy"):
        strategy = strategy.base_strategy
    is_ours = strategy is None or type(strategy) is strategy_class
    options = getattr(strategy, "options", None) or SaveOptions.from_environment()
    if is_ours:
        _check_all_agree(options.validation)
    token = _of_save.set(_Asked() if is_ours and options.validation == "mcore_ckpt" else None)
    try:
        yield
    finally:
        _of_save.reset(token)


def _check_all_agree(validation: str) -> None:
    """Raise `OptionError` on all ranks unless all validate alike: Megatron's gather waits for all. Asked once of a
    value, in the life of the default group.
    """
    group = coordination_group()
    if group.size == 1:
        return
    agreed = _agreed.setdefault(dist.group.WORLD, set())
    if validation in agreed:
        return
    with MegatronErrors():
        found = group.run_merged(
            "agree on the validation", lambda: {validation}, operator.or_, lambda merged: merged, wrap=SaveError
        )
        if len(found) > 1:
            raise OptionError(
                f"validation is {validation!r} on rank {group.rank} of the save, and another on others: set "
                "MCORE_CKPT_VALIDATION alike on all hosts, or nowhere"
            )
    agreed.add(validation)


@contextmanager
def validation_of_load(options: LoadOptions) -> Iterator[None]:
    """Within a call of Megatron's `load`."""
    token = _of_load.set(options.validation == "mcore_ckpt")
    try:
        yield
    finally:
        _of_load.reset(token)


def noted_validation() -> Validation | None:
    """What the save in progress has to validate; None if nothing, or if Megatron has done so."""
    asked = _of_save.get()
    if asked is None or asked.accesses is None:
        return None
    if asked.common is None:
        return Validation(asked.accesses)
    return Validation(asked.accesses, _digest(asked.common), functools.partial(_compare_common, asked.common))


def _digest(common: Any) -> bytes:
    try:
        return hashlib.blake2b(pickle.dumps(common), digest_size=16).digest()
    except Exception:  # noqa: BLE001  (anything may be in there; the comparison tells what cannot be sent)
        return b""


def _compare_common(common: Any, group: RankGroup) -> None:
    """Warn on each rank whose common state is not that of the first, of which alone it is saved."""
    first = group.run_on_coordinator("compare the common state", lambda: common, wrap=SaveError)
    if group.is_coordinator:
        return
    try:
        only_first, only_here, mismatch = megatron_module("dict_utils").diff(first, common)
    except Exception:  # on this rank alone: the others continue the save
        _logger.exception("Rank %d common state dict cannot be compared with that of rank 0", group.rank)
        return
    if only_first or only_here or mismatch:
        _logger.warning(
            "Rank %d common state dict differs from rank 0 common state dict. Keys only on rank 0: %s, "
            "Keys only on %d: %s, Mismatched keys: %s",
            group.rank,
            only_first,
            group.rank,
            only_here,
            mismatch,
        )


class _Ungathered:
    """What all ranks hold, in the place of Megatron's list: gathered where it is iterated over, on all ranks then."""

    def __init__(self, accesses: Accesses, gather: Callable[[], Any], group: Any) -> None:
        self.accesses = accesses
        self.group = group
        self._gather = gather

    def __iter__(self) -> Iterator[Any]:
        return iter(self._gather()[1])


def replace_validation() -> None:
    """Put ours where Megatron's `save` and `load` ask for theirs; every other caller still gets that."""
    validation = megatron_module("validation")
    metadata_of, check = validation.determine_global_metadata, validation.validate_sharding_integrity
    for name in ("state_dict_utils", "strategies.fully_parallel", "serialization"):
        patches.set(megatron_module(name), "determine_global_metadata", _noting(metadata_of))
    for name in ("state_dict_utils", "strategies.fully_parallel", "validation"):
        patches.set(megatron_module(name), "validate_sharding_integrity", _checking(check))


def _noting(stock: Any) -> Any:
    @functools.wraps(stock)
    def determine_global_metadata(sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if _of_save.get() is None and not _of_load.get():
            return stock(sharded_state_dict, *args, **kwargs)
        gather = functools.partial(stock, sharded_state_dict, *args, **kwargs)
        group = args[0] if args else kwargs.get("process_group")
        return None, _Ungathered(Accesses.of(sharded_state_dict), gather, group)

    return determine_global_metadata


def _checking(stock: Any) -> Any:
    @functools.wraps(stock)
    def validate_sharding_integrity(global_metadata: Any, common_state_dict: Any = None) -> None:
        if not isinstance(global_metadata, _Ungathered):
            stock(global_metadata, common_state_dict)
        elif (asked := _of_save.get()) is None:
            with MegatronErrors():
                _check_load(global_metadata)
        elif asked.accesses is None:
            asked.accesses, asked.common = global_metadata.accesses, common_state_dict
        # A fully parallel wrapper asks again, of the distribution that it has made: that is the plan, which is checked.

    return validate_sharding_integrity


def _check_load(requested: _Ungathered) -> None:
    group = coordination_group(requested.group)
    what = "check what is loaded"
    told = group.run_gather_parts(what, requested.accesses.told, wrap=PlanError)
    group.run_on_coordinator(what, functools.partial(check_requests, told or ()), wrap=PlanError)
    if (together := load_of_all()) is not None:
        together.checks_in = False
