"""A load by Megatron-Core to which all ranks come together, and how a rank that cannot continue tells the others.

To Megatron-Core 0.17 all ranks load together. Later ones let some load alone, but not where Megatron's `load` checks
the access integrity, as it does by default, or looks for keys that no rank asks for, nor behind a fully parallel
wrapper: there it gathers from all ranks. So all come together there, and one exchange more says whether their options
agree. Where ranks may load alone, only those whose options need the others come together; one whose options differ from
theirs is not notified there.

A rank that fails tells the others in the next exchange of this package (`RankGroup.give_up`). One is made ahead of
whatever Megatron gathers (`JointLoad.sync`), so that the others are never in a gather which this rank does not reach.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch.distributed as dist

from mcore_ckpt.core.errors import LoadError, OptionError, attempt
from mcore_ckpt.core.options import LoadOptions
from mcore_ckpt.core.ranks import RankGroup, coordination_group, mark_as_told, reached_every_rank
from mcore_ckpt.megatron._versions import differences, megatron_module, patches

_Exchange = Literal["options", "sync", "check", "load", "proof"]


@dataclass(slots=True)
class JointLoad:
    """A load to which all ranks of `group` have come.

    Attributes:
        group: the ranks.
        is_distributed: Megatron's fully parallel wrapper distributes the reads, so each byte is read by one rank.
        last: the last exchange of this package that the load is known to make.
    """

    group: RankGroup
    is_distributed: bool
    last: _Exchange
    _is_over: bool = False

    def sync(self) -> None:
        """Come together ahead of a gather of Megatron's. Raises on all ranks what one has raised before."""
        self.group.run_merged("load", lambda: None, lambda _, __: None, lambda _: None, wrap=LoadError)
        self.has_made("sync")

    def has_made(self, exchange: _Exchange) -> None:
        """Note that all ranks have come to an exchange."""
        self._is_over = exchange == self.last

    def tell(self, error: BaseException) -> None:
        """Tell the others what this rank alone has raised, if they still come to an exchange of this package."""
        if not self._is_over and not reached_every_rank(error):
            attempt(functools.partial(self.group.give_up, "load", error, wrap=LoadError))
            mark_as_told(error)


_joint_load: ContextVar[JointLoad | None] = ContextVar("_joint_load", default=None)


def joint_load() -> JointLoad | None:
    """The load in progress, if all ranks have come to it, and that is known."""
    return _joint_load.get()


@contextmanager
def joined_load(joint: JointLoad | None) -> Iterator[None]:
    """Within the block, `joint_load` is this one. What one rank raises there, it tells the others."""
    joint = None if joint is None else replace(joint)  # a load that goes back begins again
    token = _joint_load.set(joint)
    try:
        yield
    except BaseException as error:
        if joint is not None:
            joint.tell(error)
        raise
    finally:
        _joint_load.reset(token)


def join(options: LoadOptions, goes_back: bool, arguments: dict[str, Any]) -> JointLoad | None:
    """Come together with the other ranks, if they load together; None if ranks may load alone.

    Args:
        options: of this rank.
        goes_back: it goes back to an older checkpoint if this one is damaged, and has not begun to.
        arguments: of Megatron's `load` after the directory, by name.

    Raises:
        OptionError: on all ranks, if their options differ.
        LoadError: a rank is gone.
    """
    validation = megatron_module("validation")
    strict = validation.parse_strict_flag(arguments.get("strict", validation.StrictHandling.ASSUME_OK_UNEXPECTED))
    validates = bool(arguments.get("validate_access_integrity", True))
    gathers = validation.StrictHandling.requires_global_app_metadata(strict)
    strategy: Any = arguments.get("sharded_strategy")
    is_wrapped = hasattr(strategy, "base_strategy")
    needs_all = goes_back or is_wrapped or options.prove != "off"
    if not (differences().all_ranks_load or validates or gathers or needs_all):
        return None
    group = coordination_group(arguments.get("process_group"))
    _check_all_agree(goes_back, options, group)
    last: _Exchange = "options"
    if validates or gathers:
        last = "check" if validates else "sync"
    if is_ours(strategy):
        # Behind a wrapper Megatron's exchange of tensors comes between reading and the proof.
        last = "proof" if options.prove != "off" and not is_wrapped else "load"
    joint = JointLoad(group, is_wrapped and dist.get_world_size(strategy.parallelization_group) > 1, last)
    joint.has_made("options")
    return joint


def is_ours(strategy: Any) -> bool:
    """Whether a strategy of this package loads, behind a wrapper or not; None: the one that Megatron takes."""
    while hasattr(strategy, "base_strategy"):
        strategy = strategy.base_strategy
    return strategy is None or isinstance(getattr(strategy, "options", None), LoadOptions)


def _check_all_agree(goes_back: bool, options: LoadOptions, group: RankGroup) -> None:
    """Raise `OptionError` on all ranks unless all go back and prove alike: those that do otherwise exchange
    other things, and one alone would wait for ever.
    """
    values = [int(goes_back), ("off", "sample", "always").index(options.prove)]
    maxima = group.maximum("compare the options of a load", values + [-value for value in values], wrap=LoadError)
    named = {"on_damaged": "go_back" if goes_back else "raise", "prove": options.prove}
    for (name, value), highest, negated_lowest in zip(
        named.items(), maxima[: len(values)], maxima[len(values) :], strict=True
    ):
        if highest != -negated_lowest:
            raise OptionError(
                f"{name} is {value!r} on rank {group.rank} of the load, and another on others: set "
                f"MCORE_CKPT_{name.upper()} alike on all hosts, or nowhere"
            )


def sync_wrapped_loads() -> None:
    """Have the ranks come together ahead of what Megatron's fully parallel wrapper gathers for a load."""
    wrapper = megatron_module("strategies.fully_parallel").FullyParallelLoadStrategyWrapper
    stock = wrapper.load

    @functools.wraps(stock)
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (joint := joint_load()) is not None and is_ours(self):
            joint.sync()
        return stock(self, *args, **kwargs)

    patches.set(wrapper, "load", load)
