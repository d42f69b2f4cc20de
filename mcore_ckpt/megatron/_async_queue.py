"""Megatron's async queue, served by ours: its methods, and what its training code asks for by strategy name.

The methods of the class are replaced, not the class: training code makes queues when it is imported, frameworks keep
them as attributes, and all of them must be served. Each gets a queue of ours of its own at its first use.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.megatron import nvrx
from mcore_ckpt.megatron._patches import Patches
from mcore_ckpt.save.async_queue import AsyncCallsQueue

_ATTRIBUTE = "_mcore_ckpt_queue"
_FIRST_INDEX = "_mcore_ckpt_first_index"
_served: weakref.WeakSet[Any] = weakref.WeakSet()


def served_queue(queue: Any) -> AsyncCallsQueue:
    """The queue of ours that stands behind a queue of Megatron's; made at the first call."""
    ours: AsyncCallsQueue | None = vars(queue).get(_ATTRIBUTE)
    if ours is None:
        ours = AsyncCallsQueue(persistent=bool(getattr(queue, "persistent", False)))
        setattr(queue, _ATTRIBUTE, ours)
        _served.add(queue)
    return ours


def require_idle() -> None:
    """Raise `SaveError` unless every save of every served queue has been finalized."""
    waiting = sum(served_queue(queue).get_num_unfinalized_calls() for queue in list(_served))
    if waiting:
        raise SaveError(
            f"{waiting} async saves are not finalized yet, and the stock queue could not finish them; call "
            "maybe_finalize_async_calls(blocking=True) first"
        )
    for queue in list(_served):
        vars(queue).pop(_ATTRIBUTE, None)
    _served.clear()


def replace_methods(patches: Patches, stock: Any, errors: type[AbstractContextManager[None]]) -> None:
    """Let ours serve every instance of the stock queue class, and of its subclasses, old and new. Calls that the stock
    methods had in flight are finished by those.
    """
    finalize, close = stock.maybe_finalize_async_calls, stock.close
    close_takes_abort = "abort" in inspect.signature(close).parameters  # from 0.15 on

    def schedule_async_request(self: Any, async_request: Any) -> int:
        self.call_idx = served_queue(self).schedule_async_request(async_request) + _first_index(self)
        return int(self.call_idx)

    def maybe_finalize_async_calls(self: Any, blocking: bool = False, no_dist: bool = False) -> list[int]:
        before = finalize(self, blocking, no_dist) if self.async_calls else []
        if self.async_calls:
            return list(before)  # in order: what was scheduled later is finalized later
        with errors():
            indices = served_queue(self).maybe_finalize_async_calls(blocking, no_dist)
        return [*before, *(index + _first_index(self) for index in indices)]

    def get_num_unfinalized_calls(self: Any) -> int:
        return len(self.async_calls) + served_queue(self).get_num_unfinalized_calls()

    def close_both(self: Any, abort: bool = False) -> None:
        waits_for_work = getattr(stock, "_warmup_persistent_caller", None) is not None  # a worker of NVRx's
        if self.async_calls or getattr(self, "persistent_caller", None) is not None or waits_for_work:
            close(self, abort) if close_takes_abort else close(self)
        with errors():
            served_queue(self).close(abort=abort)

    patches.set(stock, "schedule_async_request", schedule_async_request)
    patches.set(stock, "maybe_finalize_async_calls", maybe_finalize_async_calls)
    patches.set(stock, "get_num_unfinalized_calls", get_num_unfinalized_calls)
    patches.set(stock, "close", close_both)
    if "warmup_persistent_caller" in vars(stock):
        patches.set(stock, "warmup_persistent_caller", AsyncCallsQueue.warmup_persistent_caller)


def _first_index(queue: Any) -> int:
    """Index of the first call that ours serves: those that the stock methods served before have the lower ones."""
    first = vars(queue).get(_FIRST_INDEX)
    if first is None:
        first = max(int(queue.call_idx), -1) + 1
        setattr(queue, _FIRST_INDEX, first)
    return int(first)


def async_strategy_source(torch_strategies: ModuleType) -> Any:
    """A `get_async_strategy` (0.17 on) that serves `"nvrx"` with or without nvidia-resiliency-ext. The queue is always
    ours, for other formats, too (`torch_dcp`, `fsdp_dtensor`); so is the writer, unless NVRx brings one.
    """
    stock = torch_strategies.get_async_strategy

    @functools.wraps(stock)
    def get_async_strategy(async_strategy: str = "nvrx", module: str | None = None) -> tuple[str, Any]:
        try:
            name, modules = stock(async_strategy)
        except ModuleNotFoundError:  # an NVRx is installed that lacks some of the names
            if async_strategy != "nvrx":
                raise
            name, modules = "nvrx", nvrx.strategy_modules()
        modules = {
            **modules,
            "AsyncCallsQueue": AsyncCallsQueue,
            "get_write_results_queue": nvrx.results_queue_is_made_when_needed,
        }
        return name, modules if module is None else modules[module]

    return get_async_strategy
