"""Megatron's validation of access integrity, in the exchange that a save of this package makes anyway.

Megatron gathers all shards of all ranks on every rank, at each save and load, and sends the common state of rank 0 to
all. Within a save of ours it is asked for here, and done when the strategy agrees with the other ranks on the plan
(`save/planner.py`): main replicas have to tile each tensor as that check says, and what has not changed since it was
checked is not checked again. Within a load the ranks tell the coordinator in columns. Elsewhere (another strategy,
local checkpoints) Megatron's own functions run.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import CheckpointError, PlanError, SaveError, attempt
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.core.ranks import RankGroup, carrying, coordination_group, mark_as_told, reached_every_rank
from mcore_ckpt.megatron._errors import MegatronErrors
from mcore_ckpt.megatron._joint_load import joint_load
from mcore_ckpt.megatron._versions import CHECKPOINTING, megatron_module, patches
from mcore_ckpt.save.plan_check import Accesses, check_requests
from mcore_ckpt.save.transaction import Validation

# Under this name Megatron warns of a common state that differs.
_logger = logger_of(f"{CHECKPOINTING}.validation")


@dataclass(slots=True)
class _Asked:
    """What Megatron has asked to be validated within one call of its `save`."""

    accesses: Accesses | None = None
    common: Any = None
    # A fully parallel wrapper has chosen others to save the main replicas, and has looked that they are the same.
    mains_are_saved: bool = False
    # The ranks of a wrapper's group, if an exchange between them comes ahead of any of all ranks, and is still to come.
    meets_in: Callable[[], RankGroup] | None = None
    # This rank has come to an exchange of all ranks. What fails before it, the others are told of there.
    has_come: bool = False

    def tell(self, error: BaseException) -> None:
        """Tell the others, in the exchanges that they come to first, what this rank has raised before."""
        if self.has_come or reached_every_rank(error):
            return
        groups = [everyone := coordination_group()]
        if self.meets_in is not None:
            within = self.meets_in()
            groups = [within, everyone] if within.size < everyone.size else [within]
        for group in groups:
            attempt(functools.partial(group.give_up, "save", error, wrap=SaveError))
        mark_as_told(error)


_of_save: ContextVar[_Asked | None] = ContextVar("_of_save", default=None)
_of_load: ContextVar[bool] = ContextVar("_of_load", default=False)


@contextmanager
def validation_of_save(strategy: Any, strategy_class: type, meets_in: Callable[[], RankGroup] | None) -> Iterator[None]:
    """Within a call of Megatron's `save` with that strategy: what it asks to be validated is noted for the strategy.
    What this rank raises before the first exchange, all ranks raise. `meets_in`: as of `_Asked`.
    """
    while hasattr(strategy, "base_strategy"):
        strategy = strategy.base_strategy
    if strategy is not None and type(strategy) is not strategy_class:
        with _as_asked(None):
            yield
        return
    options = getattr(strategy, "options", None) or SaveOptions.from_environment()
    # Ranks exchange or compare other things by other values. The exchange that comes first says whether they are alike.
    with carrying({"compare_replicas": options.compare_replicas}):
        asked = _Asked(meets_in=meets_in)
        with _as_asked(asked):
            try:
                yield
            except BaseException as error:
                asked.tell(error)
                raise


@contextmanager
def _as_asked(asked: _Asked | None) -> Iterator[None]:
    token = _of_save.set(asked)
    try:
        yield
    finally:
        _of_save.reset(token)


@contextmanager
def validation_of_load() -> Iterator[None]:
    """Within a call of Megatron's `load`."""
    token = _of_load.set(True)
    try:
        yield
    finally:
        _of_load.reset(token)


def come_to_exchange() -> None:
    """This rank comes to an exchange of the save in progress, in which all ranks are told what fails on one."""
    if (asked := _of_save.get()) is not None:
        asked.has_come = True


def come_to_exchange_within() -> None:
    """This rank comes to the exchange within the group of a wrapper, `_Asked.meets_in`."""
    if (asked := _of_save.get()) is not None:
        asked.meets_in = None


def meet(group: RankGroup, everyone: RankGroup) -> None:
    """Come together with the ranks of a group, ahead of what Megatron gathers: they are told of failures here."""
    try:
        group.run_merged("agree on the options", lambda: None, lambda _, __: None, lambda _: None, wrap=SaveError)
    except BaseException as error:
        tell_other_groups(group, everyone, error, "save", SaveError)
        raise


def tell_other_groups(
    group: RankGroup, everyone: RankGroup, error: BaseException, what: str, wrap: type[CheckpointError]
) -> None:
    """Tell the ranks of other groups, on their way to the next exchange of all, that this group has failed."""
    if group.size < everyone.size:
        attempt(functools.partial(everyone.give_up, what, error, wrap=wrap))
        mark_as_told(error)


def noted_validation() -> Validation | None:
    """What the save in progress has to validate, for the exchange that comes next; None if nothing, or if Megatron has
    done so.
    """
    come_to_exchange()
    asked = _of_save.get()
    if asked is None or asked.accesses is None:
        return None
    found = Validation(asked.accesses, mains_are_saved=asked.mains_are_saved)
    if asked.common is None:
        return found
    compare = functools.partial(_compare_common, asked.common)
    return found._replace(common_digest=_digest(asked.common), compare_common=compare)


def is_validated_here() -> bool:
    """Whether all ranks have come to a save that this package validates: then Megatron's validation gathers nothing."""
    return _of_save.get() is not None


def note_mains_are_saved() -> None:
    """What the ranks of a parallelization group save are the main replicas of the group, each once."""
    if (asked := _of_save.get()) is not None:
        asked.mains_are_saved = True


def _digest(common: Any) -> bytes:
    try:
        return hashlib.blake2b(pickle.dumps(common), digest_size=16).digest()
    except Exception:  # noqa: BLE001  (anything may be in there; the comparison tells what cannot be sent)
        return b""


def _compare_common(common: Any, group: RankGroup) -> None:
    """Warn on each rank whose common state is not that of the first, of which alone it is saved."""
    sent = group.run_on_coordinator("compare the common state", lambda: pickle.dumps(common), wrap=SaveError)
    if group.is_coordinator:
        return
    try:
        # Within the exchange, what does not unpickle would end it on this rank, and the others would wait.
        only_first, only_here, mismatch = megatron_module("dict_utils").diff(pickle.loads(sent), common)
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
        if (joint := joint_load()) is not None:
            joint.sync()
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
            if (joint := joint_load()) is not None:
                joint.sync()
            return stock(sharded_state_dict, *args, **kwargs)
        gather = functools.partial(stock, sharded_state_dict, *args, **kwargs)
        group = args[0] if args else kwargs.get("process_group")
        asked = _of_save.get()
        accesses = None if asked is None else asked.accesses
        if accesses is None:
            accesses = Accesses.of(sharded_state_dict)
        return None, _Ungathered(accesses, gather, group)

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
    if (joint := joint_load()) is not None:
        joint.has_made("check")
