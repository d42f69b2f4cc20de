"""A request that takes much longer than its like is sent again, and the first answer counts.

One connection in some hundreds hangs or crawls where the others do not: what is sent again over another is there at
once. (Dean and Barroso, The Tail at Scale, call that a hedged request.) Only for what may be done twice: a part of an
upload, a range of an object.

Where all are late, the store has too much to do, and sending again gives it more. So few are sent again that did not
help, for each hundred requests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Final

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.options import rank_of_this_process
from mcore_ckpt.core.threads import start_thread
from mcore_ckpt.storage._alarms import call_off, set_alarm
from mcore_ckpt.storage._http import Answer, Cut
from mcore_ckpt.storage._object_client import RequestError, patience

_logger = logger_of(__name__)

# So many may be sent again in vain, at first and at most; each answer allows for a part of one more.
_IN_VAIN: Final = 2.0
_IN_VAIN_FOR_EACH: Final = 0.05
_LOOK_AGAIN_S: Final = 0.2


class Hedge:
    """What requests of one store have taken lately, and what is late by that."""

    def __init__(self) -> None:
        self._usual_s = 0.0
        self._left = _IN_VAIN

    def may_send_again(self, ended: threading.Event) -> bool:
        """Wait until one more may be sent again; False if the first attempt has ended by then."""
        while not ended.is_set():
            if self._left >= 1:
                self._left -= 1
                return True
            ended.wait(_LOOK_AGAIN_S)
        return False

    def has_helped(self) -> None:
        """What was sent again was the first to arrive."""
        self._allow(1.0)

    def _allow(self, more: float) -> None:
        # (as below: of threads that do this at once, one may count in vain)
        self._left = min(_IN_VAIN, self._left + more)

    def late_after_s(self) -> float:
        """Seconds after which a request counts as late; before the first has ended, none does soon."""
        limits = patience()
        if not self._usual_s:
            return limits.idle_s / 2
        return max(limits.late_s, limits.late_factor * self._usual_s)

    def _note(self, took_s: float) -> None:
        # Most of the last dozen; threads may lose one another's note, which does no harm.
        self._allow(_IN_VAIN_FOR_EACH)
        self._usual_s = took_s if not self._usual_s else 0.9 * self._usual_s + 0.1 * took_s

    def send(self, what: str, attempt: Callable[[Cut], Answer]) -> Answer:
        """Send something, twice if need be; the memory that is sent may be reused on return.

        Raises:
            RequestError: no attempt has succeeded.
        """
        return self._first(what, attempt, attempt)

    def receive(self, what: str, attempt: Callable[[memoryview, Cut], Answer], view: memoryview) -> Answer:
        """Fill a view, twice if need be; nothing writes into it after the return. Raises as `send`."""
        spare: list[bytearray] = []

        def again(cut: Cut) -> Answer:
            spare.append(bytearray(len(view)))
            return attempt(memoryview(spare[0]), cut)

        def take_over() -> None:
            view[:] = spare[0]

        return self._first(what, lambda cut: attempt(view, cut), again, take_over)

    def _first(
        self,
        what: str,
        attempt: Callable[[Cut], Answer],
        again: Callable[[Cut], Answer],
        take_over: Callable[[], None] | None = None,
    ) -> Answer:
        """Run one attempt here, and if it is late the other on a thread; returns the first success."""
        cuts = Cut(), Cut()
        race = _Race(cuts, self)
        late_s = self.late_after_s()
        # In a copy of this thread's context, which says how long to wait.
        second = partial(copy_context().run, race.second, what, late_s, again)
        alarm = set_alarm(late_s, partial(race.start, second))
        started_s = time.monotonic()
        until_s = started_s + patience().give_up_s
        try:
            try:
                answer = attempt(cuts[0])
            except RequestError as error:
                if not error.again:
                    raise
                race.ended.set()
                call_off(alarm)
                race.join(max(0.0, until_s - time.monotonic()))  # if it has begun, it may still succeed
                cuts[1]()
                race.join()
                if race.answer is None:
                    raise
                if take_over is not None:
                    take_over()
                self._note(time.monotonic() - started_s)
                return race.answer
            self._note(time.monotonic() - started_s)
            return answer
        finally:
            call_off(alarm)
            race.end()
            race.join()


class _Race:
    """The second of two attempts, and its answer."""

    def __init__(self, cuts: tuple[Cut, Cut], hedge: Hedge) -> None:
        self._cuts = cuts
        self._hedge = hedge
        self.ended = threading.Event()  # the first attempt; set before the second is cut off or waited for
        self._lock = threading.Lock()
        self._over = False
        self._thread: threading.Thread | None = None
        self.answer: Answer | None = None

    def start(self, second: Callable[[], None]) -> None:
        """The first attempt is late: have `second` run by a thread."""
        thread = threading.Thread(target=second, name="mcore-ckpt-again", daemon=True)
        if start_thread(thread):
            self._thread = thread

    def join(self, most_s: float | None = None) -> None:
        """Wait for the second attempt, if it has been started."""
        if self._thread is not None:
            self._thread.join(most_s)

    def second(self, what: str, late_s: float, attempt: Callable[[Cut], Answer]) -> None:
        """Body of that thread."""
        if not self._hedge.may_send_again(self.ended):
            return
        who = rank_of_this_process()
        _logger.warning("%s%s: late (%.1f s); it is sent again on another connection", who, what, late_s)
        try:
            answer = attempt(self._cuts[1])
        except RequestError as error:
            _logger.info("%s: the second attempt failed, too: %s", what, error.strerror)
            return
        with self._lock:
            if self._over:
                return
            self.answer = answer
        self._hedge.has_helped()
        self._cuts[0]()

    def end(self) -> None:
        """The first attempt has ended: the second is cut off, and its answer does not count any more."""
        self.ended.set()
        with self._lock:
            self._over = True
        self._cuts[1]()
