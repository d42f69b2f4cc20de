"""Log lines, and how anything is shown to a person.

Nothing that is shown may fail a save or a load: a stream may be closed or raise, and a handler of the program's log may
be anything.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Final

_WORTH_A_LINE_BYTES: Final = 1_000_000


class _Logger(logging.Logger):
    """The logger of its name, whose handlers fail nothing. Names that are no UTF-8 are escaped, since a handler could
    not write them.
    """

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
