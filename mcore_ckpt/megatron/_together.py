"""Whether the ranks of a load by Megatron-Core come to it together, and what one of them does that cannot go on.

To Megatron-Core 0.17 all ranks load together. Later ones let some load alone, but not where Megatron's `load` checks
the access integrity, as it does by default, or looks for keys that no rank asks for, nor behind a fully parallel
wrapper: there it gathers from all ranks. So all come together there, and one exchange more says whether their options
agree. Where ranks may load alone, only those whose options need the others come together; one whose options differ from
theirs is not notified there.

A rank that fails tells the others in the exchange that they come to next, as long as that is one of this package's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from mcore_ckpt.core.errors import LoadError, OptionError
from mcore_ckpt.core.failures import attempt
from mcore_ckpt.core.options import LoadOptions
from mcore_ckpt.core.ranks import RankGroup, coordination_group, mark_as_told, reached_every_rank
from mcore_ckpt.megatron._versions import differences, megatron_module

T = TypeVar("T")


@dataclass(slots=True)
class Together:
    """A load that all ranks of `group` have come to."""

    group: RankGroup
    # What ranks load is gathered or checked (`validates`: checked) after an exchange of this package, still to come.
    checks_in: bool
    validates: bool
    # The ranks between which a fully parallel wrapper distributes the load by exchanges of this package, if that is
    # still to come.
    distributes_in: Callable[[], RankGroup] | None
    reads_in: bool  # the strategy is ours, and still has to read
    ends_in: bool  # what was read is compared with its fingerprint by an exchange of this package, after all others

    def tell(self, error: BaseException) -> None:
        """Tell the others what this rank alone has raised, if they come to an exchange of this package, and to no other
        before. Those of other parallelization groups come to another one.
        """
        groups = [self.group] if self.checks_in or self.reads_in or self.ends_in else []
        if self.distributes_in is not None and not self.checks_in:
            within = self.distributes_in()
            groups = [within, *groups] if within.size < self.group.size else [within]
        for group in groups:
            attempt(partial(group.give_up, "load", error, wrap=LoadError))
            mark_as_told(error)


_of_load: ContextVar[Together | None] = ContextVar("_of_load", default=None)


def load_of_all() -> Together | None:
    """The load in progress, if all ranks have come to it, and that is known."""
    return _of_load.get()


def meet_for(
    options: LoadOptions,
    goes_back: bool,
    is_ours: bool,
    arguments: dict[str, Any],
    distributes: Callable[[], RankGroup] | None,
) -> Callable[[], Together] | None:
    """Come together with the other ranks, if they load together; None if ranks may load alone.

    Args:
        options: of this rank.
        goes_back: it goes back to an older checkpoint if this one is damaged, and has not begun to.
        is_ours: the strategy is this package's own, without a wrapper.
        arguments: of Megatron's `load` after the directory, by name.
        distributes: between which ranks a fully parallel wrapper around one distributes the load, as this package does.

    Raises:
        OptionError: on all ranks, if their options differ.
        LoadError: a rank is gone.
    """
    validation = megatron_module("validation")
    strict = validation.parse_strict_flag(arguments.get("strict", validation.StrictHandling.ASSUME_OK_UNEXPECTED))
    validates = bool(arguments.get("validate_access_integrity", True))
    wrapped = hasattr(arguments.get("sharded_strategy"), "base_strategy")
    needs_all = goes_back or wrapped or options.prove != "off"
    gathers = validation.StrictHandling.requires_global_app_metadata(strict)
    if not (differences().all_ranks_load or validates or gathers or needs_all):
        return None
    group = coordination_group(arguments.get("process_group"))
    _check_all_agree(goes_back, options, group)
    checks_in = (validates or gathers) and options.validation == "mcore_ckpt"
    reads_in = (is_ours or distributes is not None) and (checks_in or not (validates or gathers))
    # Behind a wrapper Megatron's exchange of tensors comes between.
    ends_in = reads_in and is_ours and options.prove != "off"
    return lambda: Together(group, checks_in, validates, distributes if reads_in else None, reads_in, ends_in)


def _check_all_agree(goes_back: bool, options: LoadOptions, group: RankGroup) -> None:
    """Raise `OptionError` on all ranks unless all go back, prove, validate and distribute alike: those that
    do otherwise exchange other things, and one alone would wait for ever.
    """
    values = [
        int(goes_back),
        ("off", "sample", "always").index(options.prove),
        int(options.validation == "megatron"),
        int(options.distribution == "megatron"),
    ]
    maxima = group.maximum("compare the options of a load", values + [-value for value in values], wrap=LoadError)
    named = {
        "on_damaged": "go_back" if goes_back else "raise",
        "prove": options.prove,
        "validation": options.validation,
        "distribution": options.distribution,
    }
    for (name, value), highest, negated_lowest in zip(
        named.items(), maxima[: len(values)], maxima[len(values) :], strict=True
    ):
        if highest != -negated_lowest:
            raise OptionError(
                f"{name} is {value!r} on rank {group.rank} of the load, and another on others: set "
                f"MCORE_CKPT_{name.upper()} alike on all hosts, or nowhere"
            )


@contextmanager
def as_load_of_all(together: Together | None) -> Iterator[None]:
    """Within the block, `load_of_all` is this one. What is raised there on this rank alone, the others are told."""
    token = _of_load.set(together)
    try:
        yield
    except BaseException as error:
        if together is not None and not reached_every_rank(error):
            together.tell(error)
        raise
    finally:
        _of_load.reset(token)
