"""What a person sees of long work: a bar on a terminal, nothing where output is piped; and sizes in a few digits.

`rich` is imported when the first bar is drawn, and only then.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, TypeVar

P = TypeVar("P", bound="Progress")


class Progress:
    """A bar over a known number of bytes; a context manager. `advance` may be called from any thread.

    `shown`: None shows the bar if standard error is a terminal; False never does.
    """

    def __init__(self, what: str, total_bytes: int, *, shown: bool | None = None) -> None:
        self.done_bytes = 0
        self._lock = threading.Lock()
        self._bar: Any = None
        self._task: Any = None
        self._what = what
        self._total_bytes = total_bytes
        self._shown = sys.stderr.isatty() if shown is None else shown

    def advance(self, nbytes: int) -> None:
        """`nbytes` more are done."""
        with self._lock:
            self.done_bytes += nbytes
        if self._bar is not None:
            self._bar.update(self._task, advance=nbytes)

    def __enter__(self: P) -> P:
        if self._shown:
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
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._what, total=self._total_bytes)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class WaitingBar(Progress):
    """A bar for work of another process, shown while this one waits for it; a context manager. 0 bytes show no bar."""

    def __init__(self, what: str, total_bytes: int) -> None:
        super().__init__(what, total_bytes, shown=total_bytes > 0 and sys.stderr.isatty())

    def show(self, done_bytes: int) -> None:
        """So much is done by now."""
        self.advance(max(0, done_bytes - self.done_bytes))


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
