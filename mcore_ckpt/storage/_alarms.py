"""Calls at a moment, unless they are called off before: one thread for all of a process.

Every request has two of them, its time limit and the moment when it counts as late, and nearly all are called off. A
thread for each would be waited for four times a request, which takes longer than the request where a machine is busy.
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Final

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.threads import start_thread

_logger = logger_of(__name__)

# The thread ends when there has been nothing to do for so long.
_IDLE_S: Final = 10.0
# Of those that are called off, so many may be kept until their moment comes.
_FEW: Final = 64


class Alarm:
    """One call to come; made by `set_alarm`."""

    __slots__ = ("call", "is_off")

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self.is_off = False


class _Clock:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting: list[tuple[float, int, Alarm]] = []  # a heap, by the moment
        self.off = 0  # of those that wait
        self.running: Alarm | None = None
        self.thread: threading.Thread | None = None
        self._numbers = itertools.count()

    def set(self, after_s: float, call: Callable[[], object]) -> Alarm | None:
        alarm = Alarm(call)
        at = time.monotonic() + after_s, next(self._numbers), alarm
        with self.changed:
            if self.thread is None:
                self.thread = threading.Thread(target=self._work, name="mcore-ckpt-alarms", daemon=True)
                if not start_thread(self.thread):
                    self.thread = None
                    return None
            heapq.heappush(self.waiting, at)
            if self.waiting[0] is at:
                self.changed.notify_all()
        return alarm

    def call_off(self, alarm: Alarm) -> None:
        with self.changed:
            if not alarm.is_off:
                alarm.is_off = True
                self.off += 1
            if self.off > max(_FEW, len(self.waiting) // 2):
                self.waiting = [each for each in self.waiting if not each[2].is_off]
                heapq.heapify(self.waiting)
                self.off = 0
            while self.running is alarm and threading.current_thread() is not self.thread:
                self.changed.wait()

    def _work(self) -> None:
        while (alarm := self._next()) is not None:
            try:
                alarm.call()
            except Exception:  # the others' moments come all the same
                _logger.exception("an alarm has failed")
            with self.changed:
                self.running = None
                self.changed.notify_all()

    def _next(self) -> Alarm | None:
        with self.changed:
            while True:
                while self.waiting and self.waiting[0][2].is_off:
                    heapq.heappop(self.waiting)
                    self.off -= 1
                if not self.waiting:
                    if not self.changed.wait(_IDLE_S) and not self.waiting:
                        self.thread = None
                        return None
                elif (left_s := self.waiting[0][0] - time.monotonic()) > 0:
                    self.changed.wait(left_s)
                else:
                    self.running = heapq.heappop(self.waiting)[2]
                    self.running.is_off = True
                    return self.running


_clock = _Clock()


def _begin_again() -> None:
    """A forked child has no such thread, and none of the requests."""
    global _clock
    _clock = _Clock()


os.register_at_fork(after_in_child=_begin_again)


def set_alarm(after_s: float, call: Callable[[], object]) -> Alarm | None:
    """Have `call` called in so many seconds, by a thread that others wait for, too: it must be short. None where no
    thread can be started, at the end of the interpreter.
    """
    return _clock.set(after_s, call)


def call_off(alarm: Alarm | None) -> None:
    """On return the call has been made, or never will be."""
    if alarm is not None:
        _clock.call_off(alarm)
