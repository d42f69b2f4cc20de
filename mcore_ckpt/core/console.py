"""Log lines, and sizes in a few digits, as a person reads them.

Nothing that is shown may fail a save or a load: a stream may be closed or raise, and a handler of the program's log may
be anything.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any, Final

_WORTH_A_LINE_BYTES: Final = 1_000_000


class _Logger(logging.Logger):
    """The logger of its name, whose handlers fail nothing, and get no characters that are not shown."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._named = logging.getLogger(name)

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802  (logging's name)
        return self._named.isEnabledFor(level)

    def handle(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception, SystemExit):
            record.msg, record.args = printable(record.getMessage()), None
            self._named.handle(record)


def printable(text: str) -> str:
    """`text` with escapes for characters that are not shown: keys and paths come from files that are not trusted, and
    such characters would act in a terminal.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def logger_of(name: str) -> logging.Logger:
    """The program's logger `name`, by which the package says something: in place of `logging.getLogger`."""
    return _Logger(name)


def line_level(nbytes: int) -> int:
    """Level of the one line that a save or a load logs: that of a small one (side files, tests) is for debugging."""
    return logging.INFO if nbytes >= _WORTH_A_LINE_BYTES else logging.DEBUG


def counted(count: int, what: str) -> str:
    """`1 file`, `2 files`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal. It may be None, closed, or an object with `write` and `flush` only."""
    try:
        return bool(stream.isatty())
    except Exception:  # noqa: BLE001  (a stream of the program's own may raise anything)
        return False


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
