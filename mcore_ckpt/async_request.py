"""What goes into a queue of async saves: a request, and as its work a save of ours that is on its way."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from mcore_ckpt.ranks import coordination_group

__all__ = ["AsyncRequest", "SaveCall", "staged_arguments"]


class AsyncRequest(NamedTuple):
    """Work to run beside training and what to do afterwards; field for field Megatron's class of that name.

    Attributes:
        async_fn: the work; None for a request that has callbacks only.
        async_fn_args: positional arguments for it.
        finalize_fns: called in order, on the trainer, once the work is done on all ranks.
        async_fn_kwargs: keyword arguments for `async_fn`.
        preload_fn: makes what `async_fn` gets as its second positional argument (the staged tensors).
        is_frozen: no more callbacks may be added.
        call_idx: number given by the queue.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[..., Any]]
    async_fn_kwargs: dict[str, Any] = {}
    preload_fn: Callable[..., Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[..., Any]) -> None:
        """Add a callback behind those that are there. Raises `RuntimeError` once the request is frozen."""
        if self.is_frozen:
            raise RuntimeError("the request has been scheduled: no more finalize functions can be added")
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Do the work here and now, then, when all ranks have done so, run the callbacks."""
        if self.async_fn is not None:
            self.async_fn(*staged_arguments(self), **(self.async_fn_kwargs or {}))
        coordination_group().barrier()
        for fn in self.finalize_fns:
            fn()

    def freeze(self) -> AsyncRequest:
        """The same request, closed for further callbacks."""
        return self._replace(is_frozen=True)


def staged_arguments(request: Any) -> tuple[Any, ...]:
    """Positional arguments of a request's work, staged by its `preload_fn` if it has one."""
    arguments = list(request.async_fn_args)
    if request.preload_fn is not None:
        arguments[1] = request.preload_fn()
    return tuple(arguments)


class SaveCall(ABC):
    """A save of ours on its way: the writing has been started, this tells how it fares.

    Used as a request's `async_fn`. In a queue of ours it is only watched. A stock queue calls it in a forked or spawned
    process, where it waits until the writing has ended, without touching what belongs to the trainer.

    Attributes:
        skipped: there is nothing to wait for and nothing to commit; the same on all ranks.
        on_failure: what to do if this save fails; None leaves it to the queue's options. The same on all ranks.
        what: the save in words for messages, such as its directory.
    """

    skipped: bool = False
    on_failure: Literal["raise", "warn"] | None = None
    what: str = "a checkpoint"
    _owner_pid: int

    def __new__(cls, *args: Any, **kwargs: Any) -> SaveCall:
        self = super().__new__(cls)
        self._owner_pid = os.getpid()
        return self

    @abstractmethod
    def poll(self) -> bool:
        """Whether this rank's writing is done. Returns at once.

        Raises:
            SaveError: it failed; again at every further call.
        """

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> bool:
        """As `poll`, but waits up to `timeout_s` seconds, None for as long as it takes."""

    @abstractmethod
    def abort(self) -> None:
        """Stop writing and remove what was written. Called on every rank, and harmless on one that is done.

        The queue calls it when the save will not be committed: it failed on some rank, or the queue was closed. It is
        no place for collectives.
        """

    def elsewhere(self) -> Callable[[], None]:
        """A function, picklable by name, that waits in another process until the writing has ended, well or not.

        By default it waits for nothing: the commit waits anyway.
        """
        return _wait_for_nothing

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the writing; in another process than the one that started it, by `elsewhere`."""
        if os.getpid() == self._owner_pid:
            self.wait()
        else:
            self.elsewhere()()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Elsewhere, (self.elsewhere(),)


class _Elsewhere:
    """What a `SaveCall` becomes when it is pickled: callable with the arguments of a request, which it ignores."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._wait()


def _wait_for_nothing() -> None:
    pass
