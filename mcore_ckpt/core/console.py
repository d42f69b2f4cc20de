"""Log lines, and how anything is shown to a person: sizes in a few digits, and a bar over a command's long work.

Nothing that is shown may fail a save or a load: a stream may be closed or raise, and a handler of the program's log may
be anything. `rich` is imported when the first bar is drawn, and only then.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from typing import Any, Final, TypeVar

_WORTH_A_LINE_BYTES: Final = 1_000_000


class _Logger(logging.Logger):
    """The logger of its name, whose handlers fail nothing, and get no name that is no UTF-8."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._named = logging.getLogger(name)

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802  (logging's name)
        return self._named.isEnabledFor(level)

    def handle(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception, SystemExit):
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


P = TypeVar("P", bound="Progress")

# A bar comes when a person has waited so long, and moves that often.
_BAR_PERIOD_S: Final = 0.1
_PATIENCE_S: Final = 1.0  # with a terminal that nobody reads


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal. It may be None, closed, or an object with `write` and `flush` only."""
    try:
        return bool(stream.isatty())
    except Exception:  # noqa: BLE001  (a stream of the program's own may raise anything)
        return False


class Progress:
    """A bar over a known number of bytes, those of all ranks of a command; a context manager. `advance` may be called
    from any thread.

    `shown`: None shows the bar if standard error is a terminal, on the first rank; False never does.
    """

    def __init__(self, what: str, total_bytes: int, *, shown: bool | None = None) -> None:
        from mcore_ckpt.core.team import Counter, current_team  # (which trainers do without)

        self.counter = Counter()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._what = what
        self._total_bytes = total_bytes
        self._shown = (is_terminal(sys.stderr) if shown is None else shown) and current_team().rank == 0

    def advance(self, nbytes: int) -> None:
        """`nbytes` more are done, by this rank. Raises where another one has failed."""
        self.counter.add(nbytes)

    def __enter__(self: P) -> P:
        if self._shown:
            self._ended.clear()
            self._thread = threading.Thread(target=self._draw, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._ended.set()
            self._thread.join(_PATIENCE_S)
            self._thread = None

    def _draw(self) -> None:
        if not self._ended.wait(_BAR_PERIOD_S):
            with contextlib.suppress(Exception):  # of a stream that is closed, say
                self._draw_bar()

    def _draw_bar(self) -> None:
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
                bar.update(task, completed=max(self.counter.own_bytes, self.counter.all_bytes), refresh=True)


def human_bytes(nbytes: int) -> str:
    """Decimal units, three digits: `1.53 GB`."""
    return _human(nbytes, ("B", "KB", "MB", "GB", "TB", "PB"))


def human_count(count: int) -> str:
    """`8.03 B` parameters and the like."""
    return _human(count, ("", "K", "M", "B"))


def _human(count: int, units: tuple[str, ...]) -> str:
    value, power = float(min(count, 10**300)), 0  # an index may claim any shape
    while abs(value) >= 1000 and power + 1 < len(units):
        value, power = value / 1000, power + 1
    shown = str(count) if not power else f"{value:.3g}" if value < 999.5 else f"{value:.0f}"
    return f"{shown} {units[power]}".strip()
