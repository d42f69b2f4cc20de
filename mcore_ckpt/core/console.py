"""What a person sees of long work: log lines, a bar on a terminal, sizes in a few digits.

Nothing that is shown may fail a save or a load, or block it: a stream may be closed, raise, or be a pipe that nobody
reads, and a handler of the program's log may be anything. So all of it is shown by threads of their own, which the work
waits for a moment only. `rich` is imported when the first bar is drawn, and only then.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

P = TypeVar("P", bound="Progress")

_PATIENCE_S: Final = 1.0
_WORTH_A_LINE_BYTES: Final = 1_000_000
# A bar comes when a person has waited so long, and moves that often.
_BAR_PERIOD_S: Final = 0.1

# The thread for which patience has ended. As long as it lives, nothing else is shown: it would wait for the same
# stream.
_stuck: threading.Thread | None = None


def _show_in_turn(show: Callable[[], object]) -> None:
    """Call `show` in a thread of its own, and wait a moment for its end; but nothing at all while something that was
    shown before is stuck. What it raises is dropped.
    """
    if not _is_stuck():
        thread = _started(show)
        if thread is None:
            _quietly(show)
        else:
            _end(thread)


def _started(show: Callable[[], object]) -> threading.Thread | None:
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


def _end(thread: threading.Thread) -> None:
    global _stuck
    thread.join(_PATIENCE_S)
    if thread.is_alive():
        _stuck = thread


def _is_stuck() -> bool:
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


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal. It may be None, closed, or an object with `write` and `flush` only."""
    try:
        return bool(stream.isatty())
    except Exception:  # noqa: BLE001  (a stream of the program's own may raise anything)
        return False


class Progress:
    """A bar over a known number of bytes; a context manager. `advance` may be called from any thread.

    `shown`: None shows the bar if standard error is a terminal; False never does.
    """

    def __init__(self, what: str, total_bytes: int, *, shown: bool | None = None) -> None:
        self.done_bytes = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._what = what
        self._total_bytes = total_bytes
        self._shown = is_terminal(sys.stderr) if shown is None else shown

    def advance(self, nbytes: int) -> None:
        """`nbytes` more are done."""
        with self._lock:
            self.done_bytes += nbytes

    def __enter__(self: P) -> P:
        if self._shown and not _is_stuck():
            self._ended.clear()
            self._thread = _started(self._draw)
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._ended.set()
            _end(self._thread)
            self._thread = None

    def _draw(self) -> None:
        if self._ended.wait(_BAR_PERIOD_S):
            return
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        # What the job prints meanwhile must not wait for the terminal of the bar: its streams stay its own.
        bar = Bar(
            *columns,
            console=Console(stderr=True),
            transient=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with bar:
            task = bar.add_task(self._what, total=self._total_bytes)
            while not self._ended.wait(_BAR_PERIOD_S):
                bar.update(task, completed=self.done_bytes, refresh=True)


# An index may claim any shape: so much is still a floating-point number.
_MANY = 10**300
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def human_bytes(nbytes: int) -> str:
    """Decimal units, three digits: `1.53 GB`."""
    value = float(min(nbytes, _MANY))
    for unit in _UNITS:
        if abs(value) < 1000 or unit == _UNITS[-1]:
            return f"{nbytes} B" if unit == "B" else f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
        value /= 1000
    raise AssertionError("unreachable: the last unit takes everything")


def human_count(count: int) -> str:
    """`8.03 B` parameters and the like."""
    value = float(min(count, _MANY))
    for unit in ("", " K", " M", " B"):
        if abs(value) < 1000 or unit == " B":
            return f"{value:.3g}{unit}" if unit else str(count)
        value /= 1000
    raise AssertionError("unreachable: the last unit takes everything")


def counted(count: int, what: str) -> str:
    """`1 file`, `2 files`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
