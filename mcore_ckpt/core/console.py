"""Log lines, and how anything is shown to a person.

Nothing that is shown may fail a save or a load, or block it: a stream may be closed, raise, or be a pipe that nobody
reads, and a handler of the program's log may be anything. So all of it is shown by threads of their own, which the work
waits for a moment only.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

_PATIENCE_S: Final = 1.0
_WORTH_A_LINE_BYTES: Final = 1_000_000

# The thread for which patience has ended. As long as it lives, nothing else is shown: it would wait for the same
# stream.
_stuck: threading.Thread | None = None


def _show_in_turn(show: Callable[[], object]) -> None:
    """Call `show` in a thread of its own, and wait a moment for its end; but nothing at all while something that was
    shown before is stuck. What it raises is dropped.
    """
    if not is_stuck():
        thread = start_aside(show)
        if thread is None:
            _quietly(show)
        else:
            end_aside(thread)


def start_aside(show: Callable[[], object]) -> threading.Thread | None:
    """A thread that calls `show`; None if there are no more threads, as at the interpreter's end."""
    run = contextvars.copy_context().run
    thread = threading.Thread(target=run, args=(_quietly, show), name="mcore_ckpt-shows", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


def _quietly(show: Callable[[], object]) -> None:
    with contextlib.suppress(BaseException):  # a handler may exit, which is not for this thread to do
        show()


def end_aside(thread: threading.Thread) -> None:
    """Wait a moment for the end of what was started."""
    global _stuck
    thread.join(_PATIENCE_S)
    if thread.is_alive():
        _stuck = thread


def is_stuck() -> bool:
    """Whether something that was shown is stuck: nothing else is to be started then."""
    return _stuck is not None and _stuck.is_alive()


class _Logger(logging.Logger):
    """The logger of its name, whose handlers run aside. Lines that come while one of them is stuck are dropped. Names
    that are no UTF-8 are escaped, since a handler could not write them.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._named = logging.getLogger(name)

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802  (logging's name)
        return self._named.isEnabledFor(level)

    def handle(self, record: logging.LogRecord) -> None:
        _show_in_turn(partial(self._hand_on, record))

    def _hand_on(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        record.msg, record.args = message.encode("utf-8", "backslashreplace").decode(), None
        self._named.handle(record)


def logger_of(name: str) -> logging.Logger:
    """The program's logger `name`, by which the package says something: in place of `logging.getLogger`."""
    return _Logger(name)


def line_level(nbytes: int) -> int:
    """Level of the one line that a save or a load logs: that of a small one (side files, tests) is for debugging."""
    return logging.INFO if nbytes >= _WORTH_A_LINE_BYTES else logging.DEBUG


def counted(count: int, what: str) -> str:
    """`1 file`, `2 files`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
