"""Signals that wait: for the end of a step that other ranks depend on, and until a child has its own way with them.

A Ctrl-C raises between any two steps of the caller. One of several ranks which is on its way to a collective would
leave the others waiting there. So the Ctrl-C waits (`interrupts_wait`) for a step whose failure all ranks are notified
of (`interruptible`), or for the end.

A process that works for another leaves signals to that one (`leave_signals_to_parent`).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

# What terminals and schedulers send to all processes of a job: to stop it, or as a notice that its time is up.
_TO_ALL_PROCESSES: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class _HeldBack:
    """The handlers of signals, and which signals have come that wait for them."""

    def __init__(self) -> None:
        self.passing = False
        self._waiting: list[int] = []
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def begin(self) -> None:
        for number in _TO_ALL_PROCESSES:
            handler = signal.getsignal(number)
            if callable(handler):  # what the system does by default ends the process, which the others notice
                self._handlers[number] = handler
                signal.signal(number, self._handle)

    def end(self) -> None:
        try:
            for number, handler in self._handlers.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, handler)
        finally:
            self.passing = True  # if one that is back has raised meanwhile, others are still in place: they pass on

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.passing or number in self._waiting:  # a second request does not wait
            self._handlers[number](number, frame)
        else:
            self._waiting.append(number)

    def deliver(self) -> None:
        if self._waiting:
            number = self._waiting.pop(0)
            try:
                self._handlers[number](number, None)
            finally:
                self.deliver()  # a Ctrl-C is raised here; what else has come is answered all the same


_held_back: _HeldBack | None = None


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Ctrl-C, and other signals that have handlers, wait until the block ends, however; but see `interruptible`.

    A second one of a kind does not wait. Signals come to the main thread; in others this does nothing. May be nested.
    """
    global _held_back
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    outer = _held_back
    if outer is not None:
        passing, outer.passing = outer.passing, False
        try:
            yield
        finally:
            outer.passing = passing
            if passing:
                outer.deliver()
        return
    held = _held_back = _HeldBack()
    try:
        held.begin()
        yield
    finally:
        _held_back = None
        try:
            held.end()
        finally:
            held.deliver()


@contextmanager
def interruptible() -> Iterator[None]:
    """Within `interrupts_wait`, what waits is raised now, and nothing waits until the block ends."""
    held = _held_back if threading.current_thread() is threading.main_thread() else None
    if held is None:
        yield
        return
    passing = held.passing
    try:
        held.passing = True
        held.deliver()
        yield
    finally:
        held.passing = passing


def leave_signals_to_parent() -> None:
    """In a process that works for another: what is sent to both is that one's to answer, which may still need this one.

    It is watched as well (`exit_with_parent`), and ended by SIGKILL.
    """
    for number in _TO_ALL_PROCESSES:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _TO_ALL_PROCESSES)


@contextmanager
def signals_held_back() -> Iterator[None]:
    """A process that is started within the block gets none of them before it calls `leave_signals_to_parent`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TO_ALL_PROCESSES)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
